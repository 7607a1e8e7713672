"""LLM.int8(): the published arithmetic, whatever the number of outliers, and the same through layers and files."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

import octofuse
from helpers import DEVICES
from octofuse import _C
from octofuse.nn import LLMInt8Linear, quantised_layer
from octofuse.quant import Scheme, scheme_named


def case(
    m: int, n: int, k: int, columns: int, device: str, dtype: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor, Tensor]:
    """x with so many columns that hold outliers, some of them in one row alone; w and its scales."""
    g = torch.Generator().manual_seed(m + 3 * n + 7 * k + columns)
    x = torch.randn(m, k, generator=g).clamp(-5, 5)
    chosen = torch.randperm(k, generator=g)[:columns]
    x[0, chosen] = 7.0 + torch.rand(len(chosen), generator=g) * 60
    x[:, chosen[::2]] *= 9.0
    w = torch.randint(-127, 128, (n, k), generator=g, dtype=torch.int8)
    scale = torch.rand(n, generator=g) / 1000 + 1e-4
    return x.to(dtype).to(device), w.to(device), scale.to(device)


def published(x: Tensor, w: Tensor, scale: Tensor, threshold: float = 6.0) -> tuple[Tensor, Tensor, Tensor]:
    """int8 codes and scales of what is no outlier, and the whole product in fp64."""
    outliers = x.abs() >= threshold
    q, scales = octofuse.quantize_per_token(x.masked_fill(outliers, 0))
    columns = outliers.any(0)
    q = q * ~columns
    exact = (q.double() @ w.double().t()) * scales.double() + (x.double() * columns) @ w.double().t()
    return q, scales, exact * scale.double()


SHAPES = (
    (1, 64, 128),
    (2, 70, 96),
    (4, 100, 1000),
    (19, 70, 4104),
    (32, 65, 40000),
    (5, 100, 264),
    (33, 130, 4104),
    (130, 200, 2056),
    (200, 65, 20000),
    (60, 40, 40000),
    (70, 50, 1003),
    (300, 50, 14336),
    # On compute capability 9.0: blocks of one tile of 128 tokens, and blocks of several tiles with a short K.
    (384, 6144, 256),
    (512, 4096, 256),
    (900, 4096, 256),
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_published_arithmetic(device: str, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    for columns in (0, 1, 7, 40, k // 3):
        x, w, scale = case(m, n, k, columns, device, dtype)
        q, scales, exact = published(x, w, scale)
        size = (x.double().abs() @ w.double().abs().t() * scale.double()).max()
        tolerance = 4 * torch.finfo(dtype).eps * exact.abs().max() + 2.0**-20 * size
        if (found := _C.outlier_product(x, w, scale, 6.0)) is not None:
            assert torch.equal(found[0], q)
            assert torch.equal(found[1], scales)
            in_int8 = q.double() @ w.double().t() * scales.double() * scale.double()
            assert (in_int8 + found[2].double() - exact).abs().max() <= tolerance, columns
        got = octofuse.llm_int8_linear(x, w, scale)
        assert got.dtype == dtype
        assert (got.double() - exact).abs().max() <= tolerance, columns
        if columns == 0:
            own = octofuse.i8f16_linear(*octofuse.quantize_per_token(x)[:1], w, scales, scale, out_dtype=dtype)
            assert torch.equal(got, own)


@pytest.mark.parametrize("device", DEVICES)
def test_views_epilogues_and_again(device: str) -> None:
    x, w, scale = case(9, 72, 200, 11, device)
    wide = torch.zeros(9, 232, device=device, dtype=x.dtype)
    for first in (0, 8, 3):
        view = wide[:, first : first + 200].copy_(x)
        assert torch.equal(octofuse.llm_int8_linear(view, w, scale), octofuse.llm_int8_linear(x, w, scale))
    bias, residual = torch.randn(72, device=device), torch.randn(9, 72, device=device).half()
    plain = octofuse.llm_int8_linear(x, w, scale, bias)
    exact = published(x, w, scale)[2] + bias.double()
    torch.testing.assert_close(plain.double(), exact, rtol=2e-3, atol=2e-3)
    got = octofuse.llm_int8_linear(x, w, scale, bias, residual=residual)
    torch.testing.assert_close(got.double(), exact + residual.double(), rtol=2e-3, atol=2e-3)
    got = octofuse.llm_int8_linear(x, w, scale, bias, activation="relu", residual=residual)
    torch.testing.assert_close(got.double(), exact.relu() + residual.double(), rtol=2e-3, atol=2e-3)
    many = torch.stack([octofuse.llm_int8_linear(x, w, scale, bias) for _ in range(5)])
    assert torch.equal(many, plain.expand(5, -1, -1))
    assert octofuse.llm_int8_linear(x[:0], w, scale).shape == (0, 72)
    assert octofuse.llm_int8_linear(x.view(3, 3, 200), w, scale).shape == (3, 3, 72)


def skip_other_devices() -> None:
    if torch.cuda.get_device_capability() != (9, 0) or "90a" not in _C.build_info()["architectures"]:
        pytest.skip("other devices' products of outliers are rounded before they are added")


def in_fixed_point(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """Up to 48 tokens: outliers as integers of at most 22 bits, sums exact, the formula in fp32 step by step."""
    outliers = x.abs() >= 6.0
    q, scales, _ = published(x, w, scale)
    if not outliers.any():
        return octofuse.i8f16_linear(q, w, scales, scale, out_dtype=x.dtype)
    exponent = torch.frexp(x.float().abs().amax(1, keepdim=True))[1] - 1.0
    numbers = (x.double() * outliers.any(0) * 2.0 ** (21 - exponent.double())).round()
    sums = [(t.double() @ w.double().t()).float() for t in (q, numbers)]
    t = sums[0] * scales + sums[1] * 2.0 ** (exponent - 21)
    return (t * scale).to(x.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 2, 5, 16, 48])
@pytest.mark.parametrize(("n", "k"), [(64, 128), (200, 1000), (1003, 2056), (4096, 4096), (96, 20000), (30000, 520)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_few_tokens_are_exact(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    skip_other_devices()
    for columns in (0, 1, 40, k // 3):
        x, w, scale = case(m, n, k, columns, "cuda", dtype)
        assert torch.equal(octofuse.llm_int8_linear(x, w, scale), in_fixed_point(x, w, scale)), columns
    x[0] *= 1e-4
    x[-1] *= 100.0
    assert torch.equal(octofuse.llm_int8_linear(x, w, scale), in_fixed_point(x, w, scale))


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(200, 512), (4096, 4096), (1003, 2056), (96, 14344)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_row_has_the_same_bits_in_every_kernel(n: int, k: int, dtype: torch.dtype) -> None:
    """One to 48 tokens, and more; alone and beside rows without outliers."""
    skip_other_devices()
    noise = torch.randn(2100, k).clamp(-5, 5).to(dtype).cuda()
    for columns in (0, 3, 40, 80, 300):
        x, w, scale = case(1, n, k, columns, "cuda", dtype)
        for same in ((1, 2, 3, 5, 16, 32, 33, 48), (49, 64, 100, 129, 300, 700, 2100)):
            want = None
            for m in same:
                got = octofuse.llm_int8_linear(x.expand(m, k).contiguous(), w, scale)
                want = got[:1] if want is None else want
                assert torch.equal(got, want.expand(m, n)), (columns, m)
                rows = noise[:m].clone()
                rows[m // 2] = x[0]
                got = octofuse.llm_int8_linear(rows, w, scale)
                assert torch.equal(got[m // 2], want[0]), (columns, m)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 3, 20, 90, 1000])
@pytest.mark.parametrize("n", [40, 256, 1003])
def test_epilogues_of_every_kernel(m: int, n: int) -> None:
    x, w, scale = case(m, n, 1024, 30, "cuda")
    bias, residual = torch.randn(n, device="cuda"), torch.randn(m, n, device="cuda").half()
    exact = published(x, w, scale)[2] + bias.double()
    for activation, function in (("relu", torch.relu), ("silu", torch.nn.functional.silu)):
        got = octofuse.llm_int8_linear(x, w, scale, bias, activation=activation, residual=residual)
        want = function(exact) + residual.double()
        torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=2.0**-20 * exact.abs().max().item() + 1e-3)


@pytest.mark.parametrize("m", [6, 60])
@pytest.mark.parametrize("device", DEVICES)
def test_numbers_that_are_none(m: int, device: str) -> None:
    """An infinity is an outlier; NaN spoils its row alone."""
    x, w, scale = case(m, 40, 64, 2, device)
    clean = octofuse.llm_int8_linear(x, w, scale)
    x[2, 5] = float("nan")
    got = octofuse.llm_int8_linear(x, w, scale)
    assert torch.isnan(got[2]).all()
    rest = [i for i in range(m) if i != 2]
    assert torch.equal(got[rest], clean[rest])
    x[2, 5] = float("inf")
    assert not torch.isfinite(octofuse.llm_int8_linear(x, w, scale)[2]).any()


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
def test_on_several_streams_at_once(captured: bool) -> None:
    """Blocks of one call wait for each other: they must not wait for SMs that another call's blocks hold."""
    calls = [case(m, 512, 4096, 20, "cuda") for m in (64, 300, 1000, 4000)]
    wanted = [octofuse.llm_int8_linear(*call) for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    graphs = []
    for stream, call in zip(streams, calls, strict=True):
        if not captured:
            break
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            got = octofuse.llm_int8_linear(*call)
        graphs.append((graph, got))
    torch.cuda.synchronize()
    for _ in range(50):
        results = []
        for i, (stream, call) in enumerate(zip(streams, calls, strict=True)):
            with torch.cuda.stream(stream):
                if captured:
                    graphs[i][0].replay()
                results.append(graphs[i][1] if captured else octofuse.llm_int8_linear(*call))
        torch.cuda.synchronize()
        for got, want in zip(results, wanted, strict=True):
            assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 256, 512), (1, 1003, 4104), (3, 256, 512), (40, 256, 512), (200, 256, 512)]
)
def test_in_a_graph(m: int, n: int, k: int) -> None:
    """Which columns hold outliers changes from replay to replay."""
    x, w, scale = case(m, n, k, 5, "cuda")
    graph = torch.cuda.CUDAGraph()
    octofuse.llm_int8_linear(x, w, scale)
    with torch.cuda.graph(graph):
        got = octofuse.llm_int8_linear(octofuse.activate(x, "relu"), w, scale, constant_weight=True)
    for columns in (0, 3, 300):
        x.copy_(case(m, n, k, columns, "cuda")[0])
        graph.replay()
        assert torch.equal(got, octofuse.llm_int8_linear(x.relu(), w, scale))


