"""Symptoms of known failures in a run's metrics: what was seen, and the option that usually helps.

`Diagnostics` collects the rows of metrics of each seed. About `LOOKS` times in a run it calls every
function of `SYMPTOMS`. A symptom returns a sentence, or None. The sentence is shown on stderr and
written to run.log as a warning, each kind once in a run, however often the run is resumed.

All thresholds are the constants below, compared with runs that learned and runs that did not. A
warning says what was seen, not that a run cannot recover: some agents in T-Maze have a uniform
policy for a third of their steps and then learn. A symptom needs every row of its window to agree,
and says nothing where it knows too little: too few rows, no episode that ended, a metric that is
not logged.
"""

import bisect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float

from agalite.agents.base import Agent
from agalite.agents.ppo import PPO
from agalite.agents.stream import StreamAC, StreamAgent
from agalite.memory.layers import FusedProjection
from agalite.training.config import Config
from agalite.training.logging import read_metrics
from agalite.training.run import Run
from agalite.training.session import RETURN, SUCCESS

LOOKS = 50
"""Looks at a run, at equal distances."""
MIN_ROWS = 4
"""Rows that a window needs; with fewer, no symptom is reported."""
SOLVED = 0.9
"""Rate of success from which on nothing is wrong."""

WINDOW = (0.2, 50_000)
"""The last steps of a run that a symptom looks at: a fraction of all, but at least so many."""
LONG_WINDOW = (0.4, 50_000)
"""The same for what is normal for a while."""

UNIFORM = 0.995
"""A policy with this fraction of the largest entropy is uniform."""
COLLAPSED = 0.02
"""A policy with this fraction of the largest entropy hardly explores."""
CLIPPED = 100.0
"""Gradient norm, in multiples of `max_grad_norm`, from which on clipping discards its size."""
DOMINATING = 10.0
"""The value loss, in multiples of the policy's, from which on it decides the gradient."""
FALLING = 0.9
"""A value loss falls if it is below this fraction of what it was."""
GATES_BELOW = 0.9
"""Gates do not learn if for this fraction of them the gradient is below Adam's epsilon ..."""
REST_BELOW = 0.75
"""... while it is not for as many of the other parameters: those learn."""

GATES = ("beta", "gamma", "p3")
"""The gates among the columns of `FusedProjection`."""
_Adam = optax.ScaleByAdamState
_ADAM_DECAY = 0.999  # of the mean squared gradient; optax's default


@dataclass(frozen=True)
class Facts:
    """What symptoms know about a run beside its metrics."""

    total_steps: int
    max_entropy: float | None
    """Of a uniform policy; None if actions are not discrete."""
    max_grad_norm: float
    vf_coef: float
    ent_coef: float
    norm_adv: bool
    """Whether advantages are normalised to unit variance."""
    adam_eps: float
    has_memory: bool

    @classmethod
    def of(cls, config: Config, action_space: Any) -> "Facts":
        """**Arguments:** the run's configuration and the action space of one environment."""
        agent = config.agent
        if isinstance(agent, StreamAgent):  # nothing is clipped, and there is no Adam
            return cls(
                total_steps=config.updates * config.steps_per_update,
                max_entropy=max_entropy(action_space),
                max_grad_norm=math.inf,
                vf_coef=0.0,
                ent_coef=agent.ent_coef if isinstance(agent, StreamAC) else 0.0,
                norm_adv=False,
                adam_eps=0.0,
                has_memory=config.memory != "feedforward",
            )
        return cls(
            total_steps=config.updates * config.steps_per_update,
            max_entropy=max_entropy(action_space),
            max_grad_norm=agent.max_grad_norm,
            vf_coef=agent.vf_coef if isinstance(agent, Agent) else 0.0,
            ent_coef=agent.ent_coef if isinstance(agent, Agent) else 0.0,
            norm_adv=isinstance(agent, PPO) and agent.norm_adv,
            adam_eps=agent.adam_eps,
            has_memory=config.memory != "feedforward",
        )


