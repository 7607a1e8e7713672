"""Layers: configuration, tensors and one op call each."""

from octofuse.nn.columns import columns_of, cuts_columns
from octofuse.nn.delayed import DelayedFloat8Linear
from octofuse.nn.find import linear_layers, output_heads, replace_module
from octofuse.nn.floating import FloatingLinear, fused_layer
from octofuse.nn.gathered import PARALLEL, GatheredLinear, SummedLinear, inner_of, verb_of
from octofuse.nn.joined import joined
from octofuse.nn.linear import EightBitLinear, Float8Linear, Int8Linear
from octofuse.nn.make import QUANTISED, eight_bit_class, empty_layer, quantised_layer
from octofuse.nn.norm import Norm
from octofuse.nn.outliers import LLMInt8Linear
from octofuse.nn.rows import check_blocks, check_rows, rows_of
from octofuse.nn.two_level import TwoLevelLinear
from octofuse.nn.weight_only import BCQLinear, CodebookLinear, PackedLinear, Sparse12Linear, WeightOnlyLinear
from octofuse.nn.whole import whole_of

__all__ = [
    "PARALLEL",
    "QUANTISED",
    "BCQLinear",
    "CodebookLinear",
    "DelayedFloat8Linear",
    "EightBitLinear",
    "Float8Linear",
    "FloatingLinear",
    "GatheredLinear",
    "Int8Linear",
    "LLMInt8Linear",
    "Norm",
    "PackedLinear",
    "Sparse12Linear",
    "SummedLinear",
    "TwoLevelLinear",
    "WeightOnlyLinear",
    "check_blocks",
    "check_rows",
    "columns_of",
    "cuts_columns",
    "eight_bit_class",
    "empty_layer",
    "fused_layer",
    "inner_of",
    "joined",
    "linear_layers",
    "output_heads",
    "quantised_layer",
    "replace_module",
    "rows_of",
    "verb_of",
    "whole_of",
]
