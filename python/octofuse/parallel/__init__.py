"""More than one device for one model: which part of it a rank has, and what ranks gather from each other."""

from octofuse.parallel.group import Group
from octofuse.parallel.shard import Share, shard_, share_of

__all__ = ["Group", "Share", "shard_", "share_of"]
