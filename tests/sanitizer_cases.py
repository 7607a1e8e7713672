"""Small calls of every kernel, for compute-sanitizer: `compute-sanitizer --tool memcheck python tests/sanitizer_cases.py`.

At least 100 launches over all engines, outputs and quantisers, each compared with the CPU; prints their number.
"""

from __future__ import annotations

import sys

import torch
from helpers import FLOATS, engines, operands, served

import octofuse
from octofuse.testing import reference

# Aligned and ragged, one row and several tiles, K padded inside.
SHAPES = ((1, 16, 32), (70, 264, 144), (33, 100, 77), (130, 17, 5))


def linear_cases() -> int:
    count = 0
    for m, n, k in SHAPES:
        p, host = operands(m, n, k, "cuda"), operands(m, n, k)
        acc = reference.accumulate(host.x, host.w)
        for engine in engines("cuda"):
            got = served(lambda e, p=p: octofuse.i8i32_matmul(p.x, p.w, engine=e), engine)
            if got is not None:
                assert torch.equal(got.cpu(), acc), engine
                count += 1
            for out_dtype in FLOATS:
                got = served(
                    lambda e, p=p, d=out_dtype: octofuse.i8f16_linear(
                        p.x, p.w, p.x_scale, p.w_scale, p.bias, residual=p.residual, activation="relu", out_dtype=d, engine=e
                    ),
                    engine,
                )
                if got is not None:
                    want = reference.linear(
                        host.x, host.w, host.x_scale, host.w_scale, host.bias, residual=host.residual,
                        activation="relu", out_dtype=out_dtype,
                    )  # fmt: skip
                    assert torch.equal(got.cpu(), want), engine
                    count += 1
            for activation in ("gelu", "gelu_tanh", "silu"):
                got = served(
                    lambda e, p=p, a=activation: octofuse.i8i8_linear(
                        p.x, p.w, p.x_scale, p.w_scale, p.bias, out_scale=0.05, activation=a, engine=e
                    ),
                    engine,
                )
                count += got is not None
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
            count += 3
    return count


if __name__ == "__main__":
    total = linear_cases() + quantize_cases()
    torch.cuda.synchronize()
    print(f"sanitizer cases: {total}")
    sys.exit(0 if total >= 100 else 1)
