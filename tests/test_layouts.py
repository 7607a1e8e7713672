"""Layouts: against the manual's words, element by element, and there and back."""

from __future__ import annotations

import pytest
import torch

from helpers import DEVICES
from octofuse.layouts import (
    COL,
    COL4_4R2_8C,
    COL32,
    COL32_2R_4R4,
    LAYOUTS,
    ROW,
    LaidOut,
    from_layout,
    interleaved,
    layout_named,
    to_layout,
)

ALL = (*LAYOUTS, interleaved(4), interleaved(32), interleaved(64))
SIZES = [(1, 1), (1, 33), (2, 33), (7, 31), (8, 32), (9, 64), (32, 32), (33, 65), (64, 96), (70, 130)]


def by_enumeration(layout, rows: int, cols: int) -> torch.Tensor:
    """The offsets of the padded matrix, as one would fill memory by hand: group by group, tile by tile."""
    tile_cols = layout.tile_cols
    padded_rows = -(-rows // layout.tile_rows) * layout.tile_rows
    placed = [[-1] * (-(-cols // tile_cols) * tile_cols) for _ in range(padded_rows)]
    order = list(inside(layout))
    offset = 0
    for first_col in range(0, cols, tile_cols):
        for first_row in range(0, rows, layout.tile_rows):
            for r, c in order:
                placed[first_row + r][first_col + c] = offset
                offset += 1
    return torch.tensor(placed)


def inside(layout):
    """A tile's elements in the order of memory."""
    if layout is COL4_4R2_8C:  # 4 even rows, then 4 odd ones; inner tiles of 4 columns
        for parity in (0, 1):
            for block in range(0, 32, 4):
                for r in range(parity, 8, 2):
                    yield from ((r, c) for c in range(block, block + 4))
    elif layout is COL32_2R_4R4:  # 2 rows of each group of 8, from 4 groups; 4 such rounds
        for pair in range(0, 8, 2):
            for eight in range(0, 32, 8):
                for r in (eight + pair, eight + pair + 1):
                    yield from ((r, c) for c in range(32))
    else:
        for r in range(layout.tile_rows):
            yield from ((r, c) for c in range(layout.tile_cols))


@pytest.mark.parametrize("layout", ALL, ids=lambda layout: layout.name)
def test_every_size_up_to_70_by_130(layout) -> None:
    """Groups of columns lie one after the other, so one enumeration serves every narrower matrix; ROW just counts."""
    for rows in range(1, 71):
        widest = None if layout is ROW else by_enumeration(layout, rows, 130)
        for cols in range(1, 131):
            placed = torch.arange(rows * cols).reshape(rows, cols) if widest is None else widest
            assert torch.equal(layout.offsets(rows, cols), placed[:rows, :cols]), (rows, cols)
            width = layout.tile_cols or cols
            assert layout.size(rows, cols) == placed.shape[0] * (-(-cols // width) * width)


@pytest.mark.parametrize("layout", ALL, ids=lambda layout: layout.name)
@pytest.mark.parametrize(("rows", "cols"), SIZES)
def test_positions_undo_offsets(layout, rows: int, cols: int) -> None:
    r, c = layout.position(torch.arange(layout.size(rows, cols)), rows, cols)
    assert torch.equal(layout.offset(r, c, rows, cols), torch.arange(layout.size(rows, cols)))
    padded = layout.padded(rows, cols)
    assert (int(r.max()) + 1, int(c.max()) + 1) == padded


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ALL, ids=lambda layout: layout.name)
@pytest.mark.parametrize(("rows", "cols"), SIZES)
def test_conversions_follow_the_map_and_come_back(device, layout, rows: int, cols: int, generator) -> None:
    for dtype in (torch.int8, torch.int32, torch.float16):
        matrix = torch.randint(-128, 128, (rows, cols), generator=generator).to(dtype).to(device)
        laid_out = to_layout(matrix, layout)
        assert laid_out.data.dtype == dtype
        want = torch.zeros(layout.size(rows, cols), dtype=dtype)
        want[layout.offsets(rows, cols)] = matrix.cpu()
        assert torch.equal(laid_out.data.cpu(), want), "every element in its place, zeros elsewhere"
        assert torch.equal(from_layout(laid_out), matrix)
    view = torch.randint(-128, 128, (cols, rows), generator=generator).to(torch.int8).to(device).t()
    assert torch.equal(from_layout(to_layout(view, layout)), view)


def test_the_manuals_examples() -> None:
    assert COL32.leading_dimension(2, 33) == 64
    assert COL4_4R2_8C.leading_dimension(1, 33) == 256
    assert COL32_2R_4R4.leading_dimension(1, 33) == 1024
    assert (ROW.leading_dimension(5, 7), COL.leading_dimension(5, 7)) == (7, 5)
    assert torch.equal(interleaved(32).offsets(70, 130), COL32.offsets(70, 130))
    row, col = 21, 9
    assert COL32_2R_4R4.offsets(32, 32)[row, col] == (((row % 8) // 2 * 4 + row // 8) * 2 + row % 2) * 32 + col


def test_names_and_wrong_arguments() -> None:
    assert layout_named("col32") is COL32
    assert layout_named("interleaved<64>") == interleaved(64)
    with pytest.raises(ValueError, match="layout: expected one of ROW, COL, COL32"):
        layout_named("COL33")
    with pytest.raises(ValueError, match="k: expected a power of two, got 12"):
        interleaved(12)
    with pytest.raises(ValueError, match="matrix: expected \\[rows, cols\\]"):
        to_layout(torch.zeros(2, 3, 4), COL32)
    with pytest.raises(ValueError, match="each at least 1"):
        to_layout(torch.zeros(0, 4), COL32)
    with pytest.raises(TypeError, match=r"layout: expected octofuse.layouts.Layout, got str"):
        to_layout(torch.zeros(2, 3), "COL32")
    with pytest.raises(TypeError, match=r"matrix: expected torch.Tensor"):
        to_layout([[1]], COL32)
    with pytest.raises(ValueError, match="rows: expected at least 1, got 0"):
        COL.offset(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 0, 1)
    laid_out = to_layout(torch.zeros(4, 4, dtype=torch.int8), COL32)
    with pytest.raises(ValueError, match=r"laid_out.data: expected 128 elements"):
        from_layout(LaidOut(laid_out.data[:-1], COL32, 4, 4))
    with pytest.raises(TypeError, match="laid_out: expected"):
        from_layout(laid_out.data)
