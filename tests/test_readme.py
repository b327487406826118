"""The README's example runs as printed, and its table is what the code says."""

import re
from pathlib import Path

from agalite.memory.table import rows

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_example_runs_as_printed(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len([x for x in block.splitlines() if x.strip()]) <= 15
    exec(compile(block, "README.md", "exec"), {})  # our own text, in our own test
    difference, floats = capsys.readouterr().out.splitlines()
    assert float(difference.split()[-1]) < 1e-5
    assert int(floats.split()[-1]) == 5120


def test_the_table_of_models_is_true():
    for name, parameters, state, _, _ in rows(16):
        assert f"| `{name}` | {parameters:,} | {state:,} |" in README
