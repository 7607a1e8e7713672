"""A static cache in 8 bits for transformers' own `generate`: half the memory, read as it is, with graphs and compilation.

A layer of the cache quantises keys and values as they come and hands its codes on; transformers calls
`octofuse_attention`, by the name "octofuse", with the mask that "sdpa" has. A prompt attends to its own unrounded keys and
values; a later token to what the cache holds, with one kernel, which takes each sequence's first and last position.
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
        if torch.compiler.is_compiling():
            raise ValueError(
                "cache: expected memory before a prompt is compiled: call cache.early_initialization(batch, heads, "
                "head_dim, dtype, device)"
            )
        if key_states.shape[-1] != value_states.shape[-1]:
            sizes = f"{key_states.shape[-1]} and {value_states.shape[-1]}"
            raise ValueError(f"config: expected keys and values of one head size, got {sizes}")
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size, self.num_heads = key_states.shape[:2]
        self.k_head_dim = self.v_head_dim = key_states.shape[-1]
        shape = (self.batch_size, self.num_heads, self.max_cache_len, self.k_head_dim)
        self.keys, self.key_scales = new_codes(shape, self.kind, key_states)
        self.values, self.value_scales = new_codes(shape, self.kind, key_states)
        # Attention sees what update() returns, and nothing else of the cache.
        self.keys.octofuse_scales = self.key_scales  # type: ignore[attr-defined]
        self.values.octofuse_scales = self.value_scales  # type: ignore[attr-defined]
        self.cumulative_length = self.cumulative_length.to(self.device)
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
                f"{self.config._attn_implementation!r}: call model.set_attn_implementation({NAME!r}); a model that stays "
                "with another has attention of its own"
            )
        if torch.is_grad_enabled() and key_states.requires_grad:
            raise ValueError("cache: expected no gradients through a QuantizedStaticCache: call under torch.no_grad()")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[:2] != (self.batch_size, self.num_heads):
            raise ValueError(
                f"cache: expected {self.batch_size} sequences with {self.num_heads} heads, as at its first use, got "
                f"{key_states.shape[0]} and {key_states.shape[1]}"
            )
        cache = (self.keys, self.values, self.key_scales, self.value_scales)
        length, first = key_states.shape[2], self.cumulative_length.clone()
        fits = first + length <= self.max_cache_len
        too_many = f"max_cache_len: expected room for all tokens, got {self.max_cache_len}"
        if self.device.type == "cpu" and not torch.compiler.is_compiling():
            if not fits:
                raise ValueError(too_many)
        else:  # nothing waits for the device
            torch._assert_async(fits, too_many)
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

    def crop(self, *_: Any) -> None:
        raise ValueError("cache: expected one that can be cropped, for assisted decoding, got a QuantizedStaticCache")

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

    The positions that a token sees follow one another: padding stands in front (`padding_side="left"`). A layer with a
    sliding window keeps everything and reads the window.
    Head sizes that are multiples of 16, up to 256, in fp16 or bf16 on a GPU of compute capability 8.0 or later, take one
    kernel for append and one for attention; others take steps of torch.

    Raises ValueError for other kinds, lengths below 1, and configs with layers that are no attention over a cache.
    """

    def __init__(self, config: Any, max_cache_len: int, kind: str = "int8") -> None:
        if kind not in CACHE_KINDS:
            raise ValueError(f"kind: expected {' or '.join(map(repr, CACHE_KINDS))}, got {kind!r}")
        if not isinstance(max_cache_len, int) or isinstance(max_cache_len, bool) or max_cache_len < 1:
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


def seen_by_one_token(mask: Tensor) -> Tensor:
    """mask bool `[B, 1, 1, C]` -> int64 `[2, B]`, the first and the last position of each sequence.

    Raises ValueError where others between them are hidden; in a graph the device stops instead.
    """
    # Found once a step, for all layers; in a graph by each, as a mask of the caller's own may have been seen before it.
    recorded = torch.compiler.is_compiling() or (mask.is_cuda and torch.cuda.is_current_stream_capturing())
    version = None if recorded or mask.is_inference() else mask._version
    known = None if version is None else getattr(mask, "octofuse_seen", None)
    if known is not None and known[0] == version:
        earlier: Tensor = known[1]
        return earlier
    rows = mask[:, 0, 0]
    first = rows.int().argmax(-1)
    last = rows.shape[-1] - 1 - rows.flip(-1).int().argmax(-1)
    seen = torch.stack([first, last])
    whole = (rows.sum(-1) == last - first + 1).all()
    message = "attention_mask: expected padding in front of each sequence (padding_side='left'), got gaps"
    if recorded:
        torch._assert_async(whole, message)
    elif not whole:
        raise ValueError(message)
    if version is not None:
        mask.octofuse_seen = (version, seen)  # type: ignore[attr-defined]
    return seen


def _check_codes(key: Tensor, value: Tensor) -> None:
    if key.is_floating_point() and value.is_floating_point():
        return
    if not (hasattr(key, "octofuse_scales") and hasattr(value, "octofuse_scales")):
        raise ValueError("cache: expected a model that attends to keys and values as the cache gives them, got one that "
                         "changes them")  # fmt: skip


def octofuse_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """query `[B, H, T, D]` -> `[B, T, H, D]`: over codes with their scales by `cache_attend`, over anything else as
    "sdpa", or with a softcap by steps.

    Raises ValueError for attention sinks, for biases of positions beside codes or a softcap, for masks with gaps.
    """
    _check_codes(key, value)
    scales = getattr(key, "octofuse_scales", None)
    if s_aux is not None:
        raise ValueError("s_aux: expected a model without attention sinks, got one with them")
    if position_bias is not None and (scales is not None or softcap is not None):
        raise ValueError("position_bias: expected None beside a QuantizedStaticCache or a softcap, got a tensor")
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    if scales is not None:
        codes = (key, value, scales, value.octofuse_scales)  # type: ignore[attr-defined]
        if attention_mask is None:
            raise ValueError("attention_mask: expected transformers' own for a static cache, got None")
        if attention_mask.dtype == torch.bool and attention_mask.shape[1] == 1:
            if attention_mask.shape[0] != query.shape[0]:
                attention_mask = attention_mask.expand(query.shape[0], 1, 1, -1)
            seen = seen_by_one_token(attention_mask)
            return torch.ops.octofuse.cache_attend(query, *codes, seen, factor, softcap), None
        key, value = (decoded(c, s, query.dtype) for c, s in zip(codes[:2], codes[2:], strict=True))
    if attention_mask is not None:
        attention_mask = attention_mask[..., : key.shape[2]]
    if softcap is None:
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, position_bias=position_bias, **more
        )
        return out, None
    if attention_mask is None:
        attention_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=key.device)
        if more.get("is_causal", getattr(module, "is_causal", True)) in (True, None):
            attention_mask = attention_mask.tril(key.shape[2] - query.shape[2])
    elif attention_mask.is_floating_point():
        attention_mask = attention_mask > torch.finfo(attention_mask.dtype).min / 2
    return masked_attention(query, key, value, attention_mask, factor, softcap).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, octofuse_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
