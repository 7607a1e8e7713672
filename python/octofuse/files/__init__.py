"""Checkpoints of other libraries, read as they are: compressed-tensors, GPTQ and AWQ.

`octofuse.from_pretrained` reads a folder or a hub name; `octofuse.enable()` gives transformers' own `from_pretrained` the
same layers. A format is one file here: what it says of each linear, the tensors that it stores, and how they become a
layer of `octofuse.nn`.
"""

from octofuse.files.loading import disable, enable, from_pretrained
from octofuse.files.writing import save_pretrained

__all__ = ["disable", "enable", "from_pretrained", "save_pretrained"]
