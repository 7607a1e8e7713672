"""Matrices into a layout and back: one kernel on a GPU, plain torch on the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octofuse import ops
from octofuse.layouts.maps import COL32, Layout, _inner, _inverse
from octofuse.ops import layouts as kernels

Scale = Tensor | float


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


def to_layout(matrix: Tensor, layout: Layout, *, engine: str = "auto") -> LaidOut:
    """A matrix [rows, cols] -> its elements in `layout`, padded with zeros to whole tiles.

    Args:
        matrix: of any dtype and stride; on a GPU int8, int32, fp16, bf16 and fp32 take one kernel (other strides than dense
            rows, and other dtypes, are copied by torch first or converted by it).
        layout: where the elements shall lie.
        engine: "auto", or by name "octofuse" or "cublaslt" (cublasLtMatrixTransform: int8 on a GPU).

    Raises:
        TypeError: `matrix` is no tensor or `layout` no Layout.
        ValueError: `matrix` has not two dimensions of at least 1, or the engine cannot serve.
    """
    if not isinstance(matrix, Tensor):
        raise TypeError(f"matrix: expected torch.Tensor, got {type(matrix).__name__}")
    _expect_layout(layout)
    if matrix.dim() != 2 or 0 in matrix.shape:
        raise ValueError(f"matrix: expected [rows, cols], each at least 1, got shape {list(matrix.shape)}")
    rows, cols = matrix.shape
    takes_kernel = _takes_kernel(matrix, engine)
    if _is_row(layout) and engine != "cublaslt":
        data = matrix.clone(memory_format=torch.contiguous_format).reshape(-1)
    elif takes_kernel:
        dense = matrix if matrix.stride(1) == 1 and matrix.stride(0) >= cols else matrix.contiguous()
        data = kernels.to_layout(dense, layout.name, layout.size(rows, cols), engine)
    else:
        data = _to_layout_torch(matrix, layout)
    return LaidOut(data, layout, rows, cols)


def from_layout(laid_out: LaidOut, *, engine: str = "auto") -> Tensor:
    """The matrix [rows, cols], contiguous, of what `to_layout` gave or a GEMM wrote; `engine` as there."""
    _expect_laid_out(laid_out, "laid_out")
    layout, rows, cols = laid_out.layout, laid_out.rows, laid_out.cols
    size = layout.size(rows, cols)
    if laid_out.data.dim() != 1 or laid_out.data.numel() != size:
        raise ValueError(
            f"laid_out.data: expected {size} elements for {layout.name} of {rows} x {cols}, "
            f"got shape {list(laid_out.data.shape)}"
        )
    takes_kernel = _takes_kernel(laid_out.data, engine)
    if _is_row(layout) and engine != "cublaslt":
        return laid_out.data.reshape(rows, cols)
    if takes_kernel:
        return kernels.from_layout(laid_out.data, layout.name, rows, cols, engine)
    return _from_layout_torch(laid_out)


def quantize(x: Tensor, layout: Layout = COL32, *, scale: Scale | None = None) -> tuple[LaidOut, Scale]:
    """x fp16, bf16 or fp32 [rows, cols] -> int8 in `layout`, and its scale: for COL32 on a GPU in one kernel.

    The bits are those of `quantize_per_token` (scales [rows, 1]) or, with `scale` (one fp32 element or a float above 0,
    which is handed back), of `quantize_per_tensor`.
    """
    _expect_layout(layout)
    if x.dim() != 2 or 0 in x.shape:
        raise ValueError(f"x: expected [rows, cols], each at least 1, got shape {list(x.shape)}")
    rows, cols = x.shape
    if x.is_cuda and is_col32(layout):
        q, used = kernels.quantize_col32(x, scale, layout.size(rows, cols))
        return LaidOut(q, layout, rows, cols), used
    if scale is not None:
        return to_layout(ops.quantize_per_tensor(x, scale), layout), scale
    q, scales = ops.quantize_per_token(x)
    return to_layout(q, layout), scales


def dequantize(q: LaidOut, scale: Scale, *, out_dtype: torch.dtype = torch.float16) -> Tensor:
    """int8 or int32 in any layout times `scale` (one element, [rows] or [rows, 1]) -> [rows, cols], contiguous.

    The bits are those of `octofuse.dequantize`; COL32 on a GPU takes one kernel.
    """
    _expect_laid_out(q, "q")
    if q.data.is_cuda and is_col32(q.layout):
        return kernels.dequantize_col32(q.data, q.rows, q.cols, scale, out_dtype)
    return ops.dequantize(from_layout(q), scale, out_dtype=out_dtype)


def is_col32(layout: Layout) -> bool:
    """COL32 by any name: interleaved<32> is the same order."""
    return (layout.tile_rows, layout.tile_cols) == (1, 32)


def _expect_layout(layout: Layout) -> None:
    if not isinstance(layout, Layout):
        raise TypeError(f"layout: expected octofuse.layouts.Layout, got {type(layout).__name__}")


def _expect_laid_out(laid_out: LaidOut, name: str) -> None:
    if not isinstance(laid_out, LaidOut):
        raise TypeError(f"{name}: expected octofuse.layouts.LaidOut, got {type(laid_out).__name__}")


_KERNEL_DTYPES = frozenset((torch.int8, torch.int32, torch.float16, torch.bfloat16, torch.float32))


def _is_row(layout: Layout) -> bool:
    return layout.tile_cols == 0


def _takes_kernel(tensor: Tensor, engine: str) -> bool:
    if engine not in ("auto", "octofuse", "cublaslt"):
        raise ValueError(f"engine: expected 'auto', 'octofuse' or 'cublaslt', got {engine!r}")
    if engine == "cublaslt" and not tensor.is_cuda:
        raise ValueError("engine: expected 'auto' for a tensor on the CPU, got 'cublaslt'")
    return tensor.is_cuda and (tensor.dtype in _KERNEL_DTYPES or engine == "cublaslt")


def _to_layout_torch(matrix: Tensor, layout: Layout) -> Tensor:
    rows, cols = matrix.shape
    padded_rows, padded_cols = layout.padded(rows, cols)
    padded = torch.nn.functional.pad(matrix, (0, padded_cols - cols, 0, padded_rows - rows))
    tiles = _tiles(padded, layout, cols)
    if layout.tile_rows > 1:  # elsewhere a tile lies row by row
        tiles = tiles[..., _inverse(layout, layout.tile_cols or cols).to(matrix.device)]
    return tiles.reshape(-1)


def _from_layout_torch(laid_out: LaidOut) -> Tensor:
    layout, rows, cols = laid_out.layout, laid_out.rows, laid_out.cols
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
