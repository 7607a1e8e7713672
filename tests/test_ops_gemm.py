"""Every engine against the formula and against every other engine, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch

import octofuse
from helpers import DEVICES, FLOATS, engines, int8, operands, served
from octofuse import reference
from octofuse.testing.shapes import EXTENTS, MAX_K, ROWS
from octofuse.testing.tolerance import assert_close

PAIRS = list(itertools.product(EXTENTS, EXTENTS))
SOME_ROWS = (1, 5, 17, 64, 129)


def all_engines(call, device: str) -> dict[str, torch.Tensor]:
    results = {name: served(call, name) for name in engines(device)}
    results = {name: result for name, result in results.items() if result is not None}
    assert results, "no engine served the call"
    results["auto"] = call("auto")
    return results


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("m", SOME_ROWS)
@pytest.mark.parametrize(("n", "k"), PAIRS)
def test_int32_is_exact_in_every_engine(device: str, m: int, n: int, k: int) -> None:
    p = operands(m, n, k, device)
    want = reference.accumulate(p.x, p.w)
    for name, got in all_engines(lambda e: octofuse.i8i32_matmul(p.x, p.w, engine=e), device).items():
        assert torch.equal(got, want), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("m", [2, 33])
@pytest.mark.parametrize(("n", "k"), PAIRS)
@pytest.mark.parametrize("out_dtype", FLOATS)
def test_linear_is_the_formula_in_every_engine(device: str, m: int, n: int, k: int, out_dtype: torch.dtype) -> None:
    p = operands(m, n, k, device)
    want = reference.linear(p.x, p.w, p.x_scale, p.w_scale, p.bias, residual=p.residual, out_dtype=out_dtype)
    results = all_engines(
        lambda e: octofuse.i8f16_linear(
            p.x, p.w, p.x_scale, p.w_scale, p.bias, residual=p.residual, out_dtype=out_dtype, engine=e
        ),
        device,
    )
    for name, got in results.items():
        assert torch.equal(got, want), name


EPILOGUES = list(
    itertools.product(reference.ACTIVATIONS, (False, True), (False, True), ("vector", "scalar", "number"), FLOATS)
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("activation", "with_bias", "with_residual", "scales", "out_dtype"), EPILOGUES)
def test_every_epilogue(device, activation, with_bias, with_residual, scales, out_dtype) -> None:
    p = operands(70, 264, 144, device)
    x_scale, w_scale = p.x_scale, p.w_scale
    if scales == "scalar":
        x_scale, w_scale = x_scale[0], w_scale[:1]
    elif scales == "number":
        x_scale, w_scale = 0.75, float(w_scale[0])
    bias = p.bias if with_bias else None
    residual = p.residual if with_residual else None
    want = reference.linear(
        p.x, p.w, x_scale, w_scale, bias, activation=activation, residual=residual, out_dtype=out_dtype
    )
    results = all_engines(
        lambda e: octofuse.i8f16_linear(
            p.x, p.w, x_scale, w_scale, bias, activation=activation, residual=residual, out_dtype=out_dtype, engine=e
        ),
        device,
    )
    first = next(iter(results.values()))
    for name, got in results.items():
        assert torch.equal(got, first), f"{name} differs from the first engine"
        assert_close(got, want, activation=activation, residual=residual)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (5, 16, 100), (64, 255, 48), (129, 1024, 768), (33, 3420, 7)])
def test_int8_output(device: str, activation, with_residual: bool, m: int, n: int, k: int) -> None:
    p = operands(m, n, k, device)
    residual = p.residual if with_residual else None
    out_scale = torch.tensor(0.031, device=device)
    arguments = (p.x, p.w, p.x_scale, p.w_scale, p.bias)
    want = reference.linear(*arguments, activation=activation, residual=residual, out_scale=out_scale)
    results = all_engines(
        lambda e: octofuse.i8i8_linear(
            *arguments, out_scale=out_scale, activation=activation, residual=residual, engine=e
        ),
        device,
    )
    first = next(iter(results.values()))
    for name, got in results.items():
        assert torch.equal(got, first), name
        assert_close(got, want, activation=activation)
    number = octofuse.i8i8_linear(*arguments, out_scale=float(out_scale), activation=activation, residual=residual)
    assert torch.equal(number, first)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 4, 16), (7, 100, 33), (129, 768, 768), (64, 3420, 255)])
@pytest.mark.parametrize("alpha", [1.0, 0.00037, 3e-6, 0.25])
def test_raw_requantisation(device: str, m: int, n: int, k: int, alpha: float) -> None:
    p = operands(m, n, k, device)
    acc = reference.accumulate(p.x, p.w)
    want = (acc.float() * torch.tensor(alpha)).round().clamp(-128, 127).to(torch.int8)
    for name, got in all_engines(lambda e: octofuse.i8i8_matmul(p.x, p.w, alpha, engine=e), device).items():
        assert torch.equal(got, want), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", [None, "gelu_tanh"])
@pytest.mark.parametrize(("n", "k"), [(768, 768), (100, 255), (1001, 496)])
def test_a_row_does_not_depend_on_m(device: str, activation, n: int, k: int) -> None:
    p = operands(max(ROWS), n, k, device)
    whole = octofuse.i8f16_linear(p.x, p.w, p.x_scale, p.w_scale, p.bias, activation=activation)
    for m in ROWS:
        part = octofuse.i8f16_linear(p.x[:m], p.w, p.x_scale[:m], p.w_scale, p.bias, activation=activation)
        assert torch.equal(part, whole[:m]), m


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("n", [1, 17, 256, 1001])
@pytest.mark.parametrize("out_dtype", FLOATS)
def test_every_row_count(device: str, m: int, n: int, out_dtype: torch.dtype) -> None:
    p = operands(m, n, 96, device)
    arguments = (p.x, p.w, p.x_scale, p.w_scale, p.bias)
    want = reference.linear(*arguments, out_dtype=out_dtype)
    for name, got in all_engines(
        lambda e: octofuse.i8f16_linear(*arguments, out_dtype=out_dtype, engine=e), device
    ).items():
        assert torch.equal(got, want), name


ZERO_POINTS = ("number", "scalar", "token", "column")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ZERO_POINTS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (5, 16, 100), (33, 255, 48), (129, 1024, 768), (17, 3420, 7)])
@pytest.mark.parametrize("out_dtype", [*FLOATS, torch.int8])
def test_asymmetric_activations(device: str, kind: str, m: int, n: int, k: int, out_dtype: torch.dtype) -> None:
    p = operands(m, n, k, device)
    zero = {
        "number": -37,
        "scalar": torch.tensor([101], dtype=torch.int32, device=device),
        "token": torch.arange(m, dtype=torch.int32, device=device) % 256 - 128,
        "column": (torch.arange(m, dtype=torch.int32, device=device) * 7 % 256 - 128).reshape(-1, 1),
    }[kind]
    sums = octofuse.weight_sums(p.w)
    assert torch.equal(sums, p.w.long().sum(1).int())
    arguments, w_scale = (p.x, p.w, p.x_scale), p.w_scale / 8  # a zero point far from zero makes large accumulators
    if out_dtype == torch.int8:
        want = reference.linear(*arguments, w_scale, p.bias, out_scale=0.031, x_zero_point=zero)
        results = all_engines(
            lambda e: octofuse.i8i8_linear(
                *arguments, w_scale, p.bias, out_scale=0.031, x_zero_point=zero, w_sum=sums, engine=e
            ),
            device,
        )
    else:
        want = reference.linear(*arguments, w_scale, p.bias, out_dtype=out_dtype, x_zero_point=zero)
        results = all_engines(
            lambda e: octofuse.i8f16_linear(
                *arguments, w_scale, p.bias, out_dtype=out_dtype, x_zero_point=zero, w_sum=sums, engine=e
            ),
            device,
        )
    for name, got in results.items():
        assert torch.equal(got, want), name


@pytest.mark.parametrize("device", DEVICES)
def test_a_zero_point_at_the_bound_of_k(device: str) -> None:
    k = 65793
    x = torch.full((2, k), 127, dtype=torch.int8, device=device)
    w = torch.full((24, k), -128, dtype=torch.int8, device=device)
    sums = octofuse.weight_sums(w)
    want = reference.linear(x, w, 1.0, 1.0, out_dtype=torch.float32, x_zero_point=-128)
    assert float(want[0, 0]) == float(torch.tensor(-255.0 * 128 * k))
    results = all_engines(
        lambda e: octofuse.i8f16_linear(
            x, w, 1.0, 1.0, out_dtype=torch.float32, x_zero_point=-128, w_sum=sums, engine=e
        ),
        device,
    )
    for name, got in results.items():
        assert torch.equal(got, want), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("m", range(1, 137))
@pytest.mark.parametrize(("n", "k"), [(264, 400), (72, 2064), (1000, 128)])
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32])
def test_every_small_m_is_the_formula(device: str, m: int, n: int, k: int, out_dtype: torch.dtype) -> None:
    """Every kernel's tile is crossed on the way: no M may fall beside one."""
    p = operands(m, n, k, device)
    arguments = (p.x, p.w, p.x_scale, p.w_scale, p.bias)
    want = reference.linear(*arguments, residual=p.residual, out_dtype=out_dtype)
    names = ("auto",) if device == "cpu" else engines(device)
    for name in names:
        got = served(
            lambda e: octofuse.i8f16_linear(*arguments, residual=p.residual, out_dtype=out_dtype, engine=e), name
        )
        assert got is None or torch.equal(got, want), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("left", "right"), [(-128, -128), (127, 127), (127, -128), (-128, 127)])