class History:
    """The rows of metrics of one seed, oldest first."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._rows: list[Mapping[str, float]] = []

    def add(self, step: int, row: Mapping[str, float]) -> None:
        """**Arguments:** the number of environment steps done, and the metrics by name."""
        self._steps.append(step)
        self._rows.append({name: row[name] for name in _METRICS if name in row})

    @property
    def step(self) -> int:
        """Environment steps done."""
        return self._steps[-1] if self._steps else 0

    def last(
        self, name: str, window: tuple[float, int], total_steps: int
    ) -> Float[np.ndarray, " N"]:
        """The finite values of a metric in the last steps, of at least `MIN_ROWS` rows.

        None before the run is as long as the window.

        **Arguments:**

        - `name`: of the metric.
        - `window`: a fraction of `total_steps`, and the least number of steps.
        - `total_steps`: of the run.
        """
        fraction, least = window
        start = self.step - max(fraction * total_steps, least)
        if start < 0:
            return np.empty(0)
        begin = min(bisect.bisect_right(self._steps, start), max(len(self._steps) - MIN_ROWS, 0))
        values = np.array([row.get(name, math.nan) for row in self._rows[begin:]], np.float64)
        return values[np.isfinite(values)]

    def first(self, name: str, count: int) -> Float[np.ndarray, " N"]:
        """At most `count` finite values from the beginning of the run."""
        values = np.array([row.get(name, math.nan) for row in self._rows], np.float64)
        return values[np.isfinite(values)][:count]


@dataclass(frozen=True)
class BelowEpsilon:
    """The fractions of the parameters whose gradients are smaller than Adam's epsilon.

    Adam divides a gradient by its root mean square plus epsilon: such a parameter moves by less
    than half the learning rate, and by hardly anything if its gradient is much smaller.
    """

    gates: float
    rest: float


# --- symptoms -------------------------------------------------------------------------------------


def uniform_policy(history: History, facts: Facts) -> str | None:
    """The policy is as random as at the start, and the return stays where it was."""
    if facts.max_entropy is None:
        return None
    entropy, returns, success = (
        history.last(name, WINDOW, facts.total_steps)
        for name in ("losses/entropy", RETURN, SUCCESS)
    )
    if len(entropy) < MIN_ROWS or entropy.min() < UNIFORM * facts.max_entropy:
        return None
    if not stands_still(returns, success):
        return None
    if len(success) and not success.any():
        seen = f"no episode of the last {_window_steps(WINDOW, facts):,} steps succeeded"
    else:
        seen = f"the return stays at {returns.mean():.3g}"
    lower = f", or --ent-coef below {facts.ent_coef:g}" if facts.ent_coef > 0 else ""
    return (
        f"the policy is still uniform after {history.step:,} steps (entropy {entropy.mean():.4f} "
        f"of at most {facts.max_entropy:.4f}) and {seen}: try --actor-gain 1.41, so that the first "
        f"policy prefers some actions{lower}"
    )


def collapsed_entropy(history: History, facts: Facts) -> str | None:
    """The policy hardly explores any more, but the task is not solved.

    Where success is not reported, nobody knows the best return. Then the return must be no better
    than at the start, or have lost half of what it had gained.
    """
    if facts.max_entropy is None or not facts.has_memory:
        # Without memory, being certain and wrong may be the best that there is.
        return None
    entropy, returns, success = (
        history.last(name, WINDOW, facts.total_steps)
        for name in ("losses/entropy", RETURN, SUCCESS)
    )
    if len(entropy) < MIN_ROWS or entropy.max() > COLLAPSED * facts.max_entropy:
        return None
    if len(success) >= MIN_ROWS:
        if success.mean() >= SOLVED or improves(success):
            return None
        seen = f"the rate of success stays at {success.mean():.2f}"
    elif len(returns) >= MIN_ROWS:
        every = history.first(RETURN, sys.maxsize)
        start, best, now = returns_at(every, len(returns))
        if now > start and now > best - 0.5 * (best - start):
            return None
        seen = f"the return is {now:.3g} (first {start:.3g}, best {best:.3g})"
    else:
        return None
    return (
        f"the policy has stopped exploring (entropy {entropy.mean():.4f} of at most "
        f"{facts.max_entropy:.4f}) while {seen}: try --ent-coef above {facts.ent_coef:g}"
    )


def clipped_gradients(history: History, facts: Facts) -> str | None:
    """Every gradient is scaled down so far that only its direction is left."""
    norms, success = (
        history.last(name, WINDOW, facts.total_steps) for name in ("losses/grad_norm", SUCCESS)
    )
    if len(norms) < MIN_ROWS or norms.min() < CLIPPED * facts.max_grad_norm:
        return None
    if len(success) and success.mean() >= SOLVED:
        return None
    return (
        "the gradients are clipped to a small part of their length: their norm was "
        f"{norms.min():.3g} or more in the last {_window_steps(WINDOW, facts):,} steps, "
        f"--max-grad-norm is {facts.max_grad_norm:g}: try a larger --max-grad-norm, or a smaller "
        "--learning-rate if the norm keeps growing"
    )


def dominating_value_loss(history: History, facts: Facts) -> str | None:
    """The critic's loss is many times the policy's and does not fall; the return does not rise.

    PPO's surrogate loss is near zero at any size of its gradient, and so is the mean of A2C's.
    The policy's loss is therefore at least as large as the spread of the advantages: 1 if they are
    normalised, the critic's error otherwise.
    """
    value, policy, entropy, returns, success = (
        history.last(name, LONG_WINDOW, facts.total_steps)
        for name in ("losses/value_loss", "losses/policy_loss", "losses/entropy", RETURN, SUCCESS)
    )
    if not len(value) == len(policy) == len(entropy) >= MIN_ROWS:
        return None
    spread = np.ones_like(value) if facts.norm_adv else np.sqrt(2 * value)
    size = np.maximum(np.abs(policy), spread) + facts.ent_coef * np.abs(entropy)
    ratio = facts.vf_coef * value / np.maximum(size, 1e-12)
    if ratio.min() < DOMINATING:
        return None
    before, after = np.array_split(value, 2)
    if after.mean() < FALLING * before.mean():
        return None
    if not stands_still(returns, success):
        return None
    return (
        f"the value loss decides the gradient: times --vf-coef {facts.vf_coef:g} it is "
        f"{ratio.mean():.0f} times the policy's part, and it does not fall ({before.mean():.3g}, "
        f"then {after.mean():.3g}) while the return stays at {returns.mean():.3g}: try "
        "--norm-return, a --reward-scale below 1 or a smaller --vf-coef"
    )


def frozen_gates(history: History, facts: Facts, below: BelowEpsilon) -> str | None:
    """Adam's epsilon is larger than the gates' gradients: they keep their first time constants."""
    if not _stands_still_now(history, facts):
        return None
    if below.gates < GATES_BELOW or below.rest > REST_BELOW:
        return None
    return (
        f"the memory's gates hardly learn: Adam's epsilon {facts.adam_eps:g} is larger than the "
        f"gradients of {below.gates:.0%} of their parameters (of the others: {below.rest:.0%}): "
        "try --adam-eps 1e-8"
    )


def _stands_still_now(history: History, facts: Facts) -> bool:
    return stands_still(
        history.last(RETURN, WINDOW, facts.total_steps),
        history.last(SUCCESS, WINDOW, facts.total_steps),
    )


SYMPTOMS: dict[str, Callable[[History, Facts], str | None]] = {
    "uniform policy": uniform_policy,
    "collapsed entropy": collapsed_entropy,
    "clipped gradients": clipped_gradients,
    "dominating value loss": dominating_value_loss,
}
FROZEN_GATES = "frozen gates"
"""The symptom that needs the optimizer's state beside the metrics."""

