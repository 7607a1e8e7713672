"""octofuse.linear on float8: sums within twice torch's error, and the same bits for every M."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

import octofuse
from helpers import DEVICES, FLOATS
from octofuse import _C, reference

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = [(1, 5, 3), (7, 130, 300), (33, 64, 1024), (16, 200, 640), (130, 256, 128), (65, 384, 2064)]
GPU_SHAPES = [*SHAPES, (300, 4096, 4096), (257, 1000, 4096), (5, 6144, 4096)]


def bits(t: Tensor) -> Tensor:
    return t.cpu().view(torch.uint8)


def made(m: int, n: int, k: int, device: str, dtype: torch.dtype = E4M3) -> tuple[Tensor, ...]:
    """x, w, x_scale [M, 1], w_scale [N], bias."""
    g = torch.Generator().manual_seed(m + 7 * n + 31 * k)
    x, w, bias = torch.randn(m, k, generator=g), torch.randn(n, k, generator=g), torch.randn(n, generator=g)
    q, s = octofuse.quantize_per_token(x.to(device), dtype)
    qw, sw = octofuse.quantize_per_token(w.to(device), E4M3)
    return q, qw, s, sw.view(-1), bias.to(device)


def block_scales(n: int, k: int, device: str) -> Tensor:
    g = torch.Generator().manual_seed(n + k)
    return (torch.rand(-(-n // 128), -(-k // 128), generator=g) + 0.5).to(device)


def spread(scales: Tensor, n: int, k: int, rows: int) -> Tensor:
    return reference.expanded(scales.double(), n, k, rows)


def exact(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor) -> Tensor:
    return (x.double() @ w.double().t()) * w_scale.double() * x_scale.double()


def allowed(x: Tensor, w: Tensor, fast: bool) -> float:
    """Twice the error of torch's fp8 kernel, on a GPU; else of the sums of 128 products in fp32."""
    sums = x.double().abs() @ w.double().abs().t()
    if not x.is_cuda:
        return float(sums.max()) * 2.0**-20
    return float(sums.max()) * 2.0 ** (-9 if fast else -12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_formula(dtype: torch.dtype, fast: bool, device: str) -> None:
    for m, n, k in GPU_SHAPES if device == "cuda" else SHAPES:
        x, w, x_scale, w_scale, bias = made(m, n, k, device, dtype)
        residual = torch.randn(m, n, device=device)
        more: dict[str, Any] = {"fast_accumulate": fast}
        sums = octofuse.linear(x, w, 1.0, 1.0, out_dtype=torch.float32, **more)
        assert (sums.double() - x.double() @ w.double().t()).abs().max() <= allowed(x, w, fast)
        for activation, function in ((None, lambda t: t), ("relu", torch.relu), ("gelu", gelu), ("silu", silu)):
            y = octofuse.linear(
                x, w, x_scale, w_scale, bias, activation=activation, residual=residual, out_dtype=torch.float32, **more
            )
            # From the same sums, so that only the epilogue is looked at.
            t = function((sums * w_scale * x_scale + bias).double()) + residual.double()
            torch.testing.assert_close(y.double(), t, rtol=1e-5, atol=1e-5)
            for out_dtype, tolerance in ((torch.float16, 2e-3), (torch.bfloat16, 1e-2)):
                got = octofuse.linear(
                    x, w, x_scale, w_scale, bias, activation=activation, residual=residual, out_dtype=out_dtype, **more
                )
                torch.testing.assert_close(got.float(), y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fast", [False, True])
def test_outputs_in_8_bits(fast: bool, device: str) -> None:
    for m, n, k in SHAPES:
        x, w, x_scale, w_scale, bias = made(m, n, k, device)
        more: dict[str, Any] = {"fast_accumulate": fast}
        y = octofuse.linear(x, w, x_scale, w_scale, bias, out_dtype=torch.float32, **more)
        for dtype in (E4M3, torch.int8):
            got = octofuse.linear(x, w, x_scale, w_scale, bias, out_dtype=dtype, out_scale=0.25, **more)
            assert torch.equal(bits(got), bits(octofuse.quantize_per_tensor(y, 0.25, dtype)))


@pytest.mark.parametrize("device", DEVICES)
def test_scales_of_blocks(device: str) -> None:
    for m, n, k in GPU_SHAPES if device == "cuda" else SHAPES:
        if n <= 128 and k <= 128:
            continue  # one scale for all
        g = torch.Generator().manual_seed(m)
        x, x_scale = octofuse.quantize_per_block(torch.randn(m, k, generator=g).to(device))
        _, w, *_ = made(m, n, k, device)
        w_scale = block_scales(n, k, device)
        y = octofuse.linear(x, w, x_scale, w_scale, out_dtype=torch.float32)
        wide = (x.double() * spread(x_scale, m, k, 1), w.double() * spread(w_scale, n, k, 128))
        assert (y.double() - wide[0] @ wide[1].t()).abs().max() <= allowed(*wide, False)
        # Any strides.
        padded = torch.zeros(x_scale.shape[0], x_scale.shape[1] + 3, device=device)
        padded[:, : x_scale.shape[1]] = x_scale
        again = octofuse.linear(
            x, w, padded[:, : x_scale.shape[1]], w_scale.t().contiguous().t(), out_dtype=torch.float32
        )
        assert torch.equal(again, y)


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_depends_on_nothing_else(device: str) -> None:
    """Not on M, the other rows, nor, of this library's kernels, on the kernel."""
    for m, n, k in [(300, 4096, 4096), (300, 1000, 1040), (140, 384, 300)] if device == "cuda" else SHAPES[1:4]:
        for dtype, fast, engine in ((E4M3, False, "float8"), (E4M3, True, "float8_fast"), (E5M2, False, "e5m2")):
            x, w, x_scale, w_scale, bias = made(m, n, k, device, dtype)
            names = [name for name in octofuse.engines(device) if name.startswith(f"wgmma_{engine}/")]
            whole = octofuse.linear(x, w, x_scale, w_scale, bias, fast_accumulate=fast)
            for name in ["auto", *names]:
                for rows in (slice(0, m), slice(m - 1, m), slice(3, 20), slice(0, min(m, 129))):
                    part = octofuse.linear(x[rows], w, x_scale[rows], w_scale, bias, fast_accumulate=fast, engine=name)
                    assert torch.equal(part, whole[rows]), (name, rows, n, k)
        if n > 128 or k > 128:
            x, x_scale = octofuse.quantize_per_block(torch.randn(m, k, device=device))
            blocks = block_scales(n, k, device)
            whole = octofuse.linear(x, w, x_scale, blocks)
            for name in [e for e in octofuse.engines(device) if e.startswith("wgmma_float8/")] or ["auto"]:
                for rows in (slice(0, m), slice(m - 1, m), slice(3, 20)):
                    assert torch.equal(octofuse.linear(x[rows], w, x_scale[rows], blocks, engine=name), whole[rows])


@pytest.mark.gpu
def test_cublaslt_by_name() -> None:
    x, w, x_scale, w_scale, bias = made(64, 256, 512, "cuda")
    for fast in (False, True):
        more: dict[str, Any] = {"out_dtype": torch.float32, "activation": "silu", "fast_accumulate": fast}
        y = octofuse.linear(x, w, x_scale, w_scale, bias, engine="cublaslt", **more)
        ours = octofuse.linear(x, w, x_scale, w_scale, bias, **more)
        assert (y - ours).abs().max() <= allowed(x, w, fast)
    q, s = octofuse.quantize_per_block(torch.randn(3, 512, device="cuda"))
    with pytest.raises(ValueError, match="it takes no scales of blocks"):
        octofuse.linear(q, w, s, block_scales(256, 512, "cuda"), engine="cublaslt")


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True])
def test_no_further_off_than_torch(fast: bool) -> None:
    for m, n, k in ((128, 256, 512), (64, 1024, 8192), (512, 2048, 4096)):
        x, w, x_scale, w_scale, _ = made(m, n, k, "cuda")
        true = exact(x, w, x_scale, w_scale)
        theirs = torch._scaled_mm(x, w.t(), x_scale, w_scale.view(1, -1), out_dtype=torch.bfloat16, use_fast_accum=fast)
        ours = octofuse.linear(x, w, x_scale, w_scale, out_dtype=torch.bfloat16, fast_accumulate=fast)
        error, limit = ((t.double() - true).square().mean().sqrt() for t in (ours, theirs))
        assert error <= 2 * limit


