"""Small calls of every kernel, for compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/sanitizer_cases.py

At least 100 launches over the chosen engines, all outputs and the quantisers, each compared with the CPU; prints their
number. Outputs start as copies from the host: initcheck does not see what TMA writes, and would call the copy back a read
of uninitialised memory. Wrong or missing outputs are found by the comparison.
"""

from __future__ import annotations

import argparse
import sys

import torch

import octofuse
from helpers import FLOATS, attend_call, operands, served
from inbox import Alone, on_gpu, rows_call
from octofuse import _C, layouts, reference
from octofuse.layouts import COL32, LAYOUTS, ROW, from_layout, interleaved, to_layout
from octofuse.ops import decode
from octofuse.ops.cache import new_codes
from sanitizer_lowbit import (
    integer_cases,
    lowbit_block_cases,
    lowbit_cases,
    many_token_cases,
    several_cases,
    shared_tile_cases,
)

# Aligned and ragged, one row and several tiles, K padded inside, a K that wraps every ring of stages, in two parts too.
SHAPES = ((1, 16, 32), (70, 264, 144), (33, 100, 77), (130, 17, 5), (65, 128, 256), (17, 130, 6200))


def canary(m: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((m, n), 7, dtype=dtype).cuda()


def linear_cases(chosen: list[str]) -> int:
    count = 0
    for m, n, k in SHAPES:
        p, host = operands(m, n, k, "cuda"), operands(m, n, k)
        arguments = (p.x, p.w, p.x_scale, p.w_scale, p.bias)
        host_arguments = (host.x, host.w, host.x_scale, host.w_scale, host.bias)
        acc = reference.accumulate(host.x, host.w)
        for engine in chosen:
            out = canary(m, n, torch.int32)
            got = served(lambda e, p=p, o=out: octofuse.i8i32_matmul(p.x, p.w, engine=e, out=o), engine)
            assert got is None or torch.equal(got.cpu(), acc), engine
            count += got is not None
            for dtype in FLOATS:
                full = {"activation": "relu", "out_dtype": dtype}
                out = canary(m, n, dtype)
                got = served(
                    lambda e, a=arguments, r=p.residual, f=full, o=out: octofuse.i8f16_linear(
                        *a, residual=r, engine=e, out=o, **f
                    ),
                    engine,
                )
                if got is not None:
                    want = reference.linear(*host_arguments, residual=host.residual, **full)
                    assert torch.equal(got.cpu(), want), engine
                    count += 1
            for activation in ("gelu", "gelu_tanh", "silu"):
                out = canary(m, n, torch.int8)
                got = served(
                    lambda e, a=arguments, t=activation, o=out: octofuse.i8i8_linear(
                        *a, out_scale=0.05, activation=t, engine=e, out=o
                    ),
                    engine,
                )
                count += got is not None
    return count


def many_tile_cases(chosen: list[str]) -> int:
    """A persistent kernel's block works through several tiles: 14 x 14 of them or more, more than any GPU has SMs.

    Rows of outputs whose length is a multiple of 8 leave by the copy engine.
    """
    names = [name for name in chosen if name.startswith("wgmma/") and ("_pingpong" in name or "_cooperative" in name)]
    wide = [name for name in names if "x192_" in name or "x256_" in name]
    narrow = [name for name in names if name not in wide]
    return _many_tiles(narrow, 1704) + _many_tiles(narrow[:1], 1700) + _many_tiles(wide, 3400)


def _many_tiles(names: list[str], n: int) -> int:
    m = 1700
    p, host = operands(m, n, 144, "cuda"), operands(m, n, 144)
    want = reference.linear(host.x, host.w, host.x_scale, host.w_scale, host.bias)
    for engine in names:
        out = canary(m, n, torch.float16)
        got = served(
            lambda e, o=out: octofuse.i8f16_linear(p.x, p.w, p.x_scale, p.w_scale, p.bias, engine=e, out=o), engine
        )
        assert got is None or torch.equal(got.cpu(), want), engine
    return len(names)


def float8_cases(chosen: list[str]) -> int:
    """Every float8 kernel, with and without scales of blocks, and quantisation to float8; a persistent one's many tiles."""
    count = 0
    e4m3 = torch.float8_e4m3fn
    for m, n, k in (*SHAPES, (1700, 1104, 272), (1700, 3432, 272)):
        x, w, bias = torch.randn(m, k), torch.randn(n, k), torch.randn(n)
        qw, sw = octofuse.quantize_per_token(w, e4m3)
        for engine in [name for name in chosen if name.startswith(("wgmma_float8", "wgmma_e5m2"))]:
            if m > 1000 and "pingpong" not in engine and "cooperative" not in engine:
                continue
            if m > 1000 and (n > 2000) != ("x192_" in engine or "x256_" in engine):
                continue
            fast = engine.startswith("wgmma_float8_fast")
            dtype = torch.float8_e5m2 if "e5m2" in engine else e4m3
            q, s = octofuse.quantize_per_token(x.cuda(), dtype)
            kinds: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = [(q, s, sw)]
            if not fast and (n > 128 or k > 128):
                blocks = torch.rand(-(-n // 128), -(-k // 128)) + 0.5
                kinds.append((*octofuse.quantize_per_block(x.cuda(), dtype), blocks))
            for q, s, own in kinds:
                out = canary(m, n, torch.float16)
                more = {"activation": "relu", "fast_accumulate": fast}
                got = octofuse.linear(q, qw.cuda(), s, own.cuda(), bias.cuda(), engine=engine, out=out, **more)
                want = octofuse.linear(q.cpu(), qw, s.cpu(), own, bias, **more)
                assert (got.cpu().float() - want).abs().max() <= 0.02 * want.abs().max(), (engine, m, n, k)
                count += 1
        octofuse.linear(q, qw.cuda(), s, own.cuda(), out_dtype=e4m3, out_scale=0.1)
        gated = torch.cat([x, x], -1).half().cuda()
        for block in (False, True):
            octofuse.rms_norm_quantize(x.half().cuda(), dtype=e4m3, block=block)
            octofuse.gated_activation_quantize(gated, dtype=e4m3, block=block)
            count += 2
    return count


def row_cases() -> int:
    count = 0
    for shape in ((1, 8), (5, 100), (33, 768), (3, 4096), (2, 20000)):
        for dtype in FLOATS:
            x, residual, weight = (torch.randn(s).to(dtype) for s in (shape, shape, shape[-1:]))
            q, scale, h = octofuse.add_layer_norm_quantize(x.cuda(), residual.cuda(), weight.cuda())
            want = reference.quantize_per_token(reference.norm(h.cpu(), weight, None, 1e-5, center=True))
            assert torch.equal(q.cpu(), want[0])
            assert torch.equal(scale.cpu(), want[1])
            octofuse.rms_norm_quantize(x.cuda(), weight.cuda(), scale=0.02)
            octofuse.gated_activation_quantize(torch.cat([x, residual], -1).cuda())
            octofuse.activate(x.cuda(), "gelu")
            order = torch.randperm(shape[-1]).int()
            octofuse.rms_norm(x.cuda(), weight.cuda(), order=order.cuda())
            octofuse.gated_activation(torch.cat([x, residual], -1).cuda(), order=order.cuda())
            assert torch.equal(octofuse.reorder(x.cuda(), order.cuda()).cpu(), x[..., order.long()])
            count += 7
    return count


# Norms of a block of 256 threads, of 512, and of clusters of four and of eight.
GATHERED = ((1, (16, 16, 32)), (3, (96, 112, 96)), (2, (1024, 1024, 2048)), (40, (64, 64, 64)), (2, (2048, 1024, 2048)),
            (1, (4096, 96, 4096)))  # fmt: skip


def gathered_cases() -> int:
    """Rows that ranks have parts of, as one of three sees them."""
    count = 0
    for rows, sizes in GATHERED:
        parts = [torch.randn(rows, size).half() for size in sizes]
        alone, weight = Alone(1, 3), torch.rand(sum(sizes))
        affine = {"weight": weight, "bias": weight}
        for op, more in (("copy", {}), ("rms_norm", {"weight": weight}), ("layer_norm", affine), ("layer_norm", {})):
            call = on_gpu(rows_call(parts[1], op, quantize=True, **more))
            alone.expect(parts)
            got = alone.inboxes.rows(call, sizes, clusters=op == "copy" or len(more) > 0)
            want = _C.rows(on_gpu(call._replace(x=torch.cat(parts, 1))))
            assert torch.equal(got[0].cpu(), want[0].cpu())
            count += 1
        alone.expect([part[:, : part.shape[1] // 2].contiguous() for part in parts])
        own = on_gpu(rows_call(parts[1], "gated_activation", activation="silu"))
        alone.inboxes.rows(own, tuple(size // 2 for size in sizes))
        alone.expect(parts)
        assert torch.equal(alone.inboxes.gather(parts[1].cuda(), sizes).cpu(), torch.cat(parts, 1))
        whole = [torch.randn(rows, 96).half() for _ in range(3)]
        alone.expect(whole)
        added = on_gpu(rows_call(whole[1], "rms_norm", quantize=True))
        alone.inboxes.rows(added, (96,) * 3, adds=True)
        count += 3
    sizes = (2048, 2040, 1032)
    parts, alone = [torch.randn(330, size).half() for size in sizes], Alone(1, 3)
    alone.expect_bulk(parts)
    assert torch.equal(alone.inboxes.gather(parts[1].cuda(), sizes).cpu(), torch.cat(parts, 1))
    return count + 2


def layout_cases() -> int:
    """Conversions of every kind of run, and the COL32 products, ragged ones too."""
    count = 0
    for rows, cols in ((1, 1), (33, 100), (64, 96), (48, 67), (130, 77)):
        for dtype in (torch.int8, torch.int32, torch.float16):
            matrix = torch.randint(-128, 128, (rows, cols)).to(dtype)
            for layout in (*LAYOUTS, *(interleaved(2**i) for i in (1, 2, 3, 4, 6))):
                laid_out = to_layout(matrix.cuda(), layout)
                assert torch.equal(laid_out.data.cpu(), to_layout(matrix, layout).data), layout.name
                assert torch.equal(from_layout(laid_out).cpu(), matrix), layout.name
                count += 2
        half = torch.randn(rows, cols).half()
        q, scales = layouts.quantize(half.cuda())
        assert torch.equal(q.data.cpu(), layouts.quantize(half)[0].data)
        layouts.dequantize(q, scales)
        p, host = operands(rows, 75, cols, "cuda"), operands(rows, 75, cols)
        x, w = to_layout(p.x, COL32), to_layout(p.w, COL32)
        want = reference.linear(host.x, host.w, host.x_scale, host.w_scale, host.bias)
        for out_layout in (COL32, ROW):
            y = layouts.linear(x, w, p.x_scale, p.w_scale, p.bias, out_layout=out_layout)
            assert torch.equal(from_layout(y).cpu(), want)
        layouts.matmul(x, w, alpha=0.01)
        count += 5
    return count


def decode_cases() -> int:
    """Linears that quantise for themselves, and a step of decoding; split attention too."""
    count = 0
    for m, n, k in ((1, 769, 768), (2, 96, 1600), (3, 75, 112), (4, 640, 256), (1, 64, 6400)):
        host = operands(m, n, k)
        for dtype in (torch.float16, torch.bfloat16):
            x, weight = torch.randn(m, k).to(dtype), torch.randn(k).to(dtype)
            for norm in ({}, {"norm": "layer_norm", "norm_weight": weight, "norm_bias": weight}):
                for scale in (None, 0.03):
                    residual = host.residual.to(dtype)
                    want = octofuse.quantized_linear(
                        x, host.w, host.w_scale, host.bias, residual=residual, x_scale=scale, **norm
                    )
                    on_gpu = {key: v.cuda() if isinstance(v, torch.Tensor) else v for key, v in norm.items()}
                    got = octofuse.quantized_linear(
                        x.cuda(), host.w.cuda(), host.w_scale.cuda(), host.bias.cuda(), residual=residual.cuda(),
                        x_scale=scale, **on_gpu,
                    )  # fmt: skip
                    assert torch.equal(got.cpu(), want), (m, n, k, norm.get("norm"), scale)
                    count += 1
    positions = torch.tensor([0, 130, 299])
    for dtype, queries, pairs, size, kind in (
        (torch.float16, 3, 3, 64, None), (torch.bfloat16, 4, 2, 40, None), (torch.float16, 2, 2, 128, "int8"),
        (torch.bfloat16, 9, 1, 96, "fp8"), (torch.float16, 4, 1, 256, "int8"),
    ):  # fmt: skip
        # Copied from the host: initcheck, which watches this library's kernels alone, sees no zeros that torch's write.
        codes, scales = new_codes((2, 3, pairs, 300, size), kind, torch.zeros(1, dtype=dtype))
        cache = (*codes.cuda(), *(() if scales is None else scales.cuda()))
        qkv = torch.randn(3, (queries + 2 * pairs) * size).to(dtype).cuda()
        partials, counters = decode.attend_scratch(3, queries, pairs, size, 300, qkv.device)
        scratch = (partials, torch.zeros(counters.numel(), dtype=torch.int32).cuda())
        extra = {"rotary": torch.randn(300, 16).cuda(), "query_norm": torch.ones(size).cuda(), "window": 140}
        prompts = torch.randn(3 * 7, (queries + 2 * pairs) * size).to(dtype).cuda()
        decode.append(attend_call(prompts, queries, cache, None, scratch, **extra))
        out = decode.attend(attend_call(qkv, queries, cache, positions.cuda(), scratch, **extra))
        q = decode.attend(attend_call(qkv, queries, cache, positions.cuda(), scratch, 0.02, **extra))
        assert torch.equal(q.cpu(), reference.quantize(out.cpu(), 0.02))
        stored = attend_call(qkv, queries, cache, positions.cuda(), scratch, **extra)._replace(k=None, v=None)
        decode.attend(stored._replace(starts=torch.tensor([0, 17, 280]).cuda()))
        heads = queries
        table = torch.randn(304, heads * size).to(dtype)  # logits then come back in one piece, by no kernel of torch
        x = decode.embed(positions.cuda(), positions.cuda(), table.cuda(), table.cuda())
        assert torch.equal(x.cpu(), table[positions] + table[positions])
        ids, counts, steps = (torch.zeros(3, dtype=torch.int64).cuda() for _ in range(3))
        decode.argmax(x, ids, torch.zeros(3, 4, dtype=torch.int64).cuda(), counts, steps, True)
        assert torch.equal(ids.cpu(), x.cpu().float().argmax(-1))
        if decode.takes_logits(x.device, dtype, x.shape[1]):
            got, want = decode.logits(x, table.cuda()).cpu().float(), x.cpu().float() @ table.float().t()
            assert (got - want).abs().max() <= 0.02 * want.abs().max()
        count += 5
    return count


def many_sequences_cases() -> int:
    """So many that a block of attention takes several splits of a head in turn."""
    batch, capacity = 40, 600
    positions = (torch.arange(batch) * 149 % capacity).cuda()
    for queries, pairs, size, kind in ((8, 8, 64, None), (16, 8, 128, "int8"), (8, 4, 256, "fp8")):
        codes, scales = new_codes((2, batch, pairs, capacity, size), kind, torch.zeros(1).half())
        cache = (*codes.cuda(), *(() if scales is None else (scales + 1).cuda()))
        qkv = torch.randn(batch, (queries + 2 * pairs) * size).half().cuda()
        partials, counters = decode.attend_scratch(batch, queries, pairs, size, capacity, qkv.device)
        scratch = (partials, torch.zeros(counters.numel(), dtype=torch.int32).cuda())
        call = attend_call(qkv, queries, cache, positions, scratch)
        first, again = decode.attend(call).cpu(), decode.attend(call).cpu()
        assert torch.equal(first, again)
    return 6


def outlier_cases() -> int:
    """LLM.int8(): digits, with K in one piece and in parts; gathered columns, more than are gathered; ragged sizes."""
    return _outlier_cases(
        (1, 64, 128, 3),
        (2, 70, 1000, 20),
        (3, 70, 97, 9),
        (20, 200, 640, 200),
        (5, 33, 264, 0),
        (9, 300, 2304, 12),
        (31, 72, 9000, 40),
        (1, 1030, 1024, 9),
        (50, 65, 2056, 300),
        (130, 200, 1000, 7),
    )


def outlier_tile_cases() -> int:
    """Its kernels with larger tiles, which stay for several, too."""
    return _outlier_cases((600, 4096, 384, 70), (600, 4096, 640, 270), (900, 4096, 256, 60))


def _outlier_cases(*cases: tuple[int, int, int, int]) -> int:
    count = 0
    for m, n, k, columns in cases:
        x = torch.randn(m, k).clamp(-5, 5)
        x[:, torch.randperm(k)[:columns]] *= 20
        w, scale = torch.randint(-127, 128, (n, k), dtype=torch.int8), torch.rand(n) / 100
        for dtype in (torch.float16, torch.bfloat16):
            got = octofuse.llm_int8_linear(x.to(dtype).cuda(), w.cuda(), scale.cuda()).cpu()
            want = octofuse.llm_int8_linear(x.to(dtype), w, scale)
            size = want.double().abs().max()
            assert (got.double() - want.double()).abs().max() <= 4 * torch.finfo(dtype).eps * size, (m, n, k)
            count += 1
    return count


def quantize_cases() -> int:
    count = 0
    for shape in ((1, 1), (5, 100), (130, 768)):
        for dtype in FLOATS:
            x = torch.randn(shape).to(dtype)
            q, scale = octofuse.quantize_per_token(x.cuda())
            assert torch.equal(q.cpu(), reference.quantize_per_token(x)[0])
            fixed = octofuse.quantize_per_tensor(x.cuda(), 0.02)
            assert torch.equal(fixed.cpu(), reference.quantize(x, 0.02))
            octofuse.dequantize(q, scale, out_dtype=dtype)
            octofuse.dequantize(torch.ones(shape, dtype=torch.int32).cuda(), scale, out_dtype=dtype)
            count += 4
    return count


# Parts, which may run side by side; and what is done by every engine.
PARTS = {
    "linear": (linear_cases,),
    "tiles": (many_tile_cases, float8_cases),
    "lowbit": (lowbit_cases,),
    "lowbit_blocks": (lowbit_block_cases, many_token_cases, several_cases),
    "shared_tiles": (shared_tile_cases,),
    "integers": (integer_cases,),
    "others": (
        quantize_cases,
        row_cases,
        layout_cases,
        decode_cases,
        many_sequences_cases,
        outlier_cases,
        gathered_cases,
    ),
    "outlier_tiles": (outlier_tile_cases,),
}
LEAST, LEAST_OF = 18, {"outlier_tiles": 6}  # cases of a part
OF_ENGINES = (linear_cases, many_tile_cases, float8_cases)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", nargs="+", default=["all"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    given = parser.parse_args()
    chosen = [
        name for name in octofuse.engines("cuda") if given.engines == ["all"] or name.split("/")[0] in given.engines
    ]
    counts = [case(chosen) if case in OF_ENGINES else case() for part in given.parts for case in PARTS[part]]
    torch.cuda.synchronize()
    print(f"sanitizer cases: {sum(counts)}")
    return 0 if sum(counts) >= sum(LEAST_OF.get(part, LEAST) for part in given.parts) else 1


if __name__ == "__main__":
    sys.exit(main())
