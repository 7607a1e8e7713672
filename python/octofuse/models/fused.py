"""fuse_: the blocks of a quantised transformers GPT-2, run through this library's fused linears.

A block takes four linears that quantise their own input where they are int8, the norms in two of them, gelu in c_fc and
the residuals in both projections. Attention and the cache stay those of transformers: masks, padding, any cache, beam
search and generate() work.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from octofuse.models.architecture import Architecture, architecture_of
from octofuse.models.parts import Parts, attended, fed_forward, parts_of
from octofuse.nn import QUANTISED


def fuse_(model: nn.Module) -> nn.Module:
    """Run the blocks of a GPT2LMHeadModel that quantize_ has changed fused, in place; returns it.

    Modules, their names and the state dict stay as they are; `unfuse_` goes back. Hooks on attention are called as before;
    norms and quantised linears run by their tensors, so hooks on them are not. Training code paths are refused by name when
    they are reached. Raises ValueError for other models, for one that is not quantised, and for one in training.
    """
    if getattr(getattr(model, "config", None), "model_type", None) != "gpt2" or not hasattr(model, "lm_head"):
        raise ValueError(f"model: expected a transformers GPT2LMHeadModel, got {type(model).__name__}")
    architecture = architecture_of(model)
    if not any(isinstance(module, QUANTISED) for module in model.modules()):
        raise ValueError("model: expected a model that quantize_ has changed, got one without quantised layers")
    for block in _blocks(model):
        for module, forward in ((block, _block_forward), (block.attn, _attention_forward)):
            if not _is_fused(module):
                base: Any = type(module)
                module.__class__ = _fused_class(base, forward)
        block.octofuse_architecture = architecture
    return model


def unfuse_(model: nn.Module) -> nn.Module:
    """Undo fuse_, in place; returns the model."""
    for block in _blocks(model):
        for module in (block, block.attn):
            if _is_fused(module):
                module.__class__ = type(module).__mro__[1]
        vars(block).pop("octofuse_architecture", None)
    return model


def _blocks(model: Any) -> list[Any]:
    return list(model.transformer.h)


def _is_fused(module: Any) -> bool:
    return getattr(type(module), "fused_by_octofuse", False)


@functools.cache
def _fused_class(base: Any, forward: Callable[..., Any]) -> type:
    """A subclass, so that whatever looks for transformers' own class still finds it."""
    return type(f"Fused{base.__name__}", (base,), {"forward": forward, "fused_by_octofuse": True})


def _block_forward(
    self: Any,
    hidden_states: Tensor,
    past_key_values: Any = None,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    use_cache: bool | None = False,
    **kwargs: Any,
) -> Tensor:
    """x `[B, T, width]` -> `[B, T, width]`, with transformers' own arguments."""
    if self.training:
        raise ValueError("model: expected eval mode, got training; fused blocks have no backward (unfuse_)")
    if encoder_hidden_states is not None:
        raise ValueError("encoder_hidden_states: expected None, got a tensor; fused blocks have no cross-attention")
    architecture: Architecture = self.octofuse_architecture
    parts = parts_of(self, architecture)
    # By the attention's own module, so that hooks on it (those that keep attention's weights, for one) are called.
    x, _ = self.attn(hidden_states, past_key_values, attention_mask, parts=parts, **kwargs)
    return fed_forward(parts, x, x, architecture)


def _attention_forward(
    self: Any,
    hidden_states: Tensor,
    past_key_values: Any,
    attention_mask: Tensor | None,
    *,
    parts: Parts,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """x + projection(attention(norm(x))), and the attention's weights where it keeps them.

    The attention is the one that the model's configuration names.
    """
    home = sys.modules[type(self).__mro__[1].__module__]
    kept: list[Tensor | None] = []

    def attend(outputs: tuple[Tensor, ...], scale: Tensor | None) -> Tensor:
        (qkv,) = outputs
        by_head = qkv.view(*qkv.shape[:-1], 3, self.num_heads, self.head_dim).unbind(-3)
        query, key, value = (one.transpose(1, 2) for one in by_head)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        named = self.config._attn_implementation
        attention = home.ALL_ATTENTION_FUNCTIONS.get_interface(named, home.eager_attention_forward)
        scaling = self.head_dim**-0.5
        out, weights = attention(self, query, key, value, attention_mask, dropout=0.0, scaling=scaling, **kwargs)
        kept.append(weights)
        result: Tensor = out.reshape(*out.shape[:-2], -1).contiguous()
        return result

    return attended(parts, hidden_states, attend), kept[0]
