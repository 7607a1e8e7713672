"""The build backend: scikit-build-core, told what this machine offers.

With an NVIDIA driver present, or OCTOFUSE_CUDA=ON, the kernels are built, and what the machine lacks for that (CUTLASS
always; nvcc and the cuBLAS headers where there is no toolkit) comes as build requirements. Otherwise the install is
CPU-only and needs a C++ compiler alone.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from scikit_build_core import build as _backend

TOOLCHAIN = "cuda-toolkit[nvcc,cccl,cublas]==13.0.*"


def _setting() -> str:
    value = os.environ.get("OCTOFUSE_CUDA", "AUTO").upper()
    if value in ("ON", "1", "TRUE", "YES"):
        return "ON"
    if value in ("OFF", "0", "FALSE", "NO"):
        return "OFF"
    if value == "AUTO":
        return "AUTO"
    raise SystemExit(f"OCTOFUSE_CUDA: expected ON, OFF or AUTO, got {value!r}")


def has_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()


def wants_cuda() -> bool:
    setting = _setting()
    return setting == "ON" or (setting == "AUTO" and has_driver())


def find_nvcc() -> str | None:
    """The system's nvcc, looked for where cmake/cuda_toolkit.cmake looks."""
    folders = [os.environ.get(name, "") + "/bin" for name in ("CUDA_HOME", "CUDA_PATH")]
    candidates = [os.environ.get("CUDACXX"), shutil.which("nvcc"), *(f"{f}/nvcc" for f in folders)]
    candidates.append("/usr/local/cuda/bin/nvcc")
    return next((c for c in candidates if c and os.access(c, os.X_OK)), None)


def has_cublas_header(nvcc: str) -> bool:
    """nvcc --dryrun prints the include folders that it will search."""
    run = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-c", "/dev/null"], capture_output=True, text=True, check=False)
    folders = re.findall(r'-I"?([^" ]+)', run.stderr)
    folders += [str(Path(nvcc).resolve().parent.parent / "include")]
    return any((Path(folder) / "cublasLt.h").exists() for folder in folders)


def requirements() -> list[str]:
    if not wants_cuda():
        return []
    needed = ["nvidia-cutlass==4.2.0.0"]
    nvcc = find_nvcc()
    if nvcc is None:
        needed.append(TOOLCHAIN)
    elif not has_cublas_header(nvcc):
        needed.append("nvidia-cublas>=13.0,<14")
    return needed


def _configured(settings: dict | None) -> dict:
    configured = dict(settings or {})
    cuda = wants_cuda()
    configured.setdefault("cmake.define.OCTOFUSE_CUDA", "ON" if cuda else "OFF")
    archs = os.environ.get("OCTOFUSE_CUDA_ARCHS")
    if archs:
        configured.setdefault("cmake.define.OCTOFUSE_CUDA_ARCHS", archs)
    if not cuda:
        print(
            "octofuse: CPU-only build: no NVIDIA driver found (OCTOFUSE_CUDA=ON builds the kernels anyway)", flush=True
        )
    return configured


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    return [*_backend.get_requires_for_build_wheel(config_settings), *requirements()]


def get_requires_for_build_editable(config_settings: dict | None = None) -> list[str]:
    return [*_backend.get_requires_for_build_editable(config_settings), *requirements()]


def get_requires_for_build_sdist(config_settings: dict | None = None) -> list[str]:
    return _backend.get_requires_for_build_sdist(config_settings)


def build_wheel(
    wheel_directory: str, config_settings: dict | None = None, metadata_directory: str | None = None
) -> str:
    return _backend.build_wheel(wheel_directory, _configured(config_settings), metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: dict | None = None, metadata_directory: str | None = None
) -> str:
    return _backend.build_editable(wheel_directory, _configured(config_settings), metadata_directory)


def build_sdist(sdist_directory: str, config_settings: dict | None = None) -> str:
    return _backend.build_sdist(sdist_directory, config_settings)
