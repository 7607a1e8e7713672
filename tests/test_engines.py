"""Every kernel against the textbook one, bit for bit: tile edges, many tiles a block, every kind of epilogue."""

from __future__ import annotations

import re

import pytest
import torch

import octofuse
from helpers import engines, operands, served

pytestmark = pytest.mark.gpu

# One token; ragged in everything; edges of tiles; whole tiles; a K that wraps every ring, divided by blocks too; more
# tiles than any GPU has SMs, ragged and with a long K.
SHAPES = [
    (1, 64, 64),
    (31, 130, 1040),
    (100, 261, 528),
    (129, 257, 48),
    (256, 512, 384),
    (33, 200, 9168),
    (257, 304, 2064),
    (1700, 3432, 272),
]
EPILOGUES = {
    "fp16": {},
    "bf16 silu, zero point": {"out_dtype": torch.bfloat16, "activation": "silu", "zero": True},
    "fp32 relu residual": {"out_dtype": torch.float32, "activation": "relu", "residual": True},
    "fp16 residual": {"residual": True},
    "int8 gelu_tanh": {"out_dtype": torch.int8, "activation": "gelu_tanh"},
    "int8 residual": {"out_dtype": torch.int8, "residual": True},
    "int32": {"out_dtype": torch.int32},
}


@pytest.mark.parametrize("engine", [name for name in engines("cuda") if name != "naive"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_same_bits_as_the_textbook_kernel(engine: str, shape: tuple[int, int, int], epilogue: str) -> None:
    m, n, k = shape
    found = re.match(r"skinny/(\d+)x", engine)
    if found is not None:  # as many tokens as it takes, or one less
        m = max(1, min(m, int(found[1])) - m % 2)
    p = operands(m, n, k, "cuda")
    options = dict(EPILOGUES[epilogue])
    dtype = options.pop("out_dtype", torch.float16)
    if options.pop("residual", False):
        options["residual"] = p.residual
    if options.pop("zero", False):
        options["x_zero_point"] = torch.arange(m, dtype=torch.int32, device="cuda") % 19 - 9
        options["w_sum"] = octofuse.weight_sums(p.w)

    def call(name: str) -> torch.Tensor:
        if dtype == torch.int32:
            return octofuse.i8i32_matmul(p.x, p.w, engine=name)
        if dtype == torch.int8:
            return octofuse.i8i8_linear(p.x, p.w, p.x_scale, p.w_scale, p.bias, out_scale=0.05, engine=name, **options)
        return octofuse.i8f16_linear(p.x, p.w, p.x_scale, p.w_scale, p.bias, out_dtype=dtype, engine=name, **options)

    got = served(call, engine)
    if got is None:
        pytest.skip("the engine declines this call")
    assert torch.equal(got, call("naive"))
