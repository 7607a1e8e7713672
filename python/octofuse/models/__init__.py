"""Whole models: which layers of a family are quantised, calibration, checkpoints and their evaluation."""

from octofuse.models.checkpoint import load, save
from octofuse.models.evaluate import GenerationSpeed, measure_generation, perplexity
from octofuse.models.quantize import quantize_, weight_bytes

__all__ = ["GenerationSpeed", "load", "measure_generation", "perplexity", "quantize_", "save", "weight_bytes"]
