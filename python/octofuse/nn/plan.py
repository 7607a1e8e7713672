"""Which scheme each layer of a model gets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from octofuse.quant import AnyScheme, scheme_named

Exceptions = Mapping[str, "str | AnyScheme | None"]


def schemes_of(names: Iterable[str], scheme: AnyScheme, exceptions: Exceptions) -> dict[str, AnyScheme]:
    """Each layer's scheme; layers that stay in floating point are left out.

    exceptions: by the end of a layer's name or a pattern; the first that matches counts. Raises ValueError for one that
    matches no layer, and where no layer is left.
    """
    parsed = {pattern: None if given is None else scheme_named(given) for pattern, given in exceptions.items()}
    unused = set(parsed)
    plan = {}
    for name in names:
        own: AnyScheme | None = scheme
        for pattern, other in parsed.items():
            if fnmatchcase(name, pattern) or name.endswith(f".{pattern}"):
                unused.discard(pattern)
                own = other
                break
        if own is not None:
            plan[name] = own
    if unused:
        raise ValueError(f"exceptions: expected patterns that match a layer, got {', '.join(sorted(unused))}")
    if not plan:
        raise ValueError("exceptions: expected at least one layer to quantise, got none left")
    return plan
