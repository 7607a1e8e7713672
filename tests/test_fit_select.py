"""benchmarks/fit_select.py: which of several sweeps' times count."""

from __future__ import annotations

import sys
from itertools import permutations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import fit_select
from octofuse import _C

INT8, FAST, EXACT = "wgmma/128x128_pingpong", "wgmma_float8_fast/128x128_pingpong", "wgmma_float8/128x128"


def test_sweeps_of_int8_leave_those_of_float8_alone() -> None:
    assert {INT8, FAST, EXACT} <= set(_C.candidates())
    sweeps = [
        {"us": {"1,64,64": {INT8: 3.0}}},
        {"us": {"1,64,64": {FAST: 2.0, EXACT: 4.0}}},
        {"us": {"1,64,64": {INT8: 1.0}}},
    ]
    for order in permutations(sweeps):
        found = fit_select.times_of(list(order))[1, 64, 64]
        assert set(found) == {INT8, FAST, EXACT}
        last = [sweep["us"]["1,64,64"][INT8] for sweep in order if INT8 in sweep["us"]["1,64,64"]][-1]
        assert found[INT8] == last
        assert fit_select.of_engine({(1, 64, 64): found}, "wgmma_float8/") == {(1, 64, 64): {EXACT: 4.0}}


def test_long_calls_are_chosen_by_times_behind_calls_of_their_own() -> None:
    wide = "wgmma/128x192_pingpong"
    sweeps = [
        {"us": {"64,64,64": {INT8: 1.0, FAST: 2.0}, "8192,8192,8192": {INT8: 700.0, wide: 720.0, FAST: 900.0}}},
        {"us, settled": {"8192,8192,8192": {INT8: 760.0, wide: 730.0}}},
    ]
    times, settled = (fit_select.times_of(sweeps, kind) for kind in ("us", "us, settled"))
    found = fit_select.chosen_by(times, settled, "")
    assert found == {(64, 64, 64): {INT8: 1.0}, (8192, 8192, 8192): {INT8: 760.0, wide: 730.0}}
    assert fit_select.chosen_by(times, settled, "wgmma_float8_fast/")[8192, 8192, 8192] == {FAST: 900.0}


def test_kernels_that_the_library_leaves_out_teach_no_model() -> None:
    half, whole, cutlass = "wgmma/64x64_swapped_x2", "wgmma/64x64_swapped", "cutlass_sm90/128x128x128_pingpong_2x1"
    row = {half: 2.0, whole: 1.0, cutlass: 3.0}
    assert fit_select.has_no_estimate(half, 128, 2048, 8192, row), "64 blocks: each is alone on its SM"
    assert not fit_select.has_no_estimate(half, 512, 2048, 8192, row), "256 blocks"
    assert not fit_select.has_no_estimate(half, 128, 2048, 8192, {half: 2.0}), "it is the only form"
    assert not fit_select.has_no_estimate(whole, 128, 2048, 8192, row)
    assert fit_select.has_no_estimate(cutlass, 128, 2048, 8192, row), "half of its cluster is behind the last token"
    assert not fit_select.has_no_estimate(cutlass, 256, 2048, 8192, row)
    times = {(128, 2048, 8192): row | {half: 0.1}, (512, 2048, 8192): {half: 2.0, whole: 3.0}}
    models = fit_select.fit(times, {})
    assert fit_select.held_in({(128, 2048, 8192): row | {half: 0.1}}, models) == [10.0]


def test_the_shipped_table_has_every_shape_of_the_sweeps() -> None:
    """A sweep that is left out, or overwritten by another, would lose its shapes."""
    root = Path(__file__).parents[1]
    text = (root / "cpp/src/gemm/measured_h200.inc").read_text()
    for sweep in sorted((root / "benchmarks/results/h200").glob("sweep*.json")):
        assert f"{sweep.name} (cpp " in text, sweep.name
    parts = text.split("{Arithmetic::")[1:]
    kept = {part.split(",")[0]: part for part in parts}
    assert set(kept) == {"kInt8", "kFloat8", "kFloat8Fast"}
    for arithmetic in ("kFloat8", "kFloat8Fast"):
        for weight in ("2048, 8192", "28672, 7168", "57344, 8192"):
            row = kept[arithmetic].split(f"{{{weight}, {{")[1].split("}")[0]
            assert any(int(index) >= 0 for index in row.split(",")[:6]), "few tokens"
