"""The mathematics of quantisation in plain torch: no ops, no kernels, no model surgery."""

from octofuse.quant.affine import AnyScheme, Scheme, channel_scales, scheme_named, tensor_scale
from octofuse.quant.awq import awq_scales
from octofuse.quant.calibrate import AmaxObserver, calibrate, clipped_amax, observe
from octofuse.quant.gptq import gptq
from octofuse.quant.histogram import Histogram
from octofuse.quant.smooth import search_alpha, smoothing_scales
from octofuse.quant.weight_only import WeightOnly

__all__ = [
    "AmaxObserver",
    "AnyScheme",
    "Histogram",
    "Scheme",
    "WeightOnly",
    "awq_scales",
    "calibrate",
    "channel_scales",
    "clipped_amax",
    "gptq",
    "observe",
    "scheme_named",
    "search_alpha",
    "smoothing_scales",
    "tensor_scale",
]
