"""Layers: configuration, buffers and one op call each."""

from octofuse.nn.linear import Int8Linear
from octofuse.nn.replace import linear_layers, output_heads, replace_module

__all__ = ["Int8Linear", "linear_layers", "output_heads", "replace_module"]
