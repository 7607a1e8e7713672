"""Products and fused conversions in tiled orders: the bits of the row-major ops, and refusals by name."""

from __future__ import annotations

import pytest
import torch

import octofuse
from helpers import DEVICES, FLOATS, Operands, int8, operands
from octofuse import layouts
from octofuse.layouts import COL, COL4_4R2_8C, COL32, COL32_2R_4R4, LAYOUTS, ROW, from_layout, interleaved, to_layout

# Ragged in every direction, one tile, many tiles, and several rounds of the ring.
SHAPES = [(1, 1, 1), (3, 40, 31), (33, 100, 77), (64, 64, 64), (130, 17, 500), (257, 300, 1000), (2048, 1920, 192)]


def laid_out(p: Operands) -> tuple[layouts.LaidOut, layouts.LaidOut]:
    return to_layout(p.x, COL32), to_layout(p.w, COL32)


def whole(y: layouts.LaidOut) -> torch.Tensor:
    """The matrix, after checking that the padding is zero."""
    padded = COL32.padded(y.rows, y.cols) if y.layout == COL32 else (y.rows, y.cols)
    everything = from_layout(layouts.LaidOut(y.data, y.layout, *padded))
    assert not everything[:, y.cols :].any()
    return everything[:, : y.cols]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_linear_has_the_bits_of_rows(device: str, m: int, n: int, k: int) -> None:
    p = operands(m, n, k, device)
    x, w = laid_out(p)
    scales = (p.x_scale, p.w_scale, p.bias)
    for dtype in FLOATS:
        for activation in (None, "relu", "gelu", "silu"):
            given = {"activation": activation, "residual": p.residual, "out_dtype": dtype}
            want = octofuse.i8f16_linear(p.x, p.w, *scales, **given)
            for out_layout in (COL32, ROW):
                y = layouts.linear(x, w, *scales, **given, out_layout=out_layout)
                assert (y.layout, y.rows, y.cols, y.data.dtype) == (out_layout, m, n, dtype)
                assert torch.equal(whole(y), want), (dtype, activation, out_layout.name)
    want = octofuse.i8i8_linear(p.x, p.w, *scales, out_scale=0.05, activation="gelu_tanh")
    y = layouts.linear(x, w, *scales, out_scale=0.05, activation="gelu_tanh")
    assert torch.equal(whole(y), want)
    assert torch.equal(whole(layouts.linear(x, w, 0.5, 0.01)), octofuse.i8f16_linear(p.x, p.w, 0.5, 0.01))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_matmul_has_the_bits_of_rows(device: str, m: int, n: int, k: int) -> None:
    p = operands(m, n, k, device)
    x, w = laid_out(p)
    want = octofuse.i8i32_matmul(p.x, p.w)
    assert torch.equal(whole(layouts.matmul(x, w)), want)
    assert torch.equal(whole(layouts.matmul(x, w, out_layout=ROW, engine="cutlass")), want)
    small = to_layout(p.w, interleaved(32))
    got = layouts.matmul(x, small, alpha=0.003)
    assert torch.equal(whole(got), octofuse.i8i8_matmul(p.x, p.w, 0.003))
    assert int(got.data.min()) >= -128


@pytest.mark.parametrize("device", DEVICES)
def test_four_linears_stay_in_col32(device: str) -> None:
    p = operands(70, 96, 200, device)
    weights = [
        operands(70, n, k, device, seed=i) for i, (n, k) in enumerate(((96, 200), (330, 96), (50, 330), (64, 50)))
    ]
    x, rows = to_layout(p.x, COL32), p.x
    for q in weights:
        arguments = (0.01, q.w_scale, q.bias)
        x = layouts.linear(x, to_layout(q.w, COL32), *arguments, activation="gelu", out_scale=0.02)
        rows = octofuse.i8i8_linear(rows, q.w, *arguments, activation="gelu", out_scale=0.02)
        assert torch.equal(from_layout(x), rows)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", [COL32, interleaved(32), COL4_4R2_8C, ROW, COL], ids=lambda layout: layout.name)
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (5, 100), (33, 768), (64, 33), (3, 5000), (2, 20000)])
def test_quantise_and_convert(device: str, layout, rows: int, cols: int, generator) -> None:
    for dtype in FLOATS:
        x = torch.randn(rows, cols, generator=generator).to(dtype).to(device)
        x[0, 0] = float("nan")
        q, scales = layouts.quantize(x, layout)
        want, want_scales = octofuse.quantize_per_token(x)
        assert torch.equal(q.data, to_layout(want, layout).data), "padding included"
        assert torch.equal(scales, want_scales) or bool(want_scales.isnan().any())
        fixed, given = layouts.quantize(x, layout, scale=0.03)
        assert given == 0.03
        assert torch.equal(fixed.data, to_layout(octofuse.quantize_per_tensor(x, 0.03), layout).data)
        back = layouts.dequantize(q, scales, out_dtype=dtype)
        assert torch.equal(back.nan_to_num(7), octofuse.dequantize(want, want_scales, out_dtype=dtype).nan_to_num(7))
    acc = to_layout(torch.randint(-(2**30), 2**30, (rows, cols), generator=generator).int().to(device), layout)
    scale = torch.rand(rows, 1, generator=generator).to(device) * 1e-8
    assert torch.equal(layouts.dequantize(acc, scale), octofuse.dequantize(from_layout(acc), scale))


