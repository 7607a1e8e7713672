"""transformers' own attention with a rank's heads alone."""

from __future__ import annotations

from typing import Any

from octofuse.models.architecture import Heads

# What the families call them, of a module or a config.
_QUERIES = ("num_heads", "num_attention_heads", "n_head")
_PAIRS = ("num_key_value_heads", "num_kv_heads")


class _LocalConfig:
    """A config but for its numbers of heads; what is set in the one is seen here, such as how to attend."""

    def __init__(self, whole: Any, numbers: dict[str, int]) -> None:
        self.whole, self.numbers = whole, numbers

    def __getattr__(self, name: str) -> Any:
        if name in ("whole", "numbers"):  # while it is copied
            raise AttributeError(name)
        return self.numbers[name] if name in self.numbers else getattr(self.whole, name)


def keep_heads(attention: Any, heads: Heads) -> None:
    """Lets its forward see as many heads as its linears make: in numbers of its own, and in its view of the config."""
    config = getattr(attention, "config", None)
    counts = dict.fromkeys(_QUERIES, heads.queries) | dict.fromkeys(_PAIRS, heads.pairs)
    for name, count in counts.items():
        if isinstance(getattr(attention, name, None), int):
            setattr(attention, name, count)
    if config is not None:
        attention.config = _LocalConfig(config, {name: n for name, n in counts.items() if hasattr(config, name)})
    if hasattr(attention, "num_key_value_groups"):
        attention.num_key_value_groups = heads.queries // heads.pairs
    if hasattr(attention, "split_size"):  # GPT-2's: columns of queries, of keys and of values
        attention.split_size = heads.width
