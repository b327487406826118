"""Environments by name, the table of `agalite envs`, and `agalite envs show`."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from agalite.cli import main
from agalite.envs import ENVIRONMENTS, command, make, rendering
from agalite.envs.registry import with_import


def test_options_reach_the_environment():
    assert int(make("tmaze", corridor=33).default_params.corridor) == 33


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("maze", {}, "name='maze' is unknown; choose one of: tmaze"),
        ("tmaze", {"lenght": 3}, "tmaze has no option 'lenght'; it has: corridor"),
        ("tmaze", {"corridor": 1}, "corridor=1"),
        ("tmaze", {"corridor": 257}, "corridor=257"),
        ("gym:", {}, "lacks the id"),
        (["a"], {}, "is unknown"),
        ("mystery-path-grid", {"max_steps": 2**31}, "max_steps=2147483648"),
        ("mystery-path-grid", {"reward_step": 1e39}, "reward_step=1e[+]39 must be a finite number"),
        ("mystery-path", {"reward_goal": 10**400}, "reward_goal=1000"),
        ("noisy-masked-cartpole", {"noise": 1e38}, "noise=1e[+]38"),
        ("gym:CartPoll-v1", {}, "CartPoll"),
        ("gym:CartPole-v1", {"num_envs": 0}, "num_envs=0 must be a whole number >= 1"),
    ],
)
def test_what_cannot_be_made_is_explained(name, options, message):
    with pytest.raises(ValueError, match=message):
        make(name, **options)


def test_any_gymnasium_environment_comes_in():
    with make("gym:CartPole-v1", num_envs=3, seed=5) as vector:
        obs = vector.reset()
        assert obs.shape == (3, 4)
        step = vector.step(np.zeros(3, int))
        assert step.reward.shape == (3,)


PACKAGE = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
gymnasium.register("Shy-v0", CartPoleEnv)
"""


