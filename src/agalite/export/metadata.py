"""The metadata of an exported file: all that is needed to use it."""

from typing import Any

import numpy as np

from agalite import files
from agalite.export.step import Step
from agalite.networks.heads import ActionHead, BoxHead, DiscreteHead, MultiDiscreteHead
from agalite.version import __version__

FORMAT = 2  # since 2 a file has a SHA-256

_USE = (
    "Begin with every state tensor zero and reset true. At each step give the observation, whether "
    "an episode begins with it, and the state; take the action from the distribution, and give the "
    "new_ outputs back as the state of the next step. The state need not be zeroed between "
    "episodes: reset true does that. Where there are inputs previous_action and previous_reward, "
    "they are the last step's: the action as it was drawn (i, or x), before it was made one of the "
    "environment, and its reward. With reset true they count for nothing."
)


def describe(
    step: Step, head: ActionHead, spaces: tuple[Any, Any], config: dict[str, Any], at_step: int
) -> dict[str, Any]:
    """The metadata of a step.

    **Arguments:**

    - `step`: the exported function.
    - `head`: the agent's action head.
    - `spaces`: of observations and of actions.
    - `config`: the run's config.json.
    - `at_step`: environment steps that the agent had been trained for.

    **Returns:**

    A dictionary of JSON types.
    """
    observation, action = spaces
    metadata = {
        "format": FORMAT,
        "agalite": __version__,
        "use": _USE,
        "batch": step.inputs[0].shape[0],
        "observation_space": space(observation),
        "action_space": space(action),
        "distribution": distribution(head),
        "inputs": [_tensor(x) for x in step.inputs],
        "outputs": [_tensor(x) for x in step.outputs],
        "state": [
            {"input": x.name, "output": f"new_{x.name}", "start": "zeros"} for x in step.state
        ],
        "checkpoint_step": at_step,
        "run": config,
    }
    return files.plain(metadata)


def space(value: Any) -> dict[str, Any]:
    """A space of gymnax or Gymnasium."""
    shape = [int(n) for n in value.shape or ()]
    common = {"shape": shape, "dtype": np.dtype(value.dtype).name}
    if hasattr(value, "nvec"):
        return {"kind": "MultiDiscrete", "nvec": np.asarray(value.nvec).tolist(), **common}
    if hasattr(value, "n"):
        return {"kind": "Discrete", "n": int(value.n), **common}
    return {"kind": "Box", "low": _limit(value.low), "high": _limit(value.high), **common}


def distribution(head: ActionHead) -> dict[str, Any]:
    """How an action of the environment is made of the outputs."""
    match head:
        case DiscreteHead():
            return {
                "kind": "categorical",
                "start": head.start,
                "action": "start + i, where i is drawn with probability softmax(logits)[i], or is "
                "argmax(logits) for the likeliest",
            }
        case MultiDiscreteHead():
            return {
                "kind": "categorical of each part",
                "sizes": list(head.sizes),
                "start": list(head.start),
                "shape": list(head.shape),
                "action": "logits split into parts of these sizes, one choice from each as in a "
                "categorical, plus start, in this shape",
            }
        case BoxHead():
            centre, half = _scale(np.array(head.low), np.array(head.high))
            return {
                "kind": "normal",
                "centre": centre,
                "half": half,
                "low": list(head.low),
                "high": list(head.high),
                "shape": list(head.shape),
                "action": "clip(centre + half * x, low, high) in this shape, where x is drawn from "
                "a normal distribution of this mean and std, or is mean for the likeliest; null "
                "is no limit",
            }
    raise ValueError(f"actions of a {type(head).__name__} cannot be exported")


def _tensor(x: Any) -> dict[str, Any]:
    return {"name": x.name, "shape": list(x.shape), "dtype": x.dtype.name}


def _limit(value: Any) -> Any:
    """One number if all are equal."""
    array = np.asarray(value, np.float64)
    return float(array.flat[0]) if (array == array.flat[0]).all() else array.tolist()


def _scale(low: np.ndarray, high: np.ndarray) -> tuple[list[float], list[float]]:
    """As in `BoxHead.to_env`: -1 and 1 become the limits where both are finite."""
    bounded = np.isfinite(low) & np.isfinite(high)
    with np.errstate(invalid="ignore"):
        centre, half = np.where(bounded, (low + high) / 2, 0), np.where(bounded, high - low, 2) / 2
    return centre.tolist(), half.tolist()
