"""Growth curves as pictures of the documentation: ``docs/images/growth_NAME.png``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import matplotlib as mpl

mpl.use("agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

if TYPE_CHECKING:
    from collections.abc import Sequence

    import curve

IMAGES: Final = Path(__file__).resolve().parents[2] / "docs" / "images"
TIMES: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
# Told apart in print and by eyes that do not tell red from green; the marker says it again.
COLOURS: Final = ("#0b62a4", "#c8501e", "#1b7f5c", "#7b4fa3")
MARKERS: Final = ("o", "s", "^", "D")


def draw(name: str, title: str, size: str, curves: Sequence[curve.Curve]) -> Path:
    """Draw times and bytes side by side, both axes logarithmic, with a line that grows linearly."""
    times = [each for each in curves if each.unit in TIMES]
    sides = [("CPU time, s", times), ("MiB", [each for each in curves if each.unit not in TIMES])]
    sides = [side for side in sides if side[1]]
    figure, axes = plt.subplots(1, len(sides), figsize=(5.2 * len(sides), 4.8), squeeze=False, facecolor="white")
    for panel, (label, drawn) in zip(axes[0], sides, strict=True):
        _panel(panel, label, size, drawn)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    path = IMAGES / f"growth_{name}.png"
    # Without the date and the version the same figures give the same bytes.
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
    return path


def _panel(panel: Any, label: str, size: str, curves: Sequence[curve.Curve]) -> None:
    panel.set_xscale("log")
    panel.set_yscale("log")
    for number, each in enumerate(curves):
        values = [value * TIMES.get(each.unit, 1.0) for value in each.values]
        look = {"color": COLOURS[number % 4], "marker": MARKERS[number % 4], "markersize": 5, "linewidth": 1.6}
        panel.plot(each.sizes, values, label=f"{each.name} ({each.exponent:.2f})", **look)
    low, high = panel.get_ylim()
    # Whole decades: a curve that is nearly flat should look it.
    panel.set_ylim(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)))
    _linear(panel, curves)
    panel.set_xlabel(size)
    panel.set_ylabel(label)
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
        axis.set_minor_formatter(NullFormatter())
    # The sizes that were measured, and no others: a decade can lie between two of them.
    panel.set_xticks(sorted({size for each in curves for size in each.sizes}))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.grid(visible=True, which="major", color="#dddddd", linewidth=0.6)
    panel.legend(
        fontsize=8,
        title="cost (exponent)",
        title_fontsize=8,
        frameon=False,
        ncol=2,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.16),
    )


def _linear(panel: Any, curves: Sequence[curve.Curve]) -> None:
    """Draw what grows linearly, from the lower left corner as far as the axes reach."""
    first, last = (pick(size for each in curves for size in each.sizes) for pick in (min, max))
    low, high = panel.get_ylim()
    reach = min(last / first, high / low)
    look = {"color": "#888888", "linestyle": ":", "linewidth": 1.4, "label": "linear (1.00)"}
    panel.plot([first, first * reach], [low, low * reach], **look)
