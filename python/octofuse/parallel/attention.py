"""transformers' own attention with a rank's heads alone."""

from __future__ import annotations

import copy
from typing import Any

from octofuse.models.architecture import Heads

# What the families call them, of a module or a config.
_QUERIES = ("num_heads", "num_attention_heads", "n_head")
_PAIRS = ("num_key_value_heads", "num_kv_heads")


def keep_heads(attention: Any, heads: Heads) -> None:
    """Lets its forward see as many heads as its linears make: in numbers of its own, and in its own copy of the config."""
    owners = [attention]
    if (config := getattr(attention, "config", None)) is not None:
        attention.config = copy.copy(config)
        owners.append(attention.config)
    for owner in owners:
        for names, count in ((_QUERIES, heads.queries), (_PAIRS, heads.pairs)):
            for name in names:
                if isinstance(getattr(owner, name, None), int):
                    setattr(owner, name, count)
    if hasattr(attention, "num_key_value_groups"):
        attention.num_key_value_groups = heads.queries // heads.pairs
    if hasattr(attention, "split_size"):  # GPT-2's: columns of queries, of keys and of values
        attention.split_size = heads.width
