"""The table that `agalite models` prints."""

import jax
from rich.console import Console
from rich.table import Table

from agalite import errors
from agalite.memory.registry import MODELS, make_memory


def rows(input_size: int) -> list[tuple[str, int, int, int, str]]:
    """(name, parameters, floats of state, output width, what it remembers) of every model."""
    errors.integer("input_size", input_size, minimum=1)
    out = []
    for name, model in MODELS.items():
        # Shapes only: no weights are drawn.
        memory = jax.eval_shape(lambda name=name: make_memory(name, input_size))
        row = (memory.parameter_count, memory.state_size, memory.output_size, model.remembers)
        out.append((name, *row))
    return out


def show(input_size: int) -> None:
    table = Table(title=f"Memory models at the paper's T-Maze sizes, input of {input_size}")
    for column in ("name", "parameters", "state (floats)", "output", "remembers"):
        table.add_column(column, justify="left" if column in ("name", "remembers") else "right")
    for name, parameters, state, output, remembers in rows(input_size):
        table.add_row(name, f"{parameters:,}", f"{state:,}", str(output), remembers)
    Console().print(table)
