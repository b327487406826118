"""The command line of `agalite train`, which is composed of the chosen parts."""

import dataclasses
import re
from pathlib import Path

import pytest

from agalite.agents.ppo import PPO
from agalite.cli import main
from agalite.training.command import parse
from agalite.training.config import HostConfig
from agalite.training.presets import configure, preset

PROG = "agalite train"


@pytest.mark.parametrize(
    ("words", "env", "memory", "out"),
    [
        ("masked-cartpole", "masked-cartpole", "agalite", None),
        # The value of an option is never taken for the environment.
        ("--out tmaze masked-cartpole", "masked-cartpole", "agalite", "tmaze"),
        ("--memory gru --out=tmaze masked-cartpole --seed 3", "masked-cartpole", "gru", "tmaze"),
        ("tmaze --memory gru --out masked-cartpole", "tmaze", "gru", "masked-cartpole"),
        ("gym:CartPole-v1 --memory lstm", "gym:CartPole-v1", "lstm", None),
    ],
)
def test_the_environment_is_found_among_the_options(words, env, memory, out):
    choices, config = parse(words.split(), PROG)
    assert (config.env, config.memory) == (env, memory)
    assert choices.out == (out and Path(out))


def test_options_of_all_parts():
    words = (
        "tmaze --memory gtrxl --corridor 20 --model.memory 64 --preset paper --steps 7_000_000 "
        "--learning-rate 1e-3 --out x --seeds 3 --seed 5"
    )
    choices, config = parse(words.split(), PROG)
    assert str(choices.out) == "x"
    assert config.env_options == {"corridor": 20}
    assert config.memory_options == {"init": "lecun", "memory": 64}
    assert (config.num_envs, config.num_steps) == (8, 256)
    assert config.agent == dataclasses.replace(
        preset("paper", "tmaze", "gtrxl")["agent"], learning_rate=1e-3
    )
    assert config.total_timesteps == 7_000_000
    assert config.seed_numbers.tolist() == [5, 6, 7]


def test_the_algorithm_brings_its_options():
    words = "tmaze --preset paper --algorithm ppo --num-minibatches 4 --no-norm-adv --steps 10"
    _, config = parse(words.split(), PROG)
    assert config.agent == PPO(num_minibatches=4, norm_adv=False)
    assert config.total_timesteps == 10


def test_gymnasium_environments_have_other_options():
    words = "gym:CartPole-v1 --num-workers 2 --set max_episode_steps=50 --no-processes"
    _, config = parse(words.split(), PROG)
    assert isinstance(config, HostConfig)
    assert (config.num_workers, config.processes) == (2, False)
    assert config.env_options == {"max_episode_steps": 50}


def test_an_import_becomes_part_of_the_environments_name():
    _, config = parse(["gym:Diary-v0", "--import", "host_envs", "--memory", "gru"], PROG)
    assert config.env == "gym:host_envs:Diary-v0"


@pytest.mark.parametrize("preset", ["tuned", "paper"])
def test_the_python_api_makes_the_same_configuration(preset):
    settings = {
        "env": "tmaze",
        "memory": "gru",
        "env_options": {"corridor": 9},
        "total_timesteps": 7,
    }
    words = f"tmaze --memory gru --corridor 9 --steps 7 --preset {preset}"
    assert configure(preset, settings) == parse(words.split(), PROG)[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "tmaze --preset paper --update-epochs 2",
            "--update-epochs is an option of ppo, appo and pqn; the algorithm",
        ),
        ("masked-cartpole --corridor=5", "--corridor is an option of tmaze; the environment"),
        ("", "name the environment before its options, as in: agalite train tmaze"),
        (
            "--corridor 5 --memory gru tmaze",
            "put tmaze first: agalite train tmaze --corridor 5 --m",
        ),
        ("--num-envs 5 gym:CartPole-v1", "put gym:CartPole-v1 first: agalite train gym:Cart"),
        ("--corridor 5", "name the environment before its options"),
        (
            "tmaze --memory gru --model.eta 3",
            "--model.eta is an option of agalite, galite and linear, not of gru",
        ),
        ("tmaze --memory gru --model.r=3", "--model.r is an option of agalite, not of gru"),
        ("tmaze --steps -5", r"--steps \(total_timesteps\)=-5 must be a whole number >= 1"),
        ("tmaze masked-cartpole", "tmaze and masked-cartpole: one environment at a time"),
        ("gym:CartPole-v1 --seeds 2", "seeds: gym:CartPole-v1 is stepped outside JAX"),
        ("tmaze --import some", "--import some is for environments of Gymnasium"),
        ("nowhere", "env='nowhere' is unknown; choose one of: tmaze"),
        ("tmaze --memory x", "memory='x' is unknown"),
        ("tmaze --preset best", "preset='best' is unknown"),
        ("tmaze --algorithm dqn", "algorithm='dqn' is unknown"),
    ],
)
def test_wrong_words_are_explained(words, message):
    with pytest.raises(ValueError, match=message):
        parse(words.split(), PROG)


def test_an_unknown_option_leads_to_the_right_help(capsys):
    with pytest.raises(SystemExit):
        parse(["tmaze", "--memory", "gru", "--nonsense", "2"], PROG)
    assert "agalite train tmaze --memory gru --help" in " ".join(capsys.readouterr().err.split())


def test_the_help_without_an_environment_says_whose_options_it_shows(capsys):
    for words in ([], ["tmaze"]):
        with pytest.raises(SystemExit):
            parse([*words, "--help"], PROG)
        text = " ".join(capsys.readouterr().out.replace("│", " ").split())
        said = (
            "Options shown for tmaze with memory agalite; `agalite train ENV --memory M --help` "
            "shows those of another choice."
        )
        assert (said in text) == (not words)
        assert "stream-ac or stream-q. (default: the preset's)" in text


def test_every_option_has_a_help_text(capsys):
    with pytest.raises(SystemExit):
        parse(["masked-cartpole", "--memory", "agalite", "--help"], PROG)
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "ENV Environment: a name that `agalite envs` lists" in text
    assert "--num-minibatches INT Minibatches per epoch" in text
    assert "--num-steps INT Steps per environment and rollout" in text
    assert "--steps INT, --total-timesteps INT Environment steps" in text
    assert not re.findall(r"--[\w.-]+(?: [A-Z{][^ a-z]*)? \(default", text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nowhere"], "agalite train: env='nowhere' is unknown"),
        (["train", "tmaze", "--corridor", "1"], "corridor=1"),
        (["resume", "/nowhere"], "/nowhere"),
        (["eval", "/nowhere"], "/nowhere"),
        (["plot", "/nowhere"], "/nowhere"),
        # Nothing is announced before it is refused.
        (["watch", "runs/NAME", "--out", "x.txt"], "must end in .html, .gif or .mp4"),
        (["watch", "/nowhere", "--out", "x.html"], "/nowhere"),
        (["export", "runs/NAME"], "nothing to write: name a file"),
        (["demo", "--seeds", "1", "--corridor", "1"], "corridor=1"),
        (["demo", "--seeds", "1", "--steps", "0"], "steps=0 must be"),
        (["demo", "--seeds", "1", "--out", __file__], "test_command.py is a file"),
    ],
)
def test_errors_are_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert (printed.out, printed.err.count("\n")) == ("", 1)
