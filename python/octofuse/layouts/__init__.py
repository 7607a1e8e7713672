"""The memory layouts of int8 GEMMs, as objects: where an element lies, conversions, products, and pictures."""

from octofuse.layouts.convert import LaidOut, dequantize, from_layout, quantize, to_layout
from octofuse.layouts.gemm import linear, matmul, support
from octofuse.layouts.maps import (
    COL,
    COL4_4R2_8C,
    COL32,
    COL32_2R_4R4,
    LAYOUTS,
    ROW,
    Layout,
    interleaved,
    layout_named,
)

__all__ = [
    "COL",
    "COL4_4R2_8C",
    "COL32",
    "COL32_2R_4R4",
    "LAYOUTS",
    "ROW",
    "LaidOut",
    "Layout",
    "dequantize",
    "from_layout",
    "interleaved",
    "layout_named",
    "linear",
    "matmul",
    "quantize",
    "support",
    "to_layout",
]
