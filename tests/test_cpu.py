"""The CPU engine: every instruction set that runs here, any number of threads and any batch give the same bits."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import octofuse
from helpers import FLOATS, Weight, operands, small_gpt2
from octofuse import _C, reference
from octofuse.ops import cpu

RUNNABLE = [name for name, why_not in _C.cpu_info()["isas"].items() if not why_not]
KINDS = [("uniform", bits, zeros) for bits in range(1, 9) for zeros in (False, True)]
KINDS += [("planes", bits, False) for bits in range(1, 9)] + [("sparse12", 7, False)]
KINDS += [("codebook", 4, False), ("float8", 8, False)]
# One token, a few, and many; ragged in everything, whole tiles, and more K than a panel has.
SHAPES = ((1, 1, 1), (2, 130, 65), (3, 64, 64), (4, 100, 255), (17, 33, 300), (97, 70, 768), (130, 129, 1100))


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    isa, threads = _C.cpu_info()["isa"], torch.get_num_threads()
    yield
    _C.use_cpu_isa(isa)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("isa", RUNNABLE)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_have_the_formulas_bits(isa: str, shape: tuple[int, int, int]) -> None:
    _C.use_cpu_isa(isa)
    p = operands(*shape)
    for x, w in ((p.x, p.w), (p.x.clone().fill_(-128), p.w.clone().fill_(-128)), (p.x, p.w.clone().fill_(127))):
        assert torch.equal(octofuse.i8i32_matmul(x, w), reference.accumulate(x, w))
    for dtype, activation in itertools.product(FLOATS, reference.ACTIVATIONS):
        options = {"activation": activation, "residual": p.residual, "out_dtype": dtype}
        got = octofuse.i8f16_linear(p.x, p.w, p.x_scale, p.w_scale, p.bias, **options)
        want = reference.linear(p.x, p.w, p.x_scale, p.w_scale, p.bias, **options)
        if activation in (None, "relu"):
            assert torch.equal(got, want)
        else:  # its own function, in double: fp32 roundings may differ once in millions
            assert (got != want).sum() <= got.numel() // 1000
            torch.testing.assert_close(got, want, rtol=torch.finfo(dtype).eps, atol=0)
    got = octofuse.i8i8_linear(p.x, p.w, p.x_scale, p.w_scale, p.bias, out_scale=0.03)
    want = reference.linear(p.x, p.w, p.x_scale, p.w_scale, p.bias, out_scale=0.03)
    assert torch.equal(got, want)
    zero = torch.arange(shape[0], dtype=torch.int32) % 255 - 127
    more = {"x_zero_point": zero, "out_dtype": torch.float32}
    got = octofuse.i8f16_linear(p.x, p.w, p.x_scale, p.w_scale, w_sum=octofuse.weight_sums(p.w), **more)
    assert torch.equal(got, reference.linear(p.x, p.w, p.x_scale, p.w_scale, **more))


@pytest.mark.parametrize("isa", RUNNABLE)
def test_longest_rows(isa: str) -> None:
    """Sums at the edge of int32, where the product with w + 128 wraps around."""
    _C.use_cpu_isa(isa)
    x, w = torch.full((2, 131071), -128, dtype=torch.int8), torch.full((5, 131071), -128, dtype=torch.int8)
    w[1], w[2], x[1] = 127, 0, 127
    assert torch.equal(octofuse.i8i32_matmul(x, w), reference.accumulate(x, w))
    many = x.repeat(5, 1)
    assert torch.equal(octofuse.i8i32_matmul(many, w), reference.accumulate(many, w))


@pytest.mark.parametrize("isa", RUNNABLE)
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_have_the_references_bits(isa: str, dtype: torch.dtype) -> None:
    _C.use_cpu_isa(isa)
    g = torch.Generator().manual_seed(0)
    for rows, k in ((1, 1), (3, 255), (2, 768), (5, 8193), (2, 20000)):
        x, residual = (torch.randn(rows, k, generator=g).to(dtype) * 3 + 1 for _ in range(2))
        weight, bias = torch.randn(2, k, generator=g).to(dtype)
        h = x + residual
        for center in (True, False):
            want = reference.norm(h, weight, bias if center else None, 1e-5, center=center)
            if center:
                y, added = octofuse.add_layer_norm(x, residual, weight, bias, 1e-5)
                q, scales, _ = octofuse.add_layer_norm_quantize(x, residual, weight, bias, 1e-5)
            else:
                y, added = octofuse.add_rms_norm(x, residual, weight, 1e-5)
                q, scales, _ = octofuse.add_rms_norm_quantize(x, residual, weight, 1e-5)
            assert torch.equal(y, want)
            assert torch.equal(added, h)
            for got, expected in zip((q, scales), reference.quantize_per_token(want), strict=True):
                assert torch.equal(got, expected)
        q = octofuse.quantize_per_tensor(x, 0.01)
        assert torch.equal(q, reference.quantize(x, 0.01))
        assert torch.equal(octofuse.dequantize(q, 0.01, out_dtype=dtype), (q.float() * torch.tensor(0.01)).to(dtype))


@pytest.mark.parametrize("isa", RUNNABLE)
def test_what_is_not_finite_stays_in_its_row(isa: str) -> None:
    _C.use_cpu_isa(isa)
    x = torch.tensor([[1.0, -2.0, 0.5], [float("nan"), 1, 2], [float("inf"), 1, -3], [0, 0, 0], [1e-45, 0, 0]])
    for got, want in zip(octofuse.quantize_per_token(x), reference.quantize_per_token(x), strict=True):
        assert torch.equal(got.nan_to_num(7), want.nan_to_num(7))
    for name in ("gelu", "gelu_tanh", "silu", "relu"):
        edges = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e30, -1e30, -700.0, 88.0, -17.0, 5e-42])
        got, want = octofuse.activate(edges, name), reference.activate(edges, name)
        torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-44, equal_nan=True)


@pytest.mark.parametrize(("kind", "bits", "zeros"), KINDS)
@pytest.mark.parametrize("group", [None, 32, 64, 96, 128, 256])
def test_low_bit_products(kind: str, bits: int, zeros: bool, group: int | None) -> None:
    for n, k in ((48, 128), (33, 100), (1, 300), (130, 640)):
        for dtype in (torch.float32, torch.float16) if (n, k) == (130, 640) else (torch.float32,):
            weight = Weight(kind, bits, group, n, k, zeros, dtype, "cpu")
            for m in (1, 3, 40):
                weight.check(weight.tokens(m))


@pytest.mark.parametrize("bits", range(1, 9))
def test_one_zero_for_all(bits: int) -> None:
    for zero, group in itertools.product((0, 1 << bits - 1, (1 << bits) - 1), (None, 32, 100)):
        weight = Weight("uniform", bits, group, 50, 320, zero, torch.float32, "cpu")
        full = torch.full(weight.scale.shape, zero, dtype=torch.uint8)
        for x in (weight.tokens(1), weight.tokens(40)):
            weight.check(x)
            want = octofuse.woq_linear(x, weight.packed, weight.scale, full, weight.bias, bits=bits, group=group)
            assert torch.equal(weight.multiply(x), want)
    for wrong, why in ((1 << bits, ValueError), (-1, ValueError), (True, TypeError), (0.5, TypeError)):
        with pytest.raises(why, match="zero: expected"):
            octofuse.woq_linear(x, weight.packed, weight.scale, wrong, bits=bits, group=group)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "bits", "zeros"), [KINDS[3], KINDS[7], KINDS[18], KINDS[21], KINDS[-1]])
def test_a_token_keeps_its_bits(kind: str, bits: int, zeros: bool) -> None:
    """Whatever stands beside it, by every instruction set, and by any number of threads."""
    weight = Weight(kind, bits, 64, 200, 1100, zeros, torch.float32, "cpu")
    x = weight.tokens(67)
    alone = torch.cat([weight.multiply(x[i : i + 1]) for i in range(67)])
    for isa, threads, m in itertools.product(RUNNABLE, (1, 2, 4), (1, 2, 5, 33, 67)):
        _C.use_cpu_isa(isa)
        torch.set_num_threads(threads)
        assert torch.equal(weight.multiply(x[:m]), alone[:m]), (isa, threads, m)


@pytest.mark.parametrize("isa", RUNNABLE)
def test_low_bit_epilogues_and_activations(isa: str) -> None:
    _C.use_cpu_isa(isa)
    weight = Weight("uniform", 4, 64, 50, 320, False, torch.float32, "cpu")
    x, residual = weight.tokens(9), torch.randn(9, 50)
    plain = weight.multiply(x, bias=None)
    got = weight.multiply(x, activation="relu", residual=residual)
    assert torch.equal(got, torch.relu(plain + weight.bias) + residual)
    scale = float(got.abs().amax()) / 100
    q = weight.multiply(x, activation="relu", residual=residual, out_scale=scale)
    assert torch.equal(q, reference.quantize(got, scale))
    gain, shift = torch.randn(2, 320)
    normed = reference.norm(x, gain, shift, 1e-3, center=True)
    named = {"norm": "layer_norm", "norm_weight": gain, "norm_bias": shift, "eps": 1e-3}
    assert torch.equal(weight.multiply(x, **named), weight.multiply(normed))
    tokens, scales = octofuse.quantize_per_token(x)
    want = weight.multiply(tokens.float(), bias=None) * scales + weight.bias
    assert torch.equal(weight.multiply(tokens, x_scale=scales), want)
    assert weight.multiply(x[:0]).shape == (0, 50)


def test_quantized_linear_is_its_parts_by_any_number_of_threads() -> None:
    g = torch.Generator().manual_seed(1)
    x, w = torch.randn(200, 300, generator=g), torch.randint(-127, 128, (260, 300), dtype=torch.int8, generator=g)
    w_scale, gain = torch.rand(260, generator=g), torch.randn(300, generator=g)
    q, scales = reference.quantize_per_token(reference.norm(x, gain, None, 1e-6, center=False))
    want = reference.linear(q, w, scales, w_scale, out_dtype=torch.float32)
    options = {"norm": "rms_norm", "norm_weight": gain, "eps": 1e-6}
    for threads, m in itertools.product((1, 2, 3, 8), (1, 4, 5, 9, 200)):
        torch.set_num_threads(threads)
        assert torch.equal(octofuse.quantized_linear(x[:m], w, w_scale, **options), want[:m])


def test_calls_from_many_threads() -> None:
    torch.set_num_threads(2)
    p = operands(64, 512, 512)
    want = reference.accumulate(p.x, p.w)
    wrong: list[int] = []

    def work() -> None:
        for i in range(20):
            if not torch.equal(octofuse.i8i32_matmul(p.x, p.w), want):
                wrong.append(i)

    workers = [threading.Thread(target=work) for _ in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def in_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = os.environ | environment
    return subprocess.run([sys.executable, "-c", code], env=settings, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("before", ["octofuse.i8i32_matmul(x, x)", "torch.randn(900, 900) @ torch.randn(900, 900)"])
def test_a_forked_child_has_threads_of_its_own(before: str) -> None:
    """Whoever made its parent's threads: OpenMP's are not in the child, and a region would wait for them."""
    code = f"""