@pytest.mark.gpu
def test_conversions_of_strided_and_misaligned_matrices(generator) -> None:
    big = int8((304, 700), generator).cuda()
    for view in (big, big[:, 1:], big[3:, :600], big[::2], big.t(), big[:, 5:130], big[:1, :1], big[:, 4:129]):
        for layout in (*LAYOUTS, interleaved(2), interleaved(4), interleaved(8), interleaved(16), interleaved(64)):
            want = to_layout(view.cpu(), layout)
            got = to_layout(view, layout)
            assert torch.equal(got.data.cpu(), want.data), layout.name
            assert torch.equal(from_layout(got), view)
            assert torch.equal(from_layout(got, engine="octofuse"), view)


def converted_by_cublaslt(convert, layout):
    """convert(), or None where this chip's library declines, with its reason."""
    try:
        return convert()
    except ValueError as error:
        assert str(error).startswith(f"engine: expected one that can convert to {layout.name}")
        return None


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [COL, COL32, COL4_4R2_8C, COL32_2R_4R4], ids=lambda layout: layout.name)
def test_cublaslt_converts_alike(layout, generator) -> None:
    """A second, independent implementation, in the directions that the chip's library knows."""
    for rows, cols in ((32, 32), (64, 96), (33, 100), (257, 130), (1024, 768)):
        matrix = int8((rows, cols), generator).cuda()
        ours = to_layout(matrix, layout)
        theirs = converted_by_cublaslt(lambda m=matrix: to_layout(m, layout, engine="cublaslt"), layout)
        if theirs is not None:
            assert torch.equal(from_layout(theirs), matrix), "what they wrote, we read"
            offsets = layout.offsets(rows, cols).to(matrix.device)
            assert torch.equal(theirs.data[offsets], ours.data[offsets])
        back = converted_by_cublaslt(lambda o=ours: from_layout(o, engine="cublaslt"), layout)
        assert back is None or torch.equal(back, matrix), "what we wrote, they read"
        if layout in (COL, COL32):
            assert theirs is not None
            assert back is not None


@pytest.mark.gpu
@pytest.mark.parametrize("int8_output", [False, True])
def test_cublaslt_products_in_every_order_that_it_takes(int8_output: bool) -> None:
    m, n, k = 96, 160, 256
    p = operands(m, n, k, "cuda")
    alpha = 0.002 if int8_output else None
    want = octofuse.i8i8_matmul(p.x, p.w, 0.002) if int8_output else octofuse.i8i32_matmul(p.x, p.w)
    found = layouts.support(m, n, k, int8_output=int8_output)
    assert found["ROW / ROW / ROW"] > 0
    for names, algorithms in found.items():
        x_layout, w_layout, out_layout = map(layouts.layout_named, names.split(" / "))
        x, w = to_layout(p.x, x_layout), to_layout(p.w, w_layout)
        for algorithm in range(max(1, algorithms)):
            arguments = {"alpha": alpha, "out_layout": out_layout, "engine": "cublaslt", "algorithm": algorithm}
            if algorithms > 0:
                assert torch.equal(from_layout(layouts.matmul(x, w, **arguments)), want), (names, algorithm)
                continue
            with pytest.raises(
                ValueError, match=r"engine: expected one that multiplies .* COL32 operands with engine="
            ):
                layouts.matmul(x, w, **arguments)
    with pytest.raises(ValueError, match="algorithm: expected 0 to"):
        layouts.matmul(to_layout(p.x, ROW), to_layout(p.w, ROW), engine="cublaslt", algorithm=1000)


