"""Functional ops. Importing this package registers them with torch.library as `torch.ops.octofuse.*`."""

from octofuse.ops import _register, gemm, quantize
from octofuse.ops.explain import Explanation, engines, explain, tune_cublaslt
from octofuse.ops.gemm import i8f16_linear, i8i8_linear, i8i8_matmul, i8i32_matmul, weight_sums
from octofuse.ops.quantize import dequantize, quantize_per_tensor, quantize_per_token

_register.register({**gemm.IMPLEMENTATIONS, **quantize.IMPLEMENTATIONS})

__all__ = [
    "Explanation",
    "dequantize",
    "engines",
    "explain",
    "i8f16_linear",
    "i8i8_linear",
    "i8i8_matmul",
    "i8i32_matmul",
    "quantize_per_tensor",
    "quantize_per_token",
    "tune_cublaslt",
    "weight_sums",
]
