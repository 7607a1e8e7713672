"""The mathematics of quantisation in plain torch: no ops, no kernels, no model surgery."""

from octofuse.quant.affine import Scheme, channel_scales, scheme_named, tensor_scale
from octofuse.quant.calibrate import AmaxObserver, calibrate

__all__ = ["AmaxObserver", "Scheme", "calibrate", "channel_scales", "scheme_named", "tensor_scale"]
