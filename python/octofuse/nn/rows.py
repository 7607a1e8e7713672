"""A linear with some of its outputs alone: what a rank of a parallel model holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octofuse.nn.linear import EightBitLinear, is_conv1d, weight_of
from octofuse.nn.weight_only import BCQLinear, CodebookLinear, PackedLinear, Sparse12Linear
from octofuse.quant import codebook
from octofuse.quant.affine import BLOCK
from octofuse.quant.packing import TILE_ROWS, pack, pack_pairs, packed_rows, unpack, unpack_pairs


def rows_of(layer: nn.Module, rows: Sequence[range], *, shares: bool = False) -> nn.Module:
    """A layer of the same kind whose outputs are these of the given one, in this order; each has the bits that it had.

    Args:
        layer: nn.Linear, Conv1D (which becomes an nn.Linear), EightBitLinear or PackedLinear.
        rows: runs of outputs.
        shares: an nn.Linear's weight may stay a view of the given one's, as a head's that is tied to an embedding must.

    Raises TypeError for other layers, ValueError for runs that begin inside a block of 128 of a weight with scales of
    blocks.
    """
    if isinstance(layer, nn.Linear) or is_conv1d(layer):
        return _of_floats(layer, rows, shares)
    if isinstance(layer, EightBitLinear):
        return _of_eight_bits(layer, rows)
    if isinstance(layer, PackedLinear):
        return _of_packed(layer, rows)
    raise TypeError(f"layer: expected a linear in floating point or of this library, got {type(layer).__name__}")


def check_rows(layer: nn.Module, rows: Sequence[range]) -> None:
    """Raises what `rows_of` would, and takes nothing."""
    if isinstance(layer, EightBitLinear) and _has_blocks(layer):
        check_blocks(rows, layer.out_features)


def check_blocks(rows: Sequence[range], outputs: int) -> None:
    """Raises ValueError for runs that begin or end inside a block of 128 of so many outputs."""
    blocks_of(rows, outputs)


def _has_blocks(layer: EightBitLinear) -> bool:
    return layer.scheme.weights == "block" and layer.weight_scale.shape[0] > 1


def _taken(tensor: Tensor, rows: Sequence[range], dim: int = 0) -> Tensor:
    """A copy: the whole must not stay in memory for it."""
    one_byte = tensor.element_size() == 1
    source = tensor.detach().view(torch.int8) if one_byte else tensor.detach()  # not every torch joins float8
    pieces = [source.narrow(dim, run.start, len(run)) for run in rows]
    return torch.cat(pieces, dim).contiguous().clone().view(tensor.dtype)


def _bias(layer: Any, rows: Sequence[range]) -> Tensor | None:
    return None if layer.bias is None else _taken(layer.bias, rows)


def _count(rows: Sequence[range]) -> int:
    return sum(map(len, rows))


def _of_floats(layer: Any, rows: Sequence[range], shares: bool) -> nn.Module:
    weight = weight_of(layer)
    made = nn.Linear(weight.shape[1], _count(rows), bias=False, device="meta")
    is_view = shares and len(rows) == 1
    own = weight[rows[0].start : rows[0].stop] if is_view else _taken(weight, rows)
    made.weight = nn.Parameter(own, requires_grad=False)
    made.source = type(layer)  # type: ignore[assignment]  # nn.Linear, or a Conv1D that `whole_of` makes again
    bias = _bias(layer, rows)
    made.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)  # type: ignore[assignment]
    return made.train(layer.training)


def _of_eight_bits(layer: Any, rows: Sequence[range]) -> nn.Module:
    made: Any = type(layer)(
        layer.in_features, _count(rows), bias=False, scheme=layer.scheme, activation=layer.activation, device="meta"
    )
    made.engine, made.fast_accumulate = layer.engine, layer.fast_accumulate
    made.weight = _taken(layer.weight, rows)
    scale = layer.weight_scale
    if _has_blocks(layer):
        made.weight_scale = _taken(scale, blocks_of(rows, layer.out_features))
    elif scale.dim() == 1 and scale.numel() == layer.out_features:
        made.weight_scale = _taken(scale, rows)
    else:
        made.weight_scale = scale.clone()
    made.input_scale, made.bias, made.is_conv1d = layer.input_scale, _bias(layer, rows), layer.is_conv1d
    if hasattr(layer, "amax_history"):
        made.amax_history = layer.amax_history.clone()
    return made.train(layer.training)  # type: ignore[no-any-return]


def blocks_of(rows: Sequence[range], count: int) -> list[range]:
    for run in rows:
        if run.start % BLOCK != 0 or (run.stop % BLOCK != 0 and run.stop != count):
            raise ValueError(
                f"rows: expected whole blocks of {BLOCK} of a weight with a scale for each, got {run.start} to {run.stop}"
            )
    return [range(run.start // BLOCK, -(-run.stop // BLOCK)) for run in rows]


def _of_packed(layer: Any, rows: Sequence[range]) -> nn.Module:
    made: Any = type(layer)(layer.in_features, _count(rows), bias=False, scheme=layer.scheme, device="meta")
    made.packed = _packed(layer, rows)
    for name, tensor in layer.named_buffers(recurse=False):
        if name != "order" and tensor is not None:  # scales and zero points, a column for each output
            setattr(made, name, _taken(tensor, rows, tensor.dim() - 1))
    made.order, made.bias, made.is_conv1d = layer.order, _bias(layer, rows), layer.is_conv1d
    return made.train(layer.training)  # type: ignore[no-any-return]


def has_whole_tiles(rows: Sequence[range], outputs: int) -> bool:
    """Whether no row tile of so many outputs is cut, and all but the last run end where one does."""
    ends = [run.stop for run in rows[:-1]] + [0 if rows[-1].stop == outputs else rows[-1].stop]
    return all(row % TILE_ROWS == 0 for row in [*ends, *(run.start for run in rows)])


def codes_of(layer: Any) -> Tensor:
    """Of a PackedLinear, `[N, K]`; of Sparse12Linear two columns each."""
    n, k, packed = layer.out_features, layer.in_features, layer.packed.detach()
    if isinstance(layer, Sparse12Linear):
        return unpack_pairs(packed, n, k)
    return unpack(packed, layer.scheme.bits, n, k, **_kind(layer))


def packed_of(layer: Any, codes: Tensor) -> Tensor:
    """Of codes as this layer has them."""
    return pack_pairs(codes) if isinstance(layer, Sparse12Linear) else pack(codes, layer.scheme.bits, **_kind(layer))


def _kind(layer: Any) -> dict[str, bool]:
    is_codebook = isinstance(layer, CodebookLinear) and layer.scheme.bits == codebook.BITS
    return {"planes": isinstance(layer, BCQLinear), "codebook": is_codebook}


def _packed(layer: Any, rows: Sequence[range]) -> Tensor:
    """Whole row tiles are copied; others are taken apart and packed anew."""
    if has_whole_tiles(rows, layer.out_features):
        return _taken(layer.packed, [range(run.start, packed_rows(run.stop)) for run in rows])
    return packed_of(layer, _taken(codes_of(layer), rows))
