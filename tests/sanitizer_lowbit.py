"""Small calls of every kernel of weights of few bits; sanitizer_cases.py runs them."""

from __future__ import annotations

import itertools

import torch

from helpers import IntegerWeight, Weight, many_tiles
from octofuse import _C
from octofuse.ops._calls import LowbitCall

LOWBIT = (("uniform", 4, False), ("uniform", 3, True), ("uniform", 8, False), ("planes", 2, False),
          ("sparse12", 7, False), ("codebook", 4, False), ("float8", 8, False))  # fmt: skip
INTEGERS = ((4, None, False), (4, 128, True), (4, 32, True), (3, None, False), (8, None, False))


def lowbit_cases() -> int:
    """Weights of few bits: every kernel, with and without neighbours that are missing."""
    return _lowbit_cases(((33, 100), (40, 104), (144, 2176), (3216, 128)), LOWBIT, (None, 32, 128))


def lowbit_block_cases() -> int:
    """The same, each way to cut N and K into blocks, and stages of half a k-block."""
    shapes = ((4256, 512), (6144, 128), (8464, 128), (12800, 128))
    count = _lowbit_cases(shapes, (LOWBIT[0], LOWBIT[3], LOWBIT[5]), (128,))
    tiles = ((1024, 8192, 40, "gemm"), (1024, 8192, 50, "gemm"), (1024, 8192, 90, "gemm"), (1024, 8192, 100, "gemm"))
    return count + _tile_cases(*tiles, kinds=(*LOWBIT[:3], LOWBIT[5]))


def many_token_cases() -> int:
    """Each tile of gemm_many and gemm_split, and several for a block."""
    return _tile_cases(
        *((n, k, m, engine) for engine in ("gemm_many", "gemm_split") for m, n, k in many_tiles(engine).values()),
        (10240, 256, 777, "gemm_many"),
        (4352, 512, 1111, "gemm_many"),
        (4352, 512, 440, "gemm_split"),
    )


def shared_tile_cases() -> int:
    """Tiles that clusters share: of 4 bits 176 x 128 and 112 x 192 (tokens, channels), by blocks that divide K 176 x 128
    and 128 x 192; of int8 tokens 192 x 128. And those of gemm whose k-blocks all blocks share."""
    count = _tile_cases(
        (17024, 1536, 176, "gemm_many"),
        (11392, 2048, 333, "gemm_many"),
        (8576, 2048, 176, "gemm_split"),
        (8576, 4224, 240, "gemm_split"),
        (17024, 1152, 10, "gemm"),
        (17024, 1152, 20, "gemm"),
        (17024, 1152, 40, "gemm"),
        (17024, 1152, 50, "gemm"),
    )
    count += _integer_cases(((4, None, False), (4, 128, True)), ((17024, 3200),), (10,))
    return count + _integer_cases(INTEGERS, ((17152, 2048),), (150,))


def _tile_cases(
    *shapes: tuple[int, int, int, str], kinds: tuple[tuple[str, int, bool], ...] = (LOWBIT[0], LOWBIT[5])
) -> int:
    count = 0
    for (kind, bits, zeros), (n, k, m, engine) in itertools.product(kinds, shapes):
        weight = Weight(kind, bits, 128, n, k, zeros, torch.float16, device="cpu")
        zero = weight.zero.cuda() if isinstance(weight.zero, torch.Tensor) else None
        x = weight.tokens(m)
        packed, scale, bias, residual = (
            t.cuda() for t in (weight.packed, weight.scale, weight.bias, torch.ones(m, n).half())
        )
        call = LowbitCall(
            x.cuda(), None, packed, scale, zero, None, kind, bits, 128, None, None, None, 0.0, bias, None, None, None,
            engine, True, levels=weight.levels,
        )  # fmt: skip
        want = x.double() @ weight.exact.t() + weight.bias.double()
        assert (_C.lowbit_linear(call).cpu().double() - want).abs().max() <= 2e-3 * want.abs().max(), (kind, n, m)
        _C.lowbit_linear(call._replace(activation="relu", residual=residual))
        _C.lowbit_linear(call._replace(out_scale=torch.ones(1).cuda()))
        count += 3
    return count


def several_cases() -> int:
    """3 and 7 tokens by gemv_several: several units for each pair of blocks, and blocks that divide nothing; 3 beside a
    codebook."""
    count = 0
    cases = (
        *itertools.product((("uniform", 4, 8480, 2176), ("uniform", 3, 4240, 512), ("uniform", 8, 2144, 5120)), (3, 7)),
        (("codebook", 4, 4240, 3200), 3),
    )
    for (kind, bits, n, k), m in cases:
        weight = Weight(kind, bits, 128, n, k, bits == 3, torch.float16, device="cpu")
        x = weight.tokens(m)
        packed, scale, bias = (t.cuda() for t in (weight.packed, weight.scale, weight.bias))
        zero = weight.zero.cuda() if isinstance(weight.zero, torch.Tensor) else None
        call = LowbitCall(
            x.cuda(), None, packed, scale, zero, None, kind, bits, 128, None, None, None, 0.0, bias, None, None, None,
            "gemv_int8", True, levels=weight.levels,
        )  # fmt: skip
        want = x.double() @ weight.exact.t() + weight.bias.double()
        assert (_C.lowbit_linear(call).cpu().double() - want).abs().max() <= 2e-3 * want.abs().max(), (n, k, m)
        _C.lowbit_linear(call._replace(x=x.char().cuda(), x_scale=torch.ones(m).cuda()))
        count += 2
    return count


