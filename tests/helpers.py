"""What several test files share: operands, weights of few bits, small models, and the command line."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear

import octofuse
from octofuse import _C
from octofuse.nn import PackedLinear, quantised_layer
from octofuse.ops._calls import AttendCall
from octofuse.ops.dequantized import split_zero
from octofuse.ops.lowbit import bcq_linear, codebook_linear, sparse12_linear, woq_linear
from octofuse.ops.two_level import two_level_linear
from octofuse.quant import bcq, codebook, grid, scheme_named, sparse, two_level
from octofuse.quant.packing import pack, pack_pairs, row_parts

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
PROMPTS = ([3, 1, 4, 1, 5], [92], [65, 35, 89, 79, 32, 38, 46, 26])


@dataclass
class Operands:
    """One problem on one device; values keep |t| and |residual| below 16."""

    x: Tensor
    w: Tensor
    x_scale: Tensor
    w_scale: Tensor
    bias: Tensor
    residual: Tensor


def int8(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)


def operands(m: int, n: int, k: int, device: str = "cpu", seed: int = 0) -> Operands:
    g = torch.Generator().manual_seed(seed * 1000003 + m * 7919 + n * 104729 + k)
    # An accumulator's standard deviation is about 74^2 * sqrt(k): scales that make t about 2.
    spread = 2.0 / (74.0**2 * k**0.5)
    made = Operands(
        x=int8((m, k), g),
        w=int8((n, k), g),
        x_scale=torch.rand(m, 1, generator=g) + 0.25,
        w_scale=(torch.rand(n, generator=g) + 0.25) * spread,
        bias=torch.randn(n, generator=g),
        residual=torch.randn(m, n, generator=g).to(torch.float16),
    )
    return Operands(**{name: tensor.to(device) for name, tensor in vars(made).items()})


def served(call, engine: str):
    """call(engine), or None where the engine declines with its reason (never for another error)."""
    try:
        return call(engine)
    except ValueError as error:
        assert str(error).startswith("engine: expected one that can serve this call"), error
        return None


def engines(device: str) -> tuple[str, ...]:
    """Those that multiply int8."""
    return tuple(name for name in octofuse.engines(device) if not name.startswith(("wgmma_float8", "wgmma_e5m2")))


# ---- weights of few bits ----

LEVELS = {"codebook": "nf4", "float8": "e4m3"}


def by_torch(
    codes: Tensor, scale: Tensor, zero: Tensor | int | None, kind: str, bits: int, group: int | None, k: int
) -> Tensor:
    """What the codes stand for, in the scale's dtype; of a codebook those of nf4."""
    if kind in LEVELS:
        return codebook.dequantize(codes, scale.t(), LEVELS[kind], group)
    if kind == "planes":
        return bcq.dequantize(codes, scale.permute(2, 0, 1), None, group)
    if kind == "sparse12":
        return sparse.dequantize(codes, scale.t(), k, group)
    return grid.dequantize(codes, scale.t(), zero.t() if isinstance(zero, Tensor) else zero, bits, group)


def pack_of(codes: Tensor, kind: str, bits: int) -> Tensor:
    if kind == "sparse12":
        return pack_pairs(codes)
    return pack(codes, bits, planes=kind == "planes", codebook=kind == "codebook")


