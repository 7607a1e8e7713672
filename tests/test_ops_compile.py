"""torch.compile, torch.export, opcheck and the other ways in which torch may look at an op."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import octofuse
from helpers import DEVICES, operands
from octofuse.ops._calls import LinearCall, LowbitCall, RowLinearCall, RowsCall
from octofuse.quant.packing import pack

OPS = torch.ops.octofuse


def samples(device: str) -> dict[str, tuple[tuple, dict]]:
    p = operands(5, 24, 32, device)
    q8 = torch.tensor(0.05, device=device)
    zero = torch.zeros(5, dtype=torch.int32, device=device), octofuse.weight_sums(p.w)
    linear = LinearCall(
        p.x, p.w, p.x_scale, p.w_scale, p.bias, "gelu", p.residual, torch.bfloat16, None, "auto", None, None, False
    )  # fmt: skip
    linear_i8 = linear._replace(bias=None, activation=None, residual=None, out_scale=q8)
    asymmetric = linear._replace(x_zero_point=zero[0], w_sum=zero[1])

    def empty(dtype: torch.dtype) -> dict:
        return {"out": torch.empty(5, 24, dtype=dtype, device=device)}

    floats = torch.randn(2, 3, 16, device=device, dtype=torch.float16)
    x, codes = torch.randn(2, 3, 32, device=device).half(), torch.randint(0, 16, (24, 32), dtype=torch.uint8)
    norm = ("layer_norm", torch.ones(32, device=device), None, 1e-5)
    residual = torch.randn(2, 3, 24, device=device)  # of another dtype than x, which the output has all the same
    rows = RowLinearCall(x, p.w, None, p.w_scale, *norm, None, "relu", residual, torch.float16, None, False)
    scale = torch.rand(1, 24, device=device).half()
    lowbit = LowbitCall(
        x, None, pack(codes, 4).to(device), scale, None, None, "uniform", 4, None, *norm, None, "relu", residual, None,
        "auto", False,
    )  # fmt: skip
    return {
        "quantized_linear": (rows, {}),
        "quantized_linear to int8": (rows._replace(out_scale=q8), {}),
        "lowbit_linear": (lowbit, {}),
        "lowbit_linear to int8": (lowbit._replace(out_scale=q8), {}),
        "rows": (RowsCall(x, "rms_norm", x, None, None, 1e-5, None, True, None, False), {}),
        "linear": (linear, {}),
        "linear to int8": (linear_i8, {}),
        "linear with a zero point": (asymmetric, {}),
        "linear_out": (linear, empty(torch.bfloat16)),
        "linear_out to int8": (linear_i8, empty(torch.int8)),
        "i8i32_matmul": ((p.x, p.w, "auto"), {}),
        "i8i32_matmul_out": ((p.x, p.w, "auto"), empty(torch.int32)),
        "i8i8_matmul": ((p.x, p.w, 0.01, "auto"), {}),
        "i8i8_matmul_out": ((p.x, p.w, 0.01, "auto"), empty(torch.int8)),
        "quantize_per_tensor": ((floats, q8), {}),
        "quantize_per_token": ((floats,), {}),
        "dequantize": ((p.x, p.x_scale, torch.float32), {}),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", list(samples("cpu")))
def test_opcheck(device: str, name: str) -> None:
    arguments, keywords = samples(device)[name]
    torch.library.opcheck(getattr(OPS, name.split()[0]).default, tuple(arguments), keywords)


def chain(x, w, w_scale, bias, residual):
    q, scale = octofuse.quantize_per_token(x)
    y = octofuse.i8f16_linear(q, w, scale, w_scale, bias, activation="gelu_tanh", residual=residual)
    q8 = octofuse.i8i8_linear(q, w, scale, w_scale, out_scale=0.05)
    return y, octofuse.dequantize(q8, 0.05), octofuse.quantize_per_tensor(y, 0.1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("zero", [-5, torch.arange(6, dtype=torch.int32)])
def test_compile_with_a_zero_point(device: str, zero: int | torch.Tensor) -> None:
    p = operands(6, 24, 48, device)
    zero = zero.to(device) if isinstance(zero, torch.Tensor) else zero
    sums = octofuse.weight_sums(p.w)

    def asymmetric(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        arguments = (x, p.w, p.x_scale, p.w_scale, p.bias)
        promised = {"x_zero_point": zero, "w_sum": sums, "constant_weight": True}
        return octofuse.i8f16_linear(*arguments, **promised), octofuse.i8i8_linear(
            *arguments, out_scale=0.1, **promised
        )

    for got, want in zip(torch.compile(asymmetric, fullgraph=True)(p.x), asymmetric(p.x), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(device: str, dynamic: bool) -> None:
    compiled = torch.compile(chain, fullgraph=True, dynamic=dynamic)
    for m in (3, 8, 17):
        p = operands(m, 40, 64, device)
        x = torch.randn(m, 64, device=device).half()
        arguments = (x, p.w, p.w_scale, p.bias, p.residual)
        for got, want in zip(compiled(*arguments), chain(*arguments), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("device", DEVICES)
def test_compile_with_out(device: str) -> None:
    p = operands(6, 24, 32, device)

    def into(out):
        octofuse.i8f16_linear(p.x, p.w, p.x_scale, p.w_scale, out=out)
        return out + 1

    out = torch.zeros(6, 24, dtype=torch.float16, device=device)
    got = torch.compile(into, fullgraph=True)(out)
    want = octofuse.i8f16_linear(p.x, p.w, p.x_scale, p.w_scale)
    assert torch.equal(out, want)
    assert torch.equal(got, want + 1)


@pytest.mark.parametrize("device", DEVICES)
def test_export(device: str) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            p = operands(1, 24, 32, device)
            self.register_buffer("w", p.w)
            self.register_buffer("w_scale", p.w_scale)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, scale = octofuse.quantize_per_token(x)
            return octofuse.i8f16_linear(q, self.w, scale, self.w_scale)

    layer, x = Layer(), torch.randn(4, 32, device=device)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("m", min=2, max=64)},))
    more = torch.randn(9, 32, device=device)
    assert torch.equal(program.module()(more), layer(more))


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_calls_refuse_what_eager_ones_refuse(device: str) -> None:
    p = operands(4, 24, 32, device)
    wants_gradient = torch.zeros(24, device=device, requires_grad=True)

    def call(bias, scale):
        return octofuse.i8f16_linear(p.x, p.w, scale, p.w_scale, bias)

    for bias, scale, message in (
        (wants_gradient, 0.5, "bias: expected a tensor that needs no gradient"),
        (None, -0.5, "x_scale: expected a finite number above 0"),
        (None, float("nan"), "x_scale: expected a finite number above 0"),
    ):
        with pytest.raises(Exception, match=message):
            torch.compile(call, fullgraph=True)(bias, scale)
        torch.compiler.reset()
        with pytest.raises(ValueError, match=message):
            call(bias, scale)


def test_fake_tensors_are_not_read() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        x, w = torch.ones(3, 16, dtype=torch.int8), torch.ones(8, 16, dtype=torch.int8)
        y = octofuse.i8f16_linear(x, w, 1.0, 1.0, out_dtype=torch.float32)
    assert type(y) is not torch.Tensor
    assert y.shape == (3, 8)
    assert y.dtype == torch.float32


def test_import_is_light_and_leaves_cuda_alone() -> None:
    code = (
        "import torch, time, sys; began = time.process_time(); import octofuse; took = time.process_time() - began;"
        "assert not torch.cuda.is_initialized(); assert 'transformers' not in sys.modules;"
        "assert 'rich' not in sys.modules; print(took)"
    )
    times = []
    for _ in range(3):
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        times.append(float(run.stdout))
    assert min(times) < 0.150, times
