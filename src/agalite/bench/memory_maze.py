"""`agalite bench throughput --memory-maze`: the cost of the paper's agents for Memory Maze.

AGaLiTe and GTrXL-256 at the paper's size, with its ResNet and asynchronous PPO (one epoch,
sequences of 100): acting for a group of environments, learning from a batch, and stepping the maze,
interleaved in one process. The frames are random, since the models' time does not depend on their
content. The batch is a quarter of the paper's, whose gradient does not fit into the memory of a
small machine; the time per step is the same.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from agalite.agents.rollout import Rollout
from agalite.bench.report import write_results
from agalite.bench.timing import Program, compile_program, interleave, progress_bar
from agalite.envs.gymnasium.vector import GymnasiumVector
from agalite.envs.registry import make
from agalite.ops.resets import broadcast_state
from agalite.training.asynchronous.learner import Learner, LearnerState, Network
from agalite.training.config import HostConfig
from agalite.training.presets import preset
from agalite.training.session import enable_compilation_cache

ENV = "memory-maze-9x9"
MODELS = {"agalite(4,7)": "agalite", "gtrxl-256": "gtrxl"}
PAPER = "22M parameters; AGaLiTe +43% frames per second and -52% memory against GTrXL-256"
GROUP = 32  # environments that act together; half of the paper's 64, while the others step
BATCH = 800
MAZE_STEPS = 20  # in one timed run


class Agent:
    """An agent at the paper's size: its two compiled programs and the bytes it keeps."""

    def __init__(self, name: str, memory: str, spaces: tuple[Any, Any]) -> None:
        self.name = name
        self.config = HostConfig(
            env=ENV, memory=memory, **{**preset("paper", ENV, memory), "batch_size": BATCH}
        )
        self.network = Network(self.config, *spaces)
        learner = Learner(self.config, self.network)
        state = learner.init(np.uint32(0))
        one = self.network.initial_state(state.weights, 1)
        self.memory_bytes = _bytes(one)
        self.learned_bytes = _bytes((state.weights, state.opt_state))
        self.acting = self._acting(state)
        batch = self._batch(state, spaces)
        self.learning = compile_program(f"{name} learning", learner.update, state, *batch)

    def _acting(self, state: LearnerState) -> Program:
        prepared = self.network.prepare(state.weights)
        memory = self.network.initial_state(state.weights, GROUP)
        obs = jnp.zeros((GROUP, 64, 64, 3), jnp.uint8)
        resets, key = jnp.zeros(GROUP, bool), jax.random.key(0)
        return compile_program(
            f"{self.name} acting",
            self.network.act,
            prepared,
            memory,
            obs,
            resets,
            key,
            jnp.uint32(0),
        )

    def _batch(self, state: LearnerState, spaces: tuple[Any, Any]) -> tuple[Rollout, Any]:
        c = self.config
        shape = (c.num_steps, c.rollouts)
        rng = np.random.default_rng(0)
        zeros, no = jnp.zeros(shape), jnp.zeros(shape, bool)
        obs = jnp.asarray(rng.integers(0, 256, (*shape, *spaces[0].shape), np.uint8))
        actions = jnp.zeros(shape, jnp.int32)
        rollout = Rollout(obs, no, actions, zeros - 1.8, zeros, zeros, no, zeros)
        memory = self.network.initial_state(state.weights, c.rollouts)
        count = c.num_steps // c.sequence_length
        starts = broadcast_state(memory, count)
        return rollout, starts

    def row(self) -> dict[str, Any]:
        acting = GROUP / (self.acting.milliseconds / 1e3)
        learning = BATCH / (self.learning.milliseconds / 1e3)
        environments = self.config.num_envs
        return {
            "name": self.name,
            "parameters": self.network.parameter_count,
            "acting_steps_per_second": acting,
            "learning_steps_per_second": learning,
            "steps_per_second_of_both": 1 / (1 / acting + 1 / learning),
            "state_bytes": self.memory_bytes,
            "states_of_all_environments_bytes": environments * self.memory_bytes,
            "weights_and_optimiser_bytes": self.learned_bytes,
            "learning_temporary_bytes": self.learning.temporary_bytes,
            "seconds": {"acting": self.acting.seconds, "learning": self.learning.seconds},
        }


def run(*, rounds: int, out: Path | None) -> None:
    """Measures, prints and writes frames per second and memory.

    **Arguments:**

    - `rounds`: how often each program is timed.
    - `out`: a JSON file to write; None writes nothing.
    """
    enable_compilation_cache()
    env = make(ENV, num_envs=1, seed=0, asynchronous=False)
    assert isinstance(env, GymnasiumVector)
    try:
        with progress_bar() as progress:
            task = progress.add_task("compiling", total=len(MODELS))
            agents = []
            for name, memory in MODELS.items():
                agents.append(Agent(name, memory, (env.observation_space, env.action_space)))
                progress.advance(task)
            env.reset()
            maze = Program("the maze", lambda: _walk(env), 0)
            programs = [p for agent in agents for p in (agent.acting, agent.learning)]
            interleave([maze, *programs], progress, runs=rounds)
    finally:
        env.close()
    rows = [agent.row() for agent in agents]
    steps = MAZE_STEPS / (maze.milliseconds / 1e3)
    Console().print(_table(rows))
    Console().print(f"the maze itself, one process: {steps:,.0f} steps/s\nthe paper: {PAPER}")
    compared = _compare(*agents)
    for what, value in compared.items():
        Console().print(f"{what}: {value:+.0%}")
    if out is not None:
        write_results(
            out,
            {
                "paper": PAPER,
                "agents": rows,
                "maze_steps_per_second": steps,
                "batch_size": BATCH,
                "group": GROUP,
                "compared": compared,
            },
        )


def _walk(env: Any) -> None:
    for i in range(MAZE_STEPS):
        env.step(np.array([i % 6]))


def _compare(agalite: Agent, gtrxl: Agent) -> dict[str, float]:
    """AGaLiTe relative to GTrXL, as the paper reports it: +0.43 is 43% more."""
    a, b = agalite.row(), gtrxl.row()
    parts = (
        "states_of_all_environments_bytes",
        "weights_and_optimiser_bytes",
        "learning_temporary_bytes",
    )

    def memory(row: dict[str, Any]) -> int:
        return sum(row[name] for name in parts)

    return {
        "frames per second, acting": gtrxl.acting.ratio(agalite.acting) - 1,
        "frames per second, learning": gtrxl.learning.ratio(agalite.learning) - 1,
        "frames per second, both": a["steps_per_second_of_both"] / b["steps_per_second_of_both"]
        - 1,
        "memory of 64 agents' states": a["state_bytes"] / b["state_bytes"] - 1,
        "memory of states, weights, optimiser and gradient": memory(a) / memory(b) - 1,
    }


def _bytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree) if hasattr(x, "nbytes"))


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"Memory Maze at the paper's size; a batch of {BATCH} steps")
    for column in (
        "memory",
        "parameters",
        "acting/s",
        "learning/s",
        "both/s",
        "state kB",
        "gradient MB",
    ):
        table.add_column(column, justify="left" if column == "memory" else "right")
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['parameters']:,}",
            f"{row['acting_steps_per_second']:,.0f}",
            f"{row['learning_steps_per_second']:,.0f}",
            f"{row['steps_per_second_of_both']:,.0f}",
            f"{row['state_bytes'] / 1e3:,.0f}",
            f"{row['learning_temporary_bytes'] / 1e6:,.0f}",
        )
    return table
