"""A whole model, the same on every rank, becomes this rank's part of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from octofuse.files.loading import Later
from octofuse.files.tensor_parallel import A_PART
from octofuse.models.architecture import Architecture, Heads, architecture_of
from octofuse.nn import (
    QUANTISED,
    EightBitLinear,
    GatheredLinear,
    SummedLinear,
    check_blocks,
    check_rows,
    columns_of,
    cuts_columns,
    replace_module,
    rows_of,
)
from octofuse.nn.linear import is_conv1d
from octofuse.nn.parted import Joint
from octofuse.ops import decode
from octofuse.parallel.attention import keep_heads
from octofuse.parallel.group import FastSums, Group, Sum
from octofuse.parallel.plan import HeadShare, part, rows_of_up, split
from octofuse.quant.affine import BLOCK

_ATTRIBUTE = "_octofuse_share"


@dataclass(frozen=True)
class Share:
    """What a rank has of a model; heads: of each block; rows: of each linear, every rank's outputs. Of a head that is a
    view of the embeddings there are none: these are whole."""

    group: Group
    heads: tuple[Heads, ...]
    rows: dict[str, list[Sequence[range]]]


def share_of(model: nn.Module) -> Share | None:
    """None of a whole model."""
    share: Share | None = getattr(model, _ATTRIBUTE, None)
    return share


def shard_(model: nn.Module, mesh: Any) -> nn.Module:
    """Leave this rank's part of every linear in the model, in place; `octofuse.Generator` runs it on all ranks together.

    Embeddings and norms stay whole, and a floating-point head but in fp16 or bf16 on compute capability 9.0, up to 4,096
    columns. Queries, keys and values are split by heads, the other linears by their outputs. What a linear reads is
    gathered in front of it where it is split, so every output is summed by one rank, as one device would: int8 and FP8
    schemes, and weights of few bits beside int8 tokens, give the bits of one device, whatever the number of ranks, and so
    do up to 4 tokens beside other weights of few bits.
    How sums of more tokens beside these, and of floating-point weights, are made may depend on a linear's outputs, and so
    on the number of ranks.

    With FastSums(mesh) attention's projection and a feed-forward's last linear are split by their inputs where groups of
    these allow it, and what ranks find is added in fp16 or bf16: half as many exchanges between ranks, and bits that depend
    on their number, as those of other libraries do.

    Args:
        model: of a family that `octofuse.generate` takes, in eval mode, quantised or not, with the same weights on all
            ranks; best on the CPU, to go to this rank's device afterwards. Linears that a checkpoint's reader has not
            made yet are made here, one at a time.
        mesh: a DeviceMesh of one dimension, or a process group of torch.distributed, of any backend that serves the
            device that the model will be on; or FastSums of one.

    Returns:
        The model, whose parameters want no gradient any more: gathers have none.

    Raises:
        TypeError, ValueError: naming what is not as expected, before anything is changed, on all ranks: more ranks than
            heads, ranks with other versions or models, a model that was sharded before.
        RuntimeError: where torch.distributed was not initialised; and on all other ranks, where one could not make its
            part: what was read in floating point is quantised here. The model is then of no use.
    """
    if (share := share_of(model)) is not None:
        raise ValueError(f"model: expected a whole model, got a part of one ({share.group})")
    group, fast = Group(mesh), isinstance(mesh, FastSums)
    # First: what one rank alone refused would leave the others waiting.
    group.check_alike({"the model": _digest(model), "fast sums": str(fast)})
    architecture = architecture_of(model)
    rows: dict[str, list[Sequence[range]]] = {}
    for rank in range(group.ranks):  # every rank's part, so that all refuse what one of them would
        for piece in _pieces(model, architecture, _Rank(group, rank, fast)):
            _check(piece)
            if not piece.shares:
                rows.setdefault(piece.name, []).append(piece.rows)
    pieces = _pieces(model, architecture, _Rank(group, group.rank, fast))
    shares = [HeadShare(heads, group.rank, group.ranks) for heads in architecture.heads]
    remember_(model, Share(group, tuple(share.heads for share in shares), rows))
    blocks: Any = model.get_submodule(architecture.names.blocks)
    for block, own in zip(blocks, shares, strict=True):
        keep_heads(block.get_submodule(architecture.names.qkv[0].rpartition(".")[0]), own.heads)
    with group.together():  # what is quantised now may be refused by the rank that has it
        while pieces:  # one at a time: what was whole goes as soon as its part is there
            piece = pieces.pop()
            replace_module(model, piece.name, piece.made())
    return model.requires_grad_(False)


def remember_(model: nn.Module, share: Share) -> None:
    """That the model is a part."""
    object.__setattr__(model, _ATTRIBUTE, share)
    object.__setattr__(model, "save_pretrained", _not_saved)


def forget_(model: nn.Module) -> None:
    for name in (_ATTRIBUTE, "save_pretrained"):
        object.__delattr__(model, name)


def _not_saved(*_: Any, **__: Any) -> Any:
    raise ValueError(A_PART)


def _digest(model: Any) -> str:
    """Of what has to be the same on all ranks: its tensors, by names, shapes and their corners, schemes and config."""
    tensors = [(name, tuple(t.shape), str(t.dtype), _corners(t)) for name, t in model.state_dict().items()]
    schemes = [str(module.scheme.name) for module in model.modules() if isinstance(module, QUANTISED)]
    described = getattr(model, "config", None)
    config = {} if described is None else {key: value for key, value in described.to_dict().items() if key[:1] != "_"}
    text = f"{type(model).__name__} {tensors} {schemes} {sorted(config.items(), key=str)}"
    return f"{type(model).__name__} {hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _corners(tensor: torch.Tensor) -> tuple[float, ...]:
    if tensor.is_meta or tensor.numel() == 0:
        return ()
    return tuple(float(tensor[(at,) * tensor.dim()]) for at in (0, -1))


@dataclass(frozen=True)
class _Piece:
    """A linear, this rank's outputs of it, and what is gathered around it. Where every rank's inputs, `columns`, can be
    cut, this rank's inputs instead, whose sums are added by `adds`."""

    name: str
    layer: nn.Module
    rows: Sequence[range]
    gather_output: Joint | None = None
    gather_input: Joint | None = None
    shares: bool = False
    columns: tuple[range, ...] = ()
    adds: Sum | None = None

    def made(self) -> nn.Module:
        if self.adds is not None:
            layer = self.layer.layer() if isinstance(self.layer, Later) else self.layer
            if cuts_columns(layer, self.columns):
                rank = self.adds.group.rank
                summand = columns_of(layer, self.columns[rank], bias=rank == 0)
                return SummedLinear(summand, self.adds, is_first=rank == 0)
        if isinstance(self.layer, Later):
            own = self.layer.part(self.rows, shares=self.shares)
        else:
            own = rows_of(self.layer, self.rows, shares=self.shares)
        if self.gather_output is None:
            return own
        return GatheredLinear(own, self.rows[0], self.gather_output, self.gather_input)


