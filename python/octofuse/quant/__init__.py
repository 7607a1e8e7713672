"""The mathematics of quantisation in plain torch: no ops, no kernels, no model surgery."""

from octofuse.quant.affine import Scheme, channel_scales, scheme_named, tensor_scale
from octofuse.quant.calibrate import AmaxObserver, calibrate, clipped_amax, observe
from octofuse.quant.histogram import Histogram
from octofuse.quant.smooth import search_alpha, smoothing_scales

__all__ = [
    "AmaxObserver",
    "Histogram",
    "Scheme",
    "calibrate",
    "channel_scales",
    "clipped_amax",
    "observe",
    "scheme_named",
    "search_alpha",
    "smoothing_scales",
    "tensor_scale",
]
