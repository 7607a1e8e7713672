"""The memory of `octofuse tune`: its file in every state, and what select() makes of it."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import warnings

import pytest
import torch
from typer.testing import CliRunner

import octofuse
from octofuse import _C
from octofuse.cli import app
from octofuse.ops import tuning

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
    # A kernel that cannot serve, and one that this build does not know.
    assert chosen(64, [(64, 1024, 1024, "float16", "skinny/1x8_dp4a")])["chosen"] == plain["chosen"]
    assert chosen(64, [(64, 1024, 1024, "float16", "wgmma/1x1")])["chosen"] == plain["chosen"]


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"shapes: expected \(M, N, K\) of integers of at least 1, got \(1, 0, 3\)"):
        octofuse.tune([(1, 0, 3)])
    with pytest.raises(ValueError, match="out_dtype: expected float16"):
        octofuse.tune([(1, 8, 8)], out_dtype=torch.float64)
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

    def measure(shapes, *, on_shape, **_):
        seen.extend(shapes)
        results = [tuning.Tuned(shape, "naive", 2.0, "naive", 1.0) for shape in shapes]
        for result in results:
            on_shape(result)
        return results

    monkeypatch.setattr(command, "measure", measure)
    monkeypatch.setattr(command, "pick_device", lambda name: torch.device("cuda"))
    assert CliRunner().invoke(app, ["tune", "embedded", "--shape", "768,64", "--tokens", "1,16"]).exit_code == 0
    layers = [(768, 64), (672, 224), (224, 224), (896, 224), (224, 896)]
    assert seen == [(m, n, k) for n, k in layers for m in (1, 16)]


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
