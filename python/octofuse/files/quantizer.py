"""The quantizer that transformers calls: for some files in place of its own, and for `OctofuseConfig`.

transformers finds quantizers and their settings by quant_method. Ours stand there once and for all, and hand on to
transformers' own unless `octofuse.enable()` was called, or this thread is inside `octofuse.from_pretrained`. This library's
own method needs neither.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from transformers.core_model_loading import WeightRenaming
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from octofuse.files.loading import FORMATS, Reader
from octofuse.files.on_load import OnLoad, QuantiseOp
from octofuse.files.own import METHOD
from octofuse.files.tensor_parallel import TensorParallel
from octofuse.files.writing import AUTO, config_of, is_of_transformers, keep_own_names, tensors_of
from octofuse.nn import QUANTISED
from octofuse.quant import AnyScheme, scheme_named

_INSIDE: ContextVar[bool] = ContextVar("octofuse_from_pretrained", default=False)
_DEVICE: ContextVar[torch.device | None] = ContextVar("octofuse_device", default=None)  # where layers are made
_MESH: ContextVar[Any] = ContextVar("octofuse_mesh", default=None)  # of ranks that share the model
_THEIRS: dict[str, tuple[Any, Any]] = {}
_enabled = False


class FileConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """A checkpoint's quantization_config as it is: nothing of it is interpreted, or lost when it is written again."""

    def __init__(self, config: dict[str, Any]) -> None:
        keys = _keys_of(config["quant_method"])
        self.quant_method = keys[-1] if config.get("load_in_8bit") else keys[0]
        self.config = copy.deepcopy(config)

    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.config)

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()


class OctofuseConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Quantise while transformers loads a floating-point checkpoint, a linear at a time:

        AutoModelForCausalLM.from_pretrained(name, quantization_config=OctofuseConfig("w8a8-dynamic"), device_map="cuda")

    gives the bits that `quantize_` gives of the loaded model, with no more in memory than the quantised model and one
    linear. Its `save_pretrained` and `push_to_hub` write what `octofuse.from_pretrained` reads, as does transformers once
    `octofuse.enable()` was called.

    Args:
        scheme: a name that `quant.scheme_named` knows, of one that needs no calibration.
        exceptions: other schemes for single layers, as `quantize_` has them.

    Raises ValueError for a scheme that there is not, or that needs calibration.
    """

    def __init__(
        self, scheme: str | AnyScheme = "w8a8-dynamic", exceptions: Mapping[str, str | AnyScheme | None] | None = None
    ) -> None:
        self.quant_method = METHOD
        found = scheme_named(scheme)
        others = {name: None if own is None else scheme_named(own) for name, own in (exceptions or {}).items()}
        for what, own in {"scheme": found, **{f"exceptions: {name}": own for name, own in others.items()}}.items():
            if own is not None and own.needs_calibration:
                raise ValueError(
                    f"{what}: expected one that needs no calibration, got {own.name}; load the model and call quantize_"
                )
        self.scheme = found.name
        self.exceptions = {name: None if own is None else own.name for name, own in others.items()}


class OctofuseQuantizer(HfQuantizer):  # type: ignore[misc]
    """Reads a quantised checkpoint, or quantises a floating-point one as it is read; and says what is to be written."""

    requires_calibration = False

    def __init__(self, quantization_config: FileConfig | OctofuseConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.written_as = AUTO
        self.parallel = TensorParallel()
        self.work: Reader | OnLoad
        if isinstance(quantization_config, OctofuseConfig):
            self.work = OnLoad(quantization_config.scheme, quantization_config.exceptions)
        else:
            self.work = Reader(quantization_config.to_dict(), _DEVICE.get())

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        for place in ("disk", "meta"):
            if isinstance(device_map, dict) and place in map(str, device_map.values()):
                raise ValueError(f"device_map: expected devices for quantised layers, got {place}")

    def update_device_map(self, device_map: Any) -> Any:
        return self.parallel.keep(device_map)

    def update_parallel_plan(self, model: Any, plan: dict[str, str]) -> None:
        self.parallel.clear(model, plan)

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **kwargs: Any) -> None:
        if not checkpoint_files:
            raise ValueError("checkpoint: expected safetensors files, got none")
        self.parallel.before(model)
        if isinstance(self.work, OnLoad):
            self.work.for_ranks = self.parallel.wanted or _MESH.get() is not None
        self.work.before(model, [Path(file) for file in checkpoint_files], model.dtype)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if isinstance(self.work, OnLoad):
            self.work.after(model)
        model = self.parallel.after(model, _MESH.get())  # of a linear that waits a rank makes its part alone
        if isinstance(self.work, Reader):
            self.work.after(model)
        attach(model)
        model.is_quantized = False  # or it could not be cast by half(), which reaches what is in floating point
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return isinstance(self.work, OnLoad) and self.work.needs(param_name)

    def param_element_size(self, model: Any, param_name: str, param: Any) -> float:
        """For the memory that transformers reserves beforehand."""
        if isinstance(self.work, OnLoad) and self.work.needs(param_name):
            return self.work.element_size(param_name)
        size: int = param.element_size()
        return size

    def get_quantize_ops(self) -> QuantiseOp:
        assert isinstance(self.work, OnLoad)
        return QuantiseOp(self.work)

    def get_weight_conversions(self) -> list[WeightRenaming]:
        renames = self.work.renames if isinstance(self.work, Reader) else {}
        return [WeightRenaming(pattern, put) for pattern, put in renames.items()]

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """transformers writes the model's config after this: it then speaks of the layers as they are now."""
        if getattr(model, "_hf_peft_config_loaded", False):  # it writes the adapters alone
            return model.state_dict(), {}
        model.config.quantization_config = FileConfig(config_of(model, self.written_as))
        keep_own_names(model)
        return tensors_of(model, self.written_as), {}

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """Of adapters beside the frozen layers."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def attach(model: Any) -> None:
    """What `files.attach` says."""
    for module in model.modules():
        is_ours = isinstance(getattr(module, "hf_quantizer", None), OctofuseQuantizer)
        if not is_ours and is_of_transformers(module) and any(isinstance(m, QUANTISED) for m in module.modules()):
            module.hf_quantizer = OctofuseQuantizer(OctofuseConfig())  # it only writes


@contextlib.contextmanager
def written_as(model: Any, form: str) -> Iterator[None]:
    """The model's own `save_pretrained` writes this format meanwhile."""
    quantizer = model.hf_quantizer
    quantizer.written_as = form
    try:
        yield
    finally:
        quantizer.written_as = AUTO


