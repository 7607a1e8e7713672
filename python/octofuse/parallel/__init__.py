"""More than one device for one model: which part of it a rank has, and what ranks gather from each other."""

from octofuse.files import tensor_parallel
from octofuse.parallel.group import Group
from octofuse.parallel.shard import Share, shard_, share_of

tensor_parallel.shard = shard_

__all__ = ["Group", "Share", "shard_", "share_of"]
