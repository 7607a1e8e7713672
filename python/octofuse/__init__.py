"""octofuse: quantised linear layers for PyTorch whose whole epilogue is one kernel.

Importing it initialises no CUDA context. The functional ops live in `octofuse.ops` and here; `octofuse.nn` holds the
layers, `octofuse.quant` the mathematics, `octofuse.models` what is known of each model family.
"""

import os as _os
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from octofuse.engine import calibrate_cache_
from octofuse.files import disable, enable, from_pretrained, save_pretrained
from octofuse.generate import Generator, generate, own_text
from octofuse.ops import (
    activate,
    activate_quantize,
    add_layer_norm,
    add_layer_norm_quantize,
    add_rms_norm,
    add_rms_norm_quantize,
    bcq_linear,
    codebook_linear,
    dequantize,
    engines,
    explain,
    gated_activation,
    gated_activation_quantize,
    i8f16_linear,
    i8i8_linear,
    i8i8_matmul,
    i8i32_matmul,
    layer_norm,
    layer_norm_quantize,
    linear,
    llm_int8_linear,
    quantize_per_block,
    quantize_per_tensor,
    quantize_per_token,
    quantized_linear,
    reorder,
    rms_norm,
    rms_norm_quantize,
    sparse12_linear,
    tune,
    tune_cublaslt,
    two_level_linear,
    weight_sums,
    woq_linear,
)

if _TYPE_CHECKING:
    from octofuse.files import OctofuseConfig

__version__ = "0.1.0"

__all__ = [
    "Generator",
    "OctofuseConfig",
    "__version__",
    "activate",
    "activate_quantize",
    "add_layer_norm",
    "add_layer_norm_quantize",
    "add_rms_norm",
    "add_rms_norm_quantize",
    "bcq_linear",
    "calibrate_cache_",
    "codebook_linear",
    "dequantize",
    "disable",
    "enable",
    "engines",
    "explain",
    "from_pretrained",
    "gated_activation",
    "gated_activation_quantize",
    "generate",
    "i8f16_linear",
    "i8i8_linear",
    "i8i8_matmul",
    "i8i32_matmul",
    "layer_norm",
    "layer_norm_quantize",
    "linear",
    "llm_int8_linear",
    "own_text",
    "quantize_per_block",
    "quantize_per_tensor",
    "quantize_per_token",
    "quantized_linear",
    "reorder",
    "rms_norm",
    "rms_norm_quantize",
    "save_pretrained",
    "sparse12_linear",
    "tune",
    "tune_cublaslt",
    "two_level_linear",
    "weight_sums",
    "woq_linear",
]


def __getattr__(name: str) -> _Any:
    if name == "OctofuseConfig":
        from octofuse.files import OctofuseConfig

        return OctofuseConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if _os.environ.get("OCTOFUSE_ENABLE", "0") not in ("", "0"):
    enable()
