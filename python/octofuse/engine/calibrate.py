"""The scales of a static FP8 cache, from what a model's keys and values are on text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from octofuse.engine.decoder import Decoder
from octofuse.files import cache_scales
from octofuse.ops.cache import FP8_MOST
from octofuse.parallel import share_of


def calibrate_cache_(model: nn.Module, batches: Iterable[Tensor]) -> list[tuple[float, float]]:
    """Measures `k_scale` and `v_scale` of every block, for `Generator(model, cache="fp8-static")` and for other engines.

    A scale is the largest magnitude of all keys, or values, over 448, the largest e4m3 number: keys as the cache has them,
    normalised and rotated. The scales become buffers of the block's attention, fp32 `[1]` until the model is cast, and
    `save_pretrained` of a quantised model writes them; in compressed-tensors' format with a `kv_cache_scheme`, by which
    vLLM knows them. Quantise and cast first: smoothing changes values, and a cast rounds scales.

    Args:
        model: of a family that `Generator` takes, in floating point or quantised.
        batches: token ids, int64 `[B, T]`, without padding.

    Returns the scales of keys and values, a pair for each block. Raises ValueError for no batches, batches of another
    dtype or shape or that are empty, keys or values that are not finite, and one rank's part of a model.
    """
    if share_of(model) is not None:
        raise ValueError("model: expected a whole model, got one rank's part; calibrate it before it is sharded")
    decoder = Decoder(model)
    most: Tensor | None = None
    for index, batch in enumerate(batches):
        if not isinstance(batch, Tensor) or batch.dtype != torch.int64 or batch.dim() != 2 or batch.numel() == 0:
            got = f"{batch.dtype} {list(batch.shape)}" if isinstance(batch, Tensor) else type(batch).__name__
            raise ValueError(f"batches[{index}]: expected token ids, int64 [B, T], got {got}")
        found = _largest(decoder, batch.to(decoder.device))
        most = found if most is None else torch.maximum(most, found)
    if most is None:
        raise ValueError("batches: expected at least one, got none")
    if not bool(most.isfinite().all()):
        raise ValueError("batches: expected finite keys and values, got some that are not")
    scales = [tuple(amax / FP8_MOST if amax > 0 else 1.0 for amax in pair) for pair in most.tolist()]
    blocks: Any = model.get_submodule(decoder.architecture.names.blocks)
    for block, (key, value) in zip(blocks, scales, strict=True):
        cache_scales.keep(decoder.attention_of(block), key, value)
    return scales  # type: ignore[return-value]


def _largest(decoder: Decoder, ids: Tensor) -> Tensor:
    """Of one batch, `[blocks, 2]`."""
    batch, length = ids.shape
    if length > decoder.positions:
        raise ValueError(f"batches: expected at most the model's {decoder.positions} tokens, got {length}")
    cache = decoder.new_cache(batch, length)
    decoder.prefill(ids, torch.full((batch,), length, device=ids.device), cache)
    return cache.codes.abs().amax((2, 3, 4, 5)).float()