@pytest.mark.parametrize("k", [MAX_K, MAX_K - 15])
def test_extremes_at_the_bound_of_k(device: str, left: int, right: int, k: int) -> None:
    x = torch.full((3, k), left, dtype=torch.int8, device=device)
    w = torch.full((20, k), right, dtype=torch.int8, device=device)
    for name, got in all_engines(lambda e: octofuse.i8i32_matmul(x, w, engine=e), device).items():
        assert (got == left * right * k).all(), name


@pytest.mark.parametrize("device", DEVICES)
def test_accumulate_agrees_with_int64(device: str, generator: torch.Generator) -> None:
    x, w = int8((9, 257), generator), int8((11, 257), generator)
    want = (x.long()[:, None, :] * w.long()[None, :, :]).sum(-1)
    assert torch.equal(octofuse.i8i32_matmul(x.to(device), w.to(device)).cpu().long(), want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 32), (0, 5, 32), (3, 0, 32)])
def test_no_rows(device: str, shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape, dtype=torch.int8, device=device)
    w = torch.ones(24, 32, dtype=torch.int8, device=device)
    assert octofuse.i8f16_linear(x, w, 1.0, 1.0).shape == (*shape[:-1], 24)
    assert octofuse.i8i32_matmul(x, w).shape == (*shape[:-1], 24)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lead", [(), (6,), (2, 3), (2, 1, 3), (1, 2, 3, 2)])
