"""The story as a web page: one file, nothing fetched, for any browser."""

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
from agalite.watch.episode import Watched
from agalite.watch.gates import Layer
from agalite.watch.saliency import axis_top

# --- An episode and what the memory did in it, as one JSON document for the page ------------------

_LARGEST = 640  # pixels: frames beyond are made smaller for the page


def tell(
    watched: Watched,
    layers: Sequence[Layer],
    saliency: Float[np.ndarray, "T T"],
    about: dict[str, Any],
) -> dict[str, Any]:
    """JSON's own types. about: what the page says at its top, by name."""
    steps = len(watched.steps)
    return files.plain(
        {
            "about": about,
            "steps": steps,
            "total": round(watched.total, 4),
            "ended": watched.why,
            "speed": min(watched.fps, 8.0),
            "frames": [_png(frame) for frame in watched.frames],
            "actions": [actions(x.policy, x.sampled) for x in watched.steps],
            "value": [_short(x) for x in watched.values],
            "reward": [_short(x.reward) for x in watched.steps],
            "saliency": [[_short(x) for x in saliency[t, : t + 1]] for t in range(steps)],
            "tops": [_short(axis_top(saliency[t, : t + 1])) for t in range(steps)],
            "layers": [
                {
                    "name": layer.name,
                    "reads": layer.reads,
                    "rows": [
                        {
                            "name": row.name,
                            "written": None
                            if row.written is None
                            else list(map(_short, row.written)),
                            "kept": None if row.kept is None else list(map(_short, row.kept)),
                            "horizon": row.horizon and [_short(x) for x in row.horizon],
                            "past": _triangle(row.past),
                        }
                        for row in layer.rows
                    ],
                }
                for layer in layers
            ],
        }
    )


def actions(policy: Distribution, sampled: np.ndarray) -> dict[str, Any]:
    """Bars of one step: each part of an action with its choices, or its mean and spread."""
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
                    {"low": _short(a), "high": _short(b), "mean": _short(m), "taken": _short(x)}
                    for a, b, m, x in zip(low, high, policy.mean, np.ravel(sampled), strict=True)
                ]
            }
    raise ValueError(f"a policy that is a {type(policy).__name__} cannot be drawn")


def _choices(logits: Any, taken: int) -> dict[str, Any]:
    chances = np.asarray(jax.nn.softmax(np.asarray(logits, np.float32)))
    return {"chances": [_short(x) for x in chances], "taken": taken}


def _triangle(past: Float[np.ndarray, "T T"]) -> str:
    """Row after row up to the diagonal, a byte for each, 255 is 1."""
    rows = [past[t, : t + 1] for t in range(len(past))]
    numbers = np.concatenate(rows) if rows else np.zeros(0)
    levels = np.clip(numbers * 255, 0, 255).round().astype(np.uint8)
    return base64.b64encode(levels.tobytes()).decode()


def _png(frame: np.ndarray) -> str:
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(frame))
    if max(image.size) > _LARGEST:
        image.thumbnail((_LARGEST, _LARGEST))
    drawn = io.BytesIO()
    image.save(drawn, format="PNG", optimize=True)
    return base64.b64encode(drawn.getvalue()).decode()


def _short(x: Any) -> float:
    return float(f"{float(x):.4g}")


def page(story: dict[str, Any]) -> str:
    here = resources.files("agalite.watch")
    text = {name: (here / f"page.{name}").read_text("utf-8") for name in ("html", "css", "js")}
    # "</script>" inside the data would end it.
    data = json.dumps(story, allow_nan=False, separators=(",", ":")).replace("</", "<\\/")
    whole = text["html"]
    for mark, part in (("CSS", text["css"]), ("JS", text["js"]), ("DATA", data)):
        whole = whole.replace(f"<!--{mark}-->", part)
    return whole
