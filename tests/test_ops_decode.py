"""Linears that quantise their own input, bit for bit against their parts; embedding, attention and argmax against torch."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import octofuse
from helpers import DEVICES, attend_call, int8
from octofuse.ops import decode

HALVES = (torch.float16, torch.bfloat16)
# One warp of K and several, one pass over the rows of a warp and two, ragged N, and K that takes two kernels: ragged, long.
SHAPES = ((48, 768), (2304, 768), (769, 768), (6400, 1600), (257, 1600), (75, 112), (640, 6400), (33, 100), (64, 16000))


def by_parts(x: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor, **given) -> Tensor:
    norm = {"layer_norm": octofuse.layer_norm, "rms_norm": octofuse.rms_norm, None: lambda x: x}[given.get("norm")]
    affine = [given[name] for name in ("norm_weight", "norm_bias") if given.get(name) is not None]
    h = norm(x, *affine, eps=1e-5) if given.get("norm") else x
    scale = given.get("x_scale")
    q, scale = octofuse.quantize_per_token(h) if scale is None else (octofuse.quantize_per_tensor(h, scale), scale)
    more = {"activation": given.get("activation"), "residual": given.get("residual")}
    if given.get("out_scale") is not None:
        return octofuse.i8i8_linear(q, w, scale, w_scale, bias, out_scale=given["out_scale"], **more)
    return octofuse.i8f16_linear(q, w, scale, w_scale, bias, out_dtype=given.get("out_dtype", x.dtype), **more)


def layer(n: int, k: int, dtype: torch.dtype, device: str, g: torch.Generator) -> list[Tensor]:
    """w, w_scale, bias, and a norm's weight and bias."""
    w_scale = (torch.rand(n, generator=g) + 0.5) / (74 * k**0.5)
    rest = [torch.randn(size, generator=g).to(dtype) for size in (n, k, k)]
    return [t.to(device) for t in (int8((n, k), g), w_scale, *rest)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("dtype", HALVES)
def test_quantized_linear_gives_the_bits_of_its_parts(device: str, n: int, k: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(n + k)
    w, w_scale, bias, norm_weight, norm_bias = layer(n, k, dtype, device, g)
    norms = (
        {},
        {"norm": "layer_norm", "norm_weight": norm_weight, "norm_bias": norm_bias},
        {"norm": "rms_norm", "norm_weight": norm_weight},
    )
    outputs = ({}, {"activation": "gelu_tanh", "out_scale": 0.05}, {"out_dtype": torch.float32, "activation": "relu"})
    sizes = (1, 3) if device == "cpu" else (1, 2, 3, 4, 5, 33)
    for m, norm, x_scale, (i, output) in itertools.product(sizes, norms, (None, 0.03), enumerate(outputs)):
        x = (torch.randn(m, k, generator=g) * 3).to(dtype).to(device)
        given = {**norm, "x_scale": x_scale, **output}
        if i == 0:
            given["residual"] = torch.randn(m, n, generator=g).to(dtype).to(device)
        got = octofuse.quantized_linear(x, w, w_scale, bias, **given)
        assert torch.equal(got, by_parts(x, w, w_scale, bias, **given)), (m, norm.get("norm"), x_scale, i)


@pytest.mark.parametrize("device", DEVICES)
def test_quantized_linear_takes_views_zeros_and_nan(device: str) -> None:
    g = torch.Generator().manual_seed(5)
    w, w_scale, bias, weight, norm_bias = layer(96, 256, torch.float16, device, g)
    wide = torch.randn(2, 2, 512, generator=g).half().to(device)
    norm = {"norm": "layer_norm", "norm_weight": weight, "norm_bias": norm_bias}
    for x in (
        wide[..., :256],
        wide[..., 256:],
        wide[0, 0, :256],
        wide[:, :1, 3:259],
        torch.zeros_like(wide[..., :256]),
    ):
        for given in ({}, norm, {**norm, "norm_weight": weight.float(), "norm_bias": norm_bias.float()}):
            got = octofuse.quantized_linear(x, w, w_scale, bias, **given)
            assert got.shape == (*x.shape[:-1], 96)
            assert torch.equal(got, by_parts(x, w, w_scale, bias, **given))
    x = wide[:, 0, :256].clone()
    x[0, 7] = float("nan")
    got = octofuse.quantized_linear(x, w, w_scale, bias)
    assert got[0].isnan().all()
    assert torch.equal(got[1], octofuse.quantized_linear(x[1], w, w_scale, bias))
    assert octofuse.quantized_linear(x[:0], w, w_scale, bias).shape == (0, 96)


@pytest.mark.parametrize("device", DEVICES)
def test_quantized_linear_compiles(device: str) -> None:
    g = torch.Generator().manual_seed(6)
    w, w_scale, bias, weight, norm_bias = layer(64, 128, torch.float16, device, g)

    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        norm = {"norm": "layer_norm", "norm_weight": weight, "norm_bias": norm_bias}
        hidden = octofuse.quantized_linear(x, w, w_scale, bias, activation="gelu_tanh", out_scale=0.1, **norm)
        return hidden, octofuse.quantized_linear(x, w, w_scale, bias, x_scale=0.02)

    for m in (1, 6):
        x = torch.randn(m, 128, generator=g).half().to(device)
        for got, want in zip(torch.compile(call, fullgraph=True)(x), call(x), strict=True):
            assert got.dtype == want.dtype
            assert torch.equal(got, want)


def test_quantized_linear_refuses_by_name() -> None:
    w, w_scale, bias, weight, _ = layer(8, 16, torch.float32, "cpu", torch.Generator().manual_seed(0))
    x = torch.randn(2, 16)
    for arguments, given, error, message in (
        ((x, w, w_scale), {"norm": "batch_norm"}, ValueError, "norm: expected None, 'layer_norm' or 'rms_norm'"),
        ((x, w, w_scale), {"norm_weight": weight}, ValueError, "norm_weight: expected None without a norm"),
        ((x, w, w_scale), {"norm": "rms_norm", "norm_bias": weight}, ValueError, "norm_bias: expected None"),
        ((x, w, w_scale), {"norm": "layer_norm", "eps": -1.0}, ValueError, "eps: expected a finite number"),
        ((x, w, w_scale), {"norm": "layer_norm", "norm_weight": weight[:3]}, ValueError, "weight: expected a contig"),
        ((x.int(), w, w_scale), {}, TypeError, "x: expected dtype"),
        ((x[:, :9], w, w_scale), {}, ValueError, r"w: expected shape \[N, 9\]"),
        ((x, w.float(), w_scale), {}, TypeError, "w: expected dtype int8"),
        ((x, w, w_scale[:3]), {}, ValueError, "w_scale: expected"),
        ((x, w, w_scale), {"x_scale": -1.0}, ValueError, "x_scale: expected a finite number above 0"),
        ((x, w, w_scale), {"out_dtype": torch.int32}, ValueError, "out_dtype: expected"),
        ((x, w, w_scale, bias), {"residual": x}, ValueError, "residual: expected the output's shape"),
        ((x.clone().requires_grad_(), w, w_scale), {}, ValueError, "x: expected a tensor that needs no gradient"),
    ):
        with pytest.raises(error, match=message):
            octofuse.quantized_linear(*arguments, **given)


@pytest.mark.parametrize(
    ("capability", "served"), [((9, 0), (64, 72, 256)), ((8, 6), (64, 72, 256)), ((8, 0), (64, 72, 256)), ((7, 5), ())]
)
def test_what_attention_serves(
    capability: tuple[int, int], served: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    gpu = torch.device("cuda")
    assert tuple(size for size in (64, 72, 100, 256, 264) if decode.serves(gpu, torch.float16, size, 64)) == served
    assert not decode.serves(gpu, torch.float16, 72, 64, eight_bits=True)
    assert not decode.serves(gpu, torch.float32, 64, 64)
    assert not decode.serves(torch.device("cpu"), torch.float16, 64, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_embed_and_argmax(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(1)
    of_tokens, of_positions = torch.randn(97, 48, generator=g).to(dtype), torch.randn(33, 48, generator=g).to(dtype)
    ids, positions = torch.tensor([0, 96, 5, 5]), torch.tensor([0, 32, 7, 8])
    got = decode.embed(ids.cuda(), positions.cuda(), of_tokens.cuda(), of_positions.cuda())
    assert torch.equal(got.cpu(), of_tokens[ids] + of_positions[positions])
    got = decode.embed(ids.cuda(), positions.cuda(), of_tokens.cuda(), None, 1.5)
    assert torch.equal(got.cpu(), of_tokens[ids] * 1.5)
    for vocabulary, ld in ((1, 1), (7, 7), (50257, 50257), (50257, 50264), (1000, 1001), (8192, 8192)):
        logits = torch.randn(5, ld, generator=g).to(dtype)[:, :vocabulary]
        logits[1] = 0.25  # all alike: the first
        logits[2, vocabulary // 2 :] = 7.0
        logits[3, vocabulary - 1] = float("nan")
        logits[4] = -torch.inf
        state = [torch.zeros(5, dtype=torch.int64, device="cuda") for _ in range(3)]
        ids_out, counts, positions_out = state
        history = torch.zeros(5, 3, dtype=torch.int64, device="cuda")
        counts[:] = torch.tensor([0, 1, 2, 0, 1])
        decode.argmax(logits.cuda(), ids_out, history, counts, positions_out, True)
        want = torch.tensor([int(logits[0].float().argmax()), 0, vocabulary // 2, vocabulary - 1, 0])
        assert torch.equal(ids_out.cpu(), want)
        assert torch.equal(history.cpu()[torch.arange(5), torch.tensor([0, 1, 2, 0, 1])], want)
        assert counts.tolist() == [1, 2, 3, 1, 2]
        assert positions_out.tolist() == [1] * 5
        decode.argmax(logits.cuda(), ids_out, history, torch.zeros_like(counts), positions_out, False)
        assert positions_out.tolist() == [1] * 5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("vocabulary", "width"), [(50257, 768), (1001, 1600), (17, 40), (1, 8), (6000, 3000)])
def test_logits(dtype: torch.dtype, vocabulary: int, width: int) -> None:
    device = torch.device("cuda")
    if not decode.takes_logits(device, dtype, width):
        pytest.skip("compute capability 9.0")
    torch.manual_seed(width)
    x, w = torch.randn(130, width, device=device).to(dtype), torch.randn(vocabulary, width, device=device).to(dtype)
    got = decode.logits(x, w)
    want = x.double() @ w.double().t()
    rounding = want.abs() * torch.finfo(dtype).eps / 2  # of the result; each sum in fp32 loses a little beside it
    sums = x.double().abs() @ w.double().abs().t() * 2.0**-24 * (width / 16 + 8)
    assert got.shape == (130, vocabulary)
    assert ((got.double() - want).abs() <= rounding + sums).all()
    for m in (1, 2, 7, 8, 9, 33, 64, 65):
        assert torch.equal(decode.logits(x[:m].contiguous(), w), got[:m]), m
    with pytest.raises(ValueError, match=r"w: expected a contiguous tensor of shape"):
        decode.logits(x, w[:, :-8])
    with pytest.raises(TypeError, match="w: expected dtype"):
        decode.logits(x, w.float())


def test_a_wrong_norm_is_refused_by_its_own_name() -> None:
    x, w = torch.randn(2, 64), torch.ones(32, 64, dtype=torch.int8)
    good = torch.ones(64)
    for norm, error, message in (
        ({"norm_weight": good[:-1]}, ValueError, r"norm_weight: expected a contiguous tensor of shape \[64\]"),
        ({"norm_weight": good.half()}, TypeError, "norm_weight: expected dtype"),
        ({"norm_weight": good, "norm_bias": good[:-1]}, ValueError, "norm_bias: expected a contiguous tensor"),
    ):
        with pytest.raises(error, match=message):
            octofuse.quantized_linear(x, w, 0.01, norm="layer_norm", **norm)
    with pytest.raises(ValueError, match="weight: expected a contiguous tensor"):
        octofuse.layer_norm(x, good[:-1], good)


@pytest.mark.gpu
def test_wrong_tables_are_refused_before_a_launch() -> None:
    positions = torch.zeros(2, dtype=torch.int64, device="cuda")
    tokens = torch.zeros(9, 12, dtype=torch.float16, device="cuda")
    with pytest.raises(ValueError, match=r"token_embeddings: expected \[vocabulary, width\], width a multiple of 8"):
        decode.embed(positions, positions, tokens, tokens)


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "width"), [(1, 256), (2, 256), (4, 256), (7, 256), (1, 1536)])
@pytest.mark.parametrize("static", [False, True])
def test_a_captured_chain_keeps_its_bits(m: int, width: int, static: bool) -> None:
    """Blocks of linears and attention, many times through one cache, each kernel let in before the last has finished."""
    g = torch.Generator().manual_seed(m)
    heads, size, depth, capacity = width // 64, 64, 6, 160
    shapes = ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
    blocks = [[layer(n, k, torch.float16, "cuda", g) for n, k in shapes] for _ in range(depth)]
    start = torch.randn(m, width, generator=g).half().cuda()
    scale = torch.tensor(0.05, device="cuda") if static else None

    def run(x: Tensor, cache: Tensor, positions: Tensor, scratch: tuple[Tensor, Tensor]) -> Tensor:
        for (qkv, projection, fc, out), (keys, values) in zip(blocks, cache, strict=True):
            first = {"norm": "layer_norm", "norm_weight": qkv[3], "norm_bias": qkv[4], "constant_weight": True}
            y = octofuse.quantized_linear(x, *qkv[:3], x_scale=scale, **first)
            y = decode.attend(attend_call(y, heads, (keys, values), positions, scratch, scale))
            if static:
                w, w_scale, bias = projection[:3]
                x = octofuse.i8f16_linear(y, w, scale, w_scale, bias, residual=x, constant_weight=True)
            else:
                x = octofuse.quantized_linear(y, *projection[:3], residual=x, constant_weight=True)
            second = {"norm": "layer_norm", "norm_weight": fc[3], "norm_bias": fc[4], "constant_weight": True}
            y = octofuse.quantized_linear(x, *fc[:3], activation="gelu_tanh", x_scale=scale, **second)
            x = octofuse.quantized_linear(y, *out[:3], x_scale=scale, residual=x, constant_weight=True)
            x = octofuse.layer_norm(x)
        positions.add_(1)
        return x

    def state() -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        cache = torch.zeros(depth, 2, m, heads, capacity, size, dtype=torch.float16, device="cuda")
        positions = torch.arange(m, device="cuda")
        return cache, positions, decode.attend_scratch(m, heads, heads, size, capacity, cache.device)

    plain, captured = state(), state()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(start, *captured)
    for _ in range(140):
        graph.replay()
        assert torch.equal(run(start, *plain), got)
    assert torch.equal(plain[0], captured[0])
