"""A static cache in 8 bits for transformers' own `generate`: half the memory, read as it is, with graphs and compilation.

A layer of the cache quantises keys and values as they come and hands its codes on; transformers' attention calls
`octofuse_attention`, and its mask `octofuse_mask`, both by the name "octofuse". A prompt attends to its own unrounded keys
and values; a later token to what the cache holds, with one kernel, for which the mask is each sequence's first and last
position.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache, StaticLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from octofuse.ops.cache import CACHE_KINDS, decoded, masked_attention, new_codes

NAME = "octofuse"  # of attention and mask in transformers
LAYER_TYPES = ("full_attention", "sliding_attention")


class QuantizedStaticLayer(StaticLayer):  # type: ignore[misc]
    """Codes int8, or uint8 for e4m3, `[batch, heads, max_cache_len, head size]`; a fp32 scale for each token and head."""

    cumulative_length: Tensor

    def __init__(self, max_cache_len: int, kind: str, config: Any) -> None:
        super().__init__(max_cache_len)
        self.kind, self.config = kind, config
        self.key_scales: Tensor | None = None
        self.value_scales: Tensor | None = None
        self.is_empty = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if key_states.shape[-1] != value_states.shape[-1]:
            sizes = f"{key_states.shape[-1]} and {value_states.shape[-1]}"
            raise ValueError(f"config: expected keys and values of one head size, got {sizes}")
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size, self.num_heads = key_states.shape[:2]
        self.k_head_dim = self.v_head_dim = key_states.shape[-1]
        shape = (2, self.batch_size, self.num_heads, self.max_cache_len, self.k_head_dim)
        codes, scales = new_codes(shape, self.kind, key_states)
        assert scales is not None
        self.keys, self.values = codes.unbind()
        self.key_scales, self.value_scales = scales.unbind()
        # Attention sees what update() returns, and nothing else of the cache.
        self.keys.octofuse_scales = self.key_scales  # type: ignore[attr-defined]
        self.values.octofuse_scales = self.value_scales  # type: ignore[attr-defined]
        self.cumulative_length = self.cumulative_length.to(self.device)
        if not torch.compiler.is_compiling():
            for tensor in (self.keys, self.values, self.key_scales, self.value_scales, self.cumulative_length):
                torch._dynamo.mark_static_address(tensor)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """key_states, value_states `[B, heads, T, D]` -> the codes, for one token; for more, keys and values to attend to:
        those given, or behind others everything, dequantised.
        """
        if self.config._attn_implementation != NAME:
            raise ValueError(
                f"config: expected attention by {NAME!r} beside a QuantizedStaticCache, got "
                f"{self.config._attn_implementation!r}: call model.set_attn_implementation({NAME!r})"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cache = (self.keys, self.values, self.key_scales, self.value_scales)
        length, first = key_states.shape[2], self.cumulative_length.clone()
        self.cumulative_length.add_(length)
        torch.ops.octofuse.cache_append(key_states, value_states, *cache, first)
        if length == 1:
            self.is_empty = False
            return self.keys, self.values
        if self.is_empty:
            self.is_empty = False
            return key_states, value_states
        positions = first + torch.arange(length, device=self.device)
        keys = decoded(self.keys, self.key_scales, self.dtype).index_copy_(2, positions, key_states)
        values = decoded(self.values, self.value_scales, self.dtype).index_copy_(2, positions, value_states)
        return keys, values

    def reset(self) -> None:
        super().reset()
        self.is_empty = True
        if self.key_scales is not None and self.value_scales is not None:
            self.key_scales.zero_()
            self.value_scales.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """In place: whoever has captured the addresses keeps them."""
        for tensor in (self.keys, self.values, self.key_scales, self.value_scales):
            if tensor is not None:
                tensor.copy_(tensor.index_select(0, beam_idx.to(tensor.device)))


class QuantizedStaticCache(Cache):  # type: ignore[misc]
    """Keys and values of `max_cache_len` tokens of each sequence, in 8 bits, for `model.generate(past_key_values=...)`.

        model.set_attn_implementation("octofuse")
        cache = QuantizedStaticCache(model.config, max_cache_len=4096)
        model.generate(**inputs, past_key_values=cache)

    Args:
        config: the model's own: its attention has to be "octofuse", else the first token raises ValueError.
        max_cache_len: tokens of a sequence, prompt included.
        kind: "int8", or "fp8" (e4m3); a token's channels share a scale in every head, largest magnitude / 127 or / 448.

    Padding stands in front (`padding_side="left"`). A layer with a sliding window keeps everything and reads the window.
    Head sizes that are multiples of 16, up to 256, in fp16 or bf16 on a GPU of compute capability 8.0 or later, take one
    kernel for append and one for attention; others take steps of torch.

    Raises ValueError for other kinds, lengths below 1, and configs with layers that are no attention over a cache.
    """

    def __init__(self, config: Any, max_cache_len: int, kind: str = "int8") -> None:
        if kind not in CACHE_KINDS:
            raise ValueError(f"kind: expected {' or '.join(map(repr, CACHE_KINDS))}, got {kind!r}")
        if not isinstance(max_cache_len, int) or max_cache_len < 1:
            raise ValueError(f"max_cache_len: expected an int of at least 1, got {max_cache_len!r}")
        if not isinstance(config, transformers.PretrainedConfig):
            raise ValueError(f"config: expected a transformers config, got {type(config).__name__}")
        config = config.get_text_config(decoder=True)
        others = sorted(set(getattr(config, "layer_types", None) or ()) - set(LAYER_TYPES))
        if others:
            raise ValueError(f"config: expected layers of {' and '.join(LAYER_TYPES)}, got {', '.join(others)}")
        layers = [QuantizedStaticLayer(max_cache_len, kind, config) for _ in range(config.num_hidden_layers)]
        super().__init__(layers=layers)
        self.kind = kind

    @property
    def bytes(self) -> int:
        """Of codes and scales that are allocated: none before the first token."""
        tensors = [t for layer in self.layers for t in (layer.keys, layer.values, layer.key_scales, layer.value_scales)]
        return sum(t.nbytes for t in tensors if t is not None)


def octofuse_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Tensor | int = 0,
    attention_mask: Tensor | None = None,
    **more: Any,
) -> Tensor | None:
    """One query token of a static cache: int64 `[2, 1, 1, B]`, the first and the last position that it sees; else the
    mask of "sdpa".

    Raises ValueError for padding that does not stand in front.
    """
    mask: Tensor | None = sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, attention_mask=attention_mask,
        **more,
    )  # fmt: skip
    if attention_mask is not None and not torch.compiler.is_compiling() and q_length > 1:
        valid = attention_mask.bool()
        if (valid[:, 1:] < valid[:, :-1]).any():
            raise ValueError(
                "attention_mask: expected padding in front of each sequence (padding_side='left'), got others"
            )
    if q_length != 1 or mask is None:
        return mask
    mask = mask.expand(batch_size, 1, 1, kv_length)
    first = mask.int().argmax(-1)
    last = kv_length - 1 - mask.flip(-1).int().argmax(-1)
    return torch.stack([first, last]).view(2, 1, 1, batch_size)


def octofuse_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """query `[B, H, T, D]` -> `[B, T, H, D]`: over codes with their scales by `cache_attend`, over anything else as
    "sdpa"."""
    scales = getattr(key, "octofuse_scales", None)
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    ranges = attention_mask is not None and attention_mask.dtype == torch.int64
    if scales is not None and ranges:
        assert attention_mask is not None
        seen = attention_mask.view(2, query.shape[0])
        codes = (key, value, scales, value.octofuse_scales)  # type: ignore[attr-defined]
        return torch.ops.octofuse.cache_attend(query, *codes, seen, factor, softcap), None
    if scales is not None:  # a mask of the caller's own
        key = decoded(key, scales, query.dtype)
        value = decoded(value, value.octofuse_scales, query.dtype)  # type: ignore[attr-defined]
    if ranges:  # beside another static cache
        assert attention_mask is not None
        at = torch.arange(key.shape[2], device=key.device)
        first, last = attention_mask.view(2, -1, 1, 1, 1).unbind()
        attention_mask = (at >= first) & (at <= last)
    if attention_mask is not None:
        attention_mask = attention_mask[..., : key.shape[2]]
    if softcap is not None:
        if attention_mask is None:
            attention_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=key.device).tril()
        return masked_attention(query, key, value, attention_mask, factor, softcap).transpose(1, 2).contiguous(), None
    out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **more)
    return out, None


AttentionInterface.register(NAME, octofuse_attention)
AttentionMaskInterface.register(NAME, octofuse_mask)
