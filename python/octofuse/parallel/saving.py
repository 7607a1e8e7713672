"""A sharded model, whole again for as long as its files are written."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from octofuse.nn import GatheredLinear, SummedLinear, replace_module, whole_of
from octofuse.parallel.shard import Share, forget_, remember_, share_of

_RANKS = "distributed_config"  # of a model that transformers was asked to split


def saved(model: Any, write: Callable[[], None]) -> None:
    """Calls write() on the first rank, whose model is whole meanwhile, in the host's memory; returns on all when it has.

    All ranks call it. Raises ValueError for sums that are split, and on every rank what write() raises on the first: there
    as it is, elsewhere as a RuntimeError.
    """
    share = share_of(model)
    if share is None:
        raise ValueError("model: expected the model that was sharded, got a part of it")
    if any(isinstance(module, SummedLinear) for module in model.modules()):
        raise ValueError("model: expected exact sums, got one sharded with FastSums; save it before it is sharded")
    said: list[str | None] = [None]
    config: dict[str, Any] = vars(model.config)
    ranks = config.get(_RANKS)
    parts = {name: model.get_submodule(name) for name in share.rows}
    whole, wrong = _joined(share, parts)
    for name, part in model.named_modules():  # a head that shares the embeddings' weight
        if isinstance(part, GatheredLinear) and name not in share.rows:
            parts[name], whole[name] = part, _tied(model)
    try:
        if wrong is not None:
            raise wrong
        if share.group.rank == 0:
            _exchange(model, whole)
            forget_(model)
            config.pop(_RANKS, None)  # or transformers would want the other ranks to write as well
            write()
    except BaseException as error:
        said[0] = f"{type(error).__name__}: {error}"
        raise
    finally:
        if share.group.rank == 0 and wrong is None:
            _exchange(model, parts)
            remember_(model, share)
            if ranks is not None:
                config[_RANKS] = ranks
        share.group.broadcast(said)
    if said[0] is not None and share.group.rank != 0:
        raise RuntimeError(f"{share.group}: rank 0 could not save the model: {said[0]}")


def _tied(model: Any) -> nn.Module:
    weight = model.get_input_embeddings().weight
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    head.weight = weight
    return head


def _exchange(model: nn.Module, layers: dict[str, Any]) -> None:
    for name, layer in layers.items():
        replace_module(model, name, layer)


def _joined(share: Share, parts: dict[str, Any]) -> tuple[dict[str, Any], Exception | None]:
    """On the first rank the whole layers, or what went wrong there: it takes part in all exchanges none the less."""
    whole: dict[str, Any] = {}
    wrong: Exception | None = None
    for name, part in parts.items():
        own = part.layer if isinstance(part, GatheredLinear) else part
        found = share.group.on_first(_packed(own))
        if found is None or wrong is not None:
            continue
        try:
            whole[name] = whole_of([_unpacked(one) for one in found], share.rows[name])
        except Exception as error:
            wrong = error
            whole.clear()
    return whole, wrong


def _packed(layer: nn.Module) -> bytes:
    """As torch's files have it: its objects between processes do not know float8."""
    buffer = io.BytesIO()
    torch.save(copy.deepcopy(layer).cpu(), buffer)
    return buffer.getvalue()


def _unpacked(packed: bytes) -> Any:
    return torch.load(io.BytesIO(packed), weights_only=False)  # from a rank of this program
