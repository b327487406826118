"""The page and the film of `agalite watch`, and the command line."""

import itertools
import json
import re
from functools import cache

import jax
import numpy as np
import pytest
from PIL import Image

import agalite
from agalite.agents.a2c import A2C
from agalite.cli import main
from agalite.envs.tmaze import TMaze
from agalite.networks.actor_critic import ActorCritic
from agalite.training.config import TrainConfig
from agalite.watch.page import make_page
from agalite.watch.run import past_gradient, watch_model
from chromium import needs_chromium, open_page

SMALL = {"d_model": 8, "layers": 1, "heads": 2, "head_size": 4, "ffn_size": 8}
MEMORIES = {
    "agalite": SMALL | {"eta": 2},
    "gtrxl": SMALL | {"memory": 4},
    "feedforward": {"d_model": 8, "layers": 1, "ffn_size": 8},
}
ACTIONS = ["up", "down", "left", "right"]
ENV = TMaze(4)
STEPS = 5


def agent(memory):
    return ActorCritic.make(
        ENV.observation_space(),
        ENV.action_space(),
        memory=memory,
        memory_options=MEMORIES[memory],
        hidden_size=8,
        key=jax.random.key(0),
    )


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The function from a memory's name to the page of its agent."""
    folder = tmp_path_factory.mktemp("pages")

    @cache
    def page(memory):
        path = folder / f"{memory}.html"
        options = {"steps": STEPS, "title": memory, "action_names": ACTIONS}
        watch_model(agent(memory), ENV, path, **options)
        return path

    return page


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run; the same configuration as in tests/export, so that it compiles once."""
    config = TrainConfig(
        env="tmaze",
        env_options={"corridor": 3},
        memory="gru",
        memory_options={"d_model": 8, "hidden_size": 8},
        num_envs=4,
        num_steps=8,
        hidden_size=8,
        total_timesteps=64,
        log_every=64,
        checkpoint_every=64,
    )
    return agalite.train(config, tmp_path_factory.mktemp("runs") / "maze", quiet=True).folder


def record_of(path):
    """The record inside a page."""
    return record_of_text(path.read_text())


def record_of_text(text):
    begin = text.index('type="application/json">') + len('type="application/json">')
    return json.loads(text[begin : text.index("</script>", begin)])


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("memory", MEMORIES)
def test_page_in_a_browser(pages, memory, tmp_path):
    record = record_of(pages(memory))
    last = record["steps"] - 1
    with open_page(pages(memory)) as shown:
        assert shown.requests == [pages(memory).resolve().as_uri()], "nothing may be fetched"
        assert shown.evaluate("document.title") == memory
        assert shown.evaluate("watch.step") == 0
        assert shown.evaluate("document.querySelectorAll('#actions .bar').length") == 4
        # Written, kept and left of two heads' values and keys; or what two heads read.
        strips = {"agalite": 4 * 3, "gtrxl": 2, "feedforward": 0}[memory]
        assert shown.evaluate("document.querySelectorAll('#layers canvas').length") == strips

        first = shown.evaluate("document.getElementById('frame').src")
        shown.evaluate(f"watch.show({last})")
        assert shown.evaluate("document.getElementById('slider').value") == str(last)
        assert f"step {last} of {last}" in shown.evaluate(
            "document.getElementById('clock').textContent"
        )
        bar = shown.evaluate("document.querySelector('#actions .taken span').textContent")
        choice = record["actions"][last]["choices"][0]["taken"]
        assert bar == ACTIONS[choice]

        shown.evaluate("watch.show(0)")
        shown.evaluate("document.getElementById('play').click()")
        shown.wait("watch.step >= 3")
        assert shown.evaluate("watch.playing")
        assert shown.evaluate("document.getElementById('play').textContent") == "Pause"
        shown.evaluate("document.getElementById('play').click()")
        assert not shown.evaluate("watch.playing")
        slide = "const s = document.getElementById('slider'); s.value = 2; s.oninput({target: s})"
        shown.evaluate(f"(() => {{ {slide}; return 0 }})()")
        assert shown.evaluate("watch.step") == 2
        shown.evaluate("document.getElementById('log').click()")
        assert first.startswith("data:image/png;base64,")
        drawn = "document.getElementById('frame').naturalWidth"
        assert shown.wait(drawn) == 320
        shown.screenshot(tmp_path / "page.png")
        assert shown.console_errors == []
    picture = np.asarray(Image.open(tmp_path / "page.png").convert("RGB"))
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 50, "the page is blank"


def test_page_is_complete(pages):
    """One file: nothing to fetch, every placeholder filled, every id of the script in the page."""
    text = pages("agalite").read_text()
    assert "<!--" not in text
    assert not re.search(r"""(src|href)=["'](?!data:)""", text)
    used = set(re.findall(r"""by\("(\w+)"\)""", text))
    assert {"frame", "slider", "play", "line", "map", "layers"} <= used
    assert used <= set(re.findall(r"""id="(\w+)\"""", text))
    keys = set(re.findall(r"\brecord\.(\w+)", text))
    assert keys == set(record_of(pages("agalite"))) - {"ended"}


