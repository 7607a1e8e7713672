"""The quantizer that transformers calls, in place of its own, while `octofuse.enable()` lasts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from octofuse.files.loading import FORMATS, Reader

TARGET: list[torch.device | None] = [None]  # where layers are made; None: where their tensors were loaded
_THEIRS: dict[str, tuple[Any, Any]] = {}


class FileConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """A checkpoint's quantization_config as it is: nothing of it is interpreted, or lost when it is written again."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.quant_method = config["quant_method"]
        self.config = copy.deepcopy(config)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        found = cls(config_dict)
        return (found, kwargs) if return_unused_kwargs else found

    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.config)

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()


class OctofuseQuantizer(HfQuantizer):  # type: ignore[misc]
    requires_calibration = True  # it reads quantised checkpoints alone

    def __init__(self, quantization_config: FileConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.reader = Reader(quantization_config.to_dict(), TARGET[-1])

    def _process_model_before_weight_loading(
        self, model: Any, dtype: torch.dtype | None = None, checkpoint_files: Any = None, **kwargs: Any
    ) -> None:
        if not checkpoint_files:
            raise ValueError("checkpoint: expected safetensors files, got none")
        kept = dtype if dtype is not None else model.dtype
        self.reader.before(model, [Path(file) for file in checkpoint_files], kept)

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


def register() -> None:
    for method in FORMATS:
        if method not in _THEIRS:
            _THEIRS[method] = (auto.AUTO_QUANTIZER_MAPPING[method], auto.AUTO_QUANTIZATION_CONFIG_MAPPING[method])
            auto.AUTO_QUANTIZER_MAPPING[method] = OctofuseQuantizer
            auto.AUTO_QUANTIZATION_CONFIG_MAPPING[method] = FileConfig


def unregister() -> None:
    for method, (quantizer, config) in _THEIRS.items():
        auto.AUTO_QUANTIZER_MAPPING[method], auto.AUTO_QUANTIZATION_CONFIG_MAPPING[method] = quantizer, config
    _THEIRS.clear()


def is_registered() -> bool:
    return bool(_THEIRS)
