"""Whole models: which layers of a family are quantised, calibration, and what it costs."""

from typing import TYPE_CHECKING, Any

from octofuse.models.compare import Comparison, compare
from octofuse.models.distill import distill_
from octofuse.models.evaluate import GenerationSpeed, measure_generation, perplexity
from octofuse.models.frontier import Mixture, frontier
from octofuse.models.fused import fuse_, unfuse_
from octofuse.models.profile import LayerProfile, Profile, profile
from octofuse.models.quantize import fallbacks, quantize_, weight_bytes

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    if name == "QuantizedStaticCache":  # it needs transformers, which the others do not
        from octofuse.models.static_cache import QuantizedStaticCache

        return QuantizedStaticCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