@pytest.mark.parametrize("device", DEVICES)
def test_compiles(device: str) -> None:
    x, w, scale = case(5, 48, 96, 3, device)
    compiled = torch.compile(lambda y: octofuse.llm_int8_linear(y, w, scale) * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), octofuse.llm_int8_linear(x, w, scale) * 2)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"threshold": 0.0}, ValueError, "threshold: expected more than 0, got 0"),
        ({"threshold": float("nan")}, ValueError, "threshold: expected more than 0, got"),
        ({"threshold": 1e-50}, ValueError, "threshold: expected at least 2"),
        ({"residual": 3.0}, TypeError, "residual: expected torch.Tensor, got float"),
        ({"residual": torch.ones(2, 3, dtype=torch.int32)}, TypeError, "residual: expected dtype .*, got .*int32"),
        ({"threshold": "6"}, TypeError, "threshold: expected a number, got str"),
        ({"w": torch.ones(3, 5, dtype=torch.int8)}, ValueError, r"w: expected a contiguous tensor of shape \[N, 4\]"),
        ({"w": torch.ones(3, 4)}, TypeError, "w: expected"),
        ({"x": torch.ones(2, 4, dtype=torch.int8)}, TypeError, "x: expected"),
        ({"w_scale": torch.ones(2)}, ValueError, "w_scale: expected"),
        ({"residual": torch.ones(1, 3)}, ValueError, r"residual: expected the output's shape \[2, 3\], got \[1, 3\]"),
        ({"activation": "tanh"}, ValueError, "activation"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"x": torch.ones(2, 4), "w": torch.ones(3, 4, dtype=torch.int8), "w_scale": torch.ones(3)} | change
    with pytest.raises(error, match=message):
        octofuse.llm_int8_linear(given.pop("x"), given.pop("w"), given.pop("w_scale"), **given)


