"""A layout to look at: the offsets of a small matrix as a terminal table or as a heat map."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from octofuse.layouts.maps import Layout

LARGEST = 64  # rows or columns
NUMBERS_UP_TO = 256  # elements: beyond it a number would be smaller than its cell
_SHADES = 24  # greys of a 256-colour terminal


def terminal_table(layout: Layout, rows: int, cols: int, width: int | None = None) -> Table:
    """The offset of every element, a shade lighter the further it lies from the start.

    width: characters of the terminal; columns beyond it are left out, and the title says so.
    """
    _expect_small(rows, cols)
    last = max(1, layout.size(rows, cols) - 1)
    cell = len(str(last)) + 1
    shown = cols if width is None else max(1, min(cols, (width - 3) // cell))
    left_out = "" if shown == cols else f"; columns 0 to {shown - 1} fit here, a picture (--out) shows all"
    table = Table(title=_title(layout, rows, cols) + left_out, show_lines=False, padding=(0, 0, 0, 1), box=None)
    table.add_column("")
    offsets = layout.offsets(rows, cols)[:, :shown]
    for c in range(shown):
        table.add_column(str(c), justify="right", no_wrap=True)
    for r, line in enumerate(offsets.tolist()):
        table.add_row(str(r), *(Text(str(o), style=f"color({232 + o * (_SHADES - 1) // last})") for o in line))
    return table


def draw(layout: Layout, rows: int, cols: int, path: Path) -> None:
    """Writes the picture to `path` (.png or .svg); with a number in each cell where the matrix is small. Needs matplotlib.

    Raises:
        ValueError: another suffix, or a matrix with more than 64 x 64 elements.
        ImportError: matplotlib is not installed.
    """
    _expect_small(rows, cols)
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"out: expected a name that ends in .png or .svg, got {path.name!r}")
    plt = _pyplot()
    offsets = layout.offsets(rows, cols)
    figure, axes = plt.subplots(figsize=(max(4.0, cols * 0.32), max(2.0, rows * 0.32)))
    axes.imshow(offsets.numpy(), cmap="viridis", vmin=0, vmax=layout.size(rows, cols) - 1, aspect="equal")
    axes.set(title=_title(layout, rows, cols), xlabel="column", ylabel="row")
    if rows * cols <= NUMBERS_UP_TO:
        middle = layout.size(rows, cols) / 2
        for r, line in enumerate(offsets.tolist()):
            for c, o in enumerate(line):
                axes.text(c, r, str(o), ha="center", va="center", fontsize=7, color="white" if o < middle else "black")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ImportError("drawing needs matplotlib: pip install 'octofuse[plots]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _title(layout: Layout, rows: int, cols: int) -> str:
    return f"{layout.name}, {rows} x {cols}: offset of each element (ld {layout.leading_dimension(rows, cols)})"


def _expect_small(rows: int, cols: int) -> None:
    if not (1 <= rows <= LARGEST and 1 <= cols <= LARGEST):
        raise ValueError(f"rows, cols: expected 1 to {LARGEST} each, to be readable, got {rows} x {cols}")