_METRICS = (
    *(RETURN, SUCCESS),
    *("losses/entropy", "losses/grad_norm", "losses/policy_loss", "losses/value_loss"),
)


# --- what symptoms are made of --------------------------------------------------------------------


def improves(values: Float[np.ndarray, " N"]) -> bool:
    """Whether the second half is higher than the first by more than twice its standard error."""
    before, after = np.array_split(values, 2)
    error = math.sqrt(before.var() / len(before) + after.var() / len(after))
    return bool(after.mean() - before.mean() > 2 * error)


def stands_still(returns: Float[np.ndarray, " N"], success: Float[np.ndarray, " M"]) -> bool:
    """Whether a run is known to get no better, and has not solved its task."""
    return len(returns) >= MIN_ROWS and not improves(returns) and not (success >= SOLVED).any()


def returns_at(values: Float[np.ndarray, " N"], width: int) -> tuple[float, float, float]:
    """Means over `width` rows: the first, the best and the last of the run."""
    width = min(width, len(values))
    means = np.convolve(values, np.full(width, 1 / width), mode="valid")
    return float(means[0]), float(means.max()), float(means[-1])


def max_entropy(action_space: Any) -> float | None:
    """The entropy of a uniform policy, as `make_action_head` would make one.

    **Arguments:**

    - `action_space`: of gymnax or of Gymnasium.

    **Returns:**

    The sum of the logarithms of the numbers of choices; None if actions are real numbers.
    """
    if hasattr(action_space, "nvec"):
        return float(np.log(np.asarray(action_space.nvec, np.float64)).sum())
    if hasattr(action_space, "n") and getattr(action_space, "shape", None) == ():
        return math.log(int(action_space.n))
    if not jnp.issubdtype(action_space.dtype, jnp.integer):
        return None
    bounds = (np.asarray(x, np.float64) for x in (action_space.high, action_space.low))
    high, low = (np.broadcast_to(x, action_space.shape) for x in bounds)
    return float(np.log(high - low + 1).sum())


