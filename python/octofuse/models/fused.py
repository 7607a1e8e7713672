"""fuse_: the blocks of a quantised transformers GPT-2, run through this library's fused linears.

A block takes four linears that quantise their own input, the norms in two of them, gelu in c_fc and the residuals in both
projections. Attention and the cache stay those of transformers: masks, padding, any cache, beam search and generate() work.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from octofuse.models.gpt2 import ACTIVATIONS, check_decoder
from octofuse.nn import Int8Linear


def fuse_(model: nn.Module) -> nn.Module:
    """Run the blocks of a GPT2LMHeadModel that quantize_ has changed fused, in place; returns it.

    Modules, their names and the state dict stay as they are; `unfuse_` goes back. Layers left in floating point run as
    before. Training code paths are refused by name when they are reached. Raises ValueError for other models, for one that
    is not quantised, and for one in training.
    """
    check_decoder(model)
    if not any(isinstance(module, Int8Linear) for module in model.modules()):
        raise ValueError("model: expected a model that quantize_ has changed, got one without Int8Linear layers")
    for block in _blocks(model):
        for module, forward in ((block, _block_forward), (block.attn, _attention_forward)):
            if not _is_fused(module):
                base: Any = type(module)
                module.__class__ = _fused_class(base, forward)
    return model


def unfuse_(model: nn.Module) -> nn.Module:
    """Undo fuse_, in place; returns the model."""
    for block in _blocks(model):
        for module in (block, block.attn):
            if _is_fused(module):
                module.__class__ = type(module).__mro__[1]
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
    x, _ = self.attn(hidden_states, past_key_values, attention_mask, norm=self.ln_1, **kwargs)
    hidden = _linear(
        self.mlp.c_fc, x, norm=self.ln_2, act=self.mlp.act, config=self.attn.config, reader=self.mlp.c_proj
    )
    return _linear(self.mlp.c_proj, hidden, residual=x)


def _attention_forward(
    self: Any, hidden_states: Tensor, past_key_values: Any, attention_mask: Tensor | None, *, norm: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """x + projection(attention(norm(x))), and the attention's weights where it keeps them.

    The attention is the one that the model's configuration names.
    """
    home = sys.modules[type(self).__mro__[1].__module__]
    qkv = _linear(self.c_attn, hidden_states, norm=norm)
    parts = qkv.view(*qkv.shape[:-1], 3, self.num_heads, self.head_dim).unbind(-3)
    query, key, value = (part.transpose(1, 2) for part in parts)
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, self.layer_idx)
    named = self.config._attn_implementation
    attention = home.ALL_ATTENTION_FUNCTIONS.get_interface(named, home.eager_attention_forward)
    scaling = self.head_dim**-0.5
    out, weights = attention(self, query, key, value, attention_mask, dropout=0.0, scaling=scaling, **kwargs)
    out = out.reshape(*out.shape[:-2], -1).contiguous()
    return _linear(self.c_proj, out, residual=hidden_states), weights


def _linear(
    layer: Any,
    x: Tensor,
    *,
    norm: Any = None,
    act: Any = None,
    config: Any = None,
    residual: Tensor | None = None,
    reader: Any = None,
) -> Tensor:
    """act, the activation's module, is what `config` names. reader: the layer that takes the output; if its scale is
    static, int8 is written for it.
    """
    if not isinstance(layer, Int8Linear):
        y: Tensor = layer(x if norm is None else norm(x))
        y = y if act is None else act(y)
        return y if residual is None else y + residual
    return layer.fused(
        x,
        norm=None if norm is None else (norm.weight, norm.bias, norm.eps),
        activation=None if act is None else ACTIVATIONS[config.activation_function],
        residual=residual,
        out_dtype=x.dtype if residual is None else residual.dtype,
        out_scale=reader.input_scale if isinstance(reader, Int8Linear) else None,
    )