import os, torch, octofuse
torch.set_num_threads(2)
x = torch.randint(-128, 128, (64, 1024), dtype=torch.int8)
want = (x.long() @ x.long().t()).int()
{before}
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(octofuse.i8i32_matmul(x, x), want) else 1)
print(os.waitpid(child, 0)[1])
"""
    assert in_python(code).stdout.strip() == "0"


def test_a_new_thread_has_torchs_number_of_threads() -> None:
    found = []
    for count in (1, 2):
        torch.set_num_threads(count)
        worker = threading.Thread(target=lambda: found.append(_C.cpu_info()["threads"]))
        worker.start()
        worker.join()
    assert found == [1, 2]


def test_threads_sleep_between_calls() -> None:
    code = """
import time, torch, octofuse
torch.set_num_threads(2)
x = torch.randint(-128, 128, (64, 1024), dtype=torch.int8)
for _ in range(20):
    octofuse.i8i32_matmul(x, x)
time.sleep(0.01)
before = time.process_time()
time.sleep(0.5)
print(time.process_time() - before)
"""
    assert float(in_python(code).stdout) < 0.05


@pytest.fixture
def _neighbours() -> Iterator[None]:
    """A process on every core that never sleeps."""
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    yield
    for hog in hogs:
        hog.kill()
        hog.wait()


@pytest.mark.usefixtures("_neighbours")
def test_cores_that_others_use_are_seen() -> None:
    cores = len(os.sched_getaffinity(0))
    if cores < 2 or not any(map(int, Path("/proc/stat").read_text(encoding="utf-8").split()[1:4])):
        pytest.skip("one core, or a system that does not count")
    found = []
    for _ in range(20):
        found.append(_C.free_cores())
        time.sleep(0.1)
    assert (cores + 1) // 2 <= min(found) < cores


def test_threads_leave_cores_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(3)
    seen, free = [], [2]
    monkeypatch.setattr(_C, "free_cores", lambda: free[0])

    def on_token(n: int, tokens: list[int]) -> None:
        seen.append(torch.get_num_threads())
        free[0] = 1 if n == 1 else 8

    generator = octofuse.Generator(small_gpt2().eval())
    generator([[1, 2, 3]], 4, on_token=on_token)
    assert seen == [2, 3, 1, 3]
    assert torch.get_num_threads() == 3
    free[0] = 1
    with pytest.raises(RuntimeError, match="one thread"), cpu.Threads(torch.device("cpu")):
        raise RuntimeError("one thread" if torch.get_num_threads() == 1 else "more")
    assert torch.get_num_threads() == 3
    with cpu.Threads(torch.device("cuda")) as threads:  # its host threads are torch's affair
        assert (torch.get_num_threads(), threads.crowded) == (3, False)


def test_an_instruction_set_by_name() -> None:
    code = "from octofuse import _C; print(_C.cpu_info()['isa'])"
    assert in_python(code, OCTOFUSE_CPU_ISA="portable").stdout.strip() == "portable"
    failed = in_python("import octofuse, torch; octofuse.layer_norm(torch.ones(1, 8))", OCTOFUSE_CPU_ISA="mmx")
    assert "OCTOFUSE_CPU_ISA: expected one of" in failed.stderr
    assert "got 'mmx'" in failed.stderr
    with pytest.raises(ValueError, match=r"name: expected one of .*portable, got 'mmx'"):
        _C.use_cpu_isa("mmx")
    for name, why_not in _C.cpu_info()["isas"].items():
        if why_not:
            with pytest.raises(ValueError, match=why_not):
                _C.use_cpu_isa(name)


def test_engines_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    p = operands(20, 24, 40)
    calls: list[Callable[[str], Tensor]] = [
        lambda engine: octofuse.i8f16_linear(p.x, p.w, p.x_scale, p.w_scale, engine=engine),
        lambda engine: octofuse.i8i32_matmul(p.x, p.w, engine=engine),
        lambda engine: octofuse.i8i8_matmul(p.x, p.w, 1e-3, engine=engine),
    ]
    for call in calls:
        assert torch.equal(call("cpu"), call("reference"))
        assert torch.equal(call("cpu"), call("auto"))
        with pytest.raises(ValueError, match="expected one of 'auto', 'cpu', 'onednn', 'reference' for CPU tensors"):
            call("wgmma")
    # As on a CPU with AMX, whose oneDNN may not be exact.
    monkeypatch.setattr(cpu, "has_amx", lambda: True)
    monkeypatch.setattr(cpu, "why_not_onednn", lambda: "not here")
    _C.prefer_onednn(1.0)
    try:
        for call in calls:
            assert torch.equal(call("cpu"), call("auto"))
        assert octofuse.explain(p.x, p.w).chosen.startswith("cpu/")
    finally:
        _C.prefer_onednn(math.inf)


@pytest.mark.parametrize("norm", [None, "rms_norm"])
@pytest.mark.parametrize("x_scale", [None, 0.02])
def test_products_of_onednn_have_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, norm: str | None, x_scale: float | None
) -> None:
    """As on a CPU with AMX, with and without an exact oneDNN; its product here is the reference's."""
    p = operands(20, 24, 40)
    x = torch.randn(4, 5, 40, generator=torch.Generator().manual_seed(2))
    residual = p.residual.view(4, 5, 24)
    calls: list[Callable[[], Tensor]] = [
        lambda: octofuse.quantized_linear(
            x, p.w, p.w_scale, p.bias, x_scale=x_scale, norm=norm, activation="relu", residual=residual
        ),
        lambda: octofuse.quantized_linear(x, p.w, p.w_scale, x_scale=x_scale, norm=norm, out_scale=0.1),
        lambda: octofuse.quantized_linear(p.x, p.w, p.w_scale, x_scale=0.1),
        lambda: octofuse.i8f16_linear(p.x, p.w, p.x_scale, p.w_scale),
    ]
    want = [call() for call in calls]
    used: list[int] = []

    def product(x: Tensor, packed: Tensor) -> Tensor:
        used.append(x.shape[0])
        return reference.accumulate(x, packed).float()

    monkeypatch.setattr(cpu, "has_amx", lambda: True)
    monkeypatch.setattr(cpu, "AMX_PRODUCTS", 1.0)
    monkeypatch.setattr(cpu, "_onednn_product", product)
    monkeypatch.setattr(cpu, "_packed", lambda w: w)
    try:
        for reason, times in (("", len(calls)), ("not exact", 0)):
            monkeypatch.setattr(cpu, "why_not_onednn", lambda reason=reason: reason)
            _C.prefer_onednn(1.0)
            assert all(map(torch.equal, [call() for call in calls], want))
            assert used == [20] * times
            used.clear()
    finally:
        _C.prefer_onednn(math.inf)


def test_explain_names_the_instruction_set() -> None:
    x, w = torch.zeros(1, 64, dtype=torch.int8), torch.zeros(8, 64, dtype=torch.int8)
    found = octofuse.explain(x, w)
    assert found.chosen == f"cpu/{_C.cpu_info()['isa']}"
    assert {name for name, _ in found.declined} == {"onednn", "reference"}
    weight = Weight("uniform", 4, 48, 16, 96, False, torch.float32, "cpu")
    found = octofuse.explain(octofuse.woq_linear, weight.tokens(1), weight.packed, weight.scale, bits=4, group=48)
    assert found.chosen == "dequantized"
    assert ("cpu", "it takes groups of whole multiples of 32 columns") in found.declined
    weight.check(weight.tokens(2))


def test_small_calls_take_no_thread() -> None:
    """A thread is only woken where it saves more than waking it costs: this call ends in less."""
    x, w = torch.zeros(1, 64, dtype=torch.int8), torch.zeros(64, 64, dtype=torch.int8)
    torch.set_num_threads(2)
    took = []
    for _ in range(50):
        begin = time.process_time()
        octofuse.i8i32_matmul(x, w)
        took.append(time.process_time() - begin)
    assert min(took) < 1e-3
