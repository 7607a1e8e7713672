"""More than one device for one model: which part of it a rank has, and what ranks gather from each other."""

from octofuse.files import tensor_parallel
from octofuse.parallel.group import FastSums, Group, device_of
from octofuse.parallel.saving import saved
from octofuse.parallel.shard import Share, shard_, share_of

tensor_parallel.shard, tensor_parallel.device_of = shard_, device_of
tensor_parallel.saved = saved

__all__ = ["FastSums", "Group", "Share", "shard_", "share_of"]
