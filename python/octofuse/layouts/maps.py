"""Where an element of a matrix lies in memory, for each layout that int8 GEMMs have used.

All of them are one scheme. Columns are cut into groups `tile_cols` wide that lie one after the other, a group into tiles
of `tile_rows` rows from the top down, and inside a tile a fixed permutation orders the elements. A matrix whose sides are
no multiples of a tile's is padded with zeros to whole tiles.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

_MANUAL = "cuBLAS manual, cublasLtOrder_t"


@dataclass(frozen=True)
class Layout:
    """A bijection between the elements of a padded [rows, cols] matrix and offsets from its first byte.

    Attributes:
        name: what the field calls it.
        tile_rows, tile_cols: the tile's sides; tile_cols 0: a group is as wide as the matrix.
        source: who defines it.
        used_for: which operand of which GEMM wants it.
    """

    name: str
    tile_rows: int
    tile_cols: int
    source: str
    used_for: str

    def padded(self, rows: int, cols: int) -> tuple[int, int]:
        """The sides of the matrix that is stored: multiples of the tile's."""
        width = self._width(cols)
        return -(-rows // self.tile_rows) * self.tile_rows, -(-cols // width) * width

    def size(self, rows: int, cols: int) -> int:
        """Elements of storage, padding included."""
        padded_rows, padded_cols = self.padded(rows, cols)
        return padded_rows * padded_cols

    def leading_dimension(self, rows: int, cols: int) -> int:
        """Elements from one group of columns to the next; for ROW, as for cuBLASLt, from one row to the next."""
        return cols if self.tile_cols == 0 else self._group_size(rows, cols)

    def offsets(self, rows: int, cols: int) -> Tensor:
        """int64 [rows, cols]: the offset of every element."""
        r, c = torch.arange(rows).unsqueeze(1), torch.arange(cols).unsqueeze(0)
        return self.offset(r, c, rows, cols)

    def offset(self, r: Tensor, c: Tensor, rows: int, cols: int) -> Tensor:
        """int64 indices inside the padded matrix (they broadcast) -> the offset in elements."""
        _check_sides(rows, cols)
        width = self._width(cols)
        tile = torch.div(c, width, rounding_mode="floor") * self._group_size(rows, cols)
        tile = tile + torch.div(r, self.tile_rows, rounding_mode="floor") * (self.tile_rows * width)
        return tile + _inner(self, width).to(r.device)[r % self.tile_rows, c % width]

    def position(self, offset: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
        """The inverse of `offset`: int64 offsets below size() -> (r, c). Padding lies at r >= rows or c >= cols."""
        _check_sides(rows, cols)
        width = self._width(cols)
        tile = self.tile_rows * width
        group, rest = offset // self._group_size(rows, cols), offset % self._group_size(rows, cols)
        place = _inverse(self, width).to(offset.device)[rest % tile]
        return rest // tile * self.tile_rows + place // width, group * width + place % width

    def _width(self, cols: int) -> int:
        return self.tile_cols or max(cols, 1)

    def _group_size(self, rows: int, cols: int) -> int:
        return self.padded(rows, cols)[0] * self._width(cols)


def _check_sides(rows: int, cols: int) -> None:
    for name, value in (("rows", rows), ("cols", cols)):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")


@lru_cache(maxsize=64)
def _inner(layout: Layout, width: int) -> Tensor:
    """int64 [tile_rows, width]: the place of each element in its tile."""
    r, c = torch.arange(layout.tile_rows).unsqueeze(1), torch.arange(width).unsqueeze(0)
    if layout.name == "COL4_4R2_8C":
        # Even rows before odd ones; of each, blocks of 4 columns by its 4 rows.
        return r % 2 * 128 + c // 4 * 16 + r // 2 * 4 + c % 4
    if layout.name == "COL32_2R_4R4":
        # The manual's own formula: pairs of rows, taken from each quarter of the tile in turn.
        return ((r % 8 // 2 * 4 + r // 8) * 2 + r % 2) * 32 + c
    return r * width + c


@lru_cache(maxsize=64)
def _inverse(layout: Layout, width: int) -> Tensor:
    """int64 [tile]: the element (r * width + c) at each place of a tile."""
    return _inner(layout, width).flatten().argsort()


ROW = Layout("ROW", 1, 0, _MANUAL, "activations and outputs everywhere; the layout of this library's own kernels")
COL = Layout("COL", 1, 1, _MANUAL, "cuBLAS's native order; a weight [N, K] in ROW is its transpose in COL")
COL32 = Layout("COL32", 1, 32, _MANUAL, "activations and outputs of cuBLASLt's int8 GEMM on Turing and Ampere")
COL4_4R2_8C = Layout("COL4_4R2_8C", 8, 32, _MANUAL, "weights beside COL32 activations on Turing")
COL32_2R_4R4 = Layout("COL32_2R_4R4", 32, 32, _MANUAL, "weights beside COL32 activations on Ampere")
LAYOUTS = (ROW, COL, COL32, COL4_4R2_8C, COL32_2R_4R4)


def interleaved(k: int) -> Layout:
    """CUTLASS's interleaved<k>: groups of k columns, k consecutive bytes of a row at a time. interleaved<32> is COL32."""
    if k < 1 or k & (k - 1):
        raise ValueError(f"k: expected a power of two, got {k}")
    source = "CUTLASS, layout/matrix.h: ColumnMajorInterleaved (RowMajorInterleaved of the transpose)"
    return Layout(f"interleaved<{k}>", 1, k, source, "both operands and the output of CUTLASS 2's interleaved GEMMs")


def layout_named(name: str) -> Layout:
    """A layout by its name, upper or lower case; "interleaved<k>" for any power of two k.

    Raises:
        ValueError: no layout has this name.
    """
    for layout in LAYOUTS:
        if layout.name == name.upper():
            return layout
    found = re.fullmatch(r"interleaved<?(\d+)>?", name.lower())
    if found is None:
        names = ", ".join(layout.name for layout in LAYOUTS)
        raise ValueError(f"layout: expected one of {names}, interleaved<k>, got {name!r}")
    return interleaved(int(found[1]))
