"""Matrices into a layout and back, in plain torch on any device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octofuse.layouts.maps import Layout, _inner, _inverse


@dataclass(frozen=True)
class LaidOut:
    """A matrix in a layout: it knows what its bytes mean, so that no op can take them for another order.

    Attributes:
        data: 1-D, contiguous, `layout.size(rows, cols)` elements; padding is zero.
        layout: where the elements lie.
        rows, cols: the matrix's sides without padding.
    """

    data: Tensor
    layout: Layout
    rows: int
    cols: int

    @property
    def leading_dimension(self) -> int:
        return self.layout.leading_dimension(self.rows, self.cols)

    def expect(self, layout: Layout, name: str) -> Tensor:
        """`data`, for an op that reads `layout`; ValueError naming the argument if it is another one's."""
        if self.layout != layout:
            raise ValueError(
                f"{name}: expected layout {layout.name}, got {self.layout.name} (from_layout converts back)"
            )
        return self.data


def to_layout(matrix: Tensor, layout: Layout) -> LaidOut:
    """A matrix [rows, cols] of any dtype and stride -> its elements in `layout`, padded with zeros to whole tiles.

    Raises:
        TypeError: `matrix` is no tensor or `layout` no Layout.
        ValueError: `matrix` has not two dimensions of at least 1.
    """
    if not isinstance(matrix, Tensor):
        raise TypeError(f"matrix: expected torch.Tensor, got {type(matrix).__name__}")
    if not isinstance(layout, Layout):
        raise TypeError(f"layout: expected octofuse.layouts.Layout, got {type(layout).__name__}")
    if matrix.dim() != 2 or 0 in matrix.shape:
        raise ValueError(f"matrix: expected [rows, cols], each at least 1, got shape {list(matrix.shape)}")
    rows, cols = matrix.shape
    padded_rows, padded_cols = layout.padded(rows, cols)
    padded = torch.nn.functional.pad(matrix, (0, padded_cols - cols, 0, padded_rows - rows))
    tiles = _tiles(padded, layout, cols)
    order = _inverse(layout, layout.tile_cols or cols).to(matrix.device)
    if layout.tile_rows > 1:  # elsewhere a tile lies row by row
        tiles = tiles[..., order]
    return LaidOut(tiles.reshape(-1), layout, rows, cols)


def from_layout(laid_out: LaidOut) -> Tensor:
    """The matrix [rows, cols], contiguous, of what `to_layout` gave or a GEMM wrote."""
    if not isinstance(laid_out, LaidOut):
        raise TypeError(f"laid_out: expected octofuse.layouts.LaidOut, got {type(laid_out).__name__}")
    layout, rows, cols = laid_out.layout, laid_out.rows, laid_out.cols
    size = layout.size(rows, cols)
    if laid_out.data.dim() != 1 or laid_out.data.numel() != size:
        raise ValueError(
            f"laid_out.data: expected {size} elements for {layout.name} of {rows} x {cols}, "
            f"got shape {list(laid_out.data.shape)}"
        )
    width = layout.tile_cols or cols
    padded_rows, padded_cols = layout.padded(rows, cols)
    tiles = laid_out.data.reshape(padded_cols // width, padded_rows // layout.tile_rows, layout.tile_rows * width)
    if layout.tile_rows > 1:
        tiles = tiles[..., _inner(layout, width).flatten().to(tiles.device)]
    matrix = tiles.reshape(padded_cols // width, padded_rows, width).transpose(0, 1).reshape(padded_rows, padded_cols)
    return matrix[:rows, :cols].contiguous()


def _tiles(padded: Tensor, layout: Layout, cols: int) -> Tensor:
    """[padded rows, padded cols] -> [groups, tiles of a group, elements of a tile row by row]."""
    width = layout.tile_cols or cols
    rows = padded.shape[0]
    return (
        padded.reshape(rows, -1, width).transpose(0, 1).reshape(-1, rows // layout.tile_rows, layout.tile_rows * width)
    )