def test_an_id_that_its_package_registers(tmp_path, monkeypatch):
    (tmp_path / "shy_package.py").write_text(PACKAGE)
    (tmp_path / "broken_package.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"gym:PACKAGE:Shy-v0 imports it first"):
        make("gym:Shy-v0")
    message = r"'broken_package' of .* cannot be imported \(ZeroDivisionError: division by zero\)"
    with pytest.raises(ValueError, match=message):
        make(with_import("gym:Shy-v0", "broken_package"))
    (tmp_path / "needy_package.py").write_text("import no_such_module")
    with pytest.raises(ValueError, match=r"it needs the module 'no_such_module': install that"):
        make(with_import("gym:Shy-v0", "needy_package"))
    with make(with_import("gym:Shy-v0", "shy_package")) as vector:
        assert vector.reset().shape == (1, 4)
    with pytest.raises(
        ValueError, match=r"NoEnv-v0'; gymnasium.pprint_registry\(\) lists all that"
    ):
        make("gym:NoEnv-v0")
    with pytest.raises(ValueError, match=r"close to it: Shy-v0"):
        make("gym:shy_package:Shi-v0")


@pytest.mark.parametrize(
    ("name", "package", "expected"),
    [
        ("tmaze", None, "tmaze"),
        ("gym:A/B-v0", "some.module", "gym:some.module:A/B-v0"),
        ("gym:some:B-v0", "some", "gym:some:B-v0"),
    ],
)
def test_an_import_becomes_part_of_the_name(name, package, expected):
    assert with_import(name, package) == expected


@pytest.mark.parametrize(
    ("name", "package", "message"),
    [
        ("tmaze", "some", "--import some is for environments of Gymnasium, gym:<id>; .*'tmaze'"),
        ("gym:other:B-v0", "some", "'gym:other:B-v0' already says to import other"),
        ("gym:B-v0", "", "must be the name of a package"),
    ],
)
def test_an_import_that_makes_no_sense_is_explained(name, package, message):
    with pytest.raises(ValueError, match=message):
        with_import(name, package)


def test_what_is_not_installed_says_what_to_install(monkeypatch, capsys):
    absent = dataclasses.replace(ENVIRONMENTS["tmaze"], packages=("no_such_package",), extra="envs")
    monkeypatch.setitem(ENVIRONMENTS, "tmaze", absent)
    with pytest.raises(ValueError, match=r'no_such_package is not installed: pip install "agalite'):
        make("tmaze")
    command.show_table()
    assert 'tmaze needs: pip install "agalite[envs]"\n' in capsys.readouterr().out


def test_the_table_lists_all_with_spaces_and_limits(capsys):
    rows = {row[0]: row[1:] for row in command.rows()}
    assert set(rows) == set(ENVIRONMENTS)
    assert rows["mystery-path-grid"][:3] == ("Box(84x84x3) uint8, 0 to 255", "Discrete(4)", "128")
    assert rows["tmaze"][1:4] == ("Discrete(4)", "1000", "envs")
    command.show_table()
    out = capsys.readouterr().out
    assert all(name in out for name in rows), "names are never cut short"
    assert "Discrete(43)" in out
    assert "…" not in out


def test_the_envs_are_listed_without_importing_them_all():
    # Importing agalite.envs must work where neither gymnax nor gymnasium is installed.
    code = (
        "import sys; sys.modules['gymnax'] = sys.modules['gymnasium'] = None\n"
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda n, *a: None if n in ('gymnax', 'gymnasium') else find(n, *a)\n"
        "from agalite.envs import make\n"
        "try: make('tmaze')\n"
        "except ValueError as e: print(e)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 'gymnax, gymnasium are not installed: pip install "agalite[envs]"' in done.stdout


def test_a_random_episode_becomes_a_moving_picture(tmp_path, capsys):
    out = tmp_path / "episode.gif"
    assert main(["envs", "show", "tmaze", "--out", str(out), "--steps", "12"]) == 0
    with Image.open(out) as image:
        assert image.is_animated
        assert 2 <= image.n_frames <= 13
    assert "steps of random actions" in capsys.readouterr().out


def test_the_picture_is_the_same_for_the_same_seed(tmp_path):
    options = ["corridor=5"]
    for out, seed in (("a.png", 3), ("b.png", 3), ("c.png", 4)):
        command.show("tmaze", out=tmp_path / out, seed=seed, steps=9, fps=15.0, options=options)
    a, b, c = ((tmp_path / name).read_bytes() for name in ("a.png", "b.png", "c.png"))
    assert a == b
    assert a != c


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tmaze", "--out", "x.mov"], "must end in .mp4, .gif or .png"),
        (["tmaze", "--out", "/nowhere/x.gif"], "'/nowhere' does not exist"),
        (["tmaze", "--out", "/proc/x.gif"], "out='/proc/x.gif' cannot be written"),
        (["tmaze", "--out", "x.gif", "--seed", "99999999999999999999"], "seed=9999"),
        (["nope", "--out", "x.gif"], "name='nope' is unknown"),
        (["tmaze", "--out", "x.gif", "--set", "corridor"], "must look like NAME=VALUE"),
        (["tmaze", "--out", "x.gif", "--set", "corridor=1000"], "corridor=1000"),
        (["tmaze", "--out", "x.gif", "--steps", "0"], "steps=0 must be a whole number >= 1"),
        (["tmaze", "--out", "x.gif", "--fps", "0"], "fps=0.0 must be above 0"),
        (["gym:B-v0", "--import", "no_such", "--out", "x.gif"], "the package 'no_such' of"),
    ],
)
def test_a_picture_that_cannot_be_made_is_explained(arguments, message, capsys):
    assert main(["envs", "show", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_small_frames_are_enlarged_by_whole_numbers(tmp_path):
    frame = np.arange(84 * 84 * 3, dtype=np.uint32).reshape(84, 84, 3).astype(np.uint8)
    rendering.write([frame], tmp_path / "one.png", fps=10)
    with Image.open(tmp_path / "one.png") as image:
        big = np.asarray(image.convert("RGB"))
    assert big.shape == (336, 336, 3)
    np.testing.assert_array_equal(big[::4, ::4], frame)
    assert list(tmp_path.iterdir()) == [tmp_path / "one.png"]
