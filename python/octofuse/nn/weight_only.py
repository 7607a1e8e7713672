"""Linears with frozen weights of 1 to 8 bits; activations are in floating point, or become int8 token by token."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from octofuse.nn.frozen import FrozenLinear
from octofuse.nn.gradient import multiplied
from octofuse.nn.linear import weight_of
from octofuse.nn.norm import Norm, in_floating_point, in_front, in_int8
from octofuse.nn.parted import Parted
from octofuse.ops.activations import Activation
from octofuse.ops.dequantized import dequantize_lowbit
from octofuse.ops.lowbit import bcq_linear, codebook_linear, sparse12_linear, woq_linear
from octofuse.quant import WeightOnly, bcq, codebook, gptq, grid, sparse
from octofuse.quant.packing import pack, pack_pairs, packed_rows, packed_words, row_parts

OWN_NORM = 4  # tokens that a product's kernel normalises itself, while its weights are on their way


def _dense(x: Tensor) -> Tensor:
    """With neighbouring columns side by side, as the ops want them; rows may lie apart."""
    return x if x.stride(-1) == 1 else x.contiguous()


class PackedLinear(FrozenLinear):
    """What all kinds share: the Parameters packed, int32 (quant.packing), and bias, `[N]` or None; a buffer order, int32
    `[K]` or None: which column of x meets each column of the weight, as files with activation order have it. None of them
    must change under a call.
    """

    packed: Tensor
    bias: Tensor | None
    order: Tensor | None
    weight_name = "packed"
    scales: ClassVar[str] = "scale"  # the buffer, `[G, N]` or `[G, planes, N]`, that the weight is linear in
    input_scale: ClassVar[Tensor | None] = None  # activations are in floating point, or quantised by the token

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
        shape = (packed_rows(out_features), packed_words(self._width(), in_features))
        self._register_frozen("packed", torch.zeros(shape, dtype=torch.int32, device=device))
        self._register(dtype, device)
        self.register_buffer("order", None)
        self._register_frozen("bias", torch.zeros(out_features, dtype=dtype, device=device) if bias else None)

    def _width(self) -> int:
        """Bits that a column takes."""
        return self.scheme.bits

    @abstractmethod
    def _register(self, dtype: torch.dtype, device: torch.device | str | None) -> None:
        """The buffers that a kind has besides."""

    @property
    def weight(self) -> Tensor:
        """The packed codes as int8: for models that ask a linear's weight for its device or dtype (T5 does)."""
        seen = self.packed.view(torch.int8)
        seen._is_hf_initialized = True  # type: ignore[attr-defined]  # GPT-2 fills c_proj.weight by its name
        return seen

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
    def dequantized(self, scales: Tensor | None = None) -> Tensor:
        """The weight, `[N, K]`; with other scales than the layer's own where they are given."""

    @abstractmethod
    def _multiply(self, x: Tensor, **options: Any) -> Tensor:
        """The op of this kind with the layer's tensors; a kind that may have int8 tokens takes another scale as well."""

    def forward(self, x: Tensor) -> Tensor:
        """Of an x that requires it, with the gradient with respect to x."""
        return multiplied(self, x)

    def product(self, x: Tensor) -> Tensor:
        return self.fused(x)

    def input_gradient(self, dy: Tensor) -> Tensor:
        """dy `[..., N]` -> `[..., K]` in its dtype: dy @ the weight, which is dequantised for it."""
        return dy @ self.dequantized().to(dy.dtype)

    def fused(
        self,
        x: Tensor | Parted,
        *,
        norm: Norm | None = None,
        gate: Activation | None = None,
        activation: Activation | None = None,
        residual: Tensor | None = None,
        out_scale: Tensor | None = None,
        gated: bool = False,
    ) -> Tensor:
        """act(norm(x) @ weight^T + bias) + residual (`ops.lowbit`).

        In one kernel up to 4 tokens; where the scheme has int8 tokens, one normalises or gates them and quantises, the next
        multiplies. There x has the scales' dtype: beside another the weight becomes int8 for the call.

        Args:
            x: floating point `[..., K]`.
            norm: in front.
            gate: an activation of the first half of x, `[..., 2K]`, that multiplies the other half: `gated_activation` in
                front, for which there is no norm.
            activation: None, "relu", "gelu", "gelu_tanh" or "silu".
            residual: floating point `[..., N]`.
            out_scale: fp32 `[]`: int8 output, for a layer that has it as its input_scale.
            gated: act(first half of the outputs) * the other half in place of act(outputs); there is no residual then.

        Returns:
            `[..., N]`, gated `[..., N / 2]`, in x's dtype; int8 with out_scale.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        # The packing knows K only up to a multiple of 128.
        width = self.in_features * (1 if gate is None else 2)
        if isinstance(x, Tensor) and x.shape[-1:] != (width,):  # who makes a Parted knows its width
            raise ValueError(f"x: expected shape [..., {width}], got {list(x.shape)}")
        epilogue: dict[str, Any] = {"activation": activation, "residual": residual, "out_scale": out_scale}
        if self.scheme.has_int8_tokens:
            q, x_scale = in_int8(x if isinstance(x, Parted) else _dense(x), norm, gate, self.order)
            own: Tensor = getattr(self, self.scales)
            # The scale's dtype is the output's: beside another one, in fp32, which loses nothing of either.
            scale = own if own.dtype == x.dtype else own.float()
            y = self._multiply(q, scale=scale, x_scale=x_scale, gated=gated, constant_weight=True, **epilogue)
            return y if y.dtype in (x.dtype, torch.int8) else y.to(x.dtype)
        if isinstance(x, Parted):
            alone = self.order is None and (x.joint.adds or x.tokens > OWN_NORM)
            x, norm = x.floating(norm) if alone else (x.whole(), norm)
        if gate is not None or self.order is not None:
            x, norm = in_floating_point(_dense(x), norm, gate, self.order), None
        return self._multiply(_dense(x), gated=gated, constant_weight=True, **epilogue, **in_front(norm))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, scheme={self.scheme.name}"


class WeightOnlyLinear(PackedLinear):
    """y = x @ w^T + bias with w = scale * (code - zero).

    Buffers besides: scale `[G, N]` in the weight's dtype; zero uint8 `[G, N]` if the scheme has zero points.
    """

    scale: Tensor
    zero: Tensor | None

    def _register(self, dtype: torch.dtype, device: torch.device | str | None) -> None:
        shape = (self.groups, self.out_features)
        self.register_buffer("scale", torch.ones(shape, dtype=dtype, device=device))
        zero = torch.zeros(shape, dtype=torch.uint8, device=device) if self.scheme.zero_points else None
        self.register_buffer("zero", zero)

    @property
    def zeros(self) -> Tensor | int | None:
        """Of each group, of all, or None: the grid's middle."""
        return self.scheme.zero if self.zero is None else self.zero

    def _encode(self, w: Tensor, moments: Tensor | None) -> None:
        scheme = self.scheme
        zeros: dict[str, Any] = {"zero_points": scheme.zero_points, "zero": scheme.zero}
        if scheme.method == "gptq":
            if moments is None:
                raise ValueError("moments: expected calibrated second moments for gptq, got None")
            found = gptq(w, moments, scheme.bits, scheme.group, **zeros)
            self._hold(pack(found.codes, scheme.bits), found.scale, found.zero)
        else:
            zeros["search"] = scheme.method in ("mse", "awq")
            parts = (grid.quantize_rows(part, scheme.bits, scheme.group, **zeros) for part in row_parts(w))
            # Packed at once, so that codes of one part alone are in memory.
            done = [(pack(part.codes, scheme.bits), part.scale, part.zero) for part in parts]
            packed, scales, zero_points = zip(*done, strict=True)
            self._hold(torch.cat(packed), torch.cat(scales), grid.joined_zeros(zero_points, 0))

    def _hold(self, packed: Tensor, scale: Tensor, zero: Tensor | int | None) -> None:
        """scale and zero `[N, G]`."""
        self.packed, self.scale = packed, scale.t().contiguous()
        self.zero = zero.t().contiguous() if isinstance(zero, Tensor) else None

    def dequantized(self, scales: Tensor | None = None) -> Tensor:
        of_groups = (self.packed, self.scale if scales is None else scales, self.zeros, None)
        w = dequantize_lowbit(*of_groups, "uniform", self.scheme.bits, self.scheme.group, self.in_features)
        return w if self.order is None else w[:, self.order.argsort()]

    def _multiply(self, x: Tensor, *, scale: Tensor | None = None, **options: Any) -> Tensor:
        of_groups = (self.scale if scale is None else scale, self.zeros, self.bias)
        return woq_linear(x, self.packed, *of_groups, bits=self.scheme.bits, group=self.scheme.group, **options)


