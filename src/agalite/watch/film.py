"""A film of an episode: the frame, the policy, the value, the gradients and the gates."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from agalite.envs import rendering
from agalite.watch.episode import WatchedEpisode
from agalite.watch.gates import Layer
from agalite.watch.page import action_record
from agalite.watch.saliency import axis_limit

_MAX_FPS = 6.0
_MAIN, _SECOND, _SOFT, _MARK = "#1f5fbf", "#c2570c", "#667085", "#d11a4a"
_MAX_ROWS = 24


def write_film(
    episode: WatchedEpisode,
    layers: Sequence[Layer],
    saliency: Float[np.ndarray, "T T"],
    title: str,
    names: Sequence[str],
    out: Path,
) -> None:
    """Writes a film with one frame per step.

    **Arguments:**

    - `episode`, `layers`, `saliency`: as in `page.episode_record`.
    - `title`: above every frame.
    - `names`: of the actions.
    - `out`: a .gif or .mp4 file.
    """
    figure = _Figure(episode, layers, saliency, title, names)
    frames = [figure.draw(t) for t in range(len(episode.steps))]
    rendering.write(frames, out, fps=min(episode.fps, _MAX_FPS))


class _Figure:
    """One matplotlib figure that is updated at every step; new ones would take minutes."""

    def __init__(
        self,
        episode: WatchedEpisode,
        layers: Sequence[Layer],
        saliency: Float[np.ndarray, "T T"],
        title: str,
        names: Sequence[str],
    ) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.episode, self.saliency, self.names = episode, saliency, names
        rows = [(layer, row) for layer in layers for row in layer.rows]
        self.rows = rows[:_MAX_ROWS]
        figure = Figure(figsize=(9, 5.2 + 0.16 * len(self.rows)), dpi=100, layout="constrained")
        self.canvas: Any = FigureCanvasAgg(figure)
        figure.suptitle(title, fontsize=11)
        grid = figure.add_gridspec(
            3 if self.rows else 2,
            2,
            width_ratios=(3, 2),
            height_ratios=[3, 2] + ([0.12 * len(self.rows) + 0.8] if self.rows else []),
        )
        self.env = figure.add_subplot(grid[0, 0])
        self.env.set_axis_off()
        self.image = self.env.imshow(episode.frames[0], interpolation="nearest")
        self.action = figure.add_subplot(grid[0, 1])
        self.value = self._value(figure.add_subplot(grid[1, 1]))
        self.line = figure.add_subplot(grid[1, 0])
        self.past = self.gates = None
        if self.rows:
            gated = all(row.written is not None for _, row in self.rows)
            self.past = self._past(figure.add_subplot(grid[2, 0] if gated else grid[2, :]))
            self.gates = self._gates(figure.add_subplot(grid[2, 1])) if gated else None

    def _value(self, axes: Any) -> Any:
        axes.set_title("value", fontsize=9)
        axes.plot(self.episode.values, color=_MAIN)
        axes.tick_params(labelsize=7)
        return axes.axvline(0, color=_MARK, linewidth=1)

    def _past(self, axes: Any) -> Any:
        reads = self.rows[0][0].reads
        what = (
            "attention to each input at this step" if reads else "left of each input at this step"
        )
        axes.set_title(what, fontsize=9)
        axes.set_yticks(
            range(len(self.rows)), [f"{layer.name} {row.name}" for layer, row in self.rows]
        )
        axes.tick_params(labelsize=7)
        steps = len(self.episode.steps)
        blank = np.zeros((len(self.rows), steps))
        return axes.imshow(blank, cmap="Oranges", vmin=0, vmax=1, aspect="auto", origin="upper")

    def _gates(self, axes: Any) -> Any:
        axes.set_title("gates at this step, horizon in steps", fontsize=9)
        axes.set_xticks(range(2), ["written", "kept"])
        horizons = [row.horizon for _, row in self.rows]
        words = ["" if h is None else "{1:.0f} ({0:.0f} to {2:.0f})".format(*h) for h in horizons]
        axes.set_yticks(range(len(words)), words)
        axes.yaxis.tick_right()
        axes.tick_params(labelsize=7)
        blank = np.zeros((len(self.rows), 2))
        self.numbers = [
            [axes.text(x, y, "", ha="center", va="center", fontsize=7) for x in range(2)]
            for y in range(len(self.rows))
        ]
        return axes.imshow(blank, cmap="Blues", vmin=0, vmax=1.6, aspect="auto", origin="upper")

    def draw(self, t: int) -> UInt8[np.ndarray, "height width 3"]:
        self.image.set_data(self.episode.frames[t])
        step = self.episode.steps[t]
        self.env.set_title(f"step {t}, reward {step.reward:.3g}", fontsize=9)
        self._draw_action(action_record(step.policy, step.sampled))
        self.value.set_xdata([t, t])
        self._draw_line(t)
        if self.past is not None:
            table = np.stack([row.past[t] for _, row in self.rows])
            scale = table.max() if self.rows[0][0].reads else 1.0
            self.past.set_data(table / max(scale, 1e-9))
        if self.gates is not None:
            gates = [(row.written[t], row.kept[t]) for _, row in self.rows]  # pyright: ignore
            self.gates.set_data(np.array(gates))
            for texts, values in zip(self.numbers, gates, strict=True):
                for text, value in zip(texts, values, strict=True):
                    text.set_text(f"{value:.2f}")
        self.canvas.draw()
        return np.asarray(self.canvas.buffer_rgba())[..., :3].copy()

    def _draw_action(self, record: dict[str, Any]) -> None:
        self.action.clear()
        self.action.set_title("action", fontsize=9)
        self.action.tick_params(labelsize=7)
        if "numbers" in record:
            numbers = record["numbers"]
            for i, x in enumerate(numbers):
                self.action.plot([x["low"], x["high"]], [i, i], color=_SOFT, linewidth=4)
                self.action.plot(x["taken"], i, "o", color=_MAIN)
            self.action.set_yticks(range(len(numbers)))
        else:
            # The parts of the action one below the other.
            chances = [p for part in record["choices"] for p in part["chances"]]
            taken: set[int] = set()
            begin = 0
            for part in record["choices"]:
                taken.add(begin + part["taken"])
                begin += len(part["chances"])
            colours = [_MAIN if i in taken else _SOFT for i in range(len(chances))]
            self.action.barh(range(len(chances)), chances, color=colours)
            self.action.set_xlim(0, 1)
            named = len(self.names) == len(chances)
            self.action.set_yticks(range(len(chances)), self.names if named else None)
        self.action.invert_yaxis()

    def _draw_line(self, t: int) -> None:
        steps = len(self.episode.steps)
        self.line.clear()
        self.line.set_title("what this action depends on: gradient by observation", fontsize=9)
        self.line.tick_params(labelsize=7)
        line = self.saliency[t, : t + 1]
        colours = [_SECOND] * t + [_SOFT]
        self.line.bar(range(t + 1), line, color=colours)
        self.line.set_xlim(-0.6, steps - 0.4)
        self.line.set_ylim(0, 1.1 * max(axis_limit(line), 1e-30))
        self.line.axvline(t, color=_MARK, linewidth=1)
