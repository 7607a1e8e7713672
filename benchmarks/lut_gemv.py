"""The look-up tables of nuQmm and LUT-GEMM as a kernel of our own (lut_gemv.cu), beside which bcq_linear is timed."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

GROUP = 128
COLUMNS = 256  # K is a multiple


@functools.cache
def library() -> ctypes.CDLL | None:
    """Compiled for this GPU; None without nvcc."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    folder = tempfile.mkdtemp(prefix="octofuse-lut-")
    major, minor = torch.cuda.get_device_capability()
    target = Path(folder) / "lut_gemv.so"
    options = ["-O3", "-std=c++17", f"-arch=sm_{major}{minor}", "--shared", "-Xcompiler=-fPIC", "-o", str(target)]
    subprocess.run([nvcc, *options, str(Path(__file__).with_suffix(".cu"))], check=True)
    return ctypes.CDLL(str(target))


def lut_linear(x: Tensor, signs: Tensor, alpha: Tensor) -> Tensor:
    """x fp16 `[1, K]`, signs int32 `[q, K / 32, N]`, alpha fp16 `[K / 128, q, N]` -> fp16 `[1, N]`."""
    planes, words, n = signs.shape
    y = torch.empty(1, n, dtype=x.dtype, device=x.device)
    partial = torch.empty(words * 32 // COLUMNS, n, device=x.device)
    lut = library()
    assert lut is not None
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, signs, alpha, partial, y)]
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    error = lut.lut_gemv(*pointers, planes, n, words * 32, stream)
    if error != 0:
        raise RuntimeError(f"lut_gemv: CUDA error {error}")
    return y


def signs_of(codes: Tensor, planes: int) -> Tensor:
    """Codes `[N, K]`, bit i of plane i -> int32 `[q, K / 32, N]`."""
    bits = torch.stack([codes >> i & 1 for i in range(planes)]).long()  # [q, N, K]
    words = (bits.unflatten(-1, (-1, 32)) << torch.arange(32, device=codes.device)).sum(-1)
    return (words - (words >> 31 << 32)).int().transpose(1, 2).contiguous()


def check() -> None:
    """Against fp64."""
    generator = torch.Generator("cuda").manual_seed(0)
    for planes in range(1, 5):
        n, k = 1500, 1024
        codes = torch.randint(0, 1 << planes, (n, k), generator=generator, device="cuda")
        alpha = torch.rand(k // GROUP, planes, n, generator=generator, device="cuda").half()
        x = torch.randn(1, k, generator=generator, device="cuda").half()
        levels = torch.stack([(codes >> i & 1) * 2.0 - 1.0 for i in range(planes)]).double()
        scales = alpha.double().permute(1, 2, 0).repeat_interleave(GROUP, -1)
        want = x.double() @ (levels * scales).sum(0).t()
        got = lut_linear(x, signs_of(codes, planes), alpha)
        error = float((got.double() - want).abs().max() / want.abs().max())
        if error > 2e-3:
            raise AssertionError(f"lut_gemv: {planes} planes are wrong by {error:.3g}")
