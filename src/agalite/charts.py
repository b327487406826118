"""The common style of all charts. Matplotlib is imported only when something is drawn."""

from typing import Any

# Distinguishable for colour-blind readers and in print (Okabe and Ito, 2008).
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


def new_figure(width: float, height: float) -> Any:
    """An empty figure; `width` and `height` are in inches."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError('pictures need matplotlib: pip install "agalite[train]"') from error
    # pyplot would keep every figure alive and choose a backend for the whole process.
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def style_axes(axes: Any, *, size: int = 9) -> None:
    """Draw a grid behind the lines and no frame; `size` is the font size of the tick labels."""
    axes.grid(color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(colors=INK, labelsize=size)


def unit_range(axes: Any) -> None:
    """Show the range of a rate, from 0 to 1, unless values lie outside."""
    low, high = axes.get_ylim()
    if low > -0.2 and high < 1.2:
        axes.set_ylim(-0.03, 1.03)
