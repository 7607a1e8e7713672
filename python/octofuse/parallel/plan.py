"""Which outputs of which linear a rank has: pure.

Queries, keys and values are split by heads, the first linears of a feed-forward by its columns, and every other linear by
its outputs, since its input is gathered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from octofuse.models.architecture import Heads

EVEN_UNITS = (16, 8, 1)  # outputs: kernels like whole tiles, and equal parts are gathered without a copy


def split(count: int, ranks: int, unit: int | None = None) -> tuple[int, ...]:
    """`count` outputs in as many parts, as even as units of outputs allow, none of them empty.

    unit: which no part may cut; None: whatever suits. ValueError where there are too few for all ranks.
    """
    if unit is None:
        for even in EVEN_UNITS:
            if count % (even * ranks) == 0:
                return (count // ranks,) * ranks
    unit = unit or next(small for small in EVEN_UNITS if small == 1 or -(-count // small) >= ranks)
    units = -(-count // unit)
    if units < ranks:
        raise ValueError(f"mesh: expected at most {units} ranks for {count} outputs in blocks of {unit}, got {ranks}")
    sizes = [unit * (units // ranks + (rank < units % ranks)) for rank in range(ranks)]
    sizes[-1] -= unit * units - count
    return tuple(sizes)


def part(sizes: tuple[int, ...], rank: int) -> range:
    start = sum(sizes[:rank])
    return range(start, start + sizes[rank])


@dataclass(frozen=True)
class HeadShare:
    """A rank's heads of one block: those of some pairs of keys and values; where there are fewer of these than ranks,
    several ranks have the same pair, and a part of its queries each.

    ValueError where that does not come out even.
    """

    whole: Heads
    rank: int
    ranks: int

    def __post_init__(self) -> None:
        queries, pairs = self.whole.queries, self.whole.pairs
        if pairs < self.ranks and (self.ranks % pairs != 0 or queries % self.ranks != 0):
            raise ValueError(
                f"mesh: expected at most {pairs} ranks for as many heads of keys and values, or a multiple of {pairs} that "
                f"divides {queries} heads of queries, got {self.ranks}"
            )

    @property
    def _pairs(self) -> tuple[int, ...]:
        """Of each rank."""
        return split(self.whole.pairs, self.ranks, 1) if self.whole.pairs >= self.ranks else (1,) * self.ranks

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of each rank's queries."""
        group = self.whole.queries // max(self.whole.pairs, self.ranks)
        return tuple(own * group * self.whole.size for own in self._pairs)

    @property
    def heads(self) -> Heads:
        return replace(self.whole, queries=self.widths[self.rank] // self.whole.size, pairs=self._pairs[self.rank])

    @property
    def queries(self) -> range:
        """Channels."""
        return part(self.widths, self.rank)

    @property
    def pairs(self) -> range:
        """Channels."""
        size, pairs = self.whole.size, self.whole.pairs
        first = sum(self._pairs[: self.rank]) if pairs >= self.ranks else self.rank * pairs // self.ranks
        return range(first * size, (first + self._pairs[self.rank]) * size)

    def rows(self, linears: int, interleaved: bool) -> list[list[range]]:
        """Of each linear that makes queries, keys and values: three, or one that has them behind each other, or head by
        head."""
        if linears == 3:
            return [[self.queries], [self.pairs], [self.pairs]]
        if interleaved:
            return [[range(3 * self.queries.start, 3 * self.queries.stop)]]
        width, pairs = self.whole.width, self.whole.pairs * self.whole.size
        return [[self.queries, _shifted(self.pairs, width), _shifted(self.pairs, width + pairs)]]


def rows_of_up(sizes: tuple[int, ...], rank: int, linears: int, gated: bool) -> list[list[range]]:
    """Of each first linear of a feed-forward: gates and values in two, or in one behind each other, or one alone."""
    own = part(sizes, rank)
    if not gated or linears == 2:
        return [[own]] * linears
    return [[own, _shifted(own, sum(sizes))]]


def _shifted(run: range, by: int) -> range:
    return range(run.start + by, run.stop + by)
