"""int8 activations beside weights of 4 bits in two levels (`quant.two_level`), whose sums are exact."""

from __future__ import annotations

from torch import Tensor

from octofuse.ops._calls import LowbitCall, Scale, run
from octofuse.ops.activations import Activation
from octofuse.ops.lowbit import check_call, lowbit_linear


def two_level_linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    group_scale: Tensor,
    bias: Tensor | None = None,
    *,
    group: int | None = 128,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    constant_weight: bool = False,
    x_scale: Scale | None = None,
    out_scale: Scale | None = None,
    engine: str = "auto",
    gated: bool = False,
) -> Tensor:
    """`woq_linear` with w = scale * group's scale * (code - group's zero), codes of 4 bits.

    For int8 x the bits are those of `i8f16_linear` with the integers that `scale` multiplies as its weight, by every engine
    and for any number of tokens. Kernels: up to 4 tokens compute capability 8.0 and later, more 9.0, where N is a multiple
    of 8 or a row is one group; CPUs. All other calls make the weight int8 for the call. Lin et al., "QServe", 2024.

    Args:
        x: int8 `[..., K]`, K at most 131071; in floating point, which no kernel takes, it multiplies a weight that is
            dequantised for the call.
        packed: int32, `quant.packing.pack` of codes `[N, K]` of 4 bits.
        scale: fp16, bf16 or fp32 `[1, N]`.
        group_scale: int16 `[G, N]`, for each group of `group` columns its scale and 256 times its zero; None: a row is one
            group. No level, scale * (0 to 15 - zero), may leave -128 to 127: that is not checked here, and engines give
            different bits then (`quant.two_level.check_levels`).
        bias, activation, residual, constant_weight, x_scale, out_scale, engine, gated: as `woq_linear` takes them.

    Returns:
        `[..., N]`, gated `[..., N / 2]`, as `woq_linear` does.

    Raises:
        TypeError, ValueError: naming the argument.

    Examples:
        >>> from octofuse.quant.packing import pack
        >>> packed = pack(torch.tensor([[0, 1, 2, 15]]), 4)
        >>> of_group = torch.tensor([[5 + 256 * 1]], dtype=torch.int16)  # -5, 0, 5 and 70
        >>> x = torch.ones(1, 4, dtype=torch.int8)
        >>> octofuse.two_level_linear(x, packed, torch.full((1, 1), 0.5), of_group, x_scale=1.0)
        tensor([[35.]])
    """
    call = LowbitCall(
        x, x_scale, packed, scale, None, None, "two_level", 4, group, None, None, None, 0.0, bias, activation, residual,
        out_scale, engine, constant_weight, gated, None, None, group_scale,
    )  # fmt: skip
    check_call(call)
    result: Tensor = run("lowbit_linear", "lowbit_linear", call, lowbit_linear)
    return result
