"""fuse_: the blocks of a quantised transformers model, run through this library's fused linears.

Linears quantise their own input where they are int8, and take the norms in front, the activation and the residuals.
Attention and the cache stay those of transformers: masks, padding, any cache, beam search and generate() work.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from octofuse.models.architecture import Architecture, Heads, architecture_of
from octofuse.models.blocks import BLOCKS, Names
from octofuse.models.parts import Parts, attended, fed_forward, parts_of, split_heads
from octofuse.nn import QUANTISED
from octofuse.nn.parted import whole


class _Description(NamedTuple):
    """What a fused block knows beside its modules."""

    architecture: Architecture
    heads: Heads


def fuse_(model: nn.Module) -> nn.Module:
    """Run the blocks of a causal language model that quantize_ has changed fused, in place; returns it.

    The families are those of `octofuse.generate` (docs/models.md). Modules, their names and the state dict stay as they
    are; `unfuse_` goes back. Hooks on attention are called as before; norms and quantised linears run by their tensors, so
    hooks on them are not. Training code paths are refused by name when they are reached. Raises ValueError for other
    models, for one that is not quantised, and for one in training.
    """
    architecture = architecture_of(model)
    if not any(isinstance(module, QUANTISED) for module in model.modules()):
        raise ValueError("model: expected a model that quantize_ has changed, got one without quantised layers")
    for block, heads in zip(_blocks(model, architecture.names), architecture.heads, strict=True):
        for module, forward in (
            (block, _block_forward),
            (_attention_of(block, architecture.names), _attention_forward),
        ):
            if not _is_fused(module):
                base: Any = type(module)
                module.__class__ = _fused_class(base, forward)
        block.octofuse_description = _Description(architecture, heads)
    return model


def unfuse_(model: nn.Module) -> nn.Module:
    """Undo fuse_, in place; returns the model."""
    family = BLOCKS.get(getattr(getattr(model, "config", None), "model_type", ""))
    if family is None or family.names is None:
        return model
    for block in _blocks(model, family.names):
        for module in (block, _attention_of(block, family.names)):
            if _is_fused(module):
                module.__class__ = type(module).__mro__[1]
        vars(block).pop("octofuse_description", None)
    return model


CACHE_NAMES = ("cache", "past_key_values", "layer_past")  # since transformers 5.24, before it, and in GPT-NeoX


def _blocks(model: nn.Module, names: Names) -> list[Any]:
    blocks: Any = model.get_submodule(names.blocks)
    return list(blocks)


def _attention_of(block: Any, names: Names) -> Any:
    """The module that holds the projection."""
    return block.get_submodule(names.projection.rpartition(".")[0])


def _is_fused(module: Any) -> bool:
    return getattr(type(module), "fused_by_octofuse", False)


@functools.cache
def _fused_class(base: Any, forward: Callable[..., Any]) -> type:
    """A subclass, so that whatever looks for transformers' own class still finds it. It knows the names of the arguments
    that the class's forward has, for calls by position."""
    names = tuple(inspect.signature(base.forward).parameters)[1:]
    return type(f"Fused{base.__name__}", (base,), {"forward": forward, "fused_by_octofuse": True, "given_names": names})


def _block_forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
    """x `[B, T, width]` -> `[B, T, width]`, with transformers' own arguments."""
    if self.training:
        raise ValueError("model: expected eval mode, got training; fused blocks have no backward (unfuse_)")
    given = dict(zip(self.given_names, args, strict=False)) | kwargs
    given.pop("use_cache", None)
    given.pop("encoder_attention_mask", None)
    if given.pop("encoder_hidden_states", None) is not None:
        raise ValueError("encoder_hidden_states: expected None, got a tensor; fused blocks have no cross-attention")
    architecture, heads = self.octofuse_description
    parts = parts_of(self, architecture)
    x = given.pop("hidden_states")
    caches = [given.pop(name, None) for name in CACHE_NAMES]
    cache = next((one for one in caches if one is not None), None)
    # By the attention's own module, so that hooks on it (those that keep attention's weights, for one) are called.
    y, _ = _attention_of(self, architecture.names)(
        x, parts=parts, heads=heads, architecture=architecture, cache=cache, **given
    )
    return whole(fed_forward(parts, y, x if architecture.parallel else y, architecture))


def _attention_forward(
    self: Any,
    hidden_states: Tensor,
    *,
    parts: Parts,
    heads: Heads,
    architecture: Architecture,
    cache: Any,
    attention_mask: Tensor | None = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """x + projection(attention(norm(x))), and the attention's weights where it keeps them.

    The attention is the one that the model's configuration names.
    """
    home = sys.modules[type(self).__mro__[1].__module__]
    kept: list[Tensor | None] = []
    limits = {"sliding_window": heads.window, "softcap": heads.softcap}

    def attend(outputs: tuple[Tensor, ...], scale: Tensor | None) -> Tensor:
        q, k, v = split_heads(outputs, heads, architecture.names.interleaved)
        q = q if parts.query_norm is None else parts.query_norm(q.contiguous())
        k = k if parts.key_norm is None else parts.key_norm(k.contiguous())
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        if heads.rotates:
            assert position_embeddings is not None
            q, k = home.apply_rotary_pos_emb(q, k, *position_embeddings)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        named = self.config._attn_implementation
        attention = home.ALL_ATTENTION_FUNCTIONS.get_interface(named, home.eager_attention_forward)
        more = {name: limit for name, limit in limits.items() if limit is not None} | kwargs
        out, weights = attention(self, q, k, v, attention_mask, dropout=0.0, scaling=heads.scaling, **more)
        kept.append(weights)
        result: Tensor = out.reshape(*out.shape[:-2], -1).contiguous()
        return result

    return whole(attended(parts, hidden_states, attend, architecture.residual_multiplier)), kept[0]
