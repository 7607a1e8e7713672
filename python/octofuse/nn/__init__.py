"""Layers: configuration, buffers and one op call each."""

from octofuse.nn.linear import Int8Linear
from octofuse.nn.make import QUANTISED, empty_layer, quantised_layer
from octofuse.nn.replace import linear_layers, output_heads, replace_module
from octofuse.nn.weight_only import BCQLinear, PackedLinear, Sparse12Linear, WeightOnlyLinear

__all__ = [
    "QUANTISED",
    "BCQLinear",
    "Int8Linear",
    "PackedLinear",
    "Sparse12Linear",
    "WeightOnlyLinear",
    "empty_layer",
    "linear_layers",
    "output_heads",
    "quantised_layer",
    "replace_module",
]
