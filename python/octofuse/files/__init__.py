"""Checkpoints: those of other libraries (compressed-tensors, GPTQ, AWQ), and this one's own, read and written.

`octofuse.from_pretrained` reads a folder or a hub name; `octofuse.enable()` gives transformers' own `from_pretrained` the
same layers; `octofuse.OctofuseConfig` quantises as it loads. A format is one file here: what it says of each linear, the
tensors that it stores, and how they become a layer of `octofuse.nn`.
"""

from typing import TYPE_CHECKING, Any

from octofuse.files.loading import disable, enable, from_pretrained
from octofuse.files.writing import attach, is_of_transformers, save_pretrained

if TYPE_CHECKING:
    from octofuse.files.quantizer import OctofuseConfig

__all__ = [
    "OctofuseConfig",
    "attach",
    "disable",
    "enable",
    "from_pretrained",
    "is_of_transformers",
    "save_pretrained",
]


def __getattr__(name: str) -> Any:
    if name == "OctofuseConfig":  # it needs transformers, whose import takes seconds
        from octofuse.files.quantizer import OctofuseConfig

        return OctofuseConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
