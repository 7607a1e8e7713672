"""Regular expressions out of files: known to end before they are matched."""

from __future__ import annotations

import re
from typing import Any

try:
    from re import _parser as parser  # type: ignore[attr-defined]
except ImportError:  # Python 3.10
    import sre_parse as parser  # type: ignore[no-redef]

OPEN_REPEATS = 5  # of "*", "+" and the like: each may multiply the time of a match by the length of a name


def compiled(what: str, text: str) -> re.Pattern[str]:
    """ValueError that names `what`: for what is no regular expression, or could take for ever to match."""
    try:
        found = re.compile(text)
        inside, count = _repeats(parser.parse(text))
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{what}: expected regular expressions, got {text!r}: {error}") from None
    if inside or count > OPEN_REPEATS:
        why = "a choice inside a repeat" if inside else f"{count} repeats without end"
        raise ValueError(f"{what}: expected regular expressions that end soon, got {text!r}, with {why}")
    return found


def _repeats(items: Any, inside: bool = False) -> tuple[bool, int]:
    """Whether something that may match in several ways lies in a repeat, and how many repeats without end there are."""
    nested, count = False, 0
    for code, argument in items:
        repeat = str(code) in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")
        nested |= inside and (repeat or str(code) == "BRANCH")
        count += repeat and argument[1] > 100
        bodies = [part for part in _flat(argument) if isinstance(part, parser.SubPattern)]
        for found in (_repeats(body, inside or (repeat and argument[1] > 1)) for body in bodies):
            nested, count = nested or found[0], count + found[1]
    return nested, count


def _flat(argument: Any) -> list[Any]:
    if isinstance(argument, (tuple, list)):  # a SubPattern is neither
        return [one for part in argument for one in _flat(part)]
    return [argument]
