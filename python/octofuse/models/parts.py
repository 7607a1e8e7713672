"""The parts of one block, and what a block does with them; attention itself is the caller's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octofuse.models.architecture import Architecture, Heads
from octofuse.nn import (
    EightBitLinear,
    Float8Linear,
    Int8Linear,
    Norm,
    PackedLinear,
    fused_layer,
    inner_of,
    joined,
    verb_of,
)
from octofuse.nn.floating import Fused
from octofuse.nn.gathered import AnyFused, Exchanging
from octofuse.nn.order import fold_order_
from octofuse.nn.parted import Parted, whole
from octofuse.ops.activations import Activation


class Parts(NamedTuple):
    """A block's norms, and its linears with the verb `fused`. qkv and up: one linear, or several that read the same.

    after_attention, after_feed_forward: norms of what is added to the residual, or None.
    """

    attention_norm: Norm
    qkv: tuple[Fused, ...]
    projection: AnyFused
    feed_forward_norm: Norm
    up: tuple[Fused, ...]
    down: AnyFused
    query_norm: Norm | None
    key_norm: Norm | None
    after_attention: Norm | None
    after_feed_forward: Norm | None

    @property
    def linears(self) -> tuple[Fused, ...]:
        return (*self.qkv, inner_of(self.projection), *self.up, inner_of(self.down))


# (outputs of qkv, the static scale of the layer that reads the result) -> [..., heads * head size]
Attend = Callable[[tuple[Tensor, ...], Tensor | None], Tensor]


def parts_of(block: nn.Module, architecture: Architecture, *, joins: bool = False) -> Parts:
    """The parts of a block. joins: linears that read the same become one where their kind allows it, a Conv1D's weight is
    transposed once, and the feed-forward's activation order is folded away (`nn.order`); the block's own then share memory
    with what runs (`nn.joined`)."""
    names = architecture.names

    def part(name: str) -> Any:  # get_submodule takes twice as long, and fused blocks ask at every call
        found: Any = block
        for step in name.split("."):
            found = getattr(found, step)
        return found

    def linears(given: tuple[str, ...]) -> tuple[Fused, ...]:
        layers = [part(name) for name in given]
        one = joined(layers) if joins and len(layers) > 1 else None
        return tuple(fused_layer(layer, transposes=joins) for layer in (layers if one is None else [one]))

    def gathering(name: str) -> AnyFused:
        return verb_of(part(name), transposes=joins)

    def norm(name: str | None) -> Norm | None:
        return None if name is None else architecture.norm(part(name))

    if joins:
        fold_order_([part(name) for name in names.up], part(names.down))
    return Parts(
        architecture.norm(part(names.attention_norm)), linears(names.qkv), gathering(names.projection),
        architecture.norm(part(names.feed_forward_norm)), linears(names.up), gathering(names.down),
        norm(names.query_norm), norm(names.key_norm), norm(names.after_attention), norm(names.after_feed_forward),
    )  # fmt: skip


def split_heads(outputs: tuple[Tensor, ...], heads: Heads, interleaved: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs of qkv `[..., channels]` -> views `[..., heads, size]` of queries, keys and values."""
    if len(outputs) == 3:
        q, k, v = outputs
    elif interleaved:
        q, k, v = outputs[0].unflatten(-1, (heads.queries, 3, heads.size)).unbind(-2)
        return q, k, v
    else:
        pairs = heads.pairs * heads.size
        q, k, v = outputs[0].split([heads.width, pairs, pairs], -1)
    return tuple(t.unflatten(-1, (-1, heads.size)) for t in (q, k, v))  # type: ignore[return-value]


Stream = Tensor | Parted  # what goes from block to block, `[..., width]`


def attended(parts: Parts, x: Stream, attend: Attend, multiplier: float = 1.0) -> Stream:
    """x + projection(attention(norm(x))); multiplier: of what is added."""
    source = _for(parts.qkv, x)
    qkv = tuple(layer.fused(source, norm=parts.attention_norm) for layer in parts.qkv)
    alone = _adds_alone(parts.after_attention, multiplier)
    # Attention writes int8.
    scale = parts.projection.input_scale if isinstance(inner_of(parts.projection), Int8Linear) else None
    values = attend(qkv, None if alone else scale)
    return _added(x, parts.projection, values, parts.after_attention, multiplier)


def fed_forward(parts: Parts, x: Stream, source: Stream, architecture: Architecture) -> Stream:
    """x + down(activation(up(norm(source)))); gated: down(activation(gates) * values). source: x, or what the block read
    where attention and feed-forward are parallel.

    Between up and down activations have 8 bits where down has a static scale and nothing is gated in front of it.
    """
    activation, norm = architecture.activation, parts.feed_forward_norm
    source = _for(parts.up, source)
    multiplier = architecture.residual_multiplier
    gate = activation if architecture.names.gated else None
    out_scale = None if _adds_alone(parts.after_feed_forward, multiplier) else _handed_on(parts)
    if gate is None:
        (up,) = parts.up
        hidden = up.fused(source, norm=norm, activation=activation, out_scale=out_scale)
    elif (gated := _multiplies_gates(parts)) is not None:
        hidden = gated.fused(source, norm=norm, activation=gate, gated=True, out_scale=out_scale)
        gate = None
    else:
        halves = [layer.fused(source, norm=norm) for layer in parts.up]
        hidden = halves[0] if len(halves) == 1 else torch.cat(halves, -1)
    return _added(x, parts.down, hidden, parts.after_feed_forward, multiplier, gate)


def _for(readers: tuple[Fused, ...], x: Stream) -> Stream:
    """Joined once where several linears read it."""
    return whole(x) if len(readers) > 1 else x


def _adds_alone(norm: Norm | None, multiplier: float) -> bool:
    """Whether the residual is added behind the layer. Its input is then no int8: that has no dtype of its own, and only a
    residual says which one the output has."""
    return norm is not None or multiplier != 1.0


def _handed_on(parts: Parts) -> Tensor | None:
    """down's static scale, if up can write what down reads: float8 layers write and read float8, others int8."""
    writes, reads = (isinstance(layer, Float8Linear) for layer in (parts.up[0], inner_of(parts.down)))
    return parts.down.input_scale if writes == reads else None


def _multiplies_gates(parts: Parts) -> PackedLinear | None:
    """up, if its product can multiply values by their gates and down does not quantise them by the token meanwhile."""
    if len(parts.up) > 1 or not isinstance(parts.up[0], PackedLinear):
        return None
    down = inner_of(parts.down)
    by_token = isinstance(down, EightBitLinear) and parts.down.input_scale is None
    by_token = by_token or (isinstance(down, PackedLinear) and down.scheme.has_int8_tokens)
    return None if by_token else parts.up[0]


def _added(
    x: Stream, layer: AnyFused, values: Tensor, norm: Norm | None, multiplier: float, gate: Activation | None = None
) -> Stream:
    """x + layer(values), or x + norm(layer(values)), or of it `multiplier`."""
    if not _adds_alone(norm, multiplier):
        if isinstance(layer, Exchanging):
            return layer.fused(values, residual=x, gate=gate)
        return layer.fused(values, residual=whole(x), gate=gate)
    y = whole(layer.fused(values, gate=gate))
    result: Tensor = whole(x) + (y if norm is None else norm(y)) * multiplier
    return result
