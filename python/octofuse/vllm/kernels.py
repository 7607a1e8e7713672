"""vLLM's linear kernels, in terms of this library's ops. The interface is that of vLLM 0.33."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.kernels import linear as registry
from vllm.model_executor.kernels.linear import (
    FP8ScaledMMLinearKernel,
    Int8ScaledMMLinearKernel,
    MPLinearKernel,
    MPLinearLayerConfig,
    register_linear_kernel,
)
from vllm.model_executor.layers.quantization.utils import replace_parameter
from vllm.model_executor.parameter import permute_param_layout_
from vllm.platforms import PlatformEnum, current_platform

from octofuse import _C
from octofuse.files.words import unpack_words
from octofuse.ops import linear, quantize_per_token, quantized_linear, woq_linear
from octofuse.quant.packing import pack, row_parts
from octofuse.quant.weight_only import GROUPS

LEAST_CAPABILITY = 80  # of kernels on tensor cores of int8
FLOAT8_CAPABILITY = 90  # of its own kernels
WIDTHS = (2, 4, 8)  # whose codes fill a word
SIGNED_WIDTHS = (4,)  # of CompressedTensorsW4A8Int, which hands over int8 [N, K]


def unsupported(compute_capability: int | None) -> str | None:
    """Why this library has no kernels here, or None."""
    if not current_platform.is_cuda():
        return "octofuse's kernels need CUDA"
    if not _C.build_info()["cuda"]:
        return "this octofuse was built for the CPU only"
    if compute_capability is None:
        found = current_platform.get_device_capability()
        compute_capability = None if found is None else found[0] * 10 + found[1]
    if compute_capability is not None and compute_capability < LEAST_CAPABILITY:
        return f"octofuse needs compute capability {LEAST_CAPABILITY}, got {compute_capability}"
    return None


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class OctofuseInt8LinearKernel(Int8ScaledMMLinearKernel):  # type: ignore[misc]
    """int8 weights and activations, symmetric; the scale of a token is found as it runs, or one is given for all. The bits
    do not depend on the batch."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        reason = unsupported(compute_capability)
        return reason is None, reason

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        if not c.input_symmetric:
            return False, "octofuse quantises activations without a zero point"
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """The weight stays `[N, K]`; scales become fp32, one for each channel of a fused layer, or one."""
        weight_name, weight_scale_name, input_scale_name, zero_name, adjustment_name = self.layer_param_names
        replace_parameter(layer, weight_name, _frozen(getattr(layer, weight_name).data.contiguous()))
        scale = getattr(layer, weight_scale_name).data.float().flatten()
        if scale.numel() == len(layer.logical_widths) > 1 and not self.config.is_channelwise:  # one of each part
            widths = torch.tensor(layer.logical_widths, device=scale.device)
            scale = scale.repeat_interleave(widths)
        replace_parameter(layer, weight_scale_name, _frozen(scale))
        if self.config.is_static_input_scheme:
            largest = getattr(layer, input_scale_name).data.float().max()
            replace_parameter(layer, input_scale_name, _frozen(largest))
        for name in (zero_name, adjustment_name):
            setattr(layer, name, None)

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight, weight_scale, input_scale, _, _ = self._get_layer_params(layer)
        return quantized_linear(
            x.contiguous(), weight, weight_scale, bias,
            x_scale=input_scale if self.config.is_static_input_scheme else None, constant_weight=True,
        )  # fmt: skip


