"""Schemes for weights of 1 to 8 bits; activations stay in floating point, or become int8 with a scale for each token."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

GROUPS = (32, 64, 128, 256)
CODES = ("grid", "bcq", "sparse12", "nf4", "fp4", "e4m3", "two_level")
METHODS = ("rtn", "mse", "gptq", "awq")
_BITS = {"sparse12": 7, "e4m3": 8}
_NAME = re.compile(r"w([1-8])a16(?:-g(\d+))?(?:-(zp|half))?(?:-(mse|gptq|awq))?")
_CODED = re.compile(r"bcq-q([1-8])(?:-g(\d+))?")
_SPARSE = re.compile(r"sparse12-w7(?:-g(\d+))?")
_CODEBOOK = re.compile(r"(nf4|fp4)(?:-g(\d+))?")
_FLOAT8 = re.compile(r"w8a16-fp8(?:-g(\d+))?")
_INT8_TOKENS = re.compile(r"w([2-7])a8(?:-(mse|gptq))?")
_TWO_LEVEL = re.compile(r"w4a8-g(\d+)(?:-(mse))?")
CODEBOOK_GROUP = 64  # where a name has none


@dataclass(frozen=True)
class WeightOnly:
    """How a linear layer's weight is quantised.

    bits: 1 to 8. group: columns that share a scale; None: a row. Names have 32, 64, 128 and 256 alone.
    code: levels on a uniform "grid" (quant.grid); "bcq": sums of `bits` scaled signs (quant.bcq); "sparse12": one of every
        two columns, in 7 bits (quant.sparse); "nf4" and "fp4": levels of a codebook, "e4m3": floating point in 8 bits
        (quant.codebook); "two_level": integers of 8 bits, of which each group has 16 (quant.two_level).
    zero_points: a grid that covers a group's smallest to largest value, instead of as much on either side of 0.
    half_zero: a zero between the two middle codes, so that as many levels lie on either side; else it is the code
        2^(bits - 1), as files of other libraries have it (one bit has no such code, 8 bits no other zero).
    method: of a grid: round to nearest; "mse": the range that loses least in the weight; "gptq": errors made up for by
        later columns, which calibration says how to do; "awq": as "mse", with input channels scaled first where a norm
        can take the scales (quant.awq), by calibration.
    activations: "int8": x is quantised by the token in front of every product, whose sums are integers then and exact.
        The weight's are, too: a grid with a scale for each row and the zero 2^(bits - 1), or "two_level", which has no
        other activations.
    """

    bits: int = 4
    group: int | None = 128
    code: Literal["grid", "bcq", "sparse12", "nf4", "fp4", "e4m3", "two_level"] = "grid"
    zero_points: bool = False
    method: Literal["rtn", "mse", "gptq", "awq"] = "rtn"
    half_zero: bool = False
    activations: Literal["float", "int8"] = "float"

    # What an int8 scheme may have, and this one has not.
    smooth_values: ClassVar[bool] = False
    is_static: ClassVar[bool] = False
    clipping: ClassVar[str] = "max"

    def __post_init__(self) -> None:
        if not isinstance(self.bits, int) or self.bits not in range(1, 9):
            raise ValueError(f"bits: expected 1 to 8, got {self.bits!r}")
        if self.group is not None and (type(self.group) is not int or self.group < 1):
            raise ValueError(f"group: expected None or at least 1, got {self.group!r}")
        if self.code not in CODES:
            raise ValueError(f"code: expected one of {', '.join(CODES)}, got {self.code!r}")
        if self.code in ("nf4", "fp4") and (self.bits != 4 or self.group is None):
            raise ValueError(
                f"bits, group: expected 4 bits and a group with {self.code}, got {self.bits}, {self.group}"
            )
        if self.code in _BITS and self.bits != _BITS[self.code]:
            raise ValueError(f"bits: expected {_BITS[self.code]} with {self.code}, got {self.bits}")
        if self.method not in METHODS:
            raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {self.method!r}")
        searches = self.code == "two_level" and self.method == "mse"
        if self.code != "grid" and (self.zero_points or self.half_zero or (self.method != "rtn" and not searches)):
            raise ValueError(f"code: expected 'grid' with zero_points, half_zero or a method, got {self.code!r}")
        self._check_activations()
        if self.zero_points and self.bits == 1:
            raise ValueError("zero_points: expected False at 1 bit, got True")
        if self.half_zero and (self.zero_points or self.bits in (1, 8)):
            beside = "beside zero_points" if self.zero_points else f"at {self.bits} bits"
            raise ValueError(f"half_zero: expected False {beside}, got True")

    def _check_activations(self) -> None:
        if self.activations not in ("float", "int8"):
            raise ValueError(f"activations: expected 'float' or 'int8', got {self.activations!r}")
        if self.code == "two_level" and (self.bits != 4 or self.group is None or self.activations != "int8"):
            got = f"{self.bits}, {self.group}, {self.activations!r}"
            raise ValueError(f"bits, group, activations: expected 4, a group and 'int8' of two levels, got {got}")
        if self.activations == "float" or self.code == "two_level":
            return
        is_plain = self.code == "grid" and not self.zero_points and not self.half_zero and self.method != "awq"
        if not is_plain or self.group is not None or self.bits in (1, 8):
            own = WeightOnly(self.bits, self.group, self.code, self.zero_points, self.method, self.half_zero)
            raise ValueError(
                "activations: expected 'float' but for two levels, or a grid of 2 to 7 bits with a scale for each row and "
                f"no zero points, got 'int8' beside {own.name}"
            )

    @property
    def has_int8_tokens(self) -> bool:
        return self.activations == "int8"

    @property
    def is_codebook(self) -> bool:
        return self.code in ("nf4", "fp4", "e4m3")

    @property
    def zero(self) -> int | None:
        """The zero of all groups, if that is one code; None: of each its own, or the grid's middle (`quant.grid`)."""
        own = self.code != "grid" or self.zero_points or self.half_zero or self.bits in (1, 8)
        return None if own else 1 << self.bits - 1

    @property
    def needs_calibration(self) -> bool:
        return self.method in ("gptq", "awq")

    @property
    def smoothing(self) -> Literal["awq"] | None:
        """How scales of the input channels are found, which fold into what stands before a layer."""
        return "awq" if self.method == "awq" else None

    @property
    def name(self) -> str:
        group = "" if self.group is None else f"-g{self.group}"
        if self.code == "bcq":
            return f"bcq-q{self.bits}{group}"
        if self.code == "sparse12":
            return f"sparse12-w7{group}"
        if self.code == "e4m3":
            return f"w8a16-fp8{group}"
        if self.is_codebook:
            return self.code if self.group == CODEBOOK_GROUP else f"{self.code}{group}"
        method = "" if self.method == "rtn" else f"-{self.method}"
        zero = "-zp" if self.zero_points else "-half" if self.half_zero else ""
        return f"w{self.bits}a{8 if self.has_int8_tokens else 16}{group}{zero}{method}"


