"""benchmarks/peers: what all kernels are given is the same weight, and what the tables say follows from the times."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import bench_peers
import peer_tables
from peers import layer, ours, vllm


@pytest.mark.parametrize("family", layer.FAMILIES)
def test_our_columns_multiply_the_weight_that_others_get(family: str) -> None:
    weight = layer.random_layer(family, 48, 256, "cpu")
    tokens = layer.Tokens(5, 256, "cpu")
    kernels = ours.kernels(family)
    assert {kernel.chained for kernel in kernels} == {False, True}
    for kernel in kernels:
        want = kernel.expected(weight, tokens)
        got = kernel.call(tokens[kernel.takes], *kernel.prepare(weight))
        assert layer.relative_error(got, want) < kernel.tolerance, kernel.name


def test_scales_of_two_levels_are_numbers_in_fp16() -> None:
    """So other engines' groups and ours have the same weight."""
    weight = layer.random_layer("w4a8-g128", 64, 512, "cpu")
    assert weight.steps is not None
    channel = weight.scale[:, :1].float() / weight.steps[:, :1]
    assert torch.equal(weight.scale.float(), channel * weight.steps)


def test_words_of_codes() -> None:
    weight = layer.random_layer("w4a16", 8, 128, "cpu")
    words = vllm.words(weight)
    assert words.shape == (16, 8)
    codes = torch.stack([words >> shift & 15 for shift in range(0, 32, 4)], 1).reshape(128, 8)
    assert torch.equal(codes.t().to(torch.uint8), weight.codes)


def row(m: int, **us: float) -> dict[str, object]:
    times = {name.replace("_", " "): value for name, value in us.items()}
    compared = [name for name in times if "fp8" not in name]
    return {"family": "w8a8", "M": m, "N": 64, "K": 64, "us": times | {"fp16 F.linear": 8}, "compared": compared}


def test_tables_divide_the_fastest_by_ours() -> None:
    rows = [
        row(1, octofuse=2, vLLM=4, Humming=3, vLLM_fp8=1, octofuse_quantised=3, vLLM_quantised=6),
        row(4, octofuse=2, vLLM=4, octofuse_quantised=3),
        row(16, octofuse=2, vLLM=1, octofuse_quantised=3),
    ]
    found = {label: cells for label, *cells in peer_tables.summary(rows)}
    assert found["int8"][:4] == ["1", "1.50 [1.50]", "1.00 [0.50]", ""]
    assert found["int8, with quantisation"][1:3] == ["2.00 [2.00]", ""]
    assert found["int8, beside fp8 kernels"][1] == "0.50 [0.50]"
    assert found["fp16 `F.linear`, beside int8"][1] == "4.00 [4.00]"
    assert "4-bit weights" not in found


def test_rows_of_a_layer_share_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a run that ends early stops the compiler."""
    made, stopped = [], []

    class Bench:
        def __init__(self, *layer: Any) -> None:
            made.append(layer[:3])

        def row(self, m: int, why_not: dict[str, str]) -> dict[str, Any]:
            return {"M": m, "failed": why_not}

    class Ahead:
        def __init__(self, rows: list[Any], threads: int) -> None:
            assert threads > 0

        def why_not(self, row: Any, seconds: float) -> dict[str, str]:
            return {"Humming": "late"} if row[1] == 4 else {}

        def stop(self) -> None:
            stopped.append(True)

    monkeypatch.setattr(bench_peers, "Bench", Bench)
    wanted = [(family, m, 64, 64) for family in ("w8a8", "w4a16") for m in (1, 4)]
    rows = bench_peers.rows_of(wanted, {"humming": SimpleNamespace(Ahead=Ahead)})  # type: ignore[dict-item]
    assert next(rows) == {"M": 1, "failed": {}}
    assert next(rows) == {"M": 4, "failed": {"Humming": "late"}}
    next(rows)
    assert made == [("w8a8", 64, 64), ("w4a16", 64, 64)]
    rows.close()
    assert stopped
    assert len(list(bench_peers.rows_of(wanted, {}))) == 4


def test_more_rows_of_the_same_versions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Bench:
        def __init__(self, family: str, n: int, k: int, modules: object) -> None:
            self.shape = {"family": family, "N": n, "K": k}

        def row(self, m: int, why_not: dict[str, str]) -> dict[str, Any]:
            return {**self.shape, "M": m, "us": {}, "failed": why_not | (late if m == 4 else {})}

    def run(*options: str) -> dict[str, Any]:
        monkeypatch.setattr("sys.argv", ["bench_peers.py", "--out", str(tmp_path), "--families", "w8a8", *options])
        bench_peers.main()
        record: dict[str, Any] = json.loads((tmp_path / "peers.json").read_text())
        return record

    monkeypatch.setattr(bench_peers, "Bench", Bench)
    monkeypatch.setattr(bench_peers, "found", lambda: ({}, {}))
    monkeypatch.setattr(bench_peers, "warm_up", lambda smoke: None)
    with pytest.raises(SystemExit, match="2"):  # there is no file yet
        run("--more")
    late = {"Humming": "TimeoutError: "}
    run("--shapes", "6144x4096", "--tokens", "4", "8")
    late = {}
    record = run("--shapes", "6144x4096", "4096x4096", "--tokens", "1", "4", "--more")
    shapes = [(row["N"], row["M"]) for row in record["rows"]]
    assert shapes == [(4096, 1), (4096, 4), (6144, 1), (6144, 4), (6144, 8)]
    assert not any(row["failed"] for row in record["rows"]), "what came too late was taken again"
    assert record["command"].endswith("--more")
    (tmp_path / "peers.json").write_text(json.dumps({**record, "cpp": "another"}))
    with pytest.raises(SystemExit, match=r"peers.json: expected cpp .*, got another"):
        run("--more")
