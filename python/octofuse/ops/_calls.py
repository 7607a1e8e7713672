"""The arguments of the larger ops: one struct each, which the public functions, torch.library and `_C` hand to each other.

A field's annotation says how torch.library sees it: see TYPES. `_C` reads fields by their place, so names and order are
those of cpp/bindings/call.h; a test compares both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, dtype

from octofuse.ops._guard import as_int_tensor, as_tensor, goes_direct, refuse_gradients

Scale = Tensor | float
ZeroPoint = Tensor | int


class LinearCall(NamedTuple):
    """`i8f16_linear`; with out_scale `i8i8_linear`, and out_dtype is not read. Both and float8: `linear`."""

    x: Tensor
    w: Tensor
    x_scale: Scale
    w_scale: Scale
    bias: Tensor | None
    activation: str | None
    residual: Tensor | None
    out_dtype: dtype
    out_scale: Scale | None
    engine: str
    x_zero_point: ZeroPoint | None
    w_sum: Tensor | None
    constant_weight: bool
    fast_accumulate: bool = False


class RowLinearCall(NamedTuple):
    """`quantized_linear`."""

    x: Tensor
    w: Tensor
    x_scale: Scale | None
    w_scale: Scale
    norm: str | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    eps: float
    bias: Tensor | None
    activation: str | None
    residual: Tensor | None
    out_dtype: dtype
    out_scale: Scale | None
    constant_weight: bool
    fast_accumulate: bool = False


class LowbitCall(NamedTuple):
    """`woq_linear`, `bcq_linear`, `sparse12_linear`, `codebook_linear`, `two_level_linear`.

    kind: "uniform", "planes", "sparse12", "codebook", "two_level", or "float8" of codes in e4m3.
    zero_point: one for all groups, in place of zero. levels: of a codebook, 16. group_scale: of "two_level".
    """

    x: Tensor
    x_scale: Scale | None
    packed: Tensor
    scale: Tensor
    zero: Tensor | None
    offset: Tensor | None
    kind: str
    bits: int
    group: int | None
    norm: str | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    eps: float
    bias: Tensor | None
    activation: str | None
    residual: Tensor | None
    out_scale: Scale | None
    engine: str
    constant_weight: bool
    gated: bool = False
    zero_point: int | None = None
    levels: list[float] | None = None
    group_scale: Tensor | None = None


class OutlierCall(NamedTuple):
    """`llm_int8_linear`."""

    x: Tensor
    w: Tensor
    w_scale: Scale
    bias: Tensor | None
    threshold: float
    activation: str | None
    residual: Tensor | None
    constant_weight: bool


class RowsCall(NamedTuple):
    """The functions of `ops.rows`; op: "layer_norm", "rms_norm", "activation", "gated_activation", "reorder" or "copy".

    q_dtype, q_block: of what is quantised; q_block: every 128 columns have a scale of their own. of_part: x is a part of
    the rows' columns: rows of zeros find scale 0, and a given scale may be one for each row.
    """

    x: Tensor
    op: str
    residual: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    activation: str | None
    quantize: bool
    scale: Scale | None
    constants: bool
    order: Tensor | None = None
    q_dtype: dtype = torch.int8
    q_block: bool = False
    of_part: bool = False


class AttendCall(NamedTuple):
    """`ops.decode.attend`, and `append`, which does not read what follows softcap; the fields are described there."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None
    fixed_scales: tuple[float, float] | None
    rotary: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    eps: float
    scaling: float
    window: int
    softcap: float
    positions: Tensor | None
    starts: Tensor | None
    partials: Tensor
    arrivals: Tensor
    out_scale: Scale | None


class Col32Call(NamedTuple):
    """`ops.layouts.linear_col32`; sizes: M, N, K; size: elements of the output."""

    x: Tensor
    w: Tensor
    sizes: list[int]
    x_scale: Scale | None
    w_scale: Scale | None
    bias: Tensor | None
    activation: str | None
    residual: Tensor | None
    out_dtype: dtype
    out_scale: Scale | None
    out_layout: str
    size: SymInt


class PeerCall(NamedTuple):
    """Where a call of `ops.peers` finds the other ranks: the fields of `Inboxes`, and sizes, elements of a row of each."""

    sizes: tuple[int, ...]
    rank: int
    addresses: tuple[int, ...]
    calls: Tensor
    capacity: int
    bulk: int
    limit: float


SymInt = int

# Annotations, as they are written, and their types in torch.library's schemas. A scale or a zero point may be a Python
# number in a direct call; the dispatcher sees a tensor.
TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "Scale": "Tensor",
    "Scale | None": "Tensor?",
    "ZeroPoint | None": "Tensor?",
    "str": "str",
    "str | None": "str?",
    "int": "int",
    "int | None": "int?",
    "SymInt": "SymInt",
    "list[int]": "SymInt[]",
    "float": "float",
    "list[float] | None": "float[]?",
    "bool": "bool",
    "dtype": "ScalarType",
}


# The ops, and their arguments.
CALLS: dict[str, Any] = {
    "linear": LinearCall,
    "quantized_linear": RowLinearCall,
    "lowbit_linear": LowbitCall,
    "outlier_linear": OutlierCall,
    "rows": RowsCall,
    "linear_col32": Col32Call,
    "attend": AttendCall,
}

# (field, annotation as it is written) of each; NamedTuple keeps annotations as forward references. Listed here because
# torch.compile cannot read them.
KINDS = {
    op: tuple((field, getattr(kind, "__forward_arg__", kind)) for field, kind in call.__annotations__.items())
    for op, call in CALLS.items()
}


def schema_of(op: str) -> str:
    """An op's arguments as torch.library declares them."""
    return ", ".join(f"{TYPES[kind]} {field}" for field, kind in KINDS[op])


def run(op: str, name: str, call: Any, direct: Callable[..., Any], out: Tensor | None = None) -> Any:
    """direct(call) for plain tensors; under torch.compile and the like, `torch.ops.octofuse.<op>`.

    name: of the call in messages. out: given to both, if there is one.
    """
    more = () if out is None else (out,)
    if goes_direct(*call, *more):
        if torch.is_grad_enabled():
            refuse_gradients(name, **call._asdict(), out=out)
        return direct(call, *more)
    # Tracing detaches what it records, so a lost gradient has to be refused here as well.
    refuse_gradients(name, **call._asdict(), out=out)
    seen = [_as_seen(field, kind, value, call.x) for (field, kind), value in zip(KINDS[op], call, strict=True)]
    if out is None:
        return getattr(torch.ops.octofuse, op)(*seen)
    getattr(torch.ops.octofuse, op + "_out")(*seen, out=out)
    return out


def _as_seen(field: str, kind: str, value: Any, like: Tensor) -> Any:
    """A number that stands for a tensor becomes one, checked as `_C` checks it."""
    if kind.startswith("Scale"):
        return as_tensor(field, value, like)
    return as_int_tensor(field, value, like) if kind.startswith("ZeroPoint") else value
