"""Kernels of other engines beside this library's, where this machine has them; nothing of theirs is part of this project.

Python packages (humming, gemlite, bitsandbytes) are found by import; vLLM's kernels in the library that
OCTOFUSE_VLLM_LIBRARY names: `vllm/_C_stable_libtorch.abi3.so` out of vLLM's wheel (0.33.0, for CUDA 13), which loads
without vLLM itself. Each file has `kernels(family)`, a list of `layer.Kernel`.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from importlib import metadata
from types import ModuleType

from peers.layer import Kernel

NAMES = ("pytorch", "ours", "vllm", "humming", "gemlite", "bitsandbytes")
PACKAGES = {"humming": "humming-kernels", "gemlite": "gemlite", "bitsandbytes": "bitsandbytes"}


def found(names: tuple[str, ...] = NAMES) -> tuple[dict[str, ModuleType], dict[str, str]]:
    """The engines that can be imported here, and why the others cannot."""
    modules, missing = {}, {}
    for name in names:
        module = importlib.import_module(f"peers.{name}")
        try:
            module.load()
            modules[name] = module
        except Exception as error:  # an engine that cannot start is no reason to stop
            missing[name] = f"{type(error).__name__}: {error}"
    return modules, missing


def versions_of(modules: dict[str, ModuleType]) -> dict[str, str]:
    """Of the packages behind them, where they say it: vLLM's library does not, nor a package that was only unpacked."""
    found = {}
    for name, package in PACKAGES.items():
        with suppress(metadata.PackageNotFoundError):
            if name in modules:
                found[package] = metadata.version(package)
    return found


def kernels_of(modules: dict[str, ModuleType], family: str) -> list[Kernel]:
    return [kernel for module in modules.values() for kernel in module.kernels(family)]