def _check(piece: _Piece) -> None:
    if not isinstance(piece.layer, Later):
        check_rows(piece.layer, piece.rows)
    elif piece.layer.unit is not None and piece.layer.out_features > piece.layer.unit:
        check_blocks(piece.rows, piece.layer.out_features)


@dataclass(frozen=True)
class _Rank:
    """Whose part is planned; fast: sums may be split."""

    group: Group
    number: int
    fast: bool

    @property
    def ranks(self) -> int:
        return self.group.ranks


def _pieces(model: nn.Module, architecture: Architecture, rank: _Rank) -> list[_Piece]:
    """What a rank has."""
    pieces = _of_blocks(model, architecture, rank)
    if (head := _of_head(model, architecture, rank)) is not None:
        pieces.append(head)
    return pieces


def _of_blocks(model: nn.Module, architecture: Architecture, rank: _Rank) -> list[_Piece]:
    names = architecture.names
    pieces = []
    for index, heads in enumerate(architecture.heads):
        share = HeadShare(heads, rank.number, rank.ranks)
        inside = f"{names.blocks}.{index}"
        layers = {name: model.get_submodule(f"{inside}.{name}") for name in names.linears}
        rows = dict(zip(names.qkv, share.rows(len(names.qkv), names.interleaved), strict=True))
        width = _sizes(layers[names.down])[1]
        unit = _unit([layers[name] for name in names.up])
        if rank.fast and width >= BLOCK * rank.ranks:  # groups of the last linear's inputs should stay whole
            unit = BLOCK
        hidden = split(width, rank.ranks, unit)
        rows |= zip(names.up, rows_of_up(hidden, rank.number, len(names.up), names.gated), strict=True)
        pieces += [_Piece(f"{inside}.{name}", layers[name], own) for name, own in rows.items()]
        for name, inputs in ((names.projection, share.widths), (names.down, hidden)):
            pieces.append(_gathered(f"{inside}.{name}", layers[name], rank, inputs))
    return pieces


def _of_head(model: nn.Module, architecture: Architecture, rank: _Rank) -> _Piece | None:
    """None of a head in floating point that stays whole: there is no kernel for it here whose sums do not depend on the
    number of outputs. Of one that is an embedding's weight a view is left: tokens need all of that."""
    embeddings: Any = model.get_submodule(architecture.names.token_embeddings)
    head: Any = model.get_submodule(architecture.names.head)
    if isinstance(head, nn.Linear):
        device = torch.device(rank.group.device_type)
        if head.bias is not None or not decode.takes_logits(device, head.weight.dtype, head.in_features):
            return None
    is_tied = getattr(head, "weight", None) is embeddings.weight
    return _gathered(architecture.names.head, head, rank, shares=is_tied)


def _gathered(
    name: str, layer: nn.Module, rank: _Rank, inputs: tuple[int, ...] = (), *, shares: bool = False
) -> _Piece:
    """inputs: of each rank, where what the layer reads is split as well."""
    group = rank.group
    outputs = split(_sizes(layer)[0], group.ranks, _unit([layer]))
    gather_input = group.gatherer(inputs) if inputs else None
    columns = tuple(part(inputs, number) for number in range(len(inputs)))
    adds = Sum(group) if rank.fast and inputs else None
    own = [part(outputs, rank.number)]
    return _Piece(name, layer, own, group.gatherer(outputs), gather_input, shares, columns, adds)


def _sizes(layer: Any) -> tuple[int, int]:
    """Outputs and inputs."""
    if is_conv1d(layer):
        return layer.weight.shape[1], layer.weight.shape[0]
    return layer.out_features, layer.in_features


def _unit(layers: Sequence[nn.Module]) -> int | None:
    """Outputs that no part may cut: those that share scales."""
    return BLOCK if any(_has_blocks(layer) for layer in layers) else None


def _has_blocks(layer: nn.Module) -> bool:
    if isinstance(layer, Later):
        return layer.unit is not None
    return isinstance(layer, EightBitLinear) and layer.scheme.weights == "block"