def below_epsilon(opt_state: Any, eps: float) -> list[BelowEpsilon]:
    """For each seed, how many gradients of the gates and of the rest are smaller than epsilon.

    **Arguments:**

    - `opt_state`: of the optimizer; its arrays may have a first axis for the seeds.
    - `eps`: Adam's epsilon.

    **Returns:**

    A row for each seed; none if the network has no gates of a `FusedProjection`, or the optimizer
    is not one Adam.
    """
    adams = [
        x
        for x in jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, _Adam))
        if isinstance(x, _Adam)
    ]
    if len(adams) != 1:
        return []
    count = np.asarray(adams[0].count)
    seeds = count.size
    found, sizes = np.zeros((2, seeds)), np.zeros(2)  # of the gates, and of the rest
    # As Adam does, the mean is corrected for having started at zero.
    correction = 1 - _ADAM_DECAY ** max(int(count.max()), 1)

    def add(group: int, squares: Any) -> None:
        mean = np.asarray(squares, np.float32).reshape(seeds, -1) / correction
        found[group] += (mean < eps**2).sum(axis=1)
        sizes[group] += mean.shape[1]

    def is_projection(x: Any) -> bool:
        return isinstance(x, FusedProjection)

    for leaf in jax.tree.leaves(adams[0].nu, is_leaf=is_projection):
        if not is_projection(leaf):
            add(1, leaf)
            continue
        weight, bias, at = np.asarray(leaf.inputs.weight), np.asarray(leaf.bias), 0
        for name, width in leaf.widths:
            group = 0 if name in GATES else 1
            add(group, weight[..., at : at + width, :])  # (..., H, N, D)
            add(group, bias[..., at : at + width])  # (..., H, N)
            at += width
    if not sizes.all():
        return []
    gates, rest = found / sizes[:, None]
    return [BelowEpsilon(float(a), float(b)) for a, b in zip(gates, rest, strict=True)]


def _window_steps(window: tuple[float, int], facts: Facts) -> int:
    fraction, least = window
    return int(max(fraction * facts.total_steps, least))


# --- a run ----------------------------------------------------------------------------------------


class Diagnostics:
    """Looks at a run while it is trained, and warns.

    **Arguments:**

    - `run`: open for writing. Warnings in its run.log are not repeated, and the metrics that it has
        are the beginning of the history.
    - `config`: of the run.
    - `action_space`: of one environment.
    - `quiet`: write to run.log only.
    """

    def __init__(self, run: Run, config: Config, action_space: Any, *, quiet: bool = False) -> None:
        self._run, self._quiet = run, quiet
        self._facts = Facts.of(config, action_space)
        self._histories = [History() for _ in range(config.num_seeds)]
        table = read_metrics(run.folder)
        names = [name for name in _METRICS if name in table]
        for i, (step, seed) in enumerate(zip(table["step"], table["seed"], strict=True)):
            self._histories[seed].add(int(step), {name: float(table[name][i]) for name in names})
        log = run.log_path.read_text() if run.log_path.exists() else ""
        self._open = [kind for kind in (*SYMPTOMS, FROZEN_GATES) if _prefix(kind) not in log]
        self._last_look = self._histories[0].step

    def add(self, step: int, rows: Sequence[Mapping[str, float]], opt_state: Any = None) -> None:
        """Take new rows of metrics; look at the run if it is time to.

        **Arguments:**

        - `step`: environment steps done.
        - `rows`: the metrics of each seed.
        - `opt_state`: of the optimizer, with a first axis for the seeds if it has one. It is read
            during the call only, so it may be donated afterwards.
        """
        for history, row in zip(self._histories, rows, strict=True):
            history.add(step, row)
        total = self._facts.total_steps
        if (step - self._last_look) * LOOKS < total and step < total:
            return
        self._last_look = step
        for kind in list(self._open):
            found = self._find(kind, opt_state)
            if found is not None:
                self._open.remove(kind)
                self._warn(kind, found)

    def _find(self, kind: str, opt_state: Any) -> str | None:
        """The sentence of the first seed that has this symptom."""
        if kind == FROZEN_GATES:
            # All parameters are read only if it matters.
            needed = any(_stands_still_now(history, self._facts) for history in self._histories)
            found = below_epsilon(opt_state, self._facts.adam_eps) if needed else []
            sentences = [
                frozen_gates(history, self._facts, below)
                for history, below in zip(self._histories, found, strict=False)
            ]
        else:
            sentences = [SYMPTOMS[kind](history, self._facts) for history in self._histories]
        several = len(sentences) > 1
        return next(
            (f"seed number {i}: {x}" if several else x for i, x in enumerate(sentences) if x), None
        )

    def _warn(self, kind: str, text: str) -> None:
        self._run.log(f"{_prefix(kind)} {text}")
        if not self._quiet:
            print(f"warning: {text}", file=sys.stderr)


def _prefix(kind: str) -> str:
    """The beginning of a warning in run.log, by which a resumed run finds it."""
    return f"warning ({kind}):"
