"""Functional ops. Importing this package registers them with torch.library as `torch.ops.octofuse.*`."""

from octofuse.ops import _register, cache, decode, gemm, layouts, lowbit, outliers, quantize, rows
from octofuse.ops.decode import quantized_linear
from octofuse.ops.explain import Explanation, engines, explain, tune_cublaslt
from octofuse.ops.gemm import i8f16_linear, i8i8_linear, i8i8_matmul, i8i32_matmul, weight_sums
from octofuse.ops.linear import linear
from octofuse.ops.lowbit import bcq_linear, codebook_linear, sparse12_linear, woq_linear
from octofuse.ops.outliers import llm_int8_linear
from octofuse.ops.quantize import dequantize, quantize_per_block, quantize_per_tensor, quantize_per_token
from octofuse.ops.rows import (
    activate,
    activate_quantize,
    add_layer_norm,
    add_layer_norm_quantize,
    add_rms_norm,
    add_rms_norm_quantize,
    gated_activation,
    gated_activation_quantize,
    layer_norm,
    layer_norm_quantize,
    reorder,
    rms_norm,
    rms_norm_quantize,
)
from octofuse.ops.tuning import tune
from octofuse.ops.two_level import two_level_linear

_register.register(
    {
        **gemm.IMPLEMENTATIONS,
        **quantize.IMPLEMENTATIONS,
        **rows.IMPLEMENTATIONS,
        **decode.IMPLEMENTATIONS,
        **layouts.IMPLEMENTATIONS,
        **lowbit.IMPLEMENTATIONS,
        **cache.IMPLEMENTATIONS,
        **outliers.IMPLEMENTATIONS,
    },
    cuda_only=layouts.IMPLEMENTATIONS,
)

__all__ = [
    "Explanation",
    "activate",
    "activate_quantize",
    "add_layer_norm",
    "add_layer_norm_quantize",
    "add_rms_norm",
    "add_rms_norm_quantize",
    "bcq_linear",
    "codebook_linear",
    "dequantize",
    "engines",
    "explain",
    "gated_activation",
    "gated_activation_quantize",
    "i8f16_linear",
    "i8i8_linear",
    "i8i8_matmul",
    "i8i32_matmul",
    "layer_norm",
    "layer_norm_quantize",
    "linear",
    "llm_int8_linear",
    "quantize_per_block",
    "quantize_per_tensor",
    "quantize_per_token",
    "quantized_linear",
    "reorder",
    "rms_norm",
    "rms_norm_quantize",
    "sparse12_linear",
    "tune",
    "tune_cublaslt",
    "two_level_linear",
    "weight_sums",
    "woq_linear",
]