def weight_only_named(name: str) -> WeightOnly | None:
    """The scheme of names like "w8a16", "w4a16-g128", "w3a16-g64-zp-gptq", "w4a16-g128-half", "bcq-q3-g128",
    "sparse12-w7", "nf4" (groups of 64), "fp4-g128", "w8a16-fp8", "w4a8" and "w4a8-g128"; None for others.

    Raises ValueError for a group that there is not.
    """
    if found := _NAME.fullmatch(name):
        bits, group, zero, method = found.groups()
        return WeightOnly(int(bits), _group(group), "grid", zero == "zp", method or "rtn", zero == "half")  # type: ignore[arg-type]
    if found := _INT8_TOKENS.fullmatch(name):
        return WeightOnly(int(found[1]), None, method=found[2] or "rtn", activations="int8")  # type: ignore[arg-type]
    if found := _TWO_LEVEL.fullmatch(name):
        return WeightOnly(4, _group(found[1]), "two_level", method=found[2] or "rtn", activations="int8")  # type: ignore[arg-type]
    if found := _CODED.fullmatch(name):
        return WeightOnly(int(found[1]), _group(found[2]), "bcq")
    if found := _SPARSE.fullmatch(name):
        return WeightOnly(7, _group(found[1]), "sparse12")
    if found := _CODEBOOK.fullmatch(name):
        return WeightOnly(4, _group(found[2]) or CODEBOOK_GROUP, found[1])  # type: ignore[arg-type]
    if found := _FLOAT8.fullmatch(name):
        return WeightOnly(8, _group(found[1]), "e4m3")
    return None


def _group(text: str | None) -> int | None:
    group = None if text is None else int(text)
    if group is not None and group not in GROUPS:
        raise ValueError(f"group: expected None or one of {', '.join(map(str, GROUPS))}, got {group!r}")
    return group