def _lowbit_cases(
    shapes: tuple[tuple[int, int], ...], kinds: tuple[tuple[str, int, bool], ...], groups: tuple[int | None, ...]
) -> int:
    count = 0
    for (kind, bits, zeros), (n, k), group in itertools.product(kinds, shapes, groups):
        weight = Weight(kind, bits, group, n, k, zeros, torch.float16, device="cpu")
        packed, scale, bias = (t.cuda() for t in (weight.packed, weight.scale, weight.bias))
        zero = None if weight.zero is None else weight.zero.cuda()
        _C.lowbit_dequantize(packed, scale, zero, None, kind, bits, group, weight.levels, None, k)
        for m in (1, 3, 7, 20, 40, 150):
            x = weight.tokens(m)
            call = LowbitCall(
                x.cuda(), None, packed, scale, zero, None, kind, bits, group, None, None, None, 0.0, bias, None, None, None,
                "auto", True, levels=weight.levels,
            )  # fmt: skip
            got = _C.lowbit_linear(call)
            if got is None:  # shapes that no kernel for so many tokens takes
                continue
            got = got.cpu()
            want = x.double() @ weight.exact.t() + weight.bias.double()
            assert (got.double() - want).abs().max() <= 2e-3 * want.abs().max(), (kind, bits, n, k, group, m)
            count += 1
            _C.lowbit_linear(call._replace(x=x.char().cuda(), x_scale=torch.ones(m).cuda()))
            count += 1
            if m == 150 and k > 128 and group == 128:
                residual = torch.ones(m, n).half().cuda()
                more = call._replace(engine="gemm_many")
                assert (_C.lowbit_linear(more).cpu().double() - want).abs().max() <= 2e-3 * want.abs().max()
                _C.lowbit_linear(more._replace(activation="gelu_tanh", residual=residual))
                _C.lowbit_linear(more._replace(out_scale=torch.ones(1).cuda()))
                count += 3
            if m < 5:
                residual, gain = torch.ones(m, n).half().cuda(), torch.ones(k).half().cuda()
                norm = {"norm": "layer_norm", "norm_weight": gain, "norm_bias": gain, "eps": 1e-5}
                more = {"activation": "gelu_tanh", "residual": residual, "out_scale": torch.ones(1).cuda()}
                _C.lowbit_linear(call._replace(**norm))
                _C.lowbit_linear(call._replace(**norm, **more))
                if n % 2 == 0:
                    _C.lowbit_linear(call._replace(**norm, activation="silu", gated=True))
                count += 2 + (n % 2 == 0)
    return count


def integer_cases() -> int:
    """int8 tokens beside integers of few bits: every kernel, ragged sizes, epilogues; the last K is divided by blocks."""
    return _integer_cases(INTEGERS, ((48, 128), (136, 1100), (320, 4096)), (1, 3, 20, 150, 600))


def _integer_cases(
    kinds: tuple[tuple[int, int | None, bool], ...], shapes: tuple[tuple[int, int], ...], tokens: tuple[int, ...]
) -> int:
    """kinds: bits, group, and whether there are two levels."""
    count = 0
    for (bits, group, levels), (n, k) in itertools.product(kinds, shapes):
        weight = IntegerWeight(bits, group, n, k, torch.float16, levels=levels, device="cpu")
        packed, scale, bias = (t.cuda() for t in (weight.packed, weight.scale, weight.bias))
        group_scale = None if weight.group_scale is None else weight.group_scale.cuda()
        for m in tokens:
            x, x_scale = weight.tokens(m)
            residual = torch.ones(m, n).half()
            want = weight.by_int8(x, x_scale, residual=residual)
            call = LowbitCall(
                x.cuda(), x_scale.cuda(), packed, scale, None, None, "two_level" if levels else "uniform", bits, group,
                None, None, None, 0.0, bias, None, residual.cuda(), None, "auto", True, False,
                None if levels else 1 << bits - 1, None, group_scale,
            )  # fmt: skip
            for engine in ("auto", "gemm", "gemm_many"):
                assert torch.equal(_C.lowbit_linear(call._replace(engine=engine)).cpu(), want), (bits, n, k, m, engine)
                _C.lowbit_linear(call._replace(engine=engine, out_scale=torch.ones(1).cuda(), activation="silu"))
                count += 2
    return count
