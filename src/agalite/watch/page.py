"""The web page of an episode: its JSON record inside one HTML file that opens offline.

`episode_record` makes the record, `page.html`, `page.css` and `page.js` show it.
"""

import base64
import io
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from agalite import files
from agalite.networks.heads import Categorical, DiagonalNormal, Distribution, MultiCategorical
from agalite.watch.episode import WatchedEpisode
from agalite.watch.gates import Layer, Row
from agalite.watch.saliency import axis_limit

_MAX_PIXELS = 640  # of a side; larger frames are scaled down
_MAX_FPS = 8.0


def episode_record(
    episode: WatchedEpisode,
    layers: Sequence[Layer],
    saliency: Float[np.ndarray, "T T"],
    about: dict[str, Any],
    past_gradient: dict[str, list[float]] | None = None,
) -> dict[str, Any]:
    """All that the page shows.

    **Arguments:**

    - `episode`: its steps and frames.
    - `layers`: the memory's gates or attention weights (`inspect_memory`).
    - `saliency`: the gradients (`saliency.saliency`).
    - `about`: the page's `title` and `text`, and the names of the `actions`.
    - `past_gradient`: `run.past_gradient`; None leaves that part of the page out.

    **Returns:**

    A dictionary of JSON types.
    """
    steps = len(episode.steps)
    return files.plain(
        {
            "about": about,
            "steps": steps,
            "total": round(episode.total, 4),
            "ended": episode.ending,
            "speed": min(episode.fps, _MAX_FPS),
            "frames": [_png(frame) for frame in episode.frames],
            "actions": [action_record(x.policy, x.sampled) for x in episode.steps],
            "value": [_round4(x) for x in episode.values],
            "reward": [_round4(x.reward) for x in episode.steps],
            "saliency": [[_round4(x) for x in saliency[t, : t + 1]] for t in range(steps)],
            "tops": [_round4(axis_limit(saliency[t, : t + 1])) for t in range(steps)],
            "past": past_gradient
            and {
                "steps": past_gradient["steps"],
                "fractions": [_round4(x) for x in past_gradient["fractions"]],
            },
            "layers": [
                {
                    "name": layer.name,
                    "reads": layer.reads,
                    "rows": [_row_record(row) for row in layer.rows],
                }
                for layer in layers
            ],
        }
    )


def _row_record(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "written": None if row.written is None else [_round4(x) for x in row.written],
        "kept": None if row.kept is None else [_round4(x) for x in row.kept],
        "horizon": row.horizon and [_round4(x) for x in row.horizon],
        "past": _triangle(row.past),
    }


def action_record(policy: Distribution, sampled: np.ndarray) -> dict[str, Any]:
    """One step's policy and the action taken.

    `choices` has the probabilities of each part of a discrete action, `numbers` the mean and one
    standard deviation to either side of each continuous one.
    """
    match policy:
        case Categorical():
            return {"choices": [_choices(policy.logits, int(sampled))]}
        case MultiCategorical():
            parts = np.split(np.asarray(policy.logits), np.cumsum(policy.sizes)[:-1])
            pairs = zip(parts, np.ravel(sampled), strict=True)
            return {"choices": [_choices(x, int(i)) for x, i in pairs]}
        case DiagonalNormal():
            low, high = (policy.mean + sign * np.exp(policy.log_std) for sign in (-1, 1))
            return {
                "numbers": [
                    {
                        "low": _round4(a),
                        "high": _round4(b),
                        "mean": _round4(m),
                        "taken": _round4(x),
                    }
                    for a, b, m, x in zip(low, high, policy.mean, np.ravel(sampled), strict=True)
                ]
            }
    raise ValueError(f"a policy that is a {type(policy).__name__} cannot be shown")


def _choices(logits: Any, taken: int) -> dict[str, Any]:
    chances = np.asarray(jax.nn.softmax(np.asarray(logits, np.float32)))
    return {"chances": [_round4(x) for x in chances], "taken": taken}


def _triangle(past: Float[np.ndarray, "T T"]) -> str:
    """The lower triangle, row by row, as base64 of one byte per number; 255 is 1."""
    rows = [past[t, : t + 1] for t in range(len(past))]
    numbers = np.concatenate(rows) if rows else np.zeros(0)
    levels = np.clip(numbers * 255, 0, 255).round().astype(np.uint8)
    return base64.b64encode(levels.tobytes()).decode()


def _png(frame: np.ndarray) -> str:
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(frame))
    if max(image.size) > _MAX_PIXELS:
        image.thumbnail((_MAX_PIXELS, _MAX_PIXELS))
    data = io.BytesIO()
    image.save(data, format="PNG", optimize=True)
    return base64.b64encode(data.getvalue()).decode()


def _round4(x: Any) -> float:
    return float(f"{float(x):.4g}")


def make_page(record: dict[str, Any]) -> str:
    """The HTML of the page, with styles, script and record inside it."""
    folder = resources.files("agalite.watch")
    text = {name: (folder / f"page.{name}").read_text("utf-8") for name in ("html", "css", "js")}
    # "</script>" or "<!--" in a string of the record would end the script element or comment out
    # its end. In JSON a "<" occurs in strings only.
    data = json.dumps(record, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    html = text["html"]
    for name, content in (("CSS", text["css"]), ("JS", text["js"]), ("DATA", data)):
        html = html.replace(f"<!--{name}-->", content)
    return html