@pytest.mark.gpu
def test_captured_and_compiled(generator) -> None:
    p = operands(130, 100, 77, "cuda")
    half = torch.randn(130, 77, generator=generator).half().cuda()
    w = to_layout(p.w, COL32)

    def step(x: torch.Tensor) -> torch.Tensor:
        q, scales = layouts.quantize(x)
        y = layouts.linear(q, w, scales, p.w_scale, p.bias, activation="gelu", out_scale=0.05)
        return layouts.dequantize(y, 0.05)

    want = step(half)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [step(half) for _ in range(12)]
    for _ in range(3):
        for one in got:
            one.fill_(7)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(one, want) for one in got)
    assert torch.equal(torch.compile(step, fullgraph=True)(half), want)


@pytest.mark.parametrize("device", DEVICES)
def test_a_layout_is_refused_by_its_name(device: str) -> None:
    p = operands(8, 16, 32, device)
    x, w = laid_out(p)
    scales = (p.x_scale, p.w_scale)
    ampere = to_layout(p.w, COL32_2R_4R4)
    with pytest.raises(ValueError, match="w: expected layout COL32, got COL32_2R_4R4 \\(to_layout converts"):
        layouts.linear(x, ampere, *scales)
    with pytest.raises(ValueError, match="x: expected layout COL32, got ROW"):
        layouts.linear(to_layout(p.x, ROW), w, *scales)
    with pytest.raises(ValueError, match="out_layout: expected layout COL32, got COL"):
        layouts.linear(x, w, *scales, out_layout=COL)
    with pytest.raises(ValueError, match="engine: expected one that can multiply COL32 x COL32_2R_4R4 -> COL32"):
        layouts.matmul(x, ampere, engine="cutlass")
    with pytest.raises(TypeError, match="alpha: expected float, got int"):
        layouts.matmul(x, w, alpha=1)
    with pytest.raises(ValueError, match=r"alpha: expected a finite number above 0, got 0\.0"):
        layouts.matmul(x, w, alpha=0.0)
    with pytest.raises(ValueError, match="engine: expected 'auto', 'cutlass' or 'cublaslt', got 'cuda'"):
        layouts.matmul(x, w, engine="cuda")
    with pytest.raises(ValueError, match="engine: expected 'auto', 'octofuse' or 'cublaslt', got 'x'"):
        to_layout(p.x, COL32, engine="x")
    with pytest.raises(TypeError, match=r"x: expected octofuse\.layouts\.LaidOut, got Tensor"):
        layouts.linear(p.x, w, *scales)
    with pytest.raises(TypeError, match=r"w: expected dtype int8, got torch.float16"):
        layouts.matmul(x, to_layout(p.w.half(), COL32))
    with pytest.raises(ValueError, match=r"w: expected \[N, 32\] \(x has K = 32\), got \[16, 31\]"):
        layouts.matmul(x, to_layout(p.w[:, :31], COL32))
    with pytest.raises(ValueError, match="out_dtype: expected torch dtype float16 or bfloat16 or float32"):
        layouts.linear(x, w, *scales, out_dtype=torch.int32)
    with pytest.raises(ValueError, match="x_scale"):
        layouts.linear(x, w, torch.ones(3, device=device), p.w_scale)
    with pytest.raises(ValueError, match=r"bias: expected shape \[16\]"):
        layouts.linear(x, w, *scales, torch.ones(3, device=device))
    with pytest.raises(ValueError, match=r"x: expected \[rows, cols\]"):
        layouts.quantize(torch.zeros(2, 3, 4, device=device))


def test_without_a_gpu_the_engines_say_so(generator) -> None:
    matrix = int8((4, 8), generator)
    with pytest.raises(ValueError, match="engine: expected 'auto' for a tensor on the CPU, got 'cublaslt'"):
        to_layout(matrix, COL32, engine="cublaslt")
    with pytest.raises(ValueError, match="k: expected at least 1, got 0"):
        layouts.support(32, 32, 0)
    with pytest.raises(ValueError, match="device: expected a CUDA device, got cpu"):
        layouts.support(32, 32, 32, device="cpu")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="support: needs a CUDA device"):
            layouts.support(32, 32, 32)