class Weight:
    """Random codes of one kind, what torch makes of them, and the op that multiplies them."""

    def __init__(
        self,
        kind: str,
        bits: int,
        group: int | None,
        n: int,
        k: int,
        zeros: bool | int,
        dtype: torch.dtype,
        device: str = "cuda",
    ) -> None:
        """zeros: of each group, True; none, False; or one for all."""
        self.device = device
        g = torch.Generator(device).manual_seed(n * 7 + k + bits)
        more = {"generator": g, "device": device}
        groups = 1 if group is None else -(-k // group)
        columns = -(-k // 2) if kind == "sparse12" else k
        codes = torch.randint(0, 256 if kind == "sparse12" else 1 << bits, (n, columns), dtype=torch.uint8, **more)
        if kind == "float8":
            codes -= (codes % 128 == 127).to(torch.uint8)  # no NaN
        self.packed = pack_of(codes, kind, bits)
        scale = torch.rand((groups, bits, n) if kind == "planes" else (groups, n), **more)
        self.scale = ((scale + 0.1) / (1 << bits)).to(dtype)
        self.zero: Tensor | int | None = None if zeros is False else zeros
        if zeros is True:
            self.zero = torch.randint(0, 1 << bits, (groups, n), dtype=torch.uint8, **more)
        self.levels = codebook.stored_as(LEVELS[kind])[2] if kind in LEVELS else None
        self.kind, self.bits, self.group, self.n, self.k, self.dtype = kind, bits, group, n, k, dtype
        self.rounded = by_torch(codes, self.scale, self.zero, kind, bits, group, k)
        self.exact = by_torch(codes, self.scale.float(), self.zero, kind, bits, group, k).double()
        self.bias = torch.randn(n, **more).to(dtype)

    def multiply(self, x: Tensor, **more) -> Tensor:
        more = {"bias": self.bias, "group": self.group} | more
        if self.kind == "planes":
            return bcq_linear(x, self.packed, self.scale, **more)
        if self.kind == "sparse12":
            return sparse12_linear(x, self.packed, self.scale, **more)
        if self.kind in LEVELS:
            return codebook_linear(x, self.packed, self.scale, LEVELS[self.kind], **more)
        return woq_linear(x, self.packed, self.scale, self.zero, bits=self.bits, **more)

    def dequantized(self) -> Tensor | None:
        """By the kernel."""
        stored = (self.packed, self.scale, *split_zero(self.zero))
        return _C.lowbit_dequantize(*stored, self.kind, self.bits, self.group, self.levels, None, self.k)

    def tokens(self, m: int, seed: int = 0) -> Tensor:
        return torch.randn(m, self.k, generator=torch.Generator(self.device).manual_seed(seed), device=self.device).to(
            self.dtype
        )

    def check(self, x: Tensor, **more) -> None:
        """At most twice the error that torch's linear makes with the weight in the same dtype, on many such tokens."""
        w = self.rounded
        many = torch.cat([x, self.tokens(64, seed=1)])
        own = (linear(many, w, self.bias).double() - linear(many.double(), self.exact, self.bias.double())).abs().max()
        got = self.multiply(x, **more)
        assert got.shape == (*x.shape[:-1], self.n)
        assert got.dtype == self.dtype
        assert (got.double() - linear(x.double(), self.exact, self.bias.double())).abs().max() <= 2 * own


def many_tiles(engine: str) -> dict[tuple[int, int, int], tuple[int, int, int]]:
    """The smallest M, N and K of some for each tile of gemm_many or gemm_split (tokens, channels, blocks of K)."""
    tokens = (90, 112, 128, 144, 150, 176, 192, 208, 224, 256, 288, 300, 333, 384)
    shapes = itertools.product(tokens, (208, 4352, 8704, 12800, 16896, 28672), (192, 320))
    found: dict[tuple[int, int, int], tuple[int, int, int]] = {}
    for m, n, k in sorted(shapes, key=lambda shape: shape[0] * shape[1] * shape[2]):
        chosen = _C.lowbit_select("uniform", 4, m, n, k, 64, False, engine, 90, 132, 232448)
        found.setdefault(tuple(chosen["tile"]), (m, n, k))
    return found


def check_epilogues(m: int, n: int, k: int, dtype: torch.dtype, engine: str, device: str = "cuda") -> None:
    """Of a weight of 4 bits in groups of 64: activations, bias, residual, int8 tokens, int8 outputs, gates, an odd N."""
    weight = Weight("uniform", 4, 64, n, k, False, dtype, device)
    x, residual = weight.tokens(m), torch.randn(m, n + 16, device=device).to(dtype)[:, 3 : 3 + n]
    exact = x.double() @ weight.exact.t()
    step = torch.finfo(dtype).eps
    scale = (torch.rand(m, device=device) + 0.5) / 64  # so that outputs are no larger than the bias lets be seen
    for activation, function in ((None, lambda y: y), ("relu", torch.relu), ("gelu", gelu),
                                 ("silu", torch.nn.functional.silu)):  # fmt: skip
        for bias in (None, weight.bias):
            for added in (None, residual):
                got = weight.multiply(x, activation=activation, bias=bias, residual=added, engine=engine).double()
                want = function(exact + (0 if bias is None else bias.double()))
                want += 0 if added is None else added.double()
                assert ((got - want).abs() <= 4 * step * (want.abs() + exact.abs().amax() / 8)).all(), (
                    activation,
                    bias,
                )
    numbers = torch.randint(-128, 128, (m, k), device=device, dtype=torch.int8)
    got = weight.multiply(numbers, x_scale=scale, engine=engine).double()
    products = linear(numbers.double() * scale.double().unsqueeze(1), weight.exact)
    want = products + weight.bias.double()
    assert ((got - want).abs() <= 4 * step * (want.abs() + products.abs().amax() / 8)).all()
    plain = weight.multiply(x, activation="relu", engine=engine)
    out_scale = float(plain.float().amax()) / 100
    got = weight.multiply(x, activation="relu", out_scale=out_scale, engine=engine)
    assert got.dtype == torch.int8
    assert (got.int() - octofuse.quantize_per_tensor(plain, out_scale).int()).abs().max() <= 1
    gated = weight.multiply(x, activation="silu", gated=True, engine=engine)
    both = weight.multiply(x, engine=engine)
    assert torch.equal(gated, octofuse.gated_activation(both, "silu"))
    odd = Weight("uniform", 4, None, n - 5, k, False, dtype, device)
    x = odd.tokens(m)
    products = linear(x.double(), odd.exact)
    want = products + odd.bias.double()
    got = odd.multiply(x, engine=engine).double()
    assert ((got - want).abs() <= 4 * step * (want.abs() + products.abs().amax() / 8)).all()


class IntegerWeight:
    """Random codes of a weight that is its rows' scales times integers of 8 bits; and these integers."""

    def __init__(
        self, bits: int, group: int | None, n: int, k: int, dtype: torch.dtype, *, levels: bool, device: str = "cuda"
    ) -> None:
        """levels: two of them, for each group of columns; else a row is one group."""
        more = {"generator": torch.Generator(device).manual_seed(n * 5 + k + bits), "device": device}
        self.codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, **more)
        self.packed = torch.cat([pack(part, bits) for part in row_parts(self.codes)])
        self.scale = ((torch.rand(1, n, **more) + 0.1) / (100 if levels else 10)).to(dtype)
        self.bits, self.group, self.n, self.k, self.group_scale = bits, group, n, k, None
        self.integers = (self.codes.int() - (1 << bits - 1)).to(torch.int8)
        if levels:
            groups = 1 if group is None else -(-k // group)
            step = torch.randint(1, 17, (groups, n), **more)
            zero = torch.randint(0, 16, (groups, n), **more)
            zero = torch.minimum(torch.maximum(zero, 15 - 127 // step), 128 // step).clamp(0, 15)
            self.group_scale = (step + 256 * zero).to(torch.int16)
            two_level.check_levels(self.group_scale)
            self.integers = two_level.integers(self.codes, self.group_scale.t(), group)
        self.bias = torch.randn(n, **more).to(dtype)

    def tokens(self, m: int) -> tuple[Tensor, Tensor]:
        more = {"generator": torch.Generator(self.codes.device).manual_seed(m), "device": self.codes.device}
        return torch.randint(-128, 128, (m, self.k), dtype=torch.int8, **more), torch.rand(m, 1, **more) / 100

    def multiply(self, x: Tensor, x_scale: Tensor | float, **more) -> Tensor:
        more = {"bias": self.bias, "x_scale": x_scale} | more
        if self.group_scale is not None:
            return two_level_linear(x, self.packed, self.scale, self.group_scale, group=self.group, **more)
        zero = 1 << self.bits - 1
        return woq_linear(x, self.packed, self.scale, zero, bits=self.bits, group=self.group, **more)

    def by_int8(self, x: Tensor, x_scale: Tensor | float, **more) -> Tensor:
        """What it has to be, bit by bit: the int8 linear with the integers as its weight."""
        more = {"bias": self.bias, "out_dtype": torch.int8 if "out_scale" in more else self.scale.dtype} | more
        return octofuse.linear(x, self.integers, x_scale, self.scale.float().view(-1), **more)


def check_captured(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Captured in a graph, and replayed, it gives what it gives at once, which is returned."""
    want = call(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call(x)
    for _ in range(5):
        got.zero_()
        graph.replay()
        assert torch.equal(got, want)
    return want


def layer_of(name: str, n: int, k: int, dtype: torch.dtype, device: str) -> tuple[PackedLinear, nn.Linear]:
    torch.manual_seed(n + k)
    plain = nn.Linear(k, n).to(device, dtype).requires_grad_(False)
    scheme = scheme_named(name)
    x = torch.randn(64, k, device=device)
    found = quantised_layer(plain, scheme, moments=x.t() @ x if scheme.needs_calibration else None)
    assert isinstance(found, PackedLinear)
    return found, plain


# ---- models ----


def small_gpt2(n_positions: int = 32) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "n_positions": n_positions, "n_embd": 32, "n_layer": 2, "n_head": 4}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).eval().requires_grad_(False)


def ids(batch: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(0, 97, (batch, length), generator=torch.Generator().manual_seed(1))


def attend_call(
    qkv: torch.Tensor,
    queries: int,
    cache: tuple[torch.Tensor, ...],
    positions: torch.Tensor | None,
    scratch: tuple[torch.Tensor, torch.Tensor],
    scale: Any = None,
    **given: Any,
) -> AttendCall:
    """qkv [M, (H + 2 * P) * D] and a cache [B, P, C, D] of keys, values and, in 8 bits, their scales."""
    pairs, size = cache[0].shape[1], cache[0].shape[3]
    q, k, v = (t.unflatten(1, (-1, size)) for t in qkv.split([queries * size, pairs * size, pairs * size], 1))
    usual = {
        "key_scales": None, "value_scales": None, "fixed_scales": None, "rotary": None, "query_norm": None,
        "key_norm": None, "eps": 1e-6, "scaling": size**-0.5, "window": 0, "softcap": 0.0, "starts": None,
    }  # fmt: skip
    named = dict(zip(("keys", "values", "key_scales", "value_scales"), cache, strict=False))
    partials, arrivals = scratch
    return AttendCall(
        q=q, k=k, v=v, **usual | named | given, positions=positions, partials=partials, arrivals=arrivals,
        out_scale=scale,
    )  # fmt: skip


def by_transformers(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    """Greedy, one token at a time over the whole sequence, without a cache."""
    tokens = list(prompt)
    device = model.get_input_embeddings().weight.device  # type: ignore[operator]
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens], device=device)).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


# ---- the command line ----


def command(*words: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `octofuse` with these words."""
    from typer.testing import CliRunner

    from octofuse.cli import app

    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.stdout, result.stderr
