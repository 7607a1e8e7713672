"""The memory of `octofuse tune`: its file in every state, and what select() makes of it."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import octofuse
from octofuse import _C
from octofuse.cli import app
from octofuse.nn import Float8Linear, Int8Linear
from octofuse.ops import tuning
from octofuse.ops.measure import SETTLE, device_times
from octofuse.quant import scheme_named

needs_90a = pytest.mark.skipif("90a" not in str(_C.build_info()["architectures"]), reason="needs a build for 90a")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTOFUSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "_warned", False)
    return tmp_path / "cache" / "tuning.json"


def entry(kernel: str) -> dict:
    return {"kernel": kernel, "us": 1.0}


def test_what_is_written_is_read(own_cache) -> None:
    tuning._write(own_cache, "gpu a", {"1,2,3,float16": entry("naive")})
    tuning._write(own_cache, "gpu b", {"1,2,3,float16": entry("cublaslt")})
    tuning._write(own_cache, "gpu a", {"4,5,6,int8": entry("naive")})
    found = tuning._read(own_cache)
    assert sorted(found["gpu a"]) == ["1,2,3,float16", "4,5,6,int8"]
    assert found["gpu b"]["1,2,3,float16"]["kernel"] == "cublaslt"
    assert [p.name for p in own_cache.parent.iterdir() if "lock" not in p.name] == ["tuning.json"]


def _add(path, worker: int) -> None:
    for i in range(10):
        tuning._write(path, "gpu", {f"{worker},{i},1,float16": entry("naive")})


def test_processes_lose_nothing(own_cache) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_add, args=(own_cache, i)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(tuning._read(own_cache)["gpu"]) == 40


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"devices": {}}', '{"format": 1}', '{"format": 1, "devices": []}', "\x00\xff"]
)
def test_a_corrupt_file_is_one_warning_and_then_replaced(own_cache, text, monkeypatch) -> None:
    own_cache.parent.mkdir(parents=True)
    own_cache.write_text(text)
    monkeypatch.setattr(tuning, "device_key", lambda device: "gpu")
    with pytest.warns(RuntimeWarning, match="tuning.json could not be read"):
        assert tuning.load(0) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuning.load(0) == 0, "one warning a process"
    tuning._write(own_cache, "gpu", {"1,2,3,float16": entry("naive")})
    assert tuning._read(own_cache) == {"gpu": {"1,2,3,float16": entry("naive")}}


@pytest.mark.parametrize("shape", ["1,2,3,float64", "1,2,float16", "a,2,3,int8"])
@pytest.mark.parametrize("value", [{"kernel": "naive"}, {}, 3])
def test_an_entry_that_makes_no_sense_is_not_kept(own_cache, shape, value, monkeypatch) -> None:
    monkeypatch.setattr(tuning, "_tuned", {})
    monkeypatch.setattr(tuning, "device_key", lambda device: "gpu")
    tuning._write(own_cache, "gpu", {shape: value})
    with pytest.warns(RuntimeWarning, match="could not be read"):
        assert tuning.load(0) == 0
    assert tuning.entries(0) == []


def test_another_format_is_ignored(own_cache) -> None:
    own_cache.parent.mkdir(parents=True)
    own_cache.write_text(json.dumps({"format": 99, "anything": 1}))
    assert tuning._read(own_cache) == {}


def test_a_folder_that_cannot_be_written_is_one_warning(own_cache) -> None:
    own_cache.parent.parent.joinpath("cache").write_text("a file where the folder should be")

    def write() -> None:
        with tuning._degrading("could not be written"):
            tuning._write(own_cache, "gpu", {})

    with pytest.warns(RuntimeWarning, match="could not be written"):
        write()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write()


def test_it_can_be_switched_off(own_cache, monkeypatch) -> None:
    own_cache.parent.mkdir(parents=True)
    own_cache.write_text("{")
    monkeypatch.setenv("OCTOFUSE_TUNING", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuning.load(0) == 0


def test_where_the_file_lies(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("OCTOFUSE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuning.cache_path() == tmp_path / "octofuse" / "tuning.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert tuning.cache_path().is_absolute(), "never beside whatever the process works on"


@needs_90a
def test_select_follows_what_was_tuned() -> None:
    def chosen(m, tuned, n=1024, out="float16"):
        return _C.select(m, n, 1024, out, False, False, "auto", 90, 132, True, tuned=tuned)

    tuned = [(64, 1024, 1024, "float16", "wgmma/64x128"), (128, 1024, 1024, "float16", "wgmma/128x96")]
    plain = chosen(64, [])
    assert chosen(64, tuned)["chosen"] == chosen(33, tuned)["chosen"] == "wgmma/64x128"
    assert "octofuse tune" in chosen(64, tuned)["why"]
    assert chosen(65, tuned)["chosen"] == "wgmma/128x96"
    for m, n, out in ((32, 1024, "float16"), (129, 1024, "float16"), (64, 1032, "float16"), (64, 1024, "int8")):
        assert chosen(m, tuned, n, out)["chosen"] == chosen(m, [], n, out)["chosen"], "only what was measured"
    # Float8 and int8 are apart, and so are float8's two ways to add up.
    fast, exact = "wgmma_float8_fast/64x64", "wgmma_float8/64x32"
    of_floats = [(64, 1024, 1024, "float16", kernel) for kernel in (fast, exact)]

    def chosen_float(arithmetic):
        return _C.select(64, 1024, 1024, "float16", False, False, "auto", 90, 132, True, tuned=of_floats,
                         arithmetic=arithmetic)["chosen"]  # fmt: skip

    assert (chosen_float("float8_fast"), chosen_float("float8")) == (fast, exact)
    assert chosen(64, of_floats)["chosen"] == plain["chosen"]
    # A kernel that cannot serve, and one that this build does not know.
    assert chosen(64, [(64, 1024, 1024, "float16", "skinny/1x8_dp4a")])["chosen"] == plain["chosen"]
    assert chosen(64, [(64, 1024, 1024, "float16", "wgmma/1x1")])["chosen"] == plain["chosen"]


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"shapes: expected \(M, N, K\) of integers of at least 1, got \(1, 0, 3\)"):
        octofuse.tune([(1, 0, 3)])
    with pytest.raises(ValueError, match="out_dtype: expected float16"):
        octofuse.tune([(1, 8, 8)], out_dtype=torch.float64)
    with pytest.raises(ValueError, match="dtype: expected int8 or float8_e4m3fn, got float8_e5m2"):
        octofuse.tune([(1, 8, 8)], dtype=torch.float8_e5m2)
    with pytest.raises(ValueError, match="fast_accumulate: expected False for int8"):
        octofuse.tune([(1, 8, 8)], fast_accumulate=True)
    with pytest.raises(ValueError, match="float32 or float8_e4m3fn for float8_e4m3fn, got int8"):
        octofuse.tune([(1, 8, 8)], dtype=torch.float8_e4m3fn, out_dtype=torch.int8)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="tune: needs a CUDA device"):
            octofuse.tune([(1, 8, 8)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shape", "768,768", "--device", "cpu"], "device: expected a CUDA device"),
        (["--shape", "768", "--device", "cpu"], "shape: expected N,K"),
        (["--tokens", "1,x"], "tokens: expected integers"),
        (["--tokens", "0"], "tokens: expected integers of at least 1"),
        (["--out", "float64"], "out: expected one of float16"),
        (["--dtype", "int4"], "dtype: expected int8 or float8, got 'int4'"),
    ],
)
def test_command_line_refuses(words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["tune", *words])
    assert result.exit_code == 1
    assert message in result.stderr


def test_shapes_come_from_a_model(monkeypatch) -> None:
    """The command with measuring replaced: the embedded model's four layers and a given one, each for every M."""
    from octofuse.cli import tune as command

    seen = []

    def measure(shapes, *, on_shape, dtype, fast_accumulate, **_):
        seen.extend((*shape, dtype, fast_accumulate) for shape in shapes)
        results = [tuning.Tuned(shape, "naive", 2.0, "naive", 1.0) for shape in shapes]
        for result in results:
            on_shape(result)
        return results

    monkeypatch.setattr(command, "measure", measure)
    monkeypatch.setattr(command, "pick_device", lambda name: torch.device("cuda"))
    assert CliRunner().invoke(app, ["tune", "embedded", "--shape", "768,64", "--tokens", "1,16"]).exit_code == 0
    layers = [(768, 64), (672, 224), (224, 224), (896, 224), (224, 896)]
    int8, float8 = (torch.int8, False), (torch.float8_e4m3fn, True)
    assert seen == [(m, n, k, *int8) for n, k in layers for m in (1, 16)]

    seen.clear()  # what is quantised already keeps its own operands
    model = torch.nn.Sequential(
        Int8Linear(64, 32), Float8Linear(64, 16), torch.nn.Linear(64, 8),
        Float8Linear(64, 24, scheme=scheme_named("fp8-block128")),
    )  # fmt: skip
    monkeypatch.setattr(command, "load_any", lambda *_: (model, None))
    words = ["tune", "a folder", "--shape", "40,64", "--tokens", "3", "--dtype", "float8"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert sorted(seen, key=str) == [
        (3, 16, 64, *float8),
        (3, 32, 64, *int8),
        (3, 40, 64, *float8),
        (3, 8, 64, *float8),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_float8_is_tuned_too(own_cache, out_dtype, fast) -> None:
    float8 = torch.float8_e4m3fn
    found = octofuse.tune([(48, 96, 128)], out_dtype=out_dtype, dtype=float8, fast_accumulate=fast)
    x, w = (torch.ones(rows, 128, device="cuda").to(float8) for rows in (48, 96))
    explained = octofuse.explain(x, w, out_dtype=out_dtype, fast_accumulate=fast)
    assert explained.chosen == found[0].kernel
    assert "octofuse tune" in explained.why
    assert explained.chosen.startswith("wgmma_float8_fast/" if fast else "wgmma_float8/")
    assert tuning.load(0) == 1
    assert "octofuse tune" not in octofuse.explain(x, w, out_dtype=out_dtype, fast_accumulate=not fast).why


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.int8, torch.int32])
def test_tuned_here_and_remembered_there(own_cache, out_dtype) -> None:
    seen = []
    found = octofuse.tune([(48, 96, 128), (3, 96, 128)], out_dtype=out_dtype, on_shape=seen.append)
    assert seen == found
    assert all(t.us <= t.before_us for t in found)
    x = torch.ones(48, 128, dtype=torch.int8, device="cuda")
    w = torch.ones(96, 128, dtype=torch.int8, device="cuda")
    explained = octofuse.explain(x, w, out_dtype=out_dtype)
    assert explained.chosen == found[0].kernel
    code = f"""
import torch, octofuse
x = torch.ones(48, 128, dtype=torch.int8, device="cuda")
w = torch.ones(96, 128, dtype=torch.int8, device="cuda")
assert (octofuse.i8i32_matmul(x, w) == 128).all()
e = octofuse.explain(x, w, out_dtype={out_dtype})
assert e.chosen == {found[0].kernel!r} and "octofuse tune" in e.why, e
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))


class _Timed:
    """Stands for a captured graph: each replay takes `us` a call, and they are counted."""

    def __init__(self, us: float) -> None:
        self.us, self.count, self.graph, self.replays = us, 2, self, 0

    def replay(self) -> float:
        self.replays += 1
        return self.us


def test_long_calls_settle_before_they_are_timed() -> None:
    graphs = {"short": _Timed(10.0), "long": _Timed(500.0)}
    assert device_times(graphs, repeats=3) == {"short": 10.0, "long": 500.0}  # type: ignore[arg-type]
    assert [graph.replays for graph in graphs.values()] == [6, 6]
    device_times(graphs, repeats=3, settle=0.01009)  # type: ignore[arg-type]
    assert [graph.replays - 6 for graph in graphs.values()] == [3 * (2 + 504), 3 * (2 + 10)]


@pytest.mark.parametrize(("us", "settle"), [(49.0, 0.0), (51.0, SETTLE)])
def test_long_calls_are_tuned_at_the_clock_that_the_power_limit_leaves_them(monkeypatch, us, settle) -> None:
    times = {"wgmma/128x128": us, "wgmma/64x64": us + 1, "wgmma/128x192_pingpong": us - 2}
    asked: list[tuple[str, float]] = []

    def timed(calls: list[functools.partial[Tensor]], *, repeats: int, settle: float) -> float:
        engine = calls[0].args[1]
        asked.append((engine, settle))
        return times[engine]

    monkeypatch.setattr(tuning, "device_time", timed)
    monkeypatch.setattr(tuning, "explain", lambda *_, **__: SimpleNamespace(chosen="wgmma/128x128"))
    monkeypatch.setattr(tuning, "_worth_timing", lambda *_: list(times))
    monkeypatch.setattr(tuning._Kind, "operands", lambda *_: [(torch.zeros(1), torch.zeros(1))])
    tuned, entry = tuning._tune_one((64, 64, 64), tuning._kind(torch.int8, False, torch.float16), 0)
    assert (tuned.kernel, tuned.us, entry) == (
        "wgmma/128x192_pingpong",
        us - 2,
        {"kernel": "wgmma/128x192_pingpong", "us": us - 2},
    )
    assert tuned.before_us == us
    assert asked[0] == ("wgmma/128x128", 0.0)
    assert asked[-2:] == [("wgmma/64x64", settle), ("wgmma/128x192_pingpong", settle)]
