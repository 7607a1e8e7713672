"""What runs a model token by token: its weights as a decoder, the cache of keys and values, and how a token is chosen."""

from octofuse.engine.cache import Cache
from octofuse.engine.calibrate import calibrate_cache_
from octofuse.engine.decoder import Decoder, check_cache
from octofuse.engine.sampling import Draws, Sampling

__all__ = ["Cache", "Decoder", "Draws", "Sampling", "calibrate_cache_", "check_cache"]
