"""Which kernel serves a call, and why the others do not."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octofuse import _C
from octofuse.ops import cpu, lowbit
from octofuse.ops._calls import LowbitCall
from octofuse.ops._guard import dtype_name
from octofuse.ops.activations import Activation, activation_named
from octofuse.ops.dequantized import split_zero
from octofuse.ops.two_level import two_level_linear
from octofuse.quant import codebook, two_level


@dataclass(frozen=True)
class Explanation:
    """The chosen kernel's name, why it was chosen, and (name, reason) for every other one that was looked at.

    captured: the kernel that runs in its place in a captured graph, where weights are promised to be constant.
    """

    chosen: str
    why: str
    declined: tuple[tuple[str, str], ...]
    captured: str

    def __str__(self) -> str:
        lines = [f"{self.chosen}: {self.why}"]
        if self.captured != self.chosen:
            lines.append(f"  {self.captured} in a captured graph, with constant_weight=True")
        return "\n".join(lines + [f"  not {name}: {reason}" for name, reason in self.declined])


def engines(device: torch.device | str = "cuda") -> tuple[str, ...]:
    """Names that `engine=` of the 8-bit linears accepts for this kind of device, runnable on this machine or not."""
    return cpu.ENGINES if torch.device(device).type == "cpu" else tuple(_C.candidates())


def explain(*arguments: Any, **options: Any) -> Explanation:
    """What a call would run; nothing is launched.

        explain(x, w, out_dtype=torch.float16, activation=None, engine="auto")  # 8-bit x and w: the 8-bit linears
        explain(octofuse.woq_linear, x, packed, scale, bits=4, group=128)  # a call with its function in front

    The first form: x `[..., K]`, w `[N, K]`, both int8 or both float8; what `linear`, `i8f16_linear` (out_dtype fp16, bf16,
    fp32), `i8i8_linear` (int8) or `i8i32_matmul` (int32) would run with a contiguous output. Of float8 also
    fast_accumulate, as `linear` has it, and block_scales: whether scales are those of blocks. The second: `woq_linear`,
    `bcq_linear`, `sparse12_linear`, `codebook_linear` or `two_level_linear` with all the arguments of the call.

    Raises TypeError for another function, ValueError if no engine, or not the one asked for, can serve the call; and what
    the call itself raises for wrong arguments.
    """
    function = arguments[0] if arguments else None
    if not callable(function):
        return _explain_gemm(**_bound(_explain_gemm, arguments, options))
    if function not in _KINDS:
        known = ", ".join(function.__name__ for function in _KINDS)
        raise TypeError(f"x: expected an int8 or float8 tensor, or one of {known}, got {function!r}")
    call = _call_of(function, arguments[1:], options)
    lowbit.check_call(call)
    return _explanation(_C.lowbit_explain(call))


_OUTPUTS = (torch.float16, torch.bfloat16, torch.float32, torch.int8)
_OPERANDS = {"x": (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2), "w": (torch.int8, torch.float8_e4m3fn)}
_KINDS = {lowbit.woq_linear: "uniform", lowbit.bcq_linear: "planes", lowbit.sparse12_linear: "sparse12",
          lowbit.codebook_linear: "codebook", two_level_linear: "two_level"}  # fmt: skip


def _bound(function: Any, arguments: Any, options: Any) -> dict[str, Any]:
    """Arguments by name, with defaults."""
    try:
        bound = inspect.signature(function).bind(*arguments, **options)
    except TypeError as error:
        raise TypeError(f"explain: {error}") from None
    bound.apply_defaults()
    return bound.arguments


def _call_of(function: Any, arguments: Any, options: Any) -> LowbitCall:
    """The struct that the function would hand on."""
    no_norm = {"norm": None, "norm_weight": None, "norm_bias": None, "eps": 0.0}
    given = {"zero": None, "offset": None, "bits": 8} | no_norm | _bound(function, arguments, options)
    if "alpha" in given:
        given["bits"] = lowbit.planes_of(given["alpha"])
        given["scale"] = given.pop("alpha")
    given["zero"], given["zero_point"] = split_zero(given["zero"])
    if "group_scale" in given:
        given["bits"] = two_level.BITS
    if "levels" in given:
        kind, given["bits"], given["levels"] = codebook.stored_as(given["levels"])
        return LowbitCall(kind=kind, **given)
    return LowbitCall(kind=_KINDS[function], **given)


def _explanation(found: dict[str, Any]) -> Explanation:
    declined = tuple(map(tuple, found["declined"]))
    return Explanation(found["chosen"], found["why"], declined, found.get("captured", found["chosen"]))


def _explain_gemm(
    x: Tensor,
    w: Tensor,
    *,
    out_dtype: torch.dtype = torch.float16,
    activation: Activation | None = None,
    engine: str = "auto",
    fast_accumulate: bool = False,
    block_scales: bool = False,
) -> Explanation:
    _check_operands(x, w, out_dtype)
    if fast_accumulate and (block_scales or w.dtype == torch.int8):
        raise ValueError(f"fast_accumulate: expected False for int8 and beside scales of blocks, got {fast_accumulate}")
    activation_named(activation)
    m, n, k = x.numel() // max(1, x.shape[-1]), w.shape[0], w.shape[1]
    double = out_dtype == torch.float32 and activation not in (None, "relu")
    if x.is_cuda:
        raw = out_dtype == torch.int32
        kind = (dtype_name(out_dtype), raw, double, engine)
        arithmetic = _arithmetic(x, fast_accumulate)
        return _explanation(_C.explain(m, n, k, *kind, x.get_device(), arithmetic, block_scales))
    if w.dtype != torch.int8:
        if engine not in ("auto", "cpu"):
            raise ValueError(f"engine: expected 'auto' or 'cpu' for float8 on a CPU, got {engine!r}")
        return Explanation(_kernel("cpu"), "the one that multiplies float8 on a CPU", (), _kernel("cpu"))
    chosen = cpu.select_raw(engine) if out_dtype == torch.int32 else cpu.select(engine, m * n * k)
    if engine != "auto":
        return Explanation(_kernel(chosen), "asked for by name", (), _kernel(chosen))
    no_int32 = "it has no int32 output" if out_dtype == torch.int32 else ""
    reasons = {
        "cpu": "slower for so many products, on this CPU with AMX",
        "onednn": cpu.why_not_onednn() or no_int32 or "slower without AMX or for so few products",
        "reference": "slower: plain torch, in double",
    }
    declined = tuple((_kernel(name), reason) for name, reason in reasons.items() if name != chosen)
    return Explanation(_kernel(chosen), "the fastest of those that can serve", declined, _kernel(chosen))


def _arithmetic(x: Tensor, fast: bool) -> str:
    if x.dtype == torch.int8:
        return "int8"
    return "e5m2" if x.dtype == torch.float8_e5m2 else "float8_fast" if fast else "float8"


def _kernel(engine: str) -> str:
    return f"cpu/{cpu.isa()}" if engine == "cpu" else engine


def _check_operands(x: Tensor, w: Tensor, out_dtype: torch.dtype) -> None:
    for name, tensor in (("x", x), ("w", w)):
        if not isinstance(tensor, Tensor) or tensor.dtype not in _OPERANDS[name]:
            got = f"dtype {tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name}: expected an int8 or float8 tensor, got {got}")
    if (x.dtype == torch.int8) != (w.dtype == torch.int8):
        raise TypeError(f"w: expected {'int8' if x.dtype == torch.int8 else 'float8_e4m3fn'} beside x, got {w.dtype}")
    if x.dim() < 1 or w.dim() != 2 or w.shape[1] != x.shape[-1]:
        raise ValueError(f"w: expected shape [N, K] for x [..., K], got {list(w.shape)} for {list(x.shape)}")
    other = torch.int32 if w.dtype == torch.int8 else torch.float8_e4m3fn
    if out_dtype not in (*_OUTPUTS, other):
        raise ValueError(f"out_dtype: expected {', '.join(map(str, (*_OUTPUTS, other)))}, got {out_dtype!r}")


def tune_cublaslt(x: Tensor, w: Tensor, *, out_dtype: torch.dtype = torch.int32) -> dict[int, float]:
    """Measure every algorithm of cuBLASLt's heuristic for x @ w^T and use the fastest from now on.

    Args: x int8 `[..., K]` and w int8 `[N, K]` on CUDA; out_dtype torch.int32 (`i8i32_matmul`, and `i8f16_linear` with
    engine="cublaslt") or torch.int8 (`i8i8_matmul`). Synchronises the stream; refused during graph capture.

    Returns: algorithm index in the heuristic's order -> median microseconds.
    """
    if out_dtype not in (torch.int32, torch.int8):
        raise ValueError(f"out_dtype: expected torch.int32 or torch.int8, got {out_dtype}")
    if not _C.build_info()["cuda"]:
        raise RuntimeError(
            "tune_cublaslt: this octofuse was built for the CPU only; reinstall it with OCTOFUSE_CUDA=ON"
        )
    return dict(_C.tune_cublaslt(x, w, out_dtype == torch.int8))
