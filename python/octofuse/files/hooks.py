"""Modules that accelerate moves: a device_map over several devices gives them hooks before layers are made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from octofuse.nn import replace_module


def exchange_hooked(model: nn.Module, name: str, made: Callable[[], nn.Module]) -> None:
    """Put made() where `model.get_submodule(name)` is, with hooks like its own.

    made: called when the module's tensors are in memory, which a hook may have taken away until its next call.
    """
    module: Any = model.get_submodule(name)
    if (hook := getattr(module, "_hf_hook", None)) is None:
        return replace_module(model, name, made())
    from accelerate.hooks import AlignDevicesHook, SequentialHook, add_hook_to_module, remove_hook_from_module

    remove_hook_from_module(module)
    layer = made()
    for own in hook.hooks if isinstance(hook, SequentialHook) else (hook,):
        if isinstance(own, AlignDevicesHook):
            again = AlignDevicesHook(
                own.execution_device, own.offload, own.io_same_device,
                offload_buffers=own.offload_buffers, skip_keys=own.skip_keys,
            )  # fmt: skip
            add_hook_to_module(layer, again, append=True)
    return replace_module(model, name, layer)