class _Configs:
    """Stands for a method's class of settings; theirs: transformers' own, None for this library's method."""

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs

    def from_dict(self, config: dict[str, Any], *arguments: Any, **options: Any) -> Any:
        if self.theirs is not None and not (_enabled or _INSIDE.get()):
            return self.theirs.from_dict(config, *arguments, **options)
        try:
            Reader(config)
        except ValueError as error:
            if self.theirs is None or _INSIDE.get():
                raise
            warnings.warn(f"octofuse leaves this checkpoint to transformers: {error}", stacklevel=2)
            return self.theirs.from_dict(config, *arguments, **options)
        return FileConfig(config)


class _Quantizers:
    """Stands for a method's quantizer."""

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs

    def __call__(self, config: Any, **options: Any) -> Any:
        ours = isinstance(config, (FileConfig, OctofuseConfig))
        return (OctofuseQuantizer if ours else self.theirs)(config, **options)


def stand_in() -> None:
    for method in (key for one in FORMATS for key in _keys_of(one)):
        if method not in _THEIRS:
            mappings = (auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING)
            _THEIRS[method] = quantizer, config = tuple(mapping.get(method) for mapping in mappings)
            auto.AUTO_QUANTIZER_MAPPING[method] = _Quantizers(quantizer)
            auto.AUTO_QUANTIZATION_CONFIG_MAPPING[method] = _Configs(config)


def _keys_of(method: str) -> tuple[str, ...]:
    """What transformers' mappings call a method."""
    return ("bitsandbytes_4bit", "bitsandbytes_8bit") if method == "bitsandbytes" else (method,)


def enable(wanted: bool) -> None:
    global _enabled
    _enabled = wanted


@contextlib.contextmanager
def reading_to(device: torch.device, mesh: Any = None) -> Iterator[None]:
    """What this thread's `from_pretrained` reads meanwhile becomes layers on the device, or this rank's part of them."""
    inside, where, ranks = _INSIDE.set(True), _DEVICE.set(device), _MESH.set(mesh)
    try:
        yield
    finally:
        _INSIDE.reset(inside)
        _DEVICE.reset(where)
        _MESH.reset(ranks)


stand_in()
