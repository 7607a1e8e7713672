"""Norms and activations with quantisation: against the formula, and bit for bit against their parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import octofuse
from helpers import DEVICES, FLOATS
from inbox import rows_call
from octofuse import _C, reference
from octofuse.testing.tolerance import ulp_distance

# One pack, ragged, every register variant (a warp, then blocks of growing rows), beyond all of them, and unaligned.
SHAPES = [(1, 8), (3, 7), (5, 256), (2, 3, 768), (33, 1024), (9, 2048), (4, 1600), (5, 4096), (3, 8192), (2, 16384),
          (2, 20000), (2, 131071)]  # fmt: skip
SCALES = (None, 0.031)


def made(shape, dtype, device, generator):
    """x, residual, weight and bias, with a row of zeros and one far from zero."""
    x = torch.randn(shape, generator=generator) * 3
    flat = x.view(-1, shape[-1])
    flat[0] = 0
    flat[-1] += 20
    affine = [torch.randn(shape[-1], generator=generator) for _ in range(2)]
    residual = torch.randn(shape, generator=generator)
    return [t.to(dtype).to(device) for t in (x, residual, *affine)]


def parts(y, scale):
    """What a fused op must equal: the plain result, quantised."""
    return octofuse.quantize_per_token(y) if scale is None else (octofuse.quantize_per_tensor(y, scale), scale)


def same(got, want) -> bool:
    return torch.equal(torch.as_tensor(got), torch.as_tensor(want))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("fp32_affine", [False, True])
def test_norms(device, shape, dtype, kind, fp32_affine, generator) -> None:
    x, residual, weight, bias = made(shape, dtype, device, generator)
    if fp32_affine:
        weight, bias = weight.float(), bias.float()
    affine = (weight, bias) if kind == "layer" else (weight,)
    plain, fused, add, add_fused = (
        (octofuse.layer_norm, octofuse.layer_norm_quantize, octofuse.add_layer_norm, octofuse.add_layer_norm_quantize)
        if kind == "layer"
        else (octofuse.rms_norm, octofuse.rms_norm_quantize, octofuse.add_rms_norm, octofuse.add_rms_norm_quantize)
    )
    y = plain(x, *affine, eps=1e-5)
    host = [t.cpu() for t in affine]
    want = reference.norm(x.cpu(), host[0], host[1] if kind == "layer" else None, 1e-5, center=kind == "layer")
    assert torch.equal(y.cpu(), want), "the same bits on every device"
    h = x + residual
    y_sum, h_got = add(x, residual, *affine, eps=1e-5)
    assert torch.equal(h_got, h)
    assert torch.equal(y_sum, plain(h, *affine, eps=1e-5))
    for scale in SCALES:
        for got, wanted in zip(fused(x, *affine, eps=1e-5, scale=scale), parts(y, scale), strict=True):
            assert same(got, wanted)
        q, used, h_got = add_fused(x, residual, *affine, eps=1e-5, scale=scale)
        assert torch.equal(h_got, h)
        assert same(q, parts(y_sum, scale)[0])
        assert same(used, parts(y_sum, scale)[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_activations(device, shape, dtype, activation, generator) -> None:
    x, rest = made(shape, dtype, device, generator)[:2]
    y = octofuse.activate(x, activation)
    want = reference.activate(x.cpu().float(), activation).to(dtype)
    assert ulp_distance(y.cpu(), want).max() <= (0 if activation == "relu" else 1)
    gated = torch.cat([x, rest], dim=-1)
    z = octofuse.gated_activation(gated, activation)
    assert torch.equal(z, y * rest)
    for scale in SCALES:
        for got, wanted in zip(octofuse.activate_quantize(x, activation, scale=scale), parts(y, scale), strict=True):
            assert same(got, wanted)
        fused = octofuse.gated_activation_quantize(gated, activation, scale=scale)
        for got, wanted in zip(fused, parts(z, scale), strict=True):
            assert same(got, wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(7, 768), (3, 5000), (2, 1001)])
def test_norms_are_those_of_torch(device, shape, generator) -> None:
    x, _, weight, bias = made(shape, torch.float32, device, generator)
    want = functional.layer_norm(x.double(), shape[-1:], weight.double(), bias.double(), 1e-5)
    torch.testing.assert_close(octofuse.layer_norm(x, weight, bias).double(), want, rtol=1e-5, atol=1e-5)
    want = functional.rms_norm(x.double(), shape[-1:], weight.double(), 1e-6)
    torch.testing.assert_close(octofuse.rms_norm(x, weight).double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_views_rows_and_missing_affine(device, generator) -> None:
    base = torch.randn(12, 140, generator=generator).half().to(device)
    x = base[::2, 3:103]
    y = octofuse.layer_norm(x)
    assert torch.equal(y, octofuse.layer_norm(x.contiguous()))
    for row in range(6):
        assert torch.equal(octofuse.layer_norm(x[row : row + 1]), y[row : row + 1]), "a row does not see its batch"
    assert octofuse.layer_norm(x[:0]).shape == (0, 100)
    q, scale, h = octofuse.add_rms_norm_quantize(x[:0], x[:0])
    assert (q.shape, scale.shape, h.shape) == ((0, 100), (0, 1), (0, 100))
    with pytest.raises(ValueError, match="x: expected a dense last dimension"):
        octofuse.rms_norm(base.t())


@pytest.mark.parametrize("device", DEVICES)
def test_nan_stays_in_its_row(device, generator) -> None:
    x = torch.randn(6, 256, generator=generator).to(device)
    clean = octofuse.layer_norm_quantize(x)
    x[2, 9] = float("nan")
    q, scale = octofuse.layer_norm_quantize(x)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(q[others], clean[0][others])
    assert torch.equal(scale[others], clean[1][others])
    assert torch.isnan(scale[2]).all()


BAD = {
    "weight has another length": (lambda x: octofuse.layer_norm(x, x[0, :7]),
        ValueError, r"weight: expected a contiguous tensor of shape \[16\], got \[7\]"),
    "weight is int8": (lambda x: octofuse.rms_norm(x, x[0].to(torch.int8)),
        TypeError, r"weight: expected dtype float32 or float16, got int8"),
    "bias unlike weight": (lambda x: octofuse.layer_norm(x, x[0], x[0].float()),
        TypeError, r"bias: expected dtype float16 like weight, got float32"),
    "residual has another shape": (lambda x: octofuse.add_layer_norm(x, x[:2]),
        ValueError, r"residual: expected shape \[4, 16\], got \[2, 16\]"),
    "residual has another dtype": (lambda x: octofuse.add_rms_norm(x, x.float()),
        TypeError, r"residual: expected dtype float16, got float32"),
    "eps is negative": (lambda x: octofuse.layer_norm(x, eps=-1.0),
        ValueError, r"eps: expected a finite number of at least 0"),
    "eps is text": (
        lambda x: octofuse.rms_norm(x, eps="small"),
        TypeError,
        r"eps: expected float, got str",
    ),
    "x is int8": (lambda x: octofuse.rms_norm(x.to(torch.int8)),
        TypeError, r"x: expected dtype float16 or bfloat16 or float32, got int8"),
    "x is too long": (lambda x: octofuse.rms_norm(x.new_zeros(1, 131072)),
        ValueError, r"x: expected at most 131071 columns"),
    "odd gates": (lambda x: octofuse.gated_activation(x[:, :15]),
        ValueError, r"x: expected an even last dimension"),
    "no activation": (lambda x: octofuse.activate(x, None),
        ValueError, r"activation: expected 'relu', 'gelu', 'gelu_tanh' or 'silu', got None"),
    "unknown activation": (lambda x: octofuse.activate_quantize(x, "swish"),
        ValueError, r"activation: expected .* got 'swish'"),
    "scale is 0": (lambda x: octofuse.layer_norm_quantize(x, scale=0.0),
        ValueError, r"scale: expected a finite number above 0"),
    "scale per row": (lambda x: octofuse.layer_norm_quantize(x, scale=x.float()[:, :1]),
        ValueError, r"scale: expected one element, got shape"),
    "x wants a gradient": (lambda x: octofuse.layer_norm(x.float().requires_grad_()),
        ValueError, r"x: expected a tensor that needs no gradient"),
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", BAD)
def test_refusals(device: str, case: str) -> None:
    call, error, message = BAD[case]
    with pytest.raises(error, match=message):
        call(torch.ones(4, 16, dtype=torch.float16, device=device))


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_whole(device, generator) -> None:
    x, residual, weight, bias = made((6, 768), torch.float16, device, generator)

    def block(x, residual, weight, bias):
        q, scale, h = octofuse.add_layer_norm_quantize(x, residual, weight, bias)
        g = octofuse.gated_activation_quantize(h, scale=0.05)[0]
        return octofuse.dequantize(q, scale), g, octofuse.layer_norm(h, weight, bias)

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(x, residual, weight, bias), block(x, residual, weight, bias), strict=True):
        assert torch.equal(got, want)


def check_captured_chain(run: Callable[[], list[torch.Tensor]]) -> None:
    """In a graph the same results, numbers or none."""
    want = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for _ in range(3):
        graph.replay()
        for a, b in zip(got, want, strict=True):
            assert torch.equal(torch.nan_to_num(a.float(), 7.0), torch.nan_to_num(b.float(), 7.0))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "cols"), [(1, 8), (1, 14336), (3, 4104), (32, 2048), (2, 32768), (1, 32776), (33, 64)]
)
def test_gates_of_a_captured_chain(rows: int, cols: int, dtype: torch.dtype) -> None:
    """A few rows share a cluster of blocks there, with the bits of one block; a row without a number stays alone."""
    g = torch.Generator("cuda").manual_seed(cols)
    x = (torch.randn(rows, 2 * cols, generator=g, device="cuda") * 3).to(dtype)
    x[-1, 5] = float("nan")
    scale = torch.tensor(0.03, device="cuda")

    def run() -> list[torch.Tensor]:
        y = octofuse.gated_activation(x, "silu", constants=True)
        q, scales = octofuse.gated_activation_quantize(x, "gelu_tanh", constants=True)
        fixed, _ = octofuse.gated_activation_quantize(x, "silu", scale=scale, constants=True)
        return [y, q, scales, fixed]

    check_captured_chain(run)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "cols"), [(1, 4104), (3, 6000), (32, 8192), (2, 9216), (1, 16384), (1, 16392), (33, 8192)]
)
def test_wide_norms_of_a_captured_chain(rows: int, cols: int, dtype: torch.dtype) -> None:
    """As above, one norm behind another."""
    g = torch.Generator("cuda").manual_seed(cols)
    x, residual = ((torch.randn(rows, cols, generator=g, device="cuda") * 3).to(dtype) for _ in range(2))
    weight = torch.rand(cols, generator=g, device="cuda") + 0.5
    bias = torch.randn(cols, generator=g, device="cuda")
    half_weight, half_bias = weight.to(dtype), bias.to(dtype)
    x[-1, 5] = float("nan")
    scale = torch.tensor(0.03, device="cuda")

    def norm(x: torch.Tensor, op: str, weight: torch.Tensor | None = None, **options: Any) -> list[torch.Tensor]:
        return _C.rows(rows_call(x, op, weight=weight, **options))

    def run() -> list[torch.Tensor]:
        first, h = norm(x, "rms_norm", half_weight, residual=residual)
        second = norm(first, "layer_norm", weight, bias=bias)[0]
        q, scales = norm(second, "rms_norm", weight, quantize=True)
        added = norm(second, "layer_norm", half_weight, bias=half_bias, residual=h, quantize=True)
        fixed = norm(added[2], "layer_norm", half_weight, scale=scale, quantize=True)
        narrow = norm(second, "rms_norm", q_dtype=torch.float8_e4m3fn, quantize=True)
        return [first, h, second, q, scales, *added, *fixed, *narrow]

    check_captured_chain(run)