@pytest.mark.parametrize("name", ["llm-int8", "llm-int8-t5.5", "llm-int8-t6.123456789", "llm-int8-t1e-05"])
def test_names_and_layers(name: str) -> None:
    scheme = scheme_named(name)
    assert isinstance(scheme, Scheme)
    assert scheme.name == name
    layer = torch.nn.Linear(96, 40)
    made = quantised_layer(layer, scheme)
    assert isinstance(made, LLMInt8Linear)
    made.engine = "cublaslt"
    with pytest.raises(ValueError, match="engine: expected 'auto' for llm-int8, got 'cublaslt'"):
        made(torch.ones(1, 96))
    made.engine = "auto"
    x = torch.randn(4, 96)
    x[1, 7] = 50.0
    with torch.no_grad():
        plain = quantised_layer(layer, scheme_named("w8a8-dynamic"))
        want = linear(x.double(), layer.weight.double(), layer.bias.double())
        errors = [(one(x).double() - want)[1].abs().max() for one in (made, plain)]
    assert errors[0] < errors[1] / 3  # the row with the outlier
    with pytest.raises(ValueError, match="outliers: expected None beside w8a8-static, got 6"):
        Scheme(activations="tensor", outliers=6.0)
    with pytest.raises(ValueError, match="outliers: expected None or a number above 0, got 0"):
        Scheme(outliers=0.0)


def test_autocast_changes_nothing() -> None:
    x, w, scale = case(4, 32, 64, 3, "cpu", torch.float32)
    x[0, 5] = 3000.0
    want = octofuse.llm_int8_linear(x, w, scale)
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype):
            assert torch.equal(octofuse.llm_int8_linear(x, w, scale), want)
