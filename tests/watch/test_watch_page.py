"""The page and the film of `agalite watch`, on the command line and in a real browser."""

import itertools
import json

import jax
import numpy as np
import pytest
from PIL import Image

import agalite
from agalite.cli import main
from agalite.envs.tmaze import TMaze
from agalite.networks.actor_critic import ActorCritic
from agalite.training.config import TrainConfig
from agalite.watch.command import watch_model
from agalite.watch.page import page
from browser import chromium, open_page

SMALL = {"d_model": 8, "layers": 2, "heads": 2, "head_size": 4, "ffn_size": 8}
MEMORIES = {
    "agalite": SMALL | {"eta": 2},
    "gtrxl": SMALL | {"memory": 4},
    "feedforward": {"d_model": 8, "layers": 1, "ffn_size": 8},
}


WORLD = TMaze(4)


def agent(memory):
    return ActorCritic.make(
        WORLD.observation_space(),
        WORLD.action_space(),
        memory=memory,
        memory_options=MEMORIES[memory],
        hidden_size=8,
        key=jax.random.key(0),
    )


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    out = {memory: folder / f"{memory}.html" for memory in MEMORIES}
    for memory, path in out.items():
        watch_model(
            agent(memory),
            WORLD,
            path,
            total_timesteps=12,
            title=memory,
            actions=["up", "down", "left", "right"],
        )
    return out


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = TrainConfig(
        env="tmaze",
        env_options={"corridor": 4},
        memory="feedforward",
        memory_options=MEMORIES["feedforward"],
        num_envs=4,
        num_steps=8,
        hidden_size=8,
        total_timesteps=64,
        log_every=64,
        checkpoint_every=64,
    )
    return agalite.train(config, tmp_path_factory.mktemp("runs") / "maze", quiet=True).folder


def told(path):
    text = path.read_text()
    begin = text.index('type="application/json">') + len('type="application/json">')
    return json.loads(text[begin : text.index("</script>", begin)])


@chromium
@pytest.mark.parametrize("memory", MEMORIES)
def test_the_page_works_in_a_browser(pages, memory, tmp_path):
    story = told(pages[memory])
    last = story["steps"] - 1
    with open_page(pages[memory]) as shown:
        assert shown.requests == [pages[memory].resolve().as_uri()], "nothing may be fetched"
        assert shown.evaluate("document.title") == memory
        assert shown.evaluate("watch.step") == 0
        assert shown.evaluate("document.querySelectorAll('#actions .bar').length") == 4
        # Written, kept and left of two heads' values and keys; or what two heads read; two layers.
        strips = {"agalite": 2 * 4 * 3, "gtrxl": 2 * 2, "feedforward": 0}[memory]
        assert shown.evaluate("document.querySelectorAll('#layers canvas').length") == strips

        first = shown.evaluate("document.getElementById('frame').src")
        shown.evaluate(f"watch.show({last})")
        assert shown.evaluate("document.getElementById('slider').value") == str(last)
        assert f"step {last} of {last}" in shown.evaluate(
            "document.getElementById('clock').textContent"
        )
        bar = shown.evaluate("document.querySelector('#actions .taken span').textContent")
        choice = story["actions"][last]["choices"][0]["taken"]
        assert bar == ["up", "down", "left", "right"][choice]

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


def test_the_story_is_of_the_episode(pages):
    story = told(pages["agalite"])
    steps = story["steps"]
    assert len(story["reward"]) == len(story["value"]) == len(story["actions"]) == steps
    assert len(story["frames"]) == steps + 1
    assert [len(x) for x in story["saliency"]] == list(range(1, steps + 1))
    assert story["total"] == pytest.approx(sum(story["reward"]), abs=1e-3)
    row = story["layers"][1]["rows"][0]
    assert row["name"] == "head 1 values"
    assert len(row["written"]) == len(row["kept"]) == steps
    np.testing.assert_allclose(np.add(row["written"], row["kept"]), 1, atol=1e-3)
    assert told(pages["feedforward"])["layers"] == []
    assert told(pages["gtrxl"])["layers"][0]["reads"] is True


def test_data_cannot_end_the_page():
    made = page({"about": {"title": "</script><b>"}})
    assert made.count("</script>") == 2
    assert "<\\/script><b>" in made


def test_a_film(tmp_path):
    out = tmp_path / "episode.gif"
    watch_model(agent("agalite"), WORLD, out, total_timesteps=3, greedy=True)
    with Image.open(out) as film:
        assert film.n_frames == 3
        frames = [np.asarray(film.convert("RGB")) for i in range(3) if not film.seek(i)]
    assert all((a != b).any() for a, b in itertools.pairwise(frames))


def test_the_command_line(run, tmp_path, capsys):
    pytest.importorskip("imageio_ffmpeg")
    out = tmp_path / "episode.mp4"
    assert main(["watch", str(run), "--out", str(out), "--steps", "2"]) == 0
    assert out.read_bytes()[4:8] == b"ftyp"
    out = tmp_path / "episode.html"
    assert main(["watch", str(run), "--out", str(out), "--steps", "2", "--greedy", "--best"]) == 0
    assert "2 steps, return -0.20, stopped before its end" in capsys.readouterr().out
    about = told(out)["about"]
    assert about["title"] == "feedforward in tmaze (corridor 4)"
    assert about["actions"] == ["up", "down", "left", "right"]
    assert about["text"].startswith("maze, checkpoint of step 64; seed 0, likeliest actions")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--out", "page.pdf"], "must end in .html, .gif or .mp4"),
        (["--out", "no/page.html"], "does not exist"),
        (["--out", "page.html", "--steps", "0"], "steps=0"),
        (["--out", "page.html", "--steps", "5000"], "steps=5000"),
        (["--out", "page.html", "--seed-number", "3"], "seed_number=3"),
    ],
)
def test_mistakes_are_named(run, words, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["watch", str(run), *words]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
