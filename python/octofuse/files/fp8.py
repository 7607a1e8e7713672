"""FP8 checkpoints that say so themselves: transformers' "fp8" (DeepSeek's and Qwen's own files) and ModelOpt's "FP8".

"fp8": weight in e4m3, `weight_scale_inv` fp32, one for each block of 128 x 128, which the weight is multiplied by;
activations quantised in blocks of 1 x 128 while running. ModelOpt: one weight_scale, and one input_scale, for all. A
linear that was left out has no scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from octofuse.files.formats import EightBits, Format, Stored
from octofuse.quant import Scheme
from octofuse.quant.affine import BLOCK


class Fp8(Format):
    def __init__(self, config: Mapping[str, Any]) -> None:
        if config.get("fmt", "e4m3") != "e4m3":
            raise ValueError(f"fmt: expected 'e4m3', got {config['fmt']!r}")
        if config.get("activation_scheme", "dynamic") != "dynamic":
            raise ValueError(f"activation_scheme: expected 'dynamic', got {config['activation_scheme']!r}")
        size = config.get("weight_block_size", [BLOCK, BLOCK])
        if not isinstance(size, (list, tuple)) or list(size) != [BLOCK, BLOCK]:
            raise ValueError(f"weight_block_size: expected [{BLOCK}, {BLOCK}], got {size!r}")

    def stored(self, names: tuple[str, ...], module: nn.Module, tensors: frozenset[str]) -> Stored | None:
        if "weight_scale_inv" not in tensors:
            return None
        return EightBits(Scheme("block", "block", values="float8"), "weight_scale_inv")


class ModelOpt(Format):
    def __init__(self, config: Mapping[str, Any]) -> None:
        inner = config.get("quantization", config)
        if not isinstance(inner, Mapping) or inner.get("quant_algo") != "FP8":
            got = inner.get("quant_algo") if isinstance(inner, Mapping) else inner
            raise ValueError(f"quant_algo: expected 'FP8', got {got!r}")

    def stored(self, names: tuple[str, ...], module: nn.Module, tensors: frozenset[str]) -> Stored | None:
        if "weight_scale" not in tensors:
            return None
        return EightBits(Scheme("tensor", "tensor" if "input_scale" in tensors else "token", values="float8"))