@pytest.mark.parametrize("device", DEVICES)
def test_quantized_linear_is_its_parts(device: str) -> None:
    g = torch.Generator().manual_seed(5)
    for m, k in ((1, 256), (7, 1000)):
        x = torch.randn(m, k, generator=g).half().to(device)
        weight = torch.randn(k, generator=g).half().to(device)
        _, w, _, w_scale, bias = made(m, 384, k, device)
        normed = octofuse.rms_norm(x, weight, 1e-5)
        options: dict[str, Any] = {"norm": "rms_norm", "norm_weight": weight}
        q, s = octofuse.quantize_per_token(normed, E4M3)
        assert torch.equal(
            octofuse.quantized_linear(x, w, w_scale, bias, **options), octofuse.linear(q, w, s, w_scale, bias)
        )
        q, s = octofuse.quantize_per_block(normed)
        blocks = block_scales(384, k, device)
        assert torch.equal(
            octofuse.quantized_linear(x, w, blocks, bias, **options), octofuse.linear(q, w, s, blocks, bias)
        )
        q = octofuse.quantize_per_tensor(normed, 0.02, E4M3)
        static = octofuse.quantized_linear(x, w, w_scale, bias, x_scale=0.02, **options)
        assert torch.equal(static, octofuse.linear(q, w, 0.02, w_scale, bias))
        assert torch.equal(octofuse.quantized_linear(q, w, w_scale, bias, x_scale=0.02), static)


