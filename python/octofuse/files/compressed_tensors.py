"""compressed-tensors: 8-bit weights with 8-bit activations (int8 and FP8), and weights of 2 to 8 bits or in FP8.

Its groups name the linears that they are for, by class or by a regular expression behind "re:", less those of `ignore`.
"int-quantized", "float-quantized" and "naive-quantized" store 8-bit weights; "pack-quantized" packs codes, offset by
2^(bits - 1), into words along K. Scales are in the model's dtype.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octofuse.files.formats import (
    FLOATS,
    EightBits,
    Format,
    Stored,
    Want,
    checked_scales,
    float8_layer,
    is_one_of,
    order_of,
    scale_shapes,
    weight_only_layer,
)
from octofuse.files.patterns import compiled
from octofuse.files.words import unpack_words, words_of
from octofuse.quant import Scheme
from octofuse.quant.affine import BLOCK

PACKED = "pack-quantized"
UNPACKED = ("int-quantized", "naive-quantized")
FLOAT8 = ("float-quantized", "naive-quantized")


@dataclass(frozen=True)
class _WeightOnly(Stored):
    bits: int
    group: int | None
    symmetric: bool
    packed: bool
    ordered: bool = False  # columns have groups of their own choice
    has_int8_tokens: bool = False

    def wants(self, n: int, k: int) -> dict[str, Want]:
        if self.group is not None and k % self.group != 0:
            raise ValueError(f"group_size: expected one that divides K = {k}, got {self.group}")
        groups = 1 if self.group is None else k // self.group
        scales = ((n, groups), (n,)) if groups == 1 else ((n, groups),)
        found = {"weight_scale": Want(FLOATS, scales)}
        if self.packed:
            found["weight_packed"] = Want((torch.int32,), ((n, words_of(k, self.bits)),))
            found["weight_shape"] = Want((torch.int64, torch.int32), ((2,),))
        else:
            found["weight"] = Want((torch.int8,), ((n, k),))
        if self.ordered:
            found["weight_g_idx"] = Want((torch.int32, torch.int64), ((k,),))
        if not self.symmetric:
            zeros = (words_of(n, self.bits), groups) if self.packed else (n, groups)
            found["weight_zero_point"] = Want((torch.int32 if self.packed else torch.int8,), (zeros,))
        return found

    def layer(self, tensors: Mapping[str, Tensor], n: int, k: int, dtype: torch.dtype) -> nn.Module:
        scale = checked_scales("weight_scale", tensors["weight_scale"]).view(n, -1)
        middle = 1 << self.bits - 1
        zero = None if self.symmetric else tensors["weight_zero_point"]
        if self.packed:
            if tensors["weight_shape"].tolist() != [n, k]:
                raise ValueError(f"weight_shape: expected {[n, k]}, got {tensors['weight_shape'].tolist()}")
            codes = unpack_words(tensors["weight_packed"], self.bits, k)
            zero = None if zero is None else unpack_words(zero.t().contiguous(), self.bits, n).t()
        else:
            signed = tensors["weight"]
            low, high = int(signed.min()), int(signed.max())
            if low < -middle or high >= middle:
                raise ValueError(
                    f"weight: expected {-middle} to {middle - 1} for {self.bits} bits, got {low} to {high}"
                )
            codes = (signed.to(torch.int16) + middle).to(torch.uint8)
            zero = None if zero is None else zero.to(torch.int16) + middle
        order = order_of(tensors["weight_g_idx"], self.group or k) if self.ordered else None
        codes = codes if order is None else codes[:, order]
        return weight_only_layer(codes, scale, zero, self.bits, self.group, dtype, order, self.has_int8_tokens)


@dataclass(frozen=True)
class _Float8Weights(Stored):
    """Beside activations in floating point; strategy: "tensor", "channel", "group" or "block"."""

    strategy: str
    group: int = 0  # columns that share a scale, 0: a row

    def wants(self, n: int, k: int) -> dict[str, Want]:
        if self.strategy == "group" and k % self.group != 0:
            raise ValueError(f"group_size: expected one that divides K = {k}, got {self.group}")
        scales = ((n, k // self.group),) if self.strategy == "group" else scale_shapes(self.strategy, n, k)
        return {"weight": Want((torch.float8_e4m3fn,), ((n, k),)), "weight_scale": Want(FLOATS, scales)}

    def layer(self, tensors: Mapping[str, Tensor], n: int, k: int, dtype: torch.dtype) -> nn.Module:
        scale = checked_scales("weight_scale", tensors["weight_scale"])
        if self.strategy == "block":
            scale = scale.repeat_interleave(BLOCK, 0)[:n]
        elif self.strategy != "group":
            scale = scale.reshape(-1, 1).expand(n, 1)
        return float8_layer(tensors["weight"], scale, self.group or None, dtype)


class CompressedTensors(Format):
    def __init__(self, config: Mapping[str, Any]) -> None:
        if isinstance(inner := config.get("quantization_config"), Mapping):  # as some versions nest it
            config = inner
        if config.get("transform_config"):
            raise ValueError(
                "transform_config: expected none, got one; rotations while running (Hadamard) are not served"
            )
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise ValueError("config_groups: expected at least one group, got none")
        self.ignore = _patterns("ignore", config.get("ignore") or ())
        self.groups = []
        for name, group in groups.items():
            if not isinstance(group, Mapping):
                raise ValueError(f"config_groups.{name}: expected an object, got {group!r}")
            targets = _patterns(f"config_groups.{name}.targets", group.get("targets") or ())
            self.groups.append((targets, _stored_of(name, group, config)))

    def stored(self, names: tuple[str, ...], module: nn.Module, tensors: frozenset[str]) -> Stored | None:
        if any(_rank(pattern, names, module) is not None for pattern in self.ignore):
            return None
        ranked = [
            (rank, stored)
            for targets, stored in self.groups
            for target in targets
            if (rank := _rank(target, names, module)) is not None
        ]
        return min(ranked, key=lambda pair: pair[0])[1] if ranked else None


def _patterns(what: str, given: Any) -> list[str]:
    """Names of classes or modules, or "re:" and an expression that can be compiled."""
    if not isinstance(given, (list, tuple)) or not all(isinstance(one, str) for one in given):
        raise ValueError(f"{what}: expected a list of names, got {given!r}")
    for one in given:
        if one.startswith("re:"):
            compiled(what, one.removeprefix("re:"))
    return list(given)


def _rank(pattern: str, names: tuple[str, ...], module: nn.Module) -> int | None:
    """How closely a pattern names a module: 0, by name; 1, by an expression for its beginning; 2, by class; None: not."""
    if pattern in names:
        return 0
    if pattern.startswith("re:"):
        return 1 if any(re.match(pattern.removeprefix("re:"), name) for name in names) else None
    return 2 if any(pattern == kind.__name__ for kind in type(module).__mro__) else None


def _stored_of(name: str, group: Mapping[str, Any], config: Mapping[str, Any]) -> Stored:
    """ValueError that names the first setting which is not served."""
    weights, activations = group.get("weights"), group.get("input_activations")
    form = group.get("format") or config.get("format")  # of all groups "mixed-precision", where they differ

    def expect(what: str, got: Any, *allowed: Any) -> None:
        if not is_one_of(got, allowed):
            expected = " or ".join(map(repr, allowed))
            raise ValueError(f"config_groups.{name}.{what}: expected {expected}, got {got!r}")

    if not isinstance(weights, Mapping):
        raise ValueError(f"config_groups.{name}.weights: expected an object, got {weights!r}")
    if activations is not None and not isinstance(activations, Mapping):
        raise ValueError(f"config_groups.{name}.input_activations: expected an object or none, got {activations!r}")
    expect("output_activations", group.get("output_activations"), None)
    expect("weights.type", weights.get("type", "int"), "int", "float")
    if weights.get("type") == "float":
        return _float8_of(name, expect, form, weights, activations)
    expect("format", form, PACKED, *UNPACKED)
    bits = weights.get("num_bits", 8)
    expect("weights.num_bits", bits, *range(2, 9))
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    symmetric = bool(weights.get("symmetric", True))
    actorder = weights.get("actorder")
    expect("weights.actorder", actorder, None, "weight", "static", False, "group", "dynamic")
    if activations is None or bits < 8:
        expect("weights.strategy", strategy, "group", "channel")
        if activations is not None:
            _expect_int8_activations(expect, activations)
            expect("input_activations.dynamic", activations.get("dynamic"), True)
        size = _group_size(name, weights) if strategy == "group" else None
        # Of groups sums are no integers: activations in floating point are as fast there, and lose nothing.
        int8 = activations is not None and symmetric and size is None
        return _WeightOnly(bits, size, symmetric, form == PACKED, actorder in ("group", "dynamic"), int8)
    expect("format", form, *UNPACKED)
    expect("weights.symmetric", symmetric, True)
    expect("weights.strategy", strategy, "channel", "tensor")
    _expect_int8_activations(expect, activations)
    static = not activations.get("dynamic", False)
    expect("input_activations.strategy", activations.get("strategy"), *(("tensor", None) if static else ("token",)))
    return EightBits(Scheme(strategy, "tensor" if static else "token"))  # type: ignore[arg-type]


def _float8_of(
    name: str, expect: Any, form: Any, weights: Mapping[str, Any], activations: Mapping[str, Any] | None
) -> Stored:
    expect("format", form, *FLOAT8)
    expect("weights.num_bits", weights.get("num_bits", 8), 8)
    expect("weights.symmetric", weights.get("symmetric", True), True)
    strategy = weights.get("strategy") or "tensor"
    if activations is None:
        return _float8_weights_of(name, expect, strategy, weights)
    expect("weights.strategy", strategy, "channel", "tensor", "block")
    expect("input_activations.type", activations.get("type"), "float")
    expect("input_activations.num_bits", activations.get("num_bits", 8), 8)
    expect("input_activations.symmetric", activations.get("symmetric", True), True)
    if strategy == "block":
        _expect_blocks(expect, weights)
        expect("input_activations.strategy", activations.get("strategy"), "group")
        expect("input_activations.group_size", activations.get("group_size"), BLOCK)
        expect("input_activations.dynamic", activations.get("dynamic"), True)
        return EightBits(Scheme("block", "block", values="float8"))
    static = not activations.get("dynamic", False)
    expect("input_activations.strategy", activations.get("strategy"), *(("tensor", None) if static else ("token",)))
    return EightBits(Scheme(strategy, "tensor" if static else "token", values="float8"))  # type: ignore[arg-type]


def _float8_weights_of(name: str, expect: Any, strategy: Any, weights: Mapping[str, Any]) -> Stored:
    expect("weights.strategy", strategy, "channel", "tensor", "group", "block")
    expect("weights.actorder", weights.get("actorder"), None, "weight", "static", False)
    if strategy == "block":
        _expect_blocks(expect, weights)
        return _Float8Weights(strategy, BLOCK)
    return _Float8Weights(strategy, _group_size(name, weights) if strategy == "group" else 0)


def _group_size(name: str, weights: Mapping[str, Any]) -> int:
    size = weights.get("group_size")
    if type(size) is not int or size < 1:
        raise ValueError(f"config_groups.{name}.weights.group_size: expected at least 1, got {size!r}")
    return size


def _expect_blocks(expect: Any, weights: Mapping[str, Any]) -> None:
    shape = weights.get("block_structure")
    expect("weights.block_structure", list(shape) if isinstance(shape, tuple) else shape, [BLOCK, BLOCK])


def _expect_int8_activations(expect: Any, activations: Mapping[str, Any]) -> None:
    expect("input_activations.type", activations.get("type", "int"), "int")
    expect("input_activations.num_bits", activations.get("num_bits", 8), 8)
    expect("input_activations.symmetric", activations.get("symmetric", True), True)
