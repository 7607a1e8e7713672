"""octofuse: quantised linear layers for PyTorch whose whole epilogue is one kernel.

Importing it initialises no CUDA context. The functional ops live in `octofuse.ops` and here; `octofuse.nn` holds the
layers, `octofuse.quant` the mathematics, `octofuse.models` what is known of each model family.
"""

from octofuse.ops import (
    dequantize,
    engines,
    explain,
    i8f16_linear,
    i8i8_linear,
    i8i8_matmul,
    i8i32_matmul,
    quantize_per_tensor,
    quantize_per_token,
    tune_cublaslt,
    weight_sums,
)

__version__ = "0.1.0"

__all__ = [
    "__version__",
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
