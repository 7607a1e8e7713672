"""The shapes that find remainders: used by tests, by the GPU suite and by fuzzing's seeds."""

from __future__ import annotations

# Rows: every small count, the edges of 32-, 64- and 128-row tiles, and many.
ROWS = (*range(1, 18), 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000)
# N and K: primes, powers of two and their neighbours, GPT-2's, and one that no tile divides.
EXTENTS = (1, 2, 3, 7, 8, 15, 17, 100, 255, 496, 768, 1001, 3420)
MAX_K = 131071
