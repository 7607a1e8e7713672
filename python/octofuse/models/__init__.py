"""Whole models: which layers of a family are quantised, calibration, checkpoints and their evaluation."""

from octofuse.models.checkpoint import load, save
from octofuse.models.compare import Comparison, compare
from octofuse.models.distill import distill_
from octofuse.models.evaluate import GenerationSpeed, measure_generation, perplexity
from octofuse.models.frontier import Mixture, frontier
from octofuse.models.fused import fuse_, unfuse_
from octofuse.models.quantize import fallbacks, quantize_, weight_bytes

__all__ = [
    "Comparison",
    "GenerationSpeed",
    "Mixture",
    "compare",
    "distill_",
    "fallbacks",
    "frontier",
    "fuse_",
    "load",
    "measure_generation",
    "perplexity",
    "quantize_",
    "save",
    "unfuse_",
    "weight_bytes",
]
