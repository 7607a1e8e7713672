"""Whole models: which layers of a family are quantised, calibration, and what it costs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from octofuse.models.compare import Comparison, compare
from octofuse.models.evaluate import GenerationSpeed, measure_generation, perplexity
from octofuse.models.frontier import Mixture, frontier
from octofuse.models.fused import fuse_, unfuse_
from octofuse.models.quantize import fallbacks, quantize_, weight_bytes

if TYPE_CHECKING:
    from octofuse.models.blockwise import distill_blocks_
    from octofuse.models.distill import distill_
    from octofuse.models.profiling import LayerProfile, Profile, profile
    from octofuse.models.static_cache import QuantizedStaticCache

__all__ = [
    "Comparison",
    "GenerationSpeed",
    "LayerProfile",
    "Mixture",
    "Profile",
    "QuantizedStaticCache",
    "compare",
    "distill_",
    "distill_blocks_",
    "fallbacks",
    "frontier",
    "fuse_",
    "measure_generation",
    "perplexity",
    "profile",
    "quantize_",
    "unfuse_",
    "weight_bytes",
]


# What few need, and what needs transformers, whose import takes seconds (static_cache).
_LATER = {
    "LayerProfile": "profiling", "Profile": "profiling", "profile": "profiling", "distill_": "distill",
    "distill_blocks_": "blockwise",
    "QuantizedStaticCache": "static_cache",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if (module := _LATER.get(name)) is not None:
        return getattr(import_module(f"octofuse.models.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
