"""A GPT-2 as a decoder: its weights, a static KV cache, and the fused block that prefill and decoding share.

A block of an int8 model runs: norm + quantise | qkv | attention | quantise | projection + residual | norm + quantise |
c_fc + gelu | c_proj + residual. With static scales the activations stay int8 from c_fc to c_proj; with dynamic ones c_fc's
output is quantised per token. A floating-point model takes the same way through torch's own kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear, scaled_dot_product_attention

from octofuse import ops
from octofuse.models import gpt2
from octofuse.nn import Int8Linear
from octofuse.nn.linear import weight_of

HEAD_ROWS = 64  # of the output head at a time: its kernel, and so its bits, then do not depend on the batch
ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
_TORCH_ACTIVATIONS = {
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "gelu": torch.nn.functional.gelu,
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
}


@dataclass
class Cache:
    """Keys and values, `[layers, batch, heads, capacity, head size]` each; what lies behind a sequence is never read."""

    keys: Tensor
    values: Tensor

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]


class Decoder:
    """What generation needs of a transformers GPT-2, quantised by `quantize_` or in floating point.

    The model's tensors are shared, except for floating-point Conv1D weights, which are transposed once. Raises ValueError
    for other families and for variants of GPT-2 that compute something else.
    """

    def __init__(self, model: nn.Module) -> None:
        _check(model)
        config: Any = model.config
        body: Any = model.transformer
        self.activation = ACTIVATIONS[config.activation_function]
        self.heads, self.width = config.n_head, config.n_embd
        self.positions, self.vocabulary = config.n_positions, config.vocab_size
        self.tokens, self.places = body.wte.weight.detach(), body.wpe.weight.detach()
        head: Any = model.lm_head
        self.head: Tensor = head.weight.detach()
        self.norm = _norm_of(body.ln_f)
        self.dtype, self.device = self.tokens.dtype, self.tokens.device
        self.blocks = [Block(block, self.activation, self.dtype) for block in body.h]

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """Room for `capacity` positions of `batch` sequences, all zero."""
        shape = (len(self.blocks), batch, self.heads, capacity, self.width // self.heads)
        return Cache(*(torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2)))

    @torch.no_grad()
    def prefill(self, ids: Tensor, lengths: Tensor, cache: Cache) -> Tensor:
        """ids int64 [B, T], padded behind each sequence's length [B] -> the logits [B, V] that follow the last token.

        Keys and values of positions 0 to T - 1 go into the cache.
        """
        batch, length = ids.shape

        def attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            keys[:, :, :length].copy_(k)
            values[:, :, :length].copy_(v)
            return scaled_dot_product_attention(q, k, v, is_causal=True)

        x = self._through_blocks(self._embed(ids, torch.arange(length, device=ids.device)), batch, cache, attend)
        last = x.view(batch, length, -1)[torch.arange(batch, device=ids.device), lengths - 1]
        return self._logits(last)

    @torch.no_grad()
    def step(self, ids: Tensor, places: Tensor, cache: Cache) -> Tensor:
        """The next token of each sequence, int64 [B], and its position, int64 [B] -> logits [B, V].

        Its keys and values go into the cache. Nothing waits for the host: a CUDA graph can record it.
        """
        batch = ids.shape[0]
        behind = torch.arange(cache.capacity, device=ids.device) > places.unsqueeze(1)
        mask = torch.zeros(behind.shape, dtype=self.dtype, device=ids.device).masked_fill_(behind, float("-inf"))
        mask = mask.view(batch, 1, 1, -1).expand(-1, self.heads, -1, -1)
        at = places.view(batch, 1, 1, 1).expand(-1, self.heads, -1, self.width // self.heads)

        def attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            keys.scatter_(2, at, k)
            values.scatter_(2, at, v)
            return scaled_dot_product_attention(q, keys, values, attn_mask=mask)

        return self._logits(self._through_blocks(self._embed(ids, places), batch, cache, attend))

    def _through_blocks(self, x: Tensor, batch: int, cache: Cache, attend: Callable[..., Tensor]) -> Tensor:
        """attend(q, k, v, keys, values), by head `[B, H, T, D]`, stores k and v in a layer's part of the cache."""
        by_head = partial(self._by_head, batch=batch)
        for block, keys, values in zip(self.blocks, cache.keys, cache.values, strict=True):
            x = block(
                x, lambda q, k, v, keys=keys, values=values: attend(by_head(q), by_head(k), by_head(v), keys, values)
            )
        return x

    def _embed(self, ids: Tensor, places: Tensor) -> Tensor:
        x: Tensor = self.tokens[ids] + self.places[places]
        return x.view(-1, self.width)

    def _by_head(self, x: Tensor, batch: int) -> Tensor:
        """[B * T, H * D] -> [B, H, T, D]."""
        return x.view(batch, -1, self.heads, self.width // self.heads).transpose(1, 2)

    def _logits(self, x: Tensor) -> Tensor:
        weight, bias, eps = self.norm
        x = layer_norm(x, (self.width,), weight, bias, eps)
        if not x.is_cuda:
            return linear(x, self.head)
        rows = -(-x.shape[0] // HEAD_ROWS) * HEAD_ROWS
        padded = torch.nn.functional.pad(x, (0, 0, 0, rows - x.shape[0]))
        return torch.cat([linear(part, self.head) for part in padded.split(HEAD_ROWS)])[: x.shape[0]]


class Block:
    """One transformer block. `attend(q, k, v)`, each [M, H * D], gives [B, H, T, D]."""

    def __init__(self, block: Any, activation: str, dtype: torch.dtype) -> None:
        self.norms = (_norm_of(block.ln_1), _norm_of(block.ln_2))
        linears = (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj)
        self.layers = tuple(_Layer(layer, dtype) for layer in linears)
        self.activation = activation

    def __call__(self, x: Tensor, attend: Any) -> Tensor:
        qkv, projection, fc, out = self.layers
        q, k, v = qkv(qkv.normed(x, *self.norms[0])).split(x.shape[-1], dim=-1)
        attended = attend(q, k, v).transpose(1, 2).reshape(x.shape)
        x = projection(projection.quantised(attended), residual=x)
        hidden = fc(fc.normed(x, *self.norms[1]), activation=self.activation, reader=out)
        return out(out.quantised(hidden), residual=x)


Input = tuple[Tensor, Any] | Tensor  # int8 and its scale; or a floating-point layer's own input


class _Layer:
    """An Int8Linear, or a floating-point linear, with what may be fused around it."""

    def __init__(self, layer: nn.Module, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.int8 = layer if isinstance(layer, Int8Linear) else None
        self.weight = layer.weight if isinstance(layer, Int8Linear) else weight_of(layer).contiguous()
        bias = getattr(layer, "bias", None)
        self.bias = None if bias is None else bias.detach()

    @property
    def scale(self) -> Tensor | None:
        """The static scale of the input."""
        return None if self.int8 is None else self.int8.input_scale

    def normed(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Input:
        if self.int8 is None:
            return layer_norm(x, (x.shape[-1],), weight, bias, eps)
        return ops.layer_norm_quantize(x, weight, bias, eps, scale=self.scale)

    def quantised(self, x: Tensor) -> Input:
        """An int8 x is what the layer before has written for this one already."""
        if self.int8 is None:
            return x
        if self.scale is None:
            return ops.quantize_per_token(x)
        return (x if x.dtype == torch.int8 else ops.quantize_per_tensor(x, self.scale)), self.scale

    def __call__(
        self, x: Input, *, activation: str | None = None, residual: Tensor | None = None, reader: _Layer | None = None
    ) -> Tensor:
        """reader: the layer that takes the output; if its scale is static, int8 is written for it."""
        if self.int8 is None:
            y = linear(x, self.weight, self.bias)  # type: ignore[arg-type]
            y = y if activation is None else _TORCH_ACTIVATIONS[activation](y)
            return y if residual is None else y + residual
        q, scale = x
        arguments = (q, self.weight, scale, self.int8.weight_scale, self.bias)
        if reader is not None and reader.scale is not None:
            return ops.i8i8_linear(*arguments, activation=activation, out_scale=reader.scale, constant_weight=True)
        return ops.i8f16_linear(
            *arguments, activation=activation, residual=residual, out_dtype=self.dtype, constant_weight=True
        )


def _norm_of(norm: Any) -> tuple[Tensor, Tensor, float]:
    return norm.weight.detach(), norm.bias.detach(), norm.eps


def _check(model: nn.Module) -> None:
    if not gpt2.matches(model) or not hasattr(model, "lm_head"):
        raise ValueError(f"model: expected a transformers GPT2LMHeadModel, got {type(model).__name__}")
    config: Any = model.config
    if config.activation_function not in ACTIVATIONS:
        raise ValueError(f"model: expected an activation of {', '.join(ACTIVATIONS)}, got {config.activation_function}")
    for name, usual in (("add_cross_attention", False), ("scale_attn_weights", True),
                        ("scale_attn_by_inverse_layer_idx", False)):  # fmt: skip
        if getattr(config, name, usual) != usual:
            raise ValueError(f"model: expected {name}={usual}, got {not usual}")
    if model.training:
        raise ValueError("model: expected a model in eval mode, got one in training (model.eval())")
