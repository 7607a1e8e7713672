"""Selection is a pure function: it runs here without a GPU, for any device that one can name."""

from __future__ import annotations

import pytest

from octofuse import _C

BUILT = str(_C.build_info()["architectures"]).split(",")
needs_cuda_build = pytest.mark.skipif(BUILT == [""], reason="needs a CUDA build (no GPU)")
needs_80 = pytest.mark.skipif("80" not in BUILT, reason="needs a build for 80")
needs_90a = pytest.mark.skipif("90a" not in BUILT, reason="needs a build for 90a")


# What the names of kernels begin with that multiply something else than int8.
ARITHMETICS = {"wgmma_float8": "float8", "wgmma_float8_fast": "float8_fast", "wgmma_e5m2": "e5m2"}


def select(m=1024, n=1024, k=1024, *, out="float16", raw=False, double=False, engine="auto", cc=90, lt=True, of="int8",
           bandwidth=0.0):  # fmt: skip
    return _C.select(m, n, k, out, raw, double, engine, cc, 132, lt, bandwidth=bandwidth, arithmetic=of)


def test_candidates_are_named_once() -> None:
    names = _C.candidates()
    assert len(names) == len(set(names))
    assert {name.split("/")[0] for name in names} == {
        "skinny", "wgmma", "wgmma_float8", "wgmma_float8_fast", "wgmma_e5m2", "cutlass_sm90", "cutlass_sm80",
        "cublaslt", "naive",
    }  # fmt: skip


@needs_90a
def test_hopper_takes_wgmma_for_fused_outputs() -> None:
    assert select()["chosen"].startswith(("wgmma/", "cutlass_sm90/"))


