"""Which low-bit engine takes a call, and why not the others: pure, so without a GPU for any device that one can name."""

from __future__ import annotations

import pytest
import torch

import octofuse
from helpers import Weight
from octofuse import _C
from octofuse.ops.lowbit import bcq_linear, sparse12_linear, woq_linear
from octofuse.quant.packing import pack, pack_pairs

BUILT = str(_C.build_info()["architectures"]).split(",")
needs_80 = pytest.mark.skipif("80" not in BUILT, reason="needs a build for 80")
needs_90a = pytest.mark.skipif("90a" not in BUILT, reason="needs a build for 90a")
SHARED = {90: 232448, 80: 166912, 86: 101376}  # bytes that a block may have


def select(kind="uniform", bits=4, m=1, n=4096, k=4096, *, group=128, zeros=False, engine="auto", cc=90):
    return _C.lowbit_select(kind, bits, m, n, k, group, zeros, engine, cc, 132, SHARED[cc])


def reasons(**given) -> dict[str, str]:
    return dict(select(**given)["declined"])


@needs_90a
def test_tokens_decide() -> None:
    assert select()["chosen"] == "gemv_int8"
    assert select(m=4)["chosen"] == "gemv_int8"
    assert select(m=9)["chosen"] == "gemm"
    assert select(m=128)["chosen"] == "gemm"
    assert select(m=129)["chosen"] == select(m=256)["chosen"] == select(bits=5, m=256)["chosen"] == "gemm_split"
    assert select(m=480)["chosen"] == select(m=320, n=6144)["chosen"] == select(m=960, n=2048)["chosen"] == "gemm_split"
    assert select(m=481)["chosen"] == select(m=321, n=6144)["chosen"] == select(m=2000)["chosen"] == "gemm_many"
    assert select(bits=3, m=448)["chosen"] == "gemm_split", "with fewer tiles it goes less far"
    assert select(bits=3, m=449)["chosen"] == "gemm_many"
    assert select("planes", 4, m=1025)["chosen"] == select(m=961, n=1920)["chosen"] == "dequantized"
    assert select(bits=8, m=8192, k=10240)["chosen"] == select(bits=5, m=8192, k=10240)["chosen"] == "dequantized"
    for few in (
        {"bits": 8, "m": 8191, "k": 10240},
        {"bits": 8, "m": 8192, "k": 10239},
        {"bits": 4, "m": 8192, "k": 14336},
    ):
        assert select(**few)["chosen"] == "gemm_many", few
    assert select("planes", 4, m=1024)["chosen"] == select("planes", 3, m=1025)["chosen"] == "gemm_many"
    assert select(m=128, n=1920)["chosen"] == "gemm"
    assert select(m=512, n=2048)["chosen"] == select(m=257, n=1920)["chosen"] == "gemm_split"
    assert select(m=64, n=6144)["chosen"] == select(m=64, n=28672)["chosen"] == "gemm"
    assert select(m=65, n=6144)["chosen"] == select(m=128, n=6144)["chosen"] == "gemm_split"
    assert select(bits=6, m=65, n=10240)["chosen"] == "gemm_split"
    assert select("planes", 8, m=64, group=64)["tile"] == (64, 64, 2)
    assert select("planes", 8, m=64, group=32)["tile"] == (48, 64, 2), "a ring would have one stage"
    for m, tokens in ((16, 16), (17, 32), (33, 48), (48, 48), (49, 64), (64, 64), (65, 96), (97, 128), (128, 128)):
        assert select(m=m, n=1024, k=8192, engine="gemm")["tile"] == (tokens, 64, 4), m
    for m, tokens in ((96, 96), (110, 112), (136, 144), (150, 160), (170, 176), (200, 208), (210, 224)):
        assert select(m=m, n=8192, k=28672)["tile"] == (tokens, 128, 2), m
    for bits, tile in ((4, (144, 192, 2)), (8, (144, 192, 2)), (3, (160, 128, 2)), (5, (192, 128, 2))):
        assert select(bits=bits, m=136, n=12288, k=12288)["tile"] == tile, bits
    assert select(m=65, n=28672)["chosen"] == select(bits=6, m=65, n=16384)["chosen"] == "gemm_many"
    with pytest.raises(ValueError, match="gemm_split: up to 128 columns there is nothing to divide"):
        select(m=256, k=128, engine="gemm_split")
    assert select(m=256, k=896)["chosen"] != "gemm_split", "few columns take no longer than to exchange sums"
    assert select(m=64 * 65535, engine="gemm")["chosen"] == "gemm"
    assert select(m=64 * 65535 + 1)["chosen"] == "gemm_many"
    with pytest.raises(ValueError, match="gemm: it takes up to 4194240 tokens"):
        select(m=64 * 65535 + 1, engine="gemm")
    for bits in (1, 2, 3):
        assert select(bits=bits)["chosen"] == "gemv_binary"
        assert select(bits=bits, m=2)["chosen"] == "gemv_int8"
    for planes, chosen in ((4, "gemv_binary"), (5, "gemv_int8")):
        assert select("planes", planes)["chosen"] == chosen


