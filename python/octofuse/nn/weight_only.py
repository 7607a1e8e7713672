"""Linears with weights of 1 to 8 bits and activations in floating point; inference only."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from octofuse.nn.linear import weight_of
from octofuse.ops.lowbit import bcq_linear, sparse12_linear, woq_linear
from octofuse.quant import WeightOnly, bcq, gptq, grid, sparse
from octofuse.quant.packing import pack, packed_words, unpack


class PackedLinear(nn.Module):
    """What all kinds share: packed int32 `[N, words]` (quant.packing) and bias `[N]` or None."""

    packed: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        scheme: WeightOnly,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.scheme = in_features, out_features, scheme
        words = packed_words(*self._codes())
        self.register_buffer("packed", torch.zeros(out_features, words, dtype=torch.int32, device=device))
        self._register(dtype, device)
        self.register_buffer("bias", torch.zeros(out_features, dtype=dtype, device=device) if bias else None)

    def _codes(self) -> tuple[int, int]:
        """Bits of a code, and codes of a row."""
        return self.scheme.bits, self.in_features

    @abstractmethod
    def _register(self, dtype: torch.dtype, device: torch.device | str | None) -> None:
        """The buffers that a kind has besides."""

    @property
    def groups(self) -> int:
        return grid.groups_of(self.in_features, self.scheme.group)

    @classmethod
    def from_float(cls, layer: nn.Module, scheme: WeightOnly, moments: Tensor | None = None) -> PackedLinear:
        """Quantise an nn.Linear or a transformers Conv1D; moments `[K, K]` as quant.gptq takes them, for that alone."""
        w = weight_of(layer)
        result = cls(w.shape[1], w.shape[0], bias=False, scheme=scheme, dtype=w.dtype, device=w.device)
        result._encode(w, moments)
        bias = getattr(layer, "bias", None)
        result.bias = None if bias is None else bias.detach().clone()
        result.train(layer.training)
        return result

    @abstractmethod
    def _encode(self, w: Tensor, moments: Tensor | None) -> None:
        """Fill the buffers, bias apart, from a weight `[N, K]`."""

    @abstractmethod
    def dequantized(self) -> Tensor:
        """The weight, `[N, K]`."""

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, scheme={self.scheme.name}"


class WeightOnlyLinear(PackedLinear):
    """y = x @ w^T + bias with w = scale * (code - zero).

    Buffers besides: scale `[N, G]` in the weight's dtype; zero uint8 `[N, G]` if the scheme has zero points.
    """

    scale: Tensor
    zero: Tensor | None

    def _register(self, dtype: torch.dtype, device: torch.device | str | None) -> None:
        shape = (self.out_features, self.groups)
        self.register_buffer("scale", torch.ones(shape, dtype=dtype, device=device))
        zero = torch.zeros(shape, dtype=torch.uint8, device=device) if self.scheme.zero_points else None
        self.register_buffer("zero", zero)

    def _encode(self, w: Tensor, moments: Tensor | None) -> None:
        scheme = self.scheme
        zeros = scheme.zero_points
        if scheme.method == "gptq":
            if moments is None:
                raise ValueError("moments: expected calibrated second moments for gptq, got None")
            found = gptq(w, moments, scheme.bits, scheme.group, zero_points=zeros)
        else:
            search = scheme.method == "mse"
            found = grid.quantize_rows(w, scheme.bits, scheme.group, zero_points=zeros, search=search)
        self.packed, self.scale, self.zero = pack(found.codes, scheme.bits), found.scale, found.zero

    def dequantized(self) -> Tensor:
        codes = unpack(self.packed, self.scheme.bits, self.in_features)
        return grid.dequantize(codes, self.scale, self.zero, self.scheme.bits, self.scheme.group)

    def forward(self, x: Tensor) -> Tensor:
        return woq_linear(
            x, self.packed, self.scale, self.zero, self.bias, bits=self.scheme.bits, group=self.scheme.group
        )


class BCQLinear(PackedLinear):
    """y = x @ w^T + bias with w = sum of alpha[i] * (+1 or -1).

    Buffers besides: alpha `[N, G, q]` in the weight's dtype.
    """

    alpha: Tensor

    def _register(self, dtype: torch.dtype, device: torch.device | str | None) -> None:
        shape = (self.out_features, self.groups, self.scheme.bits)
        self.register_buffer("alpha", torch.zeros(shape, dtype=dtype, device=device))

    def _encode(self, w: Tensor, moments: Tensor | None) -> None:
        found = bcq.bcq(w, self.scheme.bits, self.scheme.group)
        self.packed, self.alpha = pack(found.codes, self.scheme.bits, planes=True), found.alpha

    def dequantized(self) -> Tensor:
        codes = unpack(self.packed, self.scheme.bits, self.in_features, planes=True)
        return bcq.dequantize(codes, self.alpha, None, self.scheme.group)

    def forward(self, x: Tensor) -> Tensor:
        return bcq_linear(x, self.packed, self.alpha, None, self.bias, group=self.scheme.group)


class Sparse12Linear(PackedLinear):
    """y = x @ w^T + bias with one of every two columns of w; buffers besides: scale `[N, G]` in the weight's dtype."""

    scale: Tensor

    def _codes(self) -> tuple[int, int]:
        return 8, -(-self.in_features // 2)

    def _register(self, dtype: torch.dtype, device: torch.device | str | None) -> None:
        self.register_buffer("scale", torch.ones((self.out_features, self.groups), dtype=dtype, device=device))

    def _encode(self, w: Tensor, moments: Tensor | None) -> None:
        found = sparse.sparse12(w, self.scheme.group)
        self.packed, self.scale = pack(found.codes, 8), found.scale

    def dequantized(self) -> Tensor:
        codes = unpack(self.packed, *self._codes())
        return sparse.dequantize(codes, self.scale, self.in_features, self.scheme.group)

    def forward(self, x: Tensor) -> Tensor:
        return sparse12_linear(x, self.packed, self.scale, self.bias, group=self.scheme.group)
