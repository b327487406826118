"""The same as a film: the frame, the action, the value, the gradient line and the gates."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from agalite.envs import rendering
from agalite.watch.episode import Watched
from agalite.watch.gates import Layer
from agalite.watch.page import actions
from agalite.watch.saliency import axis_top

_SPEED = 6.0  # frames a second at most: there is much to see in each
_MAIN, _SECOND, _SOFT, _MARK = "#1f5fbf", "#c2570c", "#667085", "#d11a4a"
_MOST_ROWS = 24


def film(
    watched: Watched,
    layers: Sequence[Layer],
    saliency: Float[np.ndarray, "T T"],
    title: str,
    names: Sequence[str],
    out: Path,
) -> None:
    drawn = _Drawing(watched, layers, saliency, title, names)
    frames = [drawn.at(t) for t in range(len(watched.steps))]
    rendering.write(frames, out, fps=min(watched.fps, _SPEED))


class _Drawing:
    """One figure whose parts move from step to step: a new one each time would take minutes."""

    def __init__(
        self,
        watched: Watched,
        layers: Sequence[Layer],
        saliency: Float[np.ndarray, "T T"],
        title: str,
        names: Sequence[str],
    ) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.watched, self.saliency, self.names = watched, saliency, names
        rows = [(layer, row) for layer in layers for row in layer.rows]
        self.rows = rows[:_MOST_ROWS]
        figure = Figure(figsize=(9, 5.2 + 0.16 * len(self.rows)), dpi=100, layout="constrained")
        self.canvas: Any = FigureCanvasAgg(figure)
        figure.suptitle(title, fontsize=11)
        grid = figure.add_gridspec(
            3 if self.rows else 2,
            2,
            width_ratios=(3, 2),
            height_ratios=[3, 2] + ([0.12 * len(self.rows) + 0.8] if self.rows else []),
        )
        self.world = figure.add_subplot(grid[0, 0])
        self.world.set_axis_off()
        self.image = self.world.imshow(watched.frames[0], interpolation="nearest")
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
        axes.plot(self.watched.values, color=_MAIN)
        axes.tick_params(labelsize=7)
        return axes.axvline(0, color=_MARK, linewidth=1)

    def _past(self, axes: Any) -> Any:
        reads = self.rows[0][0].reads
        what = "how much of each input is read now" if reads else "what is left of each input now"
        axes.set_title(what, fontsize=9)
        axes.set_yticks(
            range(len(self.rows)), [f"{layer.name} {row.name}" for layer, row in self.rows]
        )
        axes.tick_params(labelsize=7)
        steps = len(self.watched.steps)
        blank = np.zeros((len(self.rows), steps))
        return axes.imshow(blank, cmap="Oranges", vmin=0, vmax=1, aspect="auto", origin="upper")

    def _gates(self, axes: Any) -> Any:
        axes.set_title("gates now, and steps for which units keep", fontsize=9)
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

    def at(self, t: int) -> UInt8[np.ndarray, "height width 3"]:
        self.image.set_data(self.watched.frames[t])
        step = self.watched.steps[t]
        self.world.set_title(f"step {t}, reward {step.reward:.3g}", fontsize=9)
        self._draw_action(actions(step.policy, step.sampled))
        self.value.set_xdata([t, t])
        self._draw_line(t)
        if self.past is not None:
            table = np.stack([row.past[t] for _, row in self.rows])
            scale = table.max() if self.rows[0][0].reads else 1.0
            self.past.set_data(table / max(scale, 1e-9))
        if self.gates is not None:
            # Means over the units of a row at this step.
            now = [(row.written[t], row.kept[t]) for _, row in self.rows]  # pyright: ignore
            self.gates.set_data(np.array(now))
            for texts, values in zip(self.numbers, now, strict=True):
                for text, value in zip(texts, values, strict=True):
                    text.set_text(f"{value:.2f}")
        self.canvas.draw()
        return np.asarray(self.canvas.buffer_rgba())[..., :3].copy()

    def _draw_action(self, told: dict[str, Any]) -> None:
        self.action.clear()
        self.action.set_title("action", fontsize=9)
        self.action.tick_params(labelsize=7)
        if "numbers" in told:
            numbers = told["numbers"]
            for i, x in enumerate(numbers):
                self.action.plot([x["low"], x["high"]], [i, i], color=_SOFT, linewidth=4)
                self.action.plot(x["taken"], i, "o", color=_MAIN)
            self.action.set_yticks(range(len(numbers)))
        else:
            # Parts one below the other.
            chances = [p for part in told["choices"] for p in part["chances"]]
            taken: set[int] = set()
            begin = 0
            for part in told["choices"]:
                taken.add(begin + part["taken"])
                begin += len(part["chances"])
            colours = [_MAIN if i in taken else _SOFT for i in range(len(chances))]
            self.action.barh(range(len(chances)), chances, color=colours)
            self.action.set_xlim(0, 1)
            named = len(self.names) == len(chances)
            self.action.set_yticks(range(len(chances)), self.names if named else None)
        self.action.invert_yaxis()

    def _draw_line(self, t: int) -> None:
        steps = len(self.watched.steps)
        self.line.clear()
        self.line.set_title("what this action depends on (gradient, by observation)", fontsize=9)
        self.line.tick_params(labelsize=7)
        line = self.saliency[t, : t + 1]
        colours = [_SECOND] * t + [_SOFT]
        self.line.bar(range(t + 1), line, color=colours)
        self.line.set_xlim(-0.6, steps - 0.4)
        self.line.set_ylim(0, 1.1 * max(axis_top(line), 1e-30))
        self.line.axvline(t, color=_MARK, linewidth=1)
