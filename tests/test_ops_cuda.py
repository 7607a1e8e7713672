"""What only a GPU can break: graphs, streams, threads, forks, devices, host-side plans."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

import octofuse
from helpers import engines, operands, served
from octofuse import reference

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("engine", engines("cuda"))
@pytest.mark.parametrize(("m", "n", "k"), [(8, 256, 128), (130, 100, 77)])
def test_graph_replays_are_bit_equal(engine: str, m: int, n: int, k: int) -> None:
    p = operands(m, n, k, "cuda")

    def call(e: str) -> torch.Tensor:
        return octofuse.i8f16_linear(p.x, p.w, p.x_scale, p.w_scale, p.bias, activation="relu", engine=e)

    want = served(call, engine)
    if want is None:
        pytest.skip("the engine declines this shape")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call(engine)
    for replay in range(1000):
        got.fill_(3.0)
        graph.replay()
        if replay % 50 == 0 or replay == 999:
            assert torch.equal(got, want), replay
    # New contents behind the same pointers.
    p.x.copy_(operands(m, n, k, "cuda", seed=1).x)
    graph.replay()
    assert torch.equal(got, call(engine))


@pytest.mark.parametrize("engine", engines("cuda"))
def test_side_stream_behind_a_delay(engine: str) -> None:
    """Inputs appear late on the side stream; a launch on any other stream would read the canary."""
    p = operands(1 if engine.startswith("skinny") else 64, 256, 128, "cuda")
    want = reference.linear(p.x, p.w, p.x_scale, p.w_scale)
    late = torch.zeros_like(p.x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(p.x)
        got = octofuse.i8f16_linear(late, p.w, p.x_scale, p.w_scale, engine=engine)
    stream.synchronize()
    assert torch.equal(got, want)


def test_two_threads_on_two_streams() -> None:
    failures: list[str] = []

    def work(seed: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for i in range(60):
                p = operands(1 + (i * 7) % 140, 264, 96, "cuda", seed)
                want = reference.linear(p.x, p.w, p.x_scale, p.w_scale, p.bias)
                for engine in ("auto", "cublaslt", "cutlass_sm80"):
                    got = octofuse.i8f16_linear(p.x, p.w, p.x_scale, p.w_scale, p.bias, engine=engine)
                    stream.synchronize()
                    if not torch.equal(got, want):
                        failures.append(f"thread {seed}, call {i}, {engine}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_fork_after_import() -> None:
    code = """
import os, torch, octofuse
child = os.fork()
if child == 0:
    x = torch.ones(4, 64, dtype=torch.int8, device="cuda")
    w = torch.ones(8, 64, dtype=torch.int8, device="cuda")
    os._exit(0 if (octofuse.i8i32_matmul(x, w) == 64).all() else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_no_memory_is_kept() -> None:
    p = operands(33, 100, 77, "cuda")  # K is padded inside: scratch memory in every call
    for _ in range(3):
        octofuse.i8f16_linear(p.x, p.w, p.x_scale, p.w_scale, engine="cublaslt")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(200):
        octofuse.i8f16_linear(p.x, p.w, p.x_scale, p.w_scale, engine="cublaslt")
    assert torch.cuda.memory_allocated() == before


def test_tuning_keeps_the_bits() -> None:
    p = operands(256, 512, 256, "cuda")
    before = octofuse.i8i32_matmul(p.x, p.w, engine="cublaslt")
    times = octofuse.tune_cublaslt(p.x, p.w)
    assert times
    assert all(microseconds > 0 for microseconds in times.values())
    assert torch.equal(octofuse.i8i32_matmul(p.x, p.w, engine="cublaslt"), before)
    octofuse.tune_cublaslt(p.x, p.w, out_dtype=torch.int8)
    want = (before.float() * 0.01).round().clamp(-128, 127).to(torch.int8)
    alpha = float(torch.tensor(0.01))
    assert torch.equal(octofuse.i8i8_matmul(p.x, p.w, alpha, engine="cublaslt"), want)


def test_more_plans_than_the_cache_holds() -> None:
    w = torch.ones(4, 16, dtype=torch.int8, device="cuda")
    x = torch.ones(4200, 16, dtype=torch.int8, device="cuda")
    for m in range(1, 4200):
        y = octofuse.i8i32_matmul(x[:m], w, engine="cublaslt")
    assert (y == 16).all()


def test_explain_names_what_runs() -> None:
    p = operands(64, 256, 128, "cuda")
    told = octofuse.explain(p.x, p.w)
    assert told.chosen in octofuse.engines("cuda")
    assert {name for name, _ in told.declined} == set(engines("cuda")) - {told.chosen}
    with pytest.raises(ValueError, match="N must be a multiple of 4"):
        octofuse.explain(p.x, p.w[:7], engine="cublaslt")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_device() -> None:
    p = operands(33, 264, 96, "cuda:1")
    want = reference.linear(p.x, p.w, p.x_scale, p.w_scale)
    for engine in engines("cuda"):
        got = served(lambda e: octofuse.i8f16_linear(p.x, p.w, p.x_scale, p.w_scale, engine=e), engine)
        assert got is None or torch.equal(got, want), engine
    assert torch.cuda.current_device() == 0