@needs_90a
def test_every_other_engine_has_a_reason() -> None:
    for m in (1, 3, 9, 5000):
        for kind, bits in (("uniform", 2), ("uniform", 7), ("planes", 3), ("sparse12", 7)):
            found = select(kind, bits, m)
            names = {"cpu", "gemv_binary", "gemv_int8", "gemm", "gemm_split", "gemm_many", "dequantized"}
            assert {found["chosen"], *dict(found["declined"])} == names
            assert all(reason for _, reason in found["declined"])
    assert reasons(m=9)["gemv_int8"] == "it takes up to 4 tokens, beside some weights 8"
    assert reasons(m=9)["gemv_binary"] == "it takes one token"
    assert reasons()["gemv_binary"] == "it takes codes of up to 3 bits, or up to 4 planes"
    assert reasons(m=5000)["gemm"] == "slower: others dequantise a weight for more tokens at a time"
    assert reasons(m=5000)["gemm_split"] == "slower: there are tiles for all SMs"
    assert reasons(m=200)["gemm_many"] == "slower: so few tiles that blocks had better divide K"
    assert reasons(m=100)["gemm_split"] == "slower: so few tokens make too few of its tiles"
    assert reasons(m=100)["gemm_many"] == "slower: so few tokens make too few of its tiles"
    assert reasons(m=5000, n=1920)["gemm_many"].startswith("slower: for so many tokens a weight that is dequantised")
    assert reasons(m=9, n=4100)["gemm"] == "with groups or planes N must be a multiple of 8"
    assert reasons(m=9, n=4104, zeros=True)["gemm"] == "with zero points of groups N must be a multiple of 16"
    assert select(m=9, n=4100, group=4096)["chosen"] == "gemm", "one row of scales may have any length"
    assert reasons(k=131071)["gemv_int8"].startswith("a token and three stages")


@needs_90a
def test_5_to_8_tokens() -> None:
    """N, K and the kind of weight decide between two kernels with other bits, the number of tokens does not."""
    for n, k, group, bits, chosen in (
        (28672, 4096, 128, 4, "gemv_int8"),
        (28672, 4096, 64, 4, "gemv_int8"),
        (28672, 4096, 64, 3, "gemm"),  # there is no such kernel
        (57344, 8192, 0, 8, "gemv_int8"),  # a row is one group
        (8192, 8192, 128, 8, "gemm"),
        (4096, 14336, 128, 4, "gemm"),
        (2048, 2048, 128, 2, "gemm"),
        (28680, 4096, 128, 4, "gemm"),  # rows of scales that cannot be copied
    ):
        for m in (5, 6, 8):
            assert select(bits=bits, m=m, n=n, k=k, group=group)["chosen"] == chosen, (m, n, k, bits)
        assert select(bits=bits, m=9, n=n, k=k, group=group)["chosen"] == "gemm"
    assert reasons(m=8, n=1024)["gemv_int8"] == "slower: gemm's blocks fit better"
    assert reasons(kind="planes", bits=3, m=5)["gemv_int8"] == "beside this weight it takes up to 4 tokens"
    assert reasons(m=5, k=65536)["gemv_int8"].startswith("a token and three stages")
    assert select(m=4, k=28672)["chosen"] == "gemv_int8"


@needs_80
def test_other_chips() -> None:
    for cc in (80, 86):
        assert select(cc=cc)["chosen"] == "gemv_int8"
        assert select(m=8, k=2048, cc=cc)["chosen"] == "gemv_int8", "no gemm there"
        assert select(m=9, cc=cc)["chosen"] == "dequantized"
        assert reasons(m=9, cc=cc)["gemm"] == "needs compute capability 9.0 (wgmma)"
        assert reasons(m=900, cc=cc)["gemm_many"] == "needs compute capability 9.0 (wgmma)"


@needs_90a
def test_engines_by_name() -> None:
    assert select(m=5000, engine="gemm")["chosen"] == "gemm", "asked for, it serves where it would not be chosen"
    assert select(m=1, engine="gemm_many")["chosen"] == "gemm_many"
    assert select(engine="dequantized") == {"chosen": "dequantized", "why": "asked for by name", "declined": []}
    with pytest.raises(
        ValueError, match=r"engine: expected one that can serve this call, got 'gemv_binary'; gemv_binary: it"
    ):
        select(m=2, bits=2, engine="gemv_binary")
    with pytest.raises(
        ValueError, match=r"engine: expected one of 'auto', 'cpu', 'gemv_binary', .*'dequantized', got 'cutlass'"
    ):
        select(engine="cutlass")