def test_leading_dimensions(device: str, lead: tuple[int, ...], generator: torch.Generator) -> None:
    x = int8((*lead, 48), generator).to(device)
    w = int8((40, 48), generator).to(device)
    got = octofuse.i8i32_matmul(x, w)
    assert got.shape == (*lead, 40)
    assert torch.equal(got.reshape(-1, 40), reference.accumulate(x.reshape(-1, 48), w))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("offset", "step"), [(0, 1), (1, 1), (3, 2), (16, 1), (7, 3)])
def test_sliced_operands(device: str, offset: int, step: int, generator: torch.Generator) -> None:
    base_x, base_w = int8((40, 130), generator).to(device), int8((90, 150), generator).to(device)
    x, w = base_x[::step, offset : offset + 100], base_w[::step, 2 * offset : 2 * offset + 100]
    want = reference.accumulate(x, w)
    for name, got in all_engines(lambda e: octofuse.i8i32_matmul(x, w, engine=e), device).items():
        assert torch.equal(got, want), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("out_dtype", FLOATS)
@pytest.mark.parametrize(
    ("m", "n", "pad"), [(5, 24, 0), (33, 100, 3), (64, 255, 1), (130, 64, 8), (130, 64, 7), (300, 1000, 23)]
)
def test_out_is_written_whole_and_nothing_beside_it(device: str, out_dtype, m: int, n: int, pad: int) -> None:
    p = operands(m, n, 80, device)
    canary = 7.0
    for name in engines(device):
        base = torch.full((m + 2, n + pad + 1), canary, dtype=out_dtype, device=device)
        view = base[1 : m + 1, :n]

        def call(e, view=view):
            return octofuse.i8f16_linear(
                p.x, p.w, p.x_scale, p.w_scale, p.bias, out_dtype=out_dtype, engine=e, out=view
            )

        got = served(call, name)
        if got is None:
            continue
        assert got is view
        assert torch.equal(view, reference.linear(p.x, p.w, p.x_scale, p.w_scale, p.bias, out_dtype=out_dtype)), name
        view.fill_(canary)
        assert (base == canary).all(), f"{name} wrote outside out"


@pytest.mark.parametrize("device", DEVICES)
def test_residual_may_be_out(device: str) -> None:
    p = operands(65, 264, 64, device)
    want = reference.linear(p.x, p.w, p.x_scale, p.w_scale, residual=p.residual)
    for name in engines(device):
        out = p.residual.clone()
        got = served(
            lambda e, out=out: octofuse.i8f16_linear(p.x, p.w, p.x_scale, p.w_scale, residual=out, out=out, engine=e),
            name,
        )
        if got is not None:
            assert torch.equal(out, want), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias_dtype", FLOATS)
@pytest.mark.parametrize("residual_dtype", FLOATS)
def test_bias_and_residual_dtypes(device: str, bias_dtype, residual_dtype) -> None:
    p = operands(40, 136, 64, device)
    bias, residual = p.bias.to(bias_dtype), p.residual.to(residual_dtype)
    want = reference.linear(p.x, p.w, p.x_scale, p.w_scale, bias, residual=residual)
    for name, got in all_engines(
        lambda e: octofuse.i8f16_linear(p.x, p.w, p.x_scale, p.w_scale, bias, residual=residual, engine=e), device
    ).items():
        assert torch.equal(got, want), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("out_dtype", FLOATS)
def test_activations_over_their_whole_range(device: str, activation: str, out_dtype: torch.dtype) -> None:
    """Accumulators 1..16256 of either sign with scales from 2^-12 to 2^6: far into both tails."""
    x = torch.arange(-128, 128, dtype=torch.int8, device=device).reshape(-1, 1)
    w = torch.tensor([[1], [3], [127]], dtype=torch.int8, device=device).repeat(8, 1)
    w_scale = torch.logspace(-12, 6, 24, base=2.0, device=device)
    want = reference.linear(x, w, 1.0, w_scale, activation=activation, out_dtype=out_dtype)
    for name, got in all_engines(
        lambda e: octofuse.i8f16_linear(x, w, 1.0, w_scale, activation=activation, out_dtype=out_dtype, engine=e),
        device,
    ).items():
        try:
            assert_close(got, want, activation=activation)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