def test_record_of_the_episode(pages):
    record = record_of(pages("agalite"))
    steps = record["steps"]
    assert len(record["reward"]) == len(record["value"]) == len(record["actions"]) == steps
    assert len(record["frames"]) == steps + 1
    assert [len(x) for x in record["saliency"]] == list(range(1, steps + 1))
    assert record["total"] == pytest.approx(sum(record["reward"]), abs=1e-3)
    row = record["layers"][0]["rows"][0]
    assert row["name"] == "head 1 values"
    assert len(row["written"]) == len(row["kept"]) == steps
    np.testing.assert_allclose(np.add(row["written"], row["kept"]), 1, atol=1e-3)


def test_record_cannot_end_the_script():
    made = make_page({"about": {"title": "</script><b><!--"}})
    assert made.count("</script>") == 2
    assert record_of_text(made)["about"]["title"] == "</script><b><!--"


def test_film(tmp_path):
    out = tmp_path / "episode.gif"
    watch_model(agent("agalite"), ENV, out, steps=STEPS)
    with Image.open(out) as film:
        assert film.n_frames == STEPS
        frames = [np.asarray(film.convert("RGB")) for i in range(STEPS) if not film.seek(i)]
    assert all((a != b).any() for a, b in itertools.pairwise(frames))


def test_command(run, tmp_path, capsys):
    pytest.importorskip("imageio_ffmpeg")
    out = tmp_path / "episode.mp4"
    assert main(["watch", str(run), "--out", str(out), "--steps", "2"]) == 0
    assert out.read_bytes()[4:8] == b"ftyp"
    out = tmp_path / "episode.html"
    assert main(["watch", str(run), "--out", str(out), "--steps", "2", "--greedy", "--best"]) == 0
    assert "2 steps, return -0.20, stopped before its end" in capsys.readouterr().out
    about = record_of(out)["about"]
    assert about["title"] == "gru in tmaze (corridor 3)"
    assert about["actions"] == ACTIONS
    assert about["text"].startswith("maze, checkpoint of step 64; seed 0, most likely actions")


def test_how_much_of_the_gradient_is_from_the_past(pages, tmp_path):
    """Means over parts of a run with the metric; nothing for one without, or of another seed."""
    assert record_of(pages("agalite"))["past"] is None
    run = tmp_path / "run"
    run.mkdir()
    lines = ["step,seed,losses/past_grad_fraction"]
    lines += [
        f"{10 * i},{seed},{0.25 + 0.5 * seed + i / 8000}" for i in range(400) for seed in (0, 1)
    ]
    (run / "metrics.csv").write_text("\n".join(lines) + "\n4000,0,nan\n")
    found = past_gradient(run, 1)
    assert found["steps"] == [20 * i + 10 for i in range(200)]
    np.testing.assert_allclose(found["fractions"], 0.75 + (2 * np.arange(200) + 0.5) / 8000)
    assert past_gradient(run, 2) is None
    (run / "metrics.csv").write_text("step,seed,charts/SPS\n10,0,1.0\n")
    assert past_gradient(run) is None


@pytest.mark.slow  # a run with traces, through the command
def test_a_run_with_traces_shows_its_past(tmp_path, capsys):
    config = TrainConfig(
        env="tmaze",
        env_options={"corridor": 3},
        memory="agalite",
        memory_options=MEMORIES["agalite"],
        agent=A2C(),
        gradient="rtrl",
        num_envs=4,
        num_steps=2,
        hidden_size=8,
        total_timesteps=64,
        log_every=8,
        checkpoint_every=64,
    )
    folder = agalite.train(config, tmp_path / "run", quiet=True).folder
    out = tmp_path / "page.html"
    assert main(["watch", str(folder), "--out", str(out), "--steps", "2"]) == 0
    past = record_of(out)["past"]
    assert past["steps"][-1] == 64
    assert 0 < past["fractions"][-1] < 1
    share = f"{past['fractions'][-1]:.1%} of the gradient came from before the rollout"
    assert share in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--out", "page.pdf"], "must end in .html, .gif or .mp4"),
        (["--out", "no/page.html"], "does not exist"),
        (["--out", "page.html", "--steps", "0"], "steps=0"),
        (["--out", "page.html", "--steps", "5000"], "steps=5000"),
        (["--out", "page.html", "--seed-number", "3"], "the run has 1 seed: seed_number must be 0"),
    ],
)
def test_bad_options_are_refused(run, words, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["watch", str(run), *words]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