class BCQLinear(PackedLinear):
    """y = x @ w^T + bias with w = sum of alpha[i] * (+1 or -1).

    Buffers besides: alpha `[G, q, N]` in the weight's dtype.
    """

    alpha: Tensor
    scales = "alpha"

    def _register(self, dtype: torch.dtype, device: torch.device | str | None) -> None:
        shape = (self.groups, self.scheme.bits, self.out_features)
        self.register_buffer("alpha", torch.zeros(shape, dtype=dtype, device=device))

    def _encode(self, w: Tensor, moments: Tensor | None) -> None:
        found = bcq.bcq(w, self.scheme.bits, self.scheme.group)
        self.packed = pack(found.codes, self.scheme.bits, planes=True)
        self.alpha = found.alpha.permute(1, 2, 0).contiguous()

    def dequantized(self, scales: Tensor | None = None) -> Tensor:
        of_groups = (self.packed, self.alpha if scales is None else scales, None, None)
        return dequantize_lowbit(*of_groups, "planes", self.scheme.bits, self.scheme.group, self.in_features)

    def _multiply(self, x: Tensor, **options: Any) -> Tensor:
        return bcq_linear(x, self.packed, self.alpha, None, self.bias, group=self.scheme.group, **options)


class Sparse12Linear(PackedLinear):
    """y = x @ w^T + bias with one of every two columns of w; buffers besides: scale `[G, N]` in the weight's dtype."""

    scale: Tensor

    def _width(self) -> int:
        return 4

    def _register(self, dtype: torch.dtype, device: torch.device | str | None) -> None:
        self.register_buffer("scale", torch.ones((self.groups, self.out_features), dtype=dtype, device=device))

    def _encode(self, w: Tensor, moments: Tensor | None) -> None:
        found = sparse.sparse12(w, self.scheme.group)
        self.packed, self.scale = pack_pairs(found.codes), found.scale.t().contiguous()

    def dequantized(self, scales: Tensor | None = None) -> Tensor:
        of_groups = (self.packed, self.scale if scales is None else scales, None, None)
        return dequantize_lowbit(*of_groups, "sparse12", 8, self.scheme.group, self.in_features)

    def _multiply(self, x: Tensor, **options: Any) -> Tensor:
        return sparse12_linear(x, self.packed, self.scale, self.bias, group=self.scheme.group, **options)