@needs_90a
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"n": 1001}, "multiples of 16 bytes"),
        ({"cc": 100}, "compute capability 9.0"),
        ({"cc": 80}, "compute capability 9.0"),
        ({"out": "float32"}, "fp16 output alone"),
        ({"out": "int8"}, "fp16 output alone"),
    ],
)
def test_sm90_declines_with_its_reason(change: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        select(engine="cutlass_sm90", **change)


@needs_90a
@pytest.mark.parametrize("change", [{"cc": 100}, {"cc": 80}, {"out": "float32", "double": True}])
def test_wgmma_declines_what_it_cannot_run(change: dict) -> None:
    with pytest.raises(ValueError, match=r"compute capability 9\.0|double"):
        select(engine="wgmma", **change)
    select(n=1001, engine="wgmma")  # it stores any width itself


@needs_80
@pytest.mark.parametrize("cc", [80, 86, 89, 100, 120])
def test_other_chips_take_mma(cc: int) -> None:
    assert select(cc=cc)["chosen"].startswith("cutlass_sm80/")
    assert select(m=1, cc=cc)["chosen"].startswith("skinny/")


@needs_cuda_build
@pytest.mark.parametrize("cc", [70, 75])
def test_too_old_chips_are_told_so(cc: int) -> None:
    with pytest.raises(ValueError, match="holds no kernels for this device"):
        select(cc=cc, lt=False)


@needs_90a
def test_cublaslt_serves_one_factor_to_int8_and_what_it_is_asked_for() -> None:
    assert select(out="int32", raw=True)["chosen"] != "cublaslt"
    assert select(out="int8")["chosen"] != "cublaslt"
    assert select(out="int8", raw=True)["chosen"] == "cublaslt"
    assert "one factor" in select(out="int8", raw=True)["why"]
    for change in ({"m": 8}, {"n": 1001}, {"lt": False}):
        assert select(out="int8", raw=True, **change)["chosen"] != "cublaslt"
    assert select(out="int32", raw=True, engine="cublaslt")["chosen"] == "cublaslt"
    with pytest.raises(ValueError, match="N must be a multiple of 4"):
        select(n=1001, out="int32", raw=True, engine="cublaslt")
    with pytest.raises(ValueError, match="libcublasLt could not be loaded"):
        select(engine="cublaslt", lt=False)


@needs_90a
def test_measured_shapes_take_the_measured_best() -> None:
    decision = select(m=1000, n=2304, k=768)
    assert decision["why"].startswith("the fastest measured")
    assert decision["chosen"] == select(m=1024, n=2304, k=768)["chosen"]
    assert select(m=1000, n=2305, k=768)["why"].startswith("the lowest estimated time")


@needs_90a
def test_every_m_has_a_kernel_that_holds_it() -> None:
    for m in range(1, 700):
        for n, k in ((4096, 4096), (3000, 1000), (50257, 768)):
            chosen = select(m=m, n=n, k=k)["chosen"]
            if chosen.startswith("skinny/"):
                assert m <= int(chosen.split("/")[1].split("x")[0])


@needs_80
@needs_90a
@pytest.mark.parametrize("m", [1, 33, 300, 1000])
def test_cutlass_means_wgmma_where_that_runs(m: int) -> None:
    """Numbers of tokens at which its tiles were not swept too."""
    assert select(m=m, engine="cutlass")["chosen"].startswith("cutlass_sm90/")


@needs_90a
@pytest.mark.parametrize("bandwidth", [3352, 4917])  # an H100's and an H200's
def test_kernels_that_were_measured_come_before_mma(bandwidth: float) -> None:
    """What is reckoned for these by data sheets is less than they need: an H100 took them for many a layer."""
    for m in (1, 4, 16, 32, 64, 128, 1024):
        for n in (8192, 16384, 28672, 65536):
            for k in (2048, 7168, 14336, 32768):
                assert not select(m=m, n=n, k=k, bandwidth=bandwidth)["chosen"].startswith("cutlass_sm80/"), (m, n, k)


@needs_90a
@pytest.mark.parametrize("bandwidth", [3352, 4917])
def test_a_block_that_would_be_alone_has_its_sm(bandwidth: float) -> None:
    """Kernels made for 2 or 3 blocks an SM are for more blocks than SMs."""
    for m, n, k in ((128, 2048, 7680), (256, 2048, 7680), (120, 4096, 12288), (500, 1024, 3584)):
        chosen = select(m=m, n=n, k=k, bandwidth=bandwidth)["chosen"]
        tokens, channels = map(int, chosen.split("/")[1].split("_")[0].split("x"))
        assert "_x" not in chosen or -(-m // tokens) * -(-n // channels) > 132, chosen


@needs_90a
def test_few_rows_take_the_skinny_kernels_and_many_the_persistent_ones() -> None:
    assert select(m=1)["chosen"].startswith("skinny/")
    assert "_pingpong" in select(m=8192, n=4096, k=4096)["chosen"]
    with pytest.raises(ValueError, match="M is larger than its tile"):
        select(m=65, engine="skinny")


def test_cpu_only_builds_serve_no_gpu() -> None:
    if BUILT != [""]:
        pytest.skip("a CUDA build")
    with pytest.raises(ValueError, match="this build holds no"):
        select(lt=False)


@needs_90a
@pytest.mark.parametrize("name", _C.candidates())
def test_every_candidate_can_be_asked_for(name: str) -> None:
    chosen = select(m=1, engine=name, of=ARITHMETICS.get(name.split("/")[0], "int8"))
    assert chosen["chosen"] == name
    assert chosen["why"] == "asked for by name"


@needs_90a
@pytest.mark.parametrize("m", [700, 3000, 8192, 100_000])
@pytest.mark.parametrize(("n", "k"), [(8192, 8192), (11008, 4096), (1000, 1000), (768, 50_000)])
def test_no_kernel_is_chosen_where_it_was_never_timed(m: int, n: int, k: int) -> None:
    """Swapped tiles are made and timed for few tokens: a model fitted there once chose one for 8192^3."""
    chosen = select(m, n, k)["chosen"]
    assert "swapped" not in chosen
    assert chosen.startswith(("wgmma/", "cutlass_sm90/"))
    declined = dict(select(m, n, k, engine="wgmma")["declined"])
    assert "nothing was measured there" in declined["wgmma/16x64_swapped_x2"]


@needs_90a
def test_tables_belong_to_the_devices_that_were_measured() -> None:
    """By what the memory clock and width say: an H200 and an H100 SXM were swept, an H100 PCIe (2,039 GB/s) was not."""
    why = {
        bandwidth: _C.select(1, 4096, 4096, "float16", False, False, "auto", 90, 132, True, [], bandwidth)["why"]
        for bandwidth in (4917.0, 3352.0, 2039.0, 0.0)
    }
    assert why[4917.0].startswith("the fastest measured")
    assert why[3352.0].startswith("the fastest measured")
    assert why[2039.0].startswith("the lowest estimated time")
    assert why[0.0] == why[4917.0], "no device was asked: taken for an H200"
    fewer = _C.select(1, 4096, 4096, "float16", False, False, "auto", 90, 114, True, [], 3352.0)["why"]
    assert fewer.startswith("the lowest estimated time")