def test_explain_takes_the_call() -> None:
    """On a CPU there are two engines, and every other says why."""
    codes = torch.randint(0, 16, (48, 128), dtype=torch.uint8)
    x, scale = torch.randn(2, 128), torch.rand(1, 48)
    found = octofuse.explain(woq_linear, x, pack(codes, 4), scale, bits=4)
    assert found.chosen == found.captured == "cpu"
    assert octofuse.explain(woq_linear, x, pack(codes, 4), scale, 8, bits=4) == found
    engines = ("gemv_binary", "gemv_int8", "gemm", "gemm_split", "gemm_many")
    declined = dict.fromkeys(engines, "needs tensors on cuda")
    assert dict(found.declined) == declined | {"dequantized": "slower"}
    assert "cpu: the fastest of those that can serve" in str(found)
    offset = torch.zeros(1, 48)
    found = octofuse.explain(bcq_linear, x, pack(codes, 4, planes=True), torch.rand(1, 4, 48), offset)
    assert found.chosen == "dequantized"
    assert "dequantized: the weight is written to memory for this call" in str(found)
    assert dict(found.declined)["cpu"] == "kernels know no offset"
    found = octofuse.explain(woq_linear, x, pack(codes, 4), scale, bits=4)
    alpha = torch.rand(1, 4, 48)
    assert octofuse.explain(bcq_linear, x, pack(codes, 4, planes=True), alpha).chosen == "cpu"
    pairs = pack_pairs(torch.randint(0, 256, (48, 64), dtype=torch.uint8))
    assert octofuse.explain(sparse12_linear, x, pairs, scale).chosen == "cpu"
    with pytest.raises(ValueError, match=r"engine: expected one that can serve .* gemm: needs tensors on cuda"):
        woq_linear(x, pack(codes, 4), scale, bits=4, engine="gemm")
    with pytest.raises(
        TypeError, match=r"x: expected an int8 or float8 tensor, or one of woq_linear, .*, got <built-in"
    ):
        octofuse.explain(torch.nn.functional.linear, x, codes)
    by_name = {"x": x, "packed": pack(codes, 4), "scale": scale, "bits": 4}
    assert octofuse.explain(woq_linear, **by_name) == found
    with pytest.raises(TypeError, match="explain: missing a required argument: 'packed'"):
        octofuse.explain(woq_linear, x, bits=4)
    with pytest.raises(ValueError, match=r"alpha: expected \[G, q, N\], got shape \[48\]"):
        octofuse.explain(bcq_linear, x, pack(codes, 4, planes=True), alpha[0, 0])


def test_explain_refuses_what_the_int8_linears_refuse() -> None:
    x, w = torch.zeros(2, 16, dtype=torch.int8), torch.zeros(8, 16, dtype=torch.int8)
    assert octofuse.explain(x=x, w=w) == octofuse.explain(x, w)
    for arguments, given, error, text in (
        ((x.float(), w), {}, TypeError, "x: expected an int8 or float8 tensor, got dtype torch.float32"),
        ((x, [1]), {}, TypeError, "w: expected an int8 or float8 tensor, got list"),
        ((x, w[0]), {}, ValueError, r"w: expected shape \[N, K\]"),
        ((x, w[:, 1:]), {}, ValueError, r"w: expected shape \[N, K\]"),
        ((x, w), {"out_dtype": torch.int64}, ValueError, "out_dtype: expected torch.float16.* got torch.int64"),
        ((x, w), {"activation": "swish"}, ValueError, "activation: expected"),
        ((x,), {}, TypeError, "explain: missing a required argument: 'w'"),
        ((), {}, TypeError, "explain: missing"),
    ):
        with pytest.raises(error, match=text):
            octofuse.explain(*arguments, **given)


@pytest.mark.gpu
def test_explain_on_the_gpu() -> None:
    weight = Weight("uniform", 2, 128, 256, 512, False, torch.float16)
    for m, chosen in ((1, "gemv_binary"), (2, "gemv_int8"), (9, "gemm"), (4000, "gemm_many")):
        found = octofuse.explain(woq_linear, weight.tokens(m), weight.packed, weight.scale, bits=2, group=128)
        assert found.chosen == chosen
    odd = weight.scale.float()
    found = octofuse.explain(woq_linear, weight.tokens(1), weight.packed, odd, bits=2, group=128)
    assert dict(found.declined)["gemm"] == "kernels take float16 and bfloat16 scales, got float32"


@pytest.mark.gpu
def test_explain_names_what_runs_in_a_capture() -> None:
    """The profiler's kernel names, eager and captured, hold what explain says."""
    for n, k in ((768, 768), (6400, 1600), (12288, 12288)):
        x = torch.ones(1, k, dtype=torch.int8, device="cuda")
        w = torch.ones(n, k, dtype=torch.int8, device="cuda")
        found = octofuse.explain(x, w)

        def call(x: torch.Tensor = x, w: torch.Tensor = w) -> None:
            octofuse.i8f16_linear(x, w, 1.0, 1.0, constant_weight=True)

        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        for run, name in ((call, found.chosen), (graph.replay, found.captured)):
            run()
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                run()
                torch.cuda.synchronize()
            names = " ".join(event.key for event in profile.key_averages())
            kernel = name.split("/")[1] if "gemv_" in name else "gemv<"
            assert kernel in names, (n, k, name, names)
