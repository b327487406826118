"""How all our charts look. Matplotlib is imported when something is drawn, not before."""

from typing import Any

# Told apart by people who confuse red and green, in print too (Okabe and Ito, 2008).
COLOURS = BLUE, ORANGE, GREEN, PINK, YELLOW, SKY, BLACK = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)
INK, FAINT = "#333333", "#DDDDDD"


def blank(width: float, height: float) -> Any:
    """An empty figure of so many inches."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError('pictures need matplotlib: pip install "agalite[train]"') from error
    # Not pyplot: it keeps every figure, and a backend, for the whole process.
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def dress(axes: Any, *, size: int = 9) -> None:
    """A grid behind the lines, and no more of a frame than is needed; `size` is of the numbers."""
    axes.grid(color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(colors=INK, labelsize=size)


def whole_range(axes: Any) -> None:
    """For a rate: from 0 to 1, so that panels compare; unless the numbers go beyond."""
    low, high = axes.get_ylim()
    if low > -0.2 and high < 1.2:
        axes.set_ylim(-0.03, 1.03)
