"""A GPT-2 as a decoder: its weights and a static KV cache. Prefill and decoding run the blocks of `models.blocks`.

A block of an int8 model runs: norm + quantise + qkv | attention (+ quantise) | (quantise +) projection + residual | norm +
quantise + c_fc + gelu (+ quantise) | (quantise +) c_proj + residual. With static scales the activations stay int8 from
attention to projection and from c_fc to c_proj; with dynamic ones the reader finds each token's scale. For one token of a
narrow model on compute capability 9.0 these are five kernels (`ops.quantized_linear` says when); else norms and per-token
scales are kernels of their own. Layers of few bits run the same five, for up to 4 tokens, without quantising anything. A
floating-point model takes the same way through torch's linears.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from octofuse.models import gpt2
from octofuse.models.blocks import BLOCKS, attended, fed_forward, parts_of
from octofuse.nn import FloatingLinear, Norm, fused_layer
from octofuse.ops import decode

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


# (keys and values of a layer, qkv, the static scale of the layer that reads the result) -> [M, H * D]
Attend = Callable[[Tensor, Tensor, Tensor | None], Tensor]


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
        self.token_embeddings = body.wte.weight.detach()
        self.position_embeddings = body.wpe.weight.detach()
        self.dtype, self.device = self.token_embeddings.dtype, self.token_embeddings.device
        head: Any = model.lm_head
        self.head = fused_layer(head, transposes=True)
        self.norm = Norm.of(body.ln_f)
        names = BLOCKS["gpt2"].names
        assert names is not None
        self.blocks = [parts_of(block, names, transposes=True) for block in body.h]
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
        rows = self.token_embeddings.new_zeros(HEAD_ROWS, self.width) if pads else None
        return Cache(pairs, scratch, rows)

    @torch.no_grad()
    def prefill(self, ids: Tensor, lengths: Tensor, cache: Cache) -> Tensor:
        """ids int64 [B, T], padded behind each sequence's length [B] -> the logits [B, V] that follow the last token.

        Keys and values of positions 0 to T - 1 go into the cache.
        """
        batch, length = ids.shape
        starts = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=ids.device)

        def attend(pairs: Tensor, qkv: Tensor, scale: Tensor | None) -> Tensor:
            by_head = self._by_head(qkv, batch)
            pairs[:, :, :, :length].copy_(by_head[1:])
            if self.fused:
                return _attend_ragged(qkv.view(qkv.shape[0], 3, self.heads, -1), starts, length)
            q, k, v = by_head
            return self._joined(scaled_dot_product_attention(q, k, v, is_causal=True))

        positions = torch.arange(length, device=ids.device).expand(batch, -1).reshape(-1)
        x = self._through_blocks(self._embed(ids.reshape(-1), positions), cache, attend)
        last = torch.arange(batch, device=ids.device) * length + (lengths - 1)
        return self._logits(x[last], cache)

    @torch.no_grad()
    def step(self, ids: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """The next token of each sequence, int64 [B], and its position, int64 [B] -> logits [B, V].

        Its keys and values go into the cache. Nothing waits for the host: a CUDA graph can record it.
        """
        if cache.scratch is None:
            attend = self._attend_by_mask(positions, cache)
        else:
            attend = partial(_attend_in_cache, positions, *cache.scratch)
        return self._logits(self._through_blocks(self._embed(ids, positions), cache, attend), cache)

    def _attend_by_mask(self, positions: Tensor, cache: Cache) -> Attend:
        """For devices and types without a kernel: torch's attention over the whole capacity."""
        batch = positions.shape[0]
        behind = torch.arange(cache.capacity, device=positions.device) > positions.unsqueeze(1)
        mask = torch.zeros(behind.shape, dtype=self.dtype, device=positions.device).masked_fill_(behind, float("-inf"))
        at = positions.view(1, batch, 1, 1, 1).expand(2, -1, self.heads, -1, self.width // self.heads)

        def attend(pairs: Tensor, qkv: Tensor, scale: Tensor | None) -> Tensor:
            by_head = self._by_head(qkv, batch)
            pairs.scatter_(3, at, by_head[1:])
            return self._joined(
                scaled_dot_product_attention(by_head[0], pairs[0], pairs[1], attn_mask=mask.view(batch, 1, 1, -1))
            )

        return attend

    def _through_blocks(self, x: Tensor, cache: Cache, attend: Attend) -> Tensor:
        for parts, pairs in zip(self.blocks, cache.pairs, strict=True):
            x = fed_forward(parts, attended(parts, x, partial(attend, pairs)), self.activation)
        return x

    def _embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """ids, positions [M] -> [M, width]."""
        if self.fused:
            return decode.embed(ids.contiguous(), positions, self.token_embeddings, self.position_embeddings)
        x: Tensor = self.token_embeddings[ids] + self.position_embeddings[positions]
        return x

    def _by_head(self, qkv: Tensor, batch: int) -> Tensor:
        """[B * T, 3 * H * D] -> [3, B, H, T, D]."""
        return qkv.view(batch, -1, 3, self.heads, self.width // self.heads).permute(2, 0, 3, 1, 4)

    def _joined(self, attended: Tensor) -> Tensor:
        """[B, H, T, D] -> [B * T, H * D]."""
        return attended.transpose(1, 2).reshape(-1, self.width)

    def _logits(self, x: Tensor, cache: Cache) -> Tensor:
        if not isinstance(self.head, FloatingLinear):
            return self.head.fused(x, norm=self.norm)
        x = self.norm(x)
        if self.streams_head:
            return decode.logits(x, self.head.weight)
        if cache.head_rows is None:
            return linear(x, self.head.weight)
        # As many rows whatever the batch: the kernel, and so the bits, do not depend on it. And products of multiples of 8
        # columns: for an odd vocabulary cuBLAS would take a kernel of a quarter of the speed.
        even = self.vocabulary // 8 * 8
        found = []
        for rows in x.split(HEAD_ROWS):
            cache.head_rows[: rows.shape[0]].copy_(rows)
            out = x.new_empty(HEAD_ROWS, even + 8)
            for columns in (slice(0, even), slice(even, self.vocabulary)):
                torch.mm(cache.head_rows, self.head.weight[columns].t(), out=out[:, columns])
            found.append(out[: rows.shape[0], : self.vocabulary])
        return found[0] if len(found) == 1 else torch.cat(found)


def _attend_in_cache(
    positions: Tensor, partials: Tensor, arrivals: Tensor, pairs: Tensor, qkv: Tensor, scale: Tensor | None
) -> Tensor:
    return decode.attend(qkv, pairs[0], pairs[1], positions, partials, arrivals, scale)


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