class CodebookLinear(PackedLinear):
    """y = x @ w^T + bias with w = scale * level of a code (nf4, fp4, e4m3); buffers besides: scale `[G, N]` in the
    weight's dtype.
    """

    scale: Tensor

    def _register(self, dtype: torch.dtype, device: torch.device | str | None) -> None:
        self.register_buffer("scale", torch.ones((self.groups, self.out_features), dtype=dtype, device=device))

    def _encode(self, w: Tensor, moments: Tensor | None) -> None:
        done = [codebook.encode(part, self.scheme.code, self.scheme.group) for part in row_parts(w)]
        self.packed = torch.cat([codebook.packed(part.codes, self.scheme.code) for part in done])
        self.scale = torch.cat([part.scale for part in done]).t().contiguous()

    def dequantized(self, scales: Tensor | None = None) -> Tensor:
        of_groups = (self.packed, self.scale if scales is None else scales, None, None)
        kind, bits, levels = codebook.stored_as(self.scheme.code)
        return dequantize_lowbit(*of_groups, kind, bits, self.scheme.group, self.in_features, levels)

    def _multiply(self, x: Tensor, **options: Any) -> Tensor:
        of_groups = (self.scale, self.scheme.code, self.bias)
        return codebook_linear(x, self.packed, *of_groups, group=self.scheme.group, **options)