class OctofuseFP8LinearKernel(FP8ScaledMMLinearKernel):  # type: ignore[misc]
    """e4m3 weights and activations with scales of channels or tensors, and of tokens or tensors, which vLLM quantises."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        reason = unsupported(compute_capability)
        if reason is None and not current_platform.is_device_capability(FLOAT8_CAPABILITY):
            reason = f"octofuse's FP8 kernels are for compute capability {FLOAT8_CAPABILITY} alone"
        return reason is None, reason

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        weights, activations = (key.scale.group_shape for key in (c.weight_quant_key, c.activation_quant_key))
        if not (weights.is_per_tensor() or weights.is_per_channel()):
            return False, f"octofuse takes scales of a weight's channels or one, got {c.weight_quant_key}"
        if not (activations.is_per_tensor() or activations.is_per_token()):
            return False, f"octofuse takes scales of tokens or one, got {c.activation_quant_key}"
        return True, None

    def apply_scaled_mm(
        self, *, A: Tensor, B: Tensor, out_dtype: torch.dtype, As: Tensor, Bs: Tensor, bias: Tensor | None,
        output_shape: list[int],
    ) -> Tensor:  # fmt: skip
        """A `[M, K]`; B `[K, N]`, a weight `[N, K]` transposed."""
        y = linear(A, B.t(), As, Bs, bias, out_dtype=out_dtype, fast_accumulate=True, constant_weight=True)
        return y.view(output_shape)


def asks_for_int8_tokens(layer: Any) -> bool:
    """What CompressedTensorsWNA8Int leaves on a layer for the kernel that is written for it."""
    asked = getattr(layer, "_humming_input_quant_config", None) or {}
    wanted = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
    return all(asked.get(name) == value for name, value in wanted.items())


class OctofuseMPLinearKernel(MPLinearKernel):  # type: ignore[misc]
    """Weights of 2, 4 or 8 bits beside activations in fp16 or bf16.

    Where a file asks for int8 activations (CompressedTensorsWNA8Int; CompressedTensorsW4A8Int, whose codes are signed) and
    weights are symmetric with a scale for each channel, tokens are quantised to int8 and their bits do not depend on the
    batch; else they stay in 16 bits.
    """

    @classmethod
    def get_min_capability(cls) -> int:
        return LEAST_CAPABILITY

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        if (reason := unsupported(None)) is not None:
            return False, reason
        kind = c.weight_type
        if not kind.is_integer() or kind.size_bits not in (SIGNED_WIDTHS if kind.is_signed() else WIDTHS):
            widths, signed = (", ".join(map(str, some)) for some in (WIDTHS, SIGNED_WIDTHS))
            return False, f"octofuse takes unsigned codes of {widths} bits and signed ones of {signed}, got {kind}"
        if c.zero_points == (kind.is_signed() or kind.has_bias()):
            return False, f"octofuse takes zero points or one zero for all, got {kind} with zero_points={c.zero_points}"
        if c.act_type not in (torch.float16, torch.bfloat16):
            return False, f"octofuse takes activations in float16 or bfloat16, got {c.act_type}"
        if c.group_size not in (-1, c.partition_weight_shape[0], *GROUPS):
            return False, f"octofuse takes groups of {', '.join(map(str, GROUPS))} or a row, got {c.group_size}"
        return True, None

    @property
    def _group(self) -> int | None:
        group = self.config.group_size
        return None if group in (-1, self.config.partition_weight_shape[0]) else group

    def process_weights_after_loading(self, layer: Any) -> None:
        """Codes are packed anew, scales lie `[G, N]`, zero points as uint8 `[G, N]`."""
        kind = self.config.weight_type
        bits = kind.size_bits
        k, n = self.config.partition_weight_shape
        self.zero = (
            1 << bits - 1 if kind.is_signed() else kind.bias
        )  # of packed codes, where the layer has no zero points
        is_exact = self._group is None and not self.config.zero_points
        self.quantises_tokens = is_exact and (kind.is_signed() or asks_for_int8_tokens(layer))

        def packed(stored: Any) -> Tensor:
            if kind.is_signed():  # int8 [N, K]
                codes = (stored.data + self.zero).to(torch.uint8)
                return torch.cat([pack(part, bits) for part in row_parts(codes)])
            words = permute_param_layout_(stored, input_dim=0, output_dim=1, packed_dim=0).data.t()
            return torch.cat([pack(unpack_words(part, bits, k), bits) for part in row_parts(words.contiguous())])

        def scales(stored: Any) -> Tensor:
            found: Tensor = permute_param_layout_(stored, input_dim=0, output_dim=1).data
            return found.to(self.config.act_type).contiguous()

        def zeros(stored: Any) -> Tensor:
            words = permute_param_layout_(stored, input_dim=0, output_dim=1, packed_dim=1).data
            return unpack_words(words.contiguous(), bits, n).to(torch.uint8).contiguous()

        self._transform_param(layer, self.w_q_name, packed)
        self._transform_param(layer, self.w_s_name, scales)
        if self.config.zero_points:
            self._transform_param(layer, self.w_zp_name, zeros)

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight, scale, zeros = self._get_weight_params(layer)
        x, x_scale = x.contiguous(), None
        if self.quantises_tokens:
            x, x_scale = quantize_per_token(x)
        return woq_linear(
            x, weight, scale, zeros if self.config.zero_points else self.zero, bias,
            bits=self.config.weight_type.size_bits, group=self._group, x_scale=x_scale, constant_weight=True,
        )  # fmt: skip


def register_in(*, first: bool) -> None:
    """Append them to vLLM's lists, once; first: in front of the others."""
    if "has_g_idx" in MPLinearLayerConfig.__dataclass_fields__:
        raise ImportError("kernels of this version meet activation order")
    kernels = (
        ("int8", registry._POSSIBLE_INT8_KERNELS, OctofuseInt8LinearKernel),
        ("fp8", registry._POSSIBLE_FP8_KERNELS, OctofuseFP8LinearKernel),
        ("mp", registry._POSSIBLE_KERNELS, OctofuseMPLinearKernel),
    )
    for kind, known, kernel in kernels:
        if kernel in known.get(PlatformEnum.CUDA, []):
            continue
        register_linear_kernel(kernel, PlatformEnum.CUDA, kind)
        if first:
            of_cuda = known[PlatformEnum.CUDA]
            of_cuda.insert(0, of_cuda.pop())
