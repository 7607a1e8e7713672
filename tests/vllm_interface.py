"""The interface files of the real vLLM, loaded without the rest of it, and this library's kernels over them: base classes,
parameters, scalar types and registry.

They are read from an installed vLLM, or from a folder OCTOFUSE_VLLM_FILES with its wheel unpacked.
"""

from __future__ import annotations

import ast
import enum
import importlib
import importlib.util
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import octofuse


def files_of_vllm() -> Path | None:
    if named := os.environ.get("OCTOFUSE_VLLM_FILES"):
        return Path(named) / "vllm"
    found = importlib.util.find_spec("vllm")
    return None if found is None or found.origin is None else Path(found.origin).parent


FILES = files_of_vllm()
needs_files = pytest.mark.skipif(FILES is None, reason="no vLLM here, and OCTOFUSE_VLLM_FILES names no files of one")

KERNELS = "vllm.model_executor.kernels"
QUANTIZATION = "vllm.model_executor.layers.quantization"
# Packages whose files are loaded one by one, so that their __init__ imports nothing.
PACKAGES = ("vllm", "vllm.model_executor", "vllm.model_executor.layers", "vllm.model_executor.layers.fusion", QUANTIZATION,
            KERNELS, f"{KERNELS}.linear", f"{KERNELS}.linear.scaled_mm", f"{KERNELS}.linear.mixed_precision")  # fmt: skip


E4M3 = torch.float8_e4m3fn


class PlatformEnum(enum.Enum):
    CUDA = 1
    CPU = 2


def parts_of(path: Path, names: tuple[str, ...], scope: dict[str, Any]) -> dict[str, Any]:
    """These classes, functions and assignments of a real file, alone, in a scope with what else they need."""

    def name_of(node: Any) -> str:
        return getattr(node, "name", None) or ast.unparse(node.targets[0] if hasattr(node, "targets") else node)

    nodes = [node for node in ast.parse(path.read_text()).body if name_of(node).split(".")[0] in names]
    exec(compile(ast.Module(nodes, []), str(path), "exec"), scope)
    return scope


def registry_of(files: Path) -> dict[str, Any]:
    """vLLM's lists of kernels, with its own `register_linear_kernel`."""
    lists = ("_POSSIBLE_KERNELS", "_POSSIBLE_INT8_KERNELS", "_POSSIBLE_FP8_KERNELS")
    scope: dict[str, Any] = {name: {PlatformEnum.CUDA: ["theirs", "other"]} for name in lists}
    source = files / "model_executor/kernels/linear/__init__.py"
    return parts_of(source, ("register_linear_kernel",), scope | {"PlatformEnum": PlatformEnum})


def keys_of(files: Path) -> dict[str, Any]:
    """vLLM's descriptions of a quantisation."""
    scope = {
        "torch": torch, "NamedTuple": NamedTuple, "ClassVar": ClassVar, "dataclass": dataclass, "ScalarType": object,
        "_dtype_abbr": str, "__name__": __name__,
    }  # fmt: skip
    names = ("_GroupShape", "GroupShape", "ScaleDesc", "QuantKey")
    return parts_of(files / "model_executor/layers/quantization/utils/quant_utils.py", names, scope)


class QuantFP8:
    """In place of vLLM's, which is one of its own kernels."""

    def __init__(self, static: bool, group_shape: Any, num_token_padding: int | None = None) -> None:
        self.by_token = group_shape.is_per_token()

    def __call__(self, x: Tensor, scale: Tensor | None, _: Tensor | None) -> tuple[Tensor, Tensor]:
        if scale is None and self.by_token:
            return octofuse.quantize_per_token(x, E4M3)
        found = x.float().abs().amax() / 448 if scale is None else scale
        return octofuse.quantize_per_tensor(x, found, E4M3), found


def module(name: str, **contents: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(contents)
    return made


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`octofuse.vllm.kernels` over the real interface."""
    assert FILES is not None
    for name in [name for name in sys.modules if name == "vllm" or name.startswith(("vllm.", "octofuse.vllm"))]:
        monkeypatch.delitem(sys.modules, name)
    for name in PACKAGES:
        package = module(name, __path__=[str(FILES.joinpath(*name.split(".")[1:]))])
        monkeypatch.setitem(sys.modules, name, package)
    platform = SimpleNamespace(
        is_cuda=lambda: True,
        get_device_capability=lambda: (9, 0),
        is_device_capability=lambda it: it == 90,
        use_sync_weight_loader=lambda: False,
        fp8_dtype=lambda: E4M3,
    )
    stubs = (
        module("vllm.logger", init_logger=logging.getLogger),
        module("vllm.platforms", PlatformEnum=PlatformEnum, current_platform=platform),
        module("vllm.distributed", get_tensor_model_parallel_rank=int, get_tensor_model_parallel_world_size=lambda: 1),
        module("vllm.model_executor.utils", replace_parameter=replaced),
        module(
            "vllm.model_executor.layers.fusion.quant_activation",
            QuantizedActivation=object,
            as_quantized_activation=lambda x, key: None,
        ),
        module(f"{QUANTIZATION}.input_quant_fp8", QuantFP8=QuantFP8),
        module(f"{QUANTIZATION}.utils.quant_utils", QuantKey=object),
    )
    importlib.invalidate_caches()
    for stub in stubs:
        monkeypatch.setitem(sys.modules, stub.__name__, stub)
    registry = sys.modules[f"{KERNELS}.linear"]
    scaled = importlib.import_module(f"{KERNELS}.linear.scaled_mm.ScaledMMLinearKernel")
    mixed = importlib.import_module(f"{KERNELS}.linear.mixed_precision.MPLinearKernel")
    vars(registry).update(
        registry_of(FILES), Int8ScaledMMLinearKernel=scaled.Int8ScaledMMLinearKernel, MPLinearKernel=mixed.MPLinearKernel,
        FP8ScaledMMLinearKernel=scaled.FP8ScaledMMLinearKernel,
        MPLinearLayerConfig=mixed.MPLinearLayerConfig,
    )  # fmt: skip
    found = importlib.import_module("octofuse.vllm.kernels")
    monkeypatch.setattr(found, "unsupported", lambda *_: None)
    yield SimpleNamespace(
        own=found, registry=registry, scaled=scaled, mixed=mixed,
        types=importlib.import_module("vllm.scalar_type").scalar_types,
        parameter=importlib.import_module("vllm.model_executor.parameter"), platform=platform,
    )  # fmt: skip
    for name in [name for name in sys.modules if name.startswith(("vllm.", "octofuse.vllm"))]:
        del sys.modules[name]


def replaced(layer: nn.Module, name: str, new: Tensor) -> None:
    setattr(layer, name, new)
