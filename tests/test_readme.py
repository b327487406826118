"""The README's example runs as printed, and its table is what the code says."""

import re
from pathlib import Path

from agalite.envs import command as worlds
from agalite.memory.registry import rows

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_the_example_runs_as_printed(capsys):
    block = BLOCKS[0]
    assert len([x for x in block.splitlines() if x.strip()]) <= 15
    exec(compile(block, "README.md", "exec"), {})  # our own text, in our own test
    difference, floats = capsys.readouterr().out.splitlines()
    assert float(difference.split()[-1]) < 1e-5
    assert int(floats.split()[-1]) == 5120


def test_the_table_of_models_is_true():
    for name, parameters, state, _, _ in rows(16):
        assert f"| `{name}` | {parameters:,} | {state:,} |" in README


def test_the_other_examples_run_as_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # one of them trains, into runs/
    assert len(BLOCKS) > 1
    for block in BLOCKS[1:]:
        exec(compile(block, "README.md", "exec"), {})


def test_the_table_of_worlds_is_true():
    for name, observation, actions, limit, _, summary in worlds.rows():
        (line,) = [x for x in README.splitlines() if x.startswith(f"| `{name}` ")]
        _, _, size, count, most, words, _ = (cell.strip() for cell in line.split("|"))
        assert size.split()[0] in observation
        assert f"({count})" in actions
        assert most == limit
        assert words.startswith(summary)
