"""What this installation is made of, what it can run here, and whether it is exact."""

from __future__ import annotations

import platform
from typing import Any

import torch
from torch import Tensor

from octofuse import _C, __version__, reference
from octofuse.ops import cpu, engines, i8f16_linear, i8i32_matmul

# Remainders of every tile, odd K (padded inside), one row and many.
SHAPES = (
    (1, 1, 1),
    (1, 8, 16),
    (3, 7, 5),
    (17, 100, 255),
    (33, 256, 64),
    (64, 15, 768),
    (129, 384, 100),
    (200, 130, 48),
)


def report() -> dict[str, Any]:
    """Versions, devices, the engines that can serve on each or why not, and the self-test's outcome."""
    result: dict[str, Any] = {
        "octofuse": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "build": _C.build_info(),
        "cublaslt": _C.cublaslt_info(),
        "driver": driver_version(),
        "devices": [describe_cpu()],
    }
    if torch.cuda.is_available():
        if result["build"]["cuda"]:
            result["devices"] += [describe_gpu(index) for index in range(torch.cuda.device_count())]
        else:
            result["note"] = (
                "a CUDA device is present, but this octofuse is CPU-only: reinstall it with OCTOFUSE_CUDA=ON"
            )
    return result


def driver_version() -> str | None:
    """The NVIDIA driver's version, or None; reads a file, so no CUDA context is made."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            words = file.readline().split()
    except OSError:
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), None)


def describe_cpu() -> dict[str, Any]:
    found = _C.cpu_info()
    reasons = {f"cpu/{name}": why_not for name, why_not in found["isas"].items()}
    reasons |= {"onednn": cpu.why_not_onednn(), "reference": ""}
    return {
        "device": "cpu",
        "name": cpu.name(),
        "isa": found["isa"],
        "threads": found["threads"],
        "engines": reasons,
        **self_test("cpu"),
    }


def describe_gpu(index: int) -> dict[str, Any]:
    info = _C.device_info(index)
    reasons: dict[str, str] = {}
    for name in engines("cuda"):
        try:
            _C.select(
                1024, 1024, 1024, "float16", False, False, name,
                info["compute_capability"], info["sm_count"], info["cublaslt"],
            )  # fmt: skip
            reasons[name] = ""
        except ValueError as error:
            reasons[name] = str(error).rpartition(f"{name}: ")[2]
    device = f"cuda:{index}"
    return {
        "device": device,
        "name": torch.cuda.get_device_name(index),
        **info,
        "engines": reasons,
        **self_test(device),
    }


def self_test(device: str) -> dict[str, Any]:
    """64 cases against the reference, exactly: 8 shapes x int32, fp16, bf16 and fp32 outputs x plain and full epilogue."""
    generator = torch.Generator().manual_seed(0)
    failures: list[str] = []
    cases = 0
    for m, n, k in SHAPES:
        tensors = _operands(m, n, k, generator)
        on_device = {name: tensor.to(device) for name, tensor in tensors.items()}
        want_acc = reference.accumulate(tensors["x"], tensors["w"])
        for extreme in (False, True):
            x = on_device["x"].clamp(max=-128) if extreme else on_device["x"]
            want = reference.accumulate(x.cpu(), tensors["w"]) if extreme else want_acc
            cases += 1
            if not torch.equal(i8i32_matmul(x, on_device["w"]).cpu(), want):
                failures.append(f"int32 {m}x{n}x{k}")
        for out_dtype in (torch.float16, torch.bfloat16, torch.float32):
            for full in (False, True):
                cases += 1
                got = _linear(on_device, full, out_dtype).cpu()
                want_out = reference.linear(
                    tensors["x"], tensors["w"], tensors["x_scale"], tensors["w_scale"],
                    tensors["bias"] if full else None, activation="relu" if full else None,
                    residual=tensors["residual"] if full else None, out_dtype=out_dtype,
                )  # fmt: skip
                if not torch.equal(got, want_out):
                    failures.append(f"{out_dtype} {m}x{n}x{k}{' full epilogue' if full else ''}")
    return {"self_test_cases": cases, "self_test_failures": failures}


def _operands(m: int, n: int, k: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "x": torch.randint(-128, 128, (m, k), dtype=torch.int8, generator=generator),
        "w": torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=generator),
        "x_scale": torch.rand(m, 1, generator=generator) * 0.01 + 1e-4,
        "w_scale": torch.rand(n, generator=generator) * 0.01 + 1e-4,
        "bias": torch.randn(n, generator=generator),
        "residual": torch.randn(m, n, generator=generator),
    }


def _linear(tensors: dict[str, Tensor], full: bool, out_dtype: torch.dtype) -> Tensor:
    return i8f16_linear(
        tensors["x"], tensors["w"], tensors["x_scale"], tensors["w_scale"], tensors["bias"] if full else None,
        activation="relu" if full else None, residual=tensors["residual"] if full else None, out_dtype=out_dtype,
    )  # fmt: skip
