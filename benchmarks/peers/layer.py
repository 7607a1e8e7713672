"""What all kernels are given: one weight, the same tokens, and a product in fp32 to compare with.

A family names the weight's bits and the activations': w8a8, w4a16, ... Weights with activations in 16 bits have groups of
128 columns, so has w4a8-g128; w8a8 and w4a8 have a scale for each channel. Scales are such that every engine's format holds
them: fp16 numbers, in w4a8-g128 whole multiples of a channel's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import octofuse

GROUP = 128
E4M3 = torch.float8_e4m3fn
FAMILIES = ("w8a8", "w4a16", "w8a16", "w4a8", "w4a8-g128", "w3a16", "w2a16", "w1a16")
ROTATED = 200 << 20  # bytes of weights that a column goes through: more than any L2
TOKENS_ROTATED = 96 << 20
CHECKED = 96  # tokens that are compared: so many of the first and of the last


@dataclass
class Layer:
    """codes [N, K]: int8 in w8a8, else uint8; scale fp16 [N, G]; steps int16 [N, G] of w4a8-g128; bias fp16 [N] of w8a8."""

    family: str
    codes: Tensor
    scale: Tensor
    steps: Tensor | None = None
    bias: Tensor | None = None

    @property
    def n(self) -> int:
        return self.codes.shape[0]

    @property
    def k(self) -> int:
        return self.codes.shape[1]

    @property
    def bits(self) -> int:
        return int(self.family[1])

    @property
    def half(self) -> int:
        """The code that stands for 0."""
        return 0 if self.family == "w8a8" else 1 << self.bits - 1

    @property
    def copies(self) -> int:
        return max(2, min(128, -(-ROTATED // (self.n * self.k * self.bits // 8))))

    def dequantized(self) -> Tensor:
        """fp32 [N, K]."""
        groups = (self.codes.float() - self.half).view(self.n, self.scale.shape[1], -1)
        return (groups * self.scale.float()[:, :, None]).view(self.n, self.k)

    def float8(self) -> tuple[Tensor, Tensor]:
        """The same weight in e4m3 [N, K], with scales fp32 [N, 1]."""
        codes, scale = octofuse.quantize_per_token(self.dequantized().half(), E4M3)
        return codes, scale


def has_int8_tokens(family: str) -> bool:
    return "a8" in family


def random_layer(family: str, n: int, k: int, device: str = "cuda") -> Layer:
    """Codes are uniform; outputs are about 1."""
    torch.manual_seed(n * 7 + k)
    if family == "w8a8":
        codes = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=device)
        scale = (torch.rand(n, 1, device=device) + 0.5) / (73 * math.sqrt(k))
        return Layer(family, codes, scale.half(), bias=torch.randn(n, device=device).half())
    levels = 1 << int(family[1])
    codes = torch.randint(0, levels, (n, k), dtype=torch.uint8, device=device)
    groups = 1 if family == "w4a8" else k // GROUP
    scale = ((torch.rand(n, groups, device=device) + 0.5) * math.sqrt(12 / k) / levels).half()
    if family != "w4a8-g128":
        return Layer(family, codes, scale)
    steps = torch.randint(5, 16, (n, groups), dtype=torch.int16, device=device)
    # Of few bits, so that its products with steps are fp16 too.
    channel = ((scale[:, :1].float() / 16).half().view(torch.int16) & ~0x1F).view(torch.float16)
    return Layer(family, codes, channel * steps.half(), steps)


class Tokens:
    """x [M, K] in every type that a kernel takes; each with what it stands for."""

    def __init__(self, m: int, k: int, device: str = "cuda") -> None:
        self.x = torch.randn(m, k, device=device).half()
        self.made: dict[str, Any] = {}

    def __getitem__(self, kind: str) -> Any:
        """fp16, bf16: a tensor; int8, e4m3: codes [M, K] and scales fp32 [M, 1]."""
        if kind not in self.made:
            self.made[kind] = {
                "fp16": lambda: self.x,
                "bf16": self.x.bfloat16,
                "int8": lambda: octofuse.quantize_per_token(self.x),
                "e4m3": lambda: octofuse.quantize_per_token(self.x, E4M3),
            }[kind]()
        return self.made[kind]

    def compared(self, kind: str) -> Tensor:
        """fp32, of the tokens that are compared."""
        value = self[kind]
        if kind in ("fp16", "bf16"):
            return compared_rows(value).float()
        return compared_rows(value[0]).float() * compared_rows(value[1])


def compared_rows(rows: Tensor) -> Tensor:
    return rows if rows.shape[0] <= 2 * CHECKED else torch.cat([rows[:CHECKED], rows[-CHECKED:]])


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def tokens_of(layer: Layer, m: int) -> list[Tokens]:
    """Several, so that they rotate too where they are large."""
    return [Tokens(m, layer.k) for _ in range(max(1, min(layer.copies, TOKENS_ROTATED // (2 * m * layer.k))))]


@dataclass(frozen=True)
class Kernel:
    """A column. prepare: the weight in the kernel's own format; call(tokens, *prepared) -> [M, N]."""

    name: str
    takes: str
    prepare: Callable[[Layer], tuple[Any, ...]]
    call: Callable[..., Tensor]
    tolerance: float = 8e-3  # of the relative error, in the Frobenius norm, beside the dequantised product
    adds_bias: bool = False
    adapt: Callable[..., Any] | None = None  # (tokens, *prepared) -> tokens, before the clock runs
    compared: bool = True  # it does the family's work, so it may be its fastest
    chained: bool = False  # may overlap with the call before it

    def weights(self, layer: Layer) -> list[tuple[Any, ...]]:
        """So many copies that a call finds none of its own in L2."""
        first = self.prepare(layer)
        return [first] + [
            tuple(p.clone() if hasattr(p, "clone") else p for p in first) for _ in range(layer.copies - 1)
        ]

    def calls(self, weights: list[tuple[Any, ...]], tokens: list[Tokens]) -> list[Callable[[], Tensor]]:
        """One for each weight."""
        kinds = [t[self.takes] for t in tokens]
        kinds = kinds if self.adapt is None else [self.adapt(x, *weights[0]) for x in kinds]
        pairs = [(kinds[i % len(kinds)], w) for i, w in enumerate(weights)]
        return [lambda x=x, w=w: self.call(x, *w) for x, w in pairs]

    def expected(self, layer: Layer, tokens: Tokens) -> Tensor:
        """fp32, of the tokens that are compared."""
        y = tokens.compared(self.takes) @ layer.dequantized().t()
        return y + layer.bias.float() if self.adds_bias and layer.bias is not None else y
