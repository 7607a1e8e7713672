"""Every refusal: its type, the argument that it names, what was expected, and that the process goes on."""

from __future__ import annotations

import pytest
import torch

import octofuse
from helpers import DEVICES
from octofuse import reference

I8 = torch.int8
M, N, K = 6, 10, 32


def good(device: str) -> dict:
    return {
        "x": torch.ones(M, K, dtype=I8, device=device),
        "w": torch.ones(N, K, dtype=I8, device=device),
        "x_scale": torch.full((M, 1), 0.5, device=device),
        "w_scale": torch.full((N,), 0.25, device=device),
        "bias": torch.zeros(N, device=device),
        "residual": torch.zeros(M, N, dtype=torch.float16, device=device),
    }


def zeros(*shape, dtype=torch.float32):
    """A tensor of the test's device, made when the test runs."""
    return lambda device: torch.zeros(shape, dtype=dtype, device=device)


def i8(*shape):
    return zeros(*shape, dtype=I8)


# name of the case: (what to change, error, message)
LINEAR = {
    "zero point without sums": ({"x_zero_point": 3}, ValueError, r"w_sum: expected int32 \[N\].*got None"),
    "sums without zero point": ({"w_sum": zeros(N, dtype=torch.int32)}, ValueError, r"x_zero_point: expected an int or tensor.*got None"),
    "zero point out of range": ({"x_zero_point": 128, "w_sum": zeros(N, dtype=torch.int32)}, ValueError, r"x_zero_point: expected an int in \[-128, 127\], got 128"),
    "zero point is fp32": ({"x_zero_point": zeros(M), "w_sum": zeros(N, dtype=torch.int32)}, TypeError, r"x_zero_point: expected dtype int32, got float32"),
    "zero point has another M": ({"x_zero_point": zeros(M + 1, dtype=torch.int32), "w_sum": zeros(N, dtype=torch.int32)}, ValueError, r"x_zero_point: expected one element or 6"),
    "sums are int64": ({"x_zero_point": 1, "w_sum": zeros(N, dtype=torch.int64)}, TypeError, r"w_sum: expected dtype int32, got int64"),
    "sums have another N": ({"x_zero_point": 1, "w_sum": zeros(N + 1, dtype=torch.int32)}, ValueError, r"w_sum: expected a contiguous tensor of shape \[10\], got \[11\]"),
    "zero point with too large K": ({"x": i8(1, 65794), "w": i8(1, 65794), "x_scale": 1.0, "w_scale": 1.0, "bias": None, "residual": None, "x_zero_point": 1, "w_sum": zeros(1, dtype=torch.int32)}, ValueError, r"x: expected K <= 65793 with a zero point"),
    "x is a list": ({"x": [[1]]}, TypeError, r"x: expected torch.Tensor, got list"),
    "x is None": ({"x": None}, TypeError, r"x: expected torch.Tensor, got NoneType"),
    "x is fp32": ({"x": zeros(M, K)}, TypeError, r"x: expected dtype int8 or float8_e4m3fn or float8_e5m2, got float32"),
    "x is uint8": ({"x": zeros(M, K, dtype=torch.uint8)}, TypeError, r"x: expected dtype int8 or float8_e4m3fn or float8_e5m2, got uint8"),
    "x is int32": ({"x": zeros(M, K, dtype=torch.int32)}, TypeError, r"x: expected dtype int8 or float8_e4m3fn or float8_e5m2, got int32"),
    "x is int64": ({"x": zeros(M, K, dtype=torch.int64)}, TypeError, r"x: expected dtype int8 or float8_e4m3fn or float8_e5m2, got int64"),
    "x is bool": ({"x": zeros(M, K, dtype=torch.bool)}, TypeError, r"x: expected dtype int8 or float8_e4m3fn or float8_e5m2, got bool"),
    "x is complex": ({"x": zeros(M, K, dtype=torch.complex64)}, TypeError, r"x: expected dtype int8 or float8_e4m3fn or float8_e5m2, got complex64"),
    "x is 0-d": ({"x": i8()}, ValueError, r"x: expected at least one dimension.*got shape \[\]"),
    "x has K = 0": ({"x": i8(M, 0), "w": i8(N, 0)}, ValueError, r"x: expected K >= 1, got shape \[6, 0\]"),
    "x has too large K": ({"x": i8(1, 131072), "w": i8(1, 131072), "x_scale": 1.0, "w_scale": 1.0, "bias": None, "residual": None}, ValueError, r"x: expected K <= 131071.*got K = 131072"),
    "x is transposed": ({"x": lambda d: torch.ones(K, M, dtype=I8, device=d).t()}, ValueError, r"x: expected a dense last dimension"),
    "x does not collapse": ({"x": lambda d: torch.ones(3, 2, K, dtype=I8, device=d).transpose(0, 1), "residual": None}, ValueError, r"x: expected leading dimensions that collapse"),
    "w is a number": ({"w": 3}, TypeError, r"w: expected torch.Tensor, got int"),
    "w is fp16": ({"w": zeros(N, K, dtype=torch.float16)}, TypeError, r"w: expected dtype int8 or float8_e4m3fn, got float16"),
    "w is 1-d": ({"w": i8(K)}, ValueError, r"w: expected two dimensions, \[N, K\], got shape \[32\]"),
    "w is 3-d": ({"w": i8(1, N, K)}, ValueError, r"w: expected two dimensions, \[N, K\], got shape \[1, 10, 32\]"),
    "w has another K": ({"w": i8(N, K + 1)}, ValueError, r"w: expected shape \[N, 32\].*got \[10, 33\]"),
    "w is [K, N]": ({"w": i8(K, N)}, ValueError, r"w: expected shape \[N, 32\].*got \[32, 10\]"),
    "w has N = 0": ({"w": i8(0, K)}, ValueError, r"w: expected N >= 1, got shape \[0, 32\]"),
    "w is a transposed view": ({"w": lambda d: torch.ones(K, N, dtype=I8, device=d).t()}, ValueError, r"w: expected a dense last dimension"),
    "x_scale is fp16": ({"x_scale": zeros(M, 1, dtype=torch.float16)}, TypeError, r"x_scale: expected dtype float32, got float16"),
    "x_scale is fp64": ({"x_scale": zeros(M, 1, dtype=torch.float64)}, TypeError, r"x_scale: expected dtype float32, got float64"),
    "x_scale has N elements": ({"x_scale": zeros(N)}, ValueError, r"x_scale: expected one element or 6 elements.*got shape \[10\]"),
    "x_scale is [1, M]": ({"x_scale": zeros(1, M)}, ValueError, r"x_scale: expected one element or 6 elements.*got shape \[1, 6\]"),
    "x_scale is 3-d": ({"x_scale": zeros(M, 1, 1)}, ValueError, r"x_scale: expected one element or 6 elements"),
    "x_scale is empty": ({"x_scale": zeros(0)}, ValueError, r"x_scale: expected one element or 6 elements"),
    "x_scale is a string": ({"x_scale": "1"}, TypeError, r"x_scale: expected torch.Tensor, got str"),
    "x_scale is None": ({"x_scale": None}, TypeError, r"x_scale: expected torch.Tensor, got NoneType"),
    "x_scale is True": ({"x_scale": True}, TypeError, r"x_scale: expected torch.Tensor, got bool"),
    "x_scale is 0": ({"x_scale": 0.0}, ValueError, r"x_scale: expected a finite number above 0, got 0"),
    "x_scale is negative": ({"x_scale": -1}, ValueError, r"x_scale: expected a finite number above 0, got -1"),
    "x_scale is NaN": ({"x_scale": float("nan")}, ValueError, r"x_scale: expected a finite number above 0, got nan"),
    "x_scale overflows": ({"x_scale": 1e60}, ValueError, r"x_scale: expected a finite number above 0, got inf"),
    "w_scale is fp16": ({"w_scale": zeros(N, dtype=torch.float16)}, TypeError, r"w_scale: expected dtype float32, got float16"),
    "w_scale has M elements": ({"w_scale": zeros(M)}, ValueError, r"w_scale: expected one element or 10 elements.*got shape \[6\]"),
    "w_scale is grouped": ({"w_scale": zeros(N, 2)}, ValueError, r"w_scale: expected one element or 10 elements"),
    "w_scale is infinite": ({"w_scale": float("inf")}, ValueError, r"w_scale: expected a finite number above 0, got inf"),
    "bias is int8": ({"bias": i8(N)}, TypeError, r"bias: expected dtype float32 or float16 or bfloat16, got int8"),
    "bias is fp64": ({"bias": zeros(N, dtype=torch.float64)}, TypeError, r"bias: expected dtype .*got float64"),
    "bias has K elements": ({"bias": zeros(K)}, ValueError, r"bias: expected shape \[10\], got \[32\]"),
    "bias is 2-d": ({"bias": zeros(1, N)}, ValueError, r"bias: expected shape \[10\], got \[1, 10\]"),
    "bias is strided": ({"bias": lambda d: torch.zeros(2 * N, device=d)[::2]}, ValueError, r"bias: expected a contiguous tensor"),
    "bias is a number": ({"bias": 1.0}, TypeError, r"bias: expected torch.Tensor, got float"),
    "bias wants a gradient": ({"bias": lambda d: torch.zeros(N, device=d, requires_grad=True)}, ValueError, r"bias: expected a tensor that needs no gradient"),
    "activation is unknown": ({"activation": "tanh"}, ValueError, r"activation: expected None, 'relu', 'gelu', 'gelu_tanh' or 'silu', got 'tanh'"),
    "activation is in capitals": ({"activation": "ReLU"}, ValueError, r"activation: .*got 'ReLU'"),
    "activation is a function": ({"activation": torch.relu}, TypeError, r"activation: expected str or None, got builtin"),
    "residual is int8": ({"residual": i8(M, N)}, TypeError, r"residual: expected dtype .*got int8"),
    "residual is transposed": ({"residual": zeros(N, M, dtype=torch.float16)}, ValueError, r"residual: expected the output's shape \[6, 10\], got \[10, 6\]"),
    "residual broadcasts": ({"residual": zeros(1, N, dtype=torch.float16)}, ValueError, r"residual: expected the output's shape \[6, 10\], got \[1, 10\]"),
    "residual is not dense": ({"residual": lambda d: torch.zeros(M, 2 * N, device=d)[:, ::2]}, ValueError, r"residual: expected a dense last dimension"),
    "residual is a list": ({"residual": []}, TypeError, r"residual: expected torch.Tensor, got list"),
    "out_dtype is int8": ({"out_dtype": I8}, ValueError, r"out_dtype: expected torch dtype float16 or bfloat16 or float32, got int8"),
    "out_dtype is fp64": ({"out_dtype": torch.float64}, ValueError, r"out_dtype: .*got float64"),
    "out_dtype is a string": ({"out_dtype": "float16"}, TypeError, r"out_dtype: expected torch.dtype, got str"),
    "out_dtype is None": ({"out_dtype": None}, TypeError, r"out_dtype: expected torch.dtype, got NoneType"),
    "engine is unknown": ({"engine": "cudnn"}, ValueError, r"engine: expected one of .*got 'cudnn'"),
    "engine is empty": ({"engine": ""}, ValueError, r"engine: expected one of"),
    "out has another dtype": ({"out": zeros(M, N)}, TypeError, r"out: expected dtype float16, got float32"),
    "out has another shape": ({"out": zeros(M, N + 1, dtype=torch.float16)}, ValueError, r"out: expected shape \[6, 10\], got \[6, 11\]"),
    "out is flat": ({"out": zeros(M * N, dtype=torch.float16)}, ValueError, r"out: expected shape \[6, 10\], got \[60\]"),
    "out is transposed": ({"out": lambda d: torch.zeros(N, M, dtype=torch.float16, device=d).t()}, ValueError, r"out: expected a dense last dimension"),
    "out is one row many times": ({"out": lambda d: torch.zeros(1, N, dtype=torch.float16, device=d).expand(M, N)}, ValueError, r"out: expected rows that do not overlap"),
    "out is a number": ({"out": 0}, TypeError, r"out: expected torch.Tensor, got int"),
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", LINEAR)
def test_linear_refuses(device: str, case: str) -> None:
    change, error, message = LINEAR[case]
    arguments = good(device)
    arguments.update({k: v(device) if callable(v) and k != "activation" else v for k, v in change.items()})
    with pytest.raises(error, match=message):
        octofuse.i8f16_linear(**arguments)
    # The process stays usable.
    fine = good(device)
    assert torch.equal(octofuse.i8f16_linear(**fine), reference.linear(**fine))


@pytest.mark.parametrize("device", DEVICES)
def test_out_that_overlaps_an_input_is_refused(device: str) -> None:
    memory = torch.zeros(4096, dtype=I8, device=device)
    x, w = memory[: M * K].view(M, K), torch.ones(N, K, dtype=I8, device=device)
    out = memory[64 : 64 + 2 * M * N].view(torch.float16).view(M, N)
    with pytest.raises(ValueError, match="out: expected memory that does not overlap x"):
        octofuse.i8f16_linear(x, w, 1.0, 1.0, out=out)
    base = torch.zeros(M + 1, N, dtype=torch.float16, device=device)
    with pytest.raises(ValueError, match="out: expected memory that does not overlap residual"):
        octofuse.i8f16_linear(x, w, 1.0, 1.0, residual=base[:M], out=base[1:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        (None, TypeError, "out_scale: expected float or torch.Tensor, got NoneType"),
        (0.0, ValueError, "out_scale: expected a finite number above 0"),
        ("a", TypeError, "out_scale: expected torch.Tensor, got str"),
        (lambda d: torch.ones(N, device=d), ValueError, r"out_scale: expected one element, got shape \[10\]"),
        (lambda d: torch.ones(1, device=d, dtype=torch.float16), TypeError, "out_scale: expected dtype float32"),
    ],
)
def test_out_scale_refuses(device: str, scale, error, message: str) -> None:
    arguments = good(device)
    with pytest.raises(error, match=message):
        octofuse.i8i8_linear(**arguments, out_scale=scale(device) if callable(scale) else scale)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("alpha", "error"), [(None, None), (1, TypeError), ("1", TypeError), (0.0, ValueError), (float("nan"), ValueError)]
)
def test_alpha_refuses(device: str, alpha, error) -> None:
    arguments = good(device)
    if error is None:
        assert octofuse.i8i32_matmul(arguments["x"], arguments["w"]).dtype == torch.int32
        return
    with pytest.raises(error, match="alpha: expected"):
        octofuse.i8i8_matmul(arguments["x"], arguments["w"], alpha)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda t: octofuse.quantize_per_token(t.to(I8)),
            TypeError,
            "x: expected dtype float16 or bfloat16 or float32",
        ),
        (lambda t: octofuse.quantize_per_token(t.double()), TypeError, "x: expected dtype .*got float64"),
        (lambda t: octofuse.quantize_per_token(t[0, 0]), ValueError, "x: expected at least one dimension"),
        (lambda t: octofuse.quantize_per_token(t[:, :0]), ValueError, "x: expected a last dimension of at least 1"),
        (lambda t: octofuse.quantize_per_token(3), TypeError, "x: expected torch.Tensor, got int"),
        (
            lambda t: octofuse.quantize_per_token(t.requires_grad_()),
            ValueError,
            "x: expected a tensor that needs no grad",
        ),
        (lambda t: octofuse.quantize_per_tensor(t, -1.0), ValueError, "scale: expected a finite number above 0"),
        (lambda t: octofuse.quantize_per_tensor(t, t[0]), ValueError, "scale: expected one element"),
        (lambda t: octofuse.quantize_per_tensor(t, t.half()[0, :1]), TypeError, "scale: expected dtype float32"),
        (
            lambda t: octofuse.dequantize(t, 1.0),
            TypeError,
            "q: expected dtype int8 or int32 or float8_e4m3fn or float8_e5m2, got float32",
        ),
        (lambda t: octofuse.dequantize(t.to(I8), t[0, :3]), ValueError, "scale: expected one element or 4 elements"),
        (lambda t: octofuse.dequantize(t.to(I8), 1.0, out_dtype=I8), ValueError, "out_dtype: expected torch dtype"),
    ],
)
def test_quantize_refuses(device: str, call, error, message: str) -> None:
    with pytest.raises(error, match=message):
        call(torch.ones(4, 8, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["w", "x_scale", "w_scale", "bias", "residual", "out"])
def test_mixed_devices_are_refused(name: str) -> None:
    arguments = good("cuda")
    arguments["out"] = torch.zeros(M, N, dtype=torch.float16, device="cuda")
    arguments[name] = arguments[name].cpu()
    with pytest.raises(ValueError, match=f"{name}: expected a tensor on cuda:0 like x, got cpu"):
        octofuse.i8f16_linear(**arguments)


def test_meta_tensors_are_refused_or_faked() -> None:
    x = torch.ones(2, 8, dtype=I8, device="meta")
    with pytest.raises((TypeError, ValueError, NotImplementedError)):
        octofuse.i8f16_linear(x, x, 1.0, 1.0)


def test_sparse_is_refused() -> None:
    x = torch.ones(2, 8, dtype=I8)
    with pytest.raises((TypeError, ValueError), match="x: expected a dense strided tensor"):
        octofuse.i8f16_linear(x.to_sparse(), x, 1.0, 1.0)
