"""What every format answers: which linears of a model it stores quantised, in which tensors, and the layer they make."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from octofuse.nn import CodebookLinear, WeightOnlyLinear, eight_bit_class, empty_layer
from octofuse.quant import Scheme, WeightOnly, codebook
from octofuse.quant.affine import BLOCK
from octofuse.quant.packing import pack, row_parts

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Want:
    """A tensor of a layer: dtypes and shapes that it may have; None: the layer looks at its shape."""

    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...] | None
    optional: bool = False


class Stored(ABC):
    """How one linear is stored."""

    @abstractmethod
    def wants(self, n: int, k: int) -> dict[str, Want]:
        """Its tensors, bias apart, by what follows the module's name; ValueError for sizes that it cannot have."""

    @abstractmethod
    def layer(self, tensors: Mapping[str, Tensor], n: int, k: int, dtype: torch.dtype) -> nn.Module:
        """The layer, without its bias. ValueError for values that a layer cannot have."""


class Format(ABC):
    """A file's quantization_config, understood. The constructor raises ValueError for what is not served, by name.

    renames: regular expressions for parts of tensors' names that no module can have, and what stands in their place here.
    """

    renames: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def __init__(self, config: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def stored(self, names: tuple[str, ...], module: nn.Module, tensors: frozenset[str]) -> Stored | None:
        """Of a linear of these names, the model's and the file's, of which the file has these tensors; None: it stays in
        floating point."""


@dataclass(frozen=True)
class EightBits(Stored):
    """Operands in 8 bits; of float8 the weight's scales may be called otherwise."""

    scheme: Scheme
    scale: str = "weight_scale"

    def wants(self, n: int, k: int) -> dict[str, Want]:
        scales = scale_shapes(self.scheme.weights, n, k)
        found = {"weight": Want((self.scheme.dtype,), ((n, k),)), self.scale: Want(FLOATS, scales)}
        if self.scheme.is_static:
            found["input_scale"] = Want(FLOATS, ((1,), ()))
        return found

    def layer(self, tensors: Mapping[str, Tensor], n: int, k: int, dtype: torch.dtype) -> nn.Module:
        layer = eight_bit_class(self.scheme)(k, n, bias=False, scheme=self.scheme, dtype=dtype, device="meta")
        layer.weight = tensors["weight"]
        scale = checked_scales(self.scale, tensors[self.scale]).float()
        layer.weight_scale = scale if self.scheme.weights == "block" else scale.reshape(-1)
        if self.scheme.is_static:
            scale = checked_scales("input_scale", tensors["input_scale"]).float().reshape(())
            if float(scale) == 0.0:
                raise ValueError("input_scale: expected more than 0, got 0")
            layer.input_scale = scale
        return layer


def scale_shapes(strategy: str, n: int, k: int) -> tuple[tuple[int, ...], ...]:
    """That a weight's scales may have: of each "channel", of the "tensor", or of each "block"."""
    blocks = (-(-n // BLOCK), -(-k // BLOCK))
    return {"channel": ((n, 1), (n,)), "tensor": ((1,), (), (1, 1)), "block": (blocks,)}[strategy]


def is_one_of(got: Any, allowed: Iterable[Any]) -> bool:
    """By value and type: JSON's true is no 1, and 4.0 no 4."""
    return any(type(got) is type(one) and got == one for one in allowed)


def group_size(size: Any) -> int | None:
    """Columns of a group, as GPTQ and AWQ write it; None for -1, a row."""
    if size in (-1, None):
        return None
    if type(size) is not int or size < 1:
        raise ValueError(f"group_size: expected -1 or at least 1, got {size!r}")
    return size


def order_of(groups: Tensor, size: int) -> Tensor | None:
    """Of each column's group, `[K]`, the columns group by group, `[K]`; None where they lie so already.

    ValueError where a group has not `size` columns.
    """
    usual = torch.arange(groups.numel(), device=groups.device) // size
    if torch.equal(groups.long(), usual) or bool((groups <= 0).all()):  # some writers leave it at 0 or -1
        return None
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order].long(), usual):
        raise ValueError(f"g_idx: expected {size} columns of each of {int(usual[-1]) + 1} groups, got another division")
    return order.int()


def checked_scales(name: str, scales: Tensor) -> Tensor:
    if not bool(torch.isfinite(scales).all()) or bool((scales < 0).any()):
        raise ValueError(f"{name}: expected finite scales of at least 0, got NaN, Inf or negative ones")
    return scales


def weight_only_layer(
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bits: int,
    group: int | None,
    dtype: torch.dtype,
    order: Tensor | None = None,
    has_int8_tokens: bool = False,
) -> nn.Module:
    """codes uint8 `[N, K]`, scale `[N, G]` and zero, integers `[N, G]` or None for 2^(bits - 1) -> a WeightOnlyLinear.

    order int32 `[K]`: which column of x each column of the codes meets. has_int8_tokens: a row is one group.
    """
    n, k = codes.shape
    middle = 1 << bits - 1
    if zero is not None and bool((zero == middle).all()):
        zero = None
    if zero is not None and (int(zero.min()) < 0 or int(zero.max()) > 255):
        raise ValueError(f"zero points: expected 0 to 255, got {int(zero.min())} to {int(zero.max())}")
    scheme = WeightOnly(
        bits, group if group is None or group < k else None, zero_points=zero is not None,
        activations="int8" if has_int8_tokens else "float",
    )  # fmt: skip
    with torch.device("meta"):
        layer = empty_layer(k, n, bias=False, scheme=scheme, dtype=dtype)
    assert isinstance(layer, WeightOnlyLinear)
    layer.packed = torch.cat([pack(part, bits) for part in row_parts(codes)])
    layer.scale = _scales_in(dtype, scale)
    layer.zero = None if zero is None else zero.to(torch.uint8).t().contiguous()
    layer.order = order
    return layer


def float8_layer(weight: Tensor, scale: Tensor, group: int | None, dtype: torch.dtype) -> nn.Module:
    """weight float8_e4m3fn `[N, K]`, scale `[N, G]` -> a CodebookLinear."""
    n, k = weight.shape
    codes = weight.view(torch.uint8)
    if bool((codes & 0x7F == 0x7F).any()):
        raise ValueError("weight: expected numbers, got NaN")
    with torch.device("meta"):
        scheme = WeightOnly(8, group if group is None or group < k else None, "e4m3")
        layer = empty_layer(k, n, bias=False, scheme=scheme, dtype=dtype)
    assert isinstance(layer, CodebookLinear)
    layer.packed = torch.cat([codebook.packed(part, codebook.E4M3) for part in row_parts(codes)])
    layer.scale = _scales_in(dtype, scale)
    codebook.check_scales("scales", layer.scale)
    return layer


def _scales_in(dtype: torch.dtype, scale: Tensor) -> Tensor:
    """[N, G] -> [G, N], rounded."""
    scales = scale.to(dtype).t().contiguous()
    if not bool(torch.isfinite(scales).all()):
        raise ValueError(f"scales: expected values that {dtype} holds, got larger ones; ask for another dtype")
    return scales
