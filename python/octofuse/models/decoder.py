"""A GPT-2 as a decoder: its weights, a static KV cache, and the fused block that prefill and decoding share.

A block of an int8 model runs: norm + quantise + qkv | attention (+ quantise) | (quantise +) projection + residual | norm +
quantise + c_fc + gelu (+ quantise) | (quantise +) c_proj + residual. With static scales the activations stay int8 from
attention to projection and from c_fc to c_proj; with dynamic ones the reader finds each token's scale. For one token of a
narrow model on compute capability 9.0 these are five kernels (`ops.quantized_linear` says when); else norms and per-token
scales are kernels of their own. A floating-point model takes the same way through torch's linears.
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
from octofuse.nn import Int8Linear, PackedLinear
from octofuse.nn.linear import weight_of
from octofuse.ops import decode
from octofuse.ops.lowbit import ACTIVATIONS

HEAD_ROWS = 64  # of the output head at a time: its kernel, and so its bits, then do not depend on the batch


@dataclass
class Cache:
    """Keys and values, `[layers, 2, batch, heads, capacity, head size]`; what lies behind a sequence is never read."""

    pairs: Tensor
    scratch: tuple[Tensor, Tensor] | None  # of decode.attend
    head_rows: Tensor | None  # HEAD_ROWS rows for an output head in cuBLAS, zero

    @property
    def capacity(self) -> int:
        return self.pairs.shape[4]


Attend = Callable[[Tensor, Tensor, "_Layer"], Tensor]  # (qkv, a layer's pairs, the layer that reads the result)


class Decoder:
    """What generation needs of a transformers GPT-2, quantised by `quantize_` or in floating point.

    The model's tensors are shared, except for floating-point Conv1D weights, which are transposed once. Raises ValueError
    for other families and for variants of GPT-2 that compute something else.
    """

    def __init__(self, model: nn.Module) -> None:
        gpt2.check_decoder(model)
        config: Any = model.config
        body: Any = model.transformer
        self.activation = gpt2.ACTIVATIONS[config.activation_function]
        self.heads, self.width = config.n_head, config.n_embd
        self.positions, self.vocabulary = config.n_positions, config.vocab_size
        self.tokens, self.places = body.wte.weight.detach(), body.wpe.weight.detach()
        self.dtype, self.device = self.tokens.dtype, self.tokens.device
        head: Any = model.lm_head
        self.head = _Layer(head, self.dtype)
        self.norm = _norm_of(body.ln_f)
        self.blocks = [Block(block, self.activation, self.dtype) for block in body.h]
        self.fused = decode.serves(self.device, self.dtype, self.width // self.heads, self.width)
        self.streams_head = decode.takes_logits(self.device, self.dtype, self.width)

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """Room for `capacity` positions of `batch` sequences, all zero."""
        size = self.width // self.heads
        pairs = torch.zeros(
            (len(self.blocks), 2, batch, self.heads, capacity, size), dtype=self.dtype, device=self.device
        )
        scratch = decode.attend_scratch(batch, self.heads, size, capacity, self.device) if self.fused else None
        pads = self.device.type == "cuda" and not self.streams_head
        rows = self.tokens.new_zeros(HEAD_ROWS, self.width) if pads else None
        return Cache(pairs, scratch, rows)

    @torch.no_grad()
    def prefill(self, ids: Tensor, lengths: Tensor, cache: Cache) -> Tensor:
        """ids int64 [B, T], padded behind each sequence's length [B] -> the logits [B, V] that follow the last token.

        Keys and values of positions 0 to T - 1 go into the cache.
        """
        batch, length = ids.shape
        starts = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=ids.device)

        def attend(qkv: Tensor, pairs: Tensor, reader: _Layer) -> Tensor:
            by_head = self._by_head(qkv, batch)
            pairs[:, :, :, :length].copy_(by_head[1:])
            if self.fused:
                return _attend_ragged(qkv.view(qkv.shape[0], 3, self.heads, -1), starts, length)
            q, k, v = by_head
            return self._joined(scaled_dot_product_attention(q, k, v, is_causal=True))

        places = torch.arange(length, device=ids.device).expand(batch, -1).reshape(-1)
        x = self._through_blocks(self._embed(ids.reshape(-1), places), cache, attend)
        last = torch.arange(batch, device=ids.device) * length + (lengths - 1)
        return self._logits(x[last], cache)

    @torch.no_grad()
    def step(self, ids: Tensor, places: Tensor, cache: Cache) -> Tensor:
        """The next token of each sequence, int64 [B], and its position, int64 [B] -> logits [B, V].

        Its keys and values go into the cache. Nothing waits for the host: a CUDA graph can record it.
        """
        if cache.scratch is None:
            attend = self._attend_by_mask(places, cache)
        else:
            attend = partial(_attend_in_cache, places, *cache.scratch)
        return self._logits(self._through_blocks(self._embed(ids, places), cache, attend), cache)

    def _attend_by_mask(self, places: Tensor, cache: Cache) -> Attend:
        """For devices and types without a kernel: torch's attention over the whole capacity."""
        batch = places.shape[0]
        behind = torch.arange(cache.capacity, device=places.device) > places.unsqueeze(1)
        mask = torch.zeros(behind.shape, dtype=self.dtype, device=places.device).masked_fill_(behind, float("-inf"))
        at = places.view(1, batch, 1, 1, 1).expand(2, -1, self.heads, -1, self.width // self.heads)

        def attend(qkv: Tensor, pairs: Tensor, reader: _Layer) -> Tensor:
            by_head = self._by_head(qkv, batch)
            pairs.scatter_(3, at, by_head[1:])
            return self._joined(
                scaled_dot_product_attention(by_head[0], pairs[0], pairs[1], attn_mask=mask.view(batch, 1, 1, -1))
            )

        return attend

    def _through_blocks(self, x: Tensor, cache: Cache, attend: Attend) -> Tensor:
        for block, pairs in zip(self.blocks, cache.pairs, strict=True):
            x = block(x, pairs, attend)
        return x

    def _embed(self, ids: Tensor, places: Tensor) -> Tensor:
        """ids, places [M] -> [M, width]."""
        if self.fused:
            return decode.embed(ids.contiguous(), places, self.tokens, self.places)
        x: Tensor = self.tokens[ids] + self.places[places]
        return x

    def _by_head(self, qkv: Tensor, batch: int) -> Tensor:
        """[B * T, 3 * H * D] -> [3, B, H, T, D]."""
        return qkv.view(batch, -1, 3, self.heads, self.width // self.heads).permute(2, 0, 3, 1, 4)

    def _joined(self, attended: Tensor) -> Tensor:
        """[B, H, T, D] -> [B * T, H * D]."""
        return attended.transpose(1, 2).reshape(-1, self.width)

    def _logits(self, x: Tensor, cache: Cache) -> Tensor:
        if self.head.int8 is not None or self.head.packed is not None:
            return self.head(x, norm=self.norm)
        x = _layer_norm(x, self.norm)
        if self.streams_head:
            return decode.logits(x, self.head.weight)
        if cache.head_rows is None:
            return linear(x, self.head.weight)
        # As many rows whatever the batch: the kernel, and so the bits, do not depend on it. And products of multiples of 8
        # columns: for an odd vocabulary cuBLAS would take a kernel of a quarter of the speed.
        even = self.vocabulary // 8 * 8
        parts = []
        for part in x.split(HEAD_ROWS):
            cache.head_rows[: part.shape[0]].copy_(part)
            out = x.new_empty(HEAD_ROWS, even + 8)
            for columns in (slice(0, even), slice(even, self.vocabulary)):
                torch.mm(cache.head_rows, self.head.weight[columns].t(), out=out[:, columns])
            parts.append(out[: part.shape[0], : self.vocabulary])
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_in_cache(
    places: Tensor, parts: Tensor, arrivals: Tensor, qkv: Tensor, pairs: Tensor, reader: _Layer
) -> Tensor:
    return decode.attend(qkv, pairs[0], pairs[1], places, parts, arrivals, reader.scale)


def _attend_ragged(qkv: Tensor, starts: Tensor, longest: int) -> Tensor:
    """Causal attention within each sequence, qkv [M, 3, H, D] -> [M, H * D].

    FlashAttention for sequences of any lengths: unlike the one for batches it never splits them by how busy the GPU is,
    so a sequence's bits do not depend on the others.
    """
    q, k, v = qkv.unbind(1)
    out: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, starts, starts, longest, longest, 0.0, True, False
    )[0]  # fmt: skip
    return out.reshape(out.shape[0], -1)


class Block:
    """One transformer block. `attend(qkv, pairs, reader)` gives [M, H * D], in int8 if the reader has a scale for it."""

    def __init__(self, block: Any, activation: str, dtype: torch.dtype) -> None:
        self.norms = (_norm_of(block.ln_1), _norm_of(block.ln_2))
        linears = (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj)
        self.layers = tuple(_Layer(layer, dtype) for layer in linears)
        self.activation = activation

    def __call__(self, x: Tensor, pairs: Tensor, attend: Attend) -> Tensor:
        qkv, projection, fc, out = self.layers
        attended = attend(qkv(x, norm=self.norms[0]), pairs, projection)
        x = projection(attended, residual=x)
        return out(fc(x, norm=self.norms[1], activation=self.activation, reader=out), residual=x)


NormParts = tuple[Tensor, Tensor, float]  # weight, bias, eps


class _Layer:
    """A quantised or floating-point linear, with what may be fused around it."""

    def __init__(self, layer: nn.Module, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.int8 = layer if isinstance(layer, Int8Linear) else None
        self.packed = layer if isinstance(layer, PackedLinear) else None
        if isinstance(layer, PackedLinear):
            self.weight = layer.packed
        else:
            self.weight = layer.weight if isinstance(layer, Int8Linear) else weight_of(layer).contiguous()
        bias = getattr(layer, "bias", None)
        self.bias = None if bias is None else bias.detach()

    @property
    def scale(self) -> Tensor | None:
        """The static scale of the input."""
        return None if self.int8 is None else self.int8.input_scale

    def __call__(
        self,
        x: Tensor,
        *,
        norm: NormParts | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
        reader: _Layer | None = None,
    ) -> Tensor:
        """x: in floating point, or int8 that the layer before has written for this one.

        reader: the layer that takes the output; if its scale is static, int8 is written for it.
        """
        if self.int8 is None:
            x = x if norm is None else _layer_norm(x, norm)
            y = linear(x, self.weight, self.bias) if self.packed is None else self.packed(x)
            y = y if activation is None else ACTIVATIONS[activation](y)
            return y if residual is None else y + residual
        return self.int8.fused(
            x,
            norm=norm,
            activation=activation,
            residual=residual,
            out_dtype=self.dtype,
            out_scale=None if reader is None else reader.scale,
        )


def _layer_norm(x: Tensor, norm: NormParts) -> Tensor:
    weight, bias, eps = norm
    if x.is_cuda:
        return ops.layer_norm(x, weight, bias, eps)
    return layer_norm(x, (x.shape[-1],), weight, bias, eps)


def _norm_of(norm: Any) -> NormParts:
    return norm.weight.detach(), norm.bias.detach(), norm.eps