@pytest.mark.parametrize("device", DEVICES)
def test_the_output_may_be_the_residual(device: str) -> None:
    x, w, x_scale, w_scale, bias = made(5, 200, 256, device)
    for dtype in FLOATS:
        for activation in (None, "silu"):
            residual = torch.randn(5, 200, device=device).to(dtype)
            more: dict[str, Any] = {"activation": activation, "out_dtype": dtype}
            expected = octofuse.linear(x, w, x_scale, w_scale, bias, residual=residual, **more)
            out = residual.clone()
            assert octofuse.linear(x, w, x_scale, w_scale, bias, residual=out, out=out, **more) is out
            assert torch.equal(out, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_int8_by_the_same_name(device: str) -> None:
    x = torch.randint(-128, 128, (5, 40), dtype=torch.int8, device=device)
    w = torch.randint(-128, 128, (12, 40), dtype=torch.int8, device=device)
    assert torch.equal(octofuse.linear(x, w, 0.5, 0.25), octofuse.i8f16_linear(x, w, 0.5, 0.25))
    codes = octofuse.linear(x, w, 0.5, 0.25, out_dtype=torch.int8, out_scale=3.0)
    assert torch.equal(codes, octofuse.i8i8_linear(x, w, 0.5, 0.25, out_scale=3.0))


@pytest.mark.parametrize("device", DEVICES)
def test_nan_and_infinity_stay_in_their_row(device: str) -> None:
    x = torch.randn(4, 256, device=device)
    x[1, 5], x[2, 7] = float("nan"), float("inf")
    w = octofuse.quantize_per_tensor(torch.randn(130, 256, device=device), 0.01, E4M3)
    q, s = octofuse.quantize_per_token(x, E4M3)
    y = octofuse.linear(q, w, s, 0.01)
    assert y[[0, 3]].isfinite().all()
    assert not y[[1, 2]].isfinite().any()


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_and_empty(device: str) -> None:
    _, w, _, w_scale, _ = made(4, 256, 256, device)
    x = torch.randn(4, 256, device=device).half()

    def call(t: Tensor) -> tuple[Tensor, ...]:
        q, s = octofuse.quantize_per_block(t)
        blocks = torch.ones(2, 2, device=device)
        return octofuse.linear(q, w, s, blocks), octofuse.quantized_linear(t, w, w_scale), q

    eager = call(x)
    for a, b in zip(torch.compile(call, fullgraph=True, backend="eager")(x), eager, strict=True):
        assert torch.equal(bits(a) if a.element_size() == 1 else a, bits(b) if b.element_size() == 1 else b)
    assert octofuse.linear(eager[2][:0], w, 1.0, w_scale).shape == (0, 256)


REFUSED = [
    ({"w": "int8"}, TypeError, "w: expected dtype float8_e4m3fn beside x in float8, got int8"),
    ({"x": "int8"}, TypeError, "w: expected dtype int8 beside x in int8, got float8_e4m3fn"),
    ({"w": "e5m2"}, TypeError, "w: expected a tensor in int8 or float8_e4m3fn"),
    ({"x": "half"}, TypeError, "x: expected dtype"),
    ({"x_scale": 0.0}, ValueError, "x_scale: expected a finite number above 0"),
    ({"w_scale": "blocks"}, ValueError, r"x_scale: expected shape \[3, 2\], a scale of every block"),
    ({"w_scale": "wrong"}, ValueError, r"w_scale: expected shape \[2, 2\], a scale of every block"),
    (
        {"fast_accumulate": True, "x_scale": "blocks", "w_scale": "blocks"},
        ValueError,
        "fast_accumulate: expected False",
    ),
    ({"x_zero_point": 3, "w_sum": "sums"}, ValueError, "x_zero_point: expected None beside float8"),
    ({"w_sum": "sums"}, ValueError, "w_sum: expected None beside float8"),
    ({"out_dtype": torch.float8_e5m2}, ValueError, "out_dtype: expected one of"),
    ({"out_dtype": E4M3}, ValueError, "out_scale: expected one beside out_dtype=torch.float8_e4m3fn, got None"),
    ({"out_scale": 1.0}, ValueError, "out_scale: expected None beside out_dtype=torch.float16"),
    ({"engine": "cublas"}, ValueError, "engine: expected"),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("changed", "error", "message"), REFUSED)
def test_refuses(changed: dict[str, Any], error: type[Exception], message: str, device: str) -> None:
    x, w, *_ = made(3, 200, 256, device)
    values = {
        "int8": torch.zeros(3 if "x" in changed else 200, 256, dtype=torch.int8, device=device),
        "e5m2": w.float().to(E5M2),
        "half": x.half(),
        "wrong": torch.ones(3, 2, device=device),
        "sums": torch.zeros(200, dtype=torch.int32, device=device),
    }
    given: dict[str, Any] = {"x": x, "w": w, "x_scale": 1.0, "w_scale": 1.0}
    for name, value in changed.items():
        if value == "blocks":
            value = torch.ones(3 if name == "x_scale" else 2, 2, device=device)
        elif isinstance(value, str) and value in values:
            value = values[value]
        given[name] = value
    if "w_scale" in changed and "x_scale" not in changed:
        given["x_scale"] = torch.ones(3, 1, device=device)
    with pytest.raises(error, match=message):
        octofuse.linear(**given)


def test_engines_of_int8_are_refused_on_a_cpu() -> None:
    x, w, x_scale, w_scale, _ = made(3, 16, 64, "cpu")
    for engine in ("reference", "onednn"):
        with pytest.raises(ValueError, match=f"engine: expected 'auto' or 'cpu' for float8 on a CPU, got '{engine}'"):
            octofuse.linear(x, w, x_scale, w_scale, engine=engine)


@pytest.mark.parametrize("device", DEVICES)
def test_long_tensors_by_one_scale(device: str) -> None:
    x = torch.randn(1, 40960, device=device)
    assert torch.equal(bits(octofuse.quantize_per_tensor(x, 0.1, E4M3)), bits(reference.quantize(x, 0.1, E4M3)))


@pytest.mark.parametrize("device", DEVICES)
def test_the_type_of_an_output_with_a_scale(device: str) -> None:
    x, w, _, w_scale, _ = made(3, 16, 64, device)
    call = {"x_scale": 1.0, "out_scale": 0.5}
    assert octofuse.quantized_linear(x, w, w_scale, **call).dtype == E4M3
    assert octofuse.quantized_linear(x, w, w_scale, out_dtype=torch.int8, **call).dtype == torch.int8
    int8 = torch.ones(16, 64, dtype=torch.int8, device=device)
    with pytest.raises(ValueError, match="out_dtype: expected one of"):
        octofuse.quantized_linear(x.float(), int8, w_scale, out_scale=0.5, out_dtype=E4M3)


@pytest.mark.parametrize("device", DEVICES)
def test_quantisation_refuses(device: str) -> None:
    x = torch.randn(2, 256, device=device)
    with pytest.raises(ValueError, match="block: expected False for int8"):
        octofuse.rms_norm_quantize(x, dtype=torch.int8, block=True)
    with pytest.raises(ValueError, match="block: expected False beside a scale"):
        octofuse.rms_norm_quantize(x, dtype=E4M3, block=True, scale=1.0)
    with pytest.raises(ValueError, match="dtype: expected torch dtype int8"):
        octofuse.quantize_per_token(x, torch.float16)


def test_selection_knows_the_operands() -> None:
    def chosen(m: int, arithmetic: str, **more: Any) -> str:
        name: str = _C.select(
            m, 4096, 4096, "float16", False, False, "auto", 90, 132, True, arithmetic=arithmetic, **more
        )["chosen"]
        return name

    if "90a" not in _C.build_info()["architectures"]:
        pytest.skip("this build holds no sm_90a kernels: selection refuses them")
    assert chosen(16, "float8").startswith("wgmma_float8/")
    assert chosen(4096, "float8_fast").startswith("wgmma_float8_fast/")
    assert chosen(16, "e5m2").startswith("wgmma_e5m2/")
    assert chosen(16, "int8").split("/")[0] in ("skinny", "wgmma")


@pytest.mark.gpu
def test_explanations() -> None:
    x, w, *_ = made(16, 256, 512, "cuda")
    found = octofuse.explain(x, w)
    assert found.chosen.startswith("wgmma_float8/")
    assert "it multiplies int8" in dict(found.declined).values()
    assert octofuse.explain(x, w, fast_accumulate=True).chosen.startswith("wgmma_float8_fast/")


def test_explanation_on_a_cpu() -> None:
    x, w, *_ = made(2, 16, 32, "cpu")
    assert octofuse.explain(x, w).chosen.startswith("cpu/")
    with pytest.raises(TypeError, match="w: expected float8_e4m3fn beside x"):
        octofuse.explain(x, torch.zeros(16, 32, dtype=torch.int8))
