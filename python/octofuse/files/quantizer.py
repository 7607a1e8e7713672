"""The quantizer that transformers calls for some files, in place of its own.

transformers finds quantizers and their settings by the file's quant_method. Ours stand there once and for all, and hand on
to transformers' own unless `octofuse.enable()` was called, or this thread is inside `octofuse.from_pretrained`.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from octofuse.files.loading import FORMATS, Reader

_INSIDE: ContextVar[bool] = ContextVar("octofuse_from_pretrained", default=False)
_DEVICE: ContextVar[torch.device | None] = ContextVar("octofuse_device", default=None)  # where layers are made
_THEIRS: dict[str, tuple[Any, Any]] = {}
_enabled = False


class FileConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """A checkpoint's quantization_config as it is: nothing of it is interpreted, or lost when it is written again."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.quant_method = config["quant_method"]
        self.config = copy.deepcopy(config)

    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.config)

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()


class OctofuseQuantizer(HfQuantizer):  # type: ignore[misc]
    requires_calibration = True  # it reads quantised checkpoints alone

    def __init__(self, quantization_config: FileConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.reader = Reader(quantization_config.to_dict(), _DEVICE.get())

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **kwargs: Any) -> None:
        if not checkpoint_files:
            raise ValueError("checkpoint: expected safetensors files, got none")
        self.reader.before(model, [Path(file) for file in checkpoint_files], model.dtype)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self.reader.after(model)
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True


class _Configs:
    """Stands for a method's class of settings."""

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs

    def from_dict(self, config: dict[str, Any], *arguments: Any, **options: Any) -> Any:
        if not (_enabled or _INSIDE.get()):
            return self.theirs.from_dict(config, *arguments, **options)
        try:
            Reader(config)
        except ValueError as error:
            if _INSIDE.get():
                raise
            warnings.warn(f"octofuse leaves this checkpoint to transformers: {error}", stacklevel=2)
            return self.theirs.from_dict(config, *arguments, **options)
        return FileConfig(config)


class _Quantizers:
    """Stands for a method's quantizer."""

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs

    def __call__(self, config: Any, **options: Any) -> Any:
        return (OctofuseQuantizer if isinstance(config, FileConfig) else self.theirs)(config, **options)


def stand_in() -> None:
    for method in FORMATS:
        if method not in _THEIRS:
            quantizer, config = auto.AUTO_QUANTIZER_MAPPING[method], auto.AUTO_QUANTIZATION_CONFIG_MAPPING[method]
            _THEIRS[method] = (quantizer, config)
            auto.AUTO_QUANTIZER_MAPPING[method] = _Quantizers(quantizer)
            auto.AUTO_QUANTIZATION_CONFIG_MAPPING[method] = _Configs(config)


def enable(wanted: bool) -> None:
    global _enabled
    if wanted:
        stand_in()
    _enabled = wanted


@contextlib.contextmanager
def reading_to(device: torch.device) -> Iterator[None]:
    """What this thread's `from_pretrained` reads meanwhile becomes layers on the device."""
    stand_in()
    inside, where = _INSIDE.set(True), _DEVICE.set(device)
    try:
        yield
    finally:
        _INSIDE.reset(inside)
        _DEVICE.reset(where)
