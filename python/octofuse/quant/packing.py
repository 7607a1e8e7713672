"""How codes of 1 to 8 bits lie in 32-bit words: the one description, for layers, checkpoints and kernels.

Rows, one for each output channel, are filled up to a multiple of 16 and columns to one of 128, with zeros, and cut into
tiles: a row tile of 16 rows by a k-block of 128 columns. The tiles of a row tile lie one after the other. A tile belongs to
32 lanes of a warp as tensor cores want their operand: in each of 4 steps, of 32 columns, lane 4 * g + t has rows g and
g + 8 and the columns 2 * t and 2 * t + 1 of every 8. That makes 4 registers of 4 codes a step, a byte each: row g's of the
first 16 columns, row g + 8's, row g's of the other 16, row g + 8's; 16 registers in all. Their bytes are columns 2 * t,
2 * t + 8, 2 * t + 1, 2 * t + 9: so the two halves of a register are the neighbours that an fp16 product wants side by
side, and the whole of it is what an int8 product wants.

A code is cut into fields of 8, 4, 2 or 1 bits, the low bits first: 7 = 4 + 2 + 1, 6 = 4 + 2, 5 = 4 + 1, 3 = 2 + 1; or,
`planes`, into single bits. A tile holds its fields one after the other. A field of f bits packs 8 / f registers into a
word: register r stands at bit r % (8 / f) * f of every byte of word r // (8 / f), so that a shift and a mask give it back.
In fields of 1 and 2 bits row g's eight registers come before those of row g + 8; of 2 bits, its first 16 columns' of all
steps before the others. So a word of one bit is the operand of a binary product, 32 columns of a row, and two words of 2
bits become two such with a shift and a mask each.
Of a lane's 2 * f words four lie side by side, then the next lane's four, and behind those of all lanes the next four (two
instead of four for one bit): 32 lanes read consecutive bytes.

Codes of a codebook (`quant.codebook`) are single fields of 4 bits, but the first of a word's two registers is its low
half, and a register's codes are nibbles side by side, the second and the third in each other's place: so a byte has two
neighbours that an fp16 product wants side by side, and half a word what a look-up by nibbles takes.

Pairs (`quant.sparse`: a byte for two columns) have 8 registers: in each step row g and then row g + 8, a byte each of the
four times two columns.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

TILE_ROWS = 16  # of a row tile
BLOCK_K = 128  # columns of a k-block
AT_ONCE = 1 << 22  # weights that are encoded or packed at a time: either takes some 16 bytes for each

_FIELDS = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}

_REGISTERS = (4, 2, 2)  # of a lane: step, 16 columns, row g or g + 8; dimensions 3 to 5
_ROWS_FIRST = {1: (5, 3, 4), 2: (5, 4, 3)}

# row tile, row g or g + 8, g, k-block, step, 16 columns, 8 columns, t, odd -> row tile, k-block, g, t, step,
# 16 columns, row g or g + 8, odd, 8 columns; and back
_OF_CODES, _TO_LANES = (2, 8, -1, 4, 2, 2, 4, 2), (0, 3, 2, 7, 4, 5, 1, 8, 6)
_OF_PAIRS, _PAIRS_TO_LANES = (2, 8, -1, 4, 2, 2, 4), (0, 3, 2, 7, 4, 1, 5, 6)


def packed_rows(rows: int) -> int:
    return -(-rows // TILE_ROWS) * TILE_ROWS


def packed_words(bits: int, columns: int) -> int:
    """32-bit words of a row of codes; of pairs as if they were codes of 4 bits."""
    return bits * -(-columns // BLOCK_K) * (BLOCK_K // 32)


def pack(codes: Tensor, bits: int, *, planes: bool = False, codebook: bool = False) -> Tensor:
    """codes [N, K], of any integer type, 0 to 2^bits - 1 -> int32 [packed_rows(N), packed_words(bits, K)].

    Raises ValueError for codes that do not fit.
    """
    fields = _fields(bits, planes)
    padded = _padded(codes, bits, BLOCK_K)
    lanes = padded.view(-1, *_OF_CODES[:2], padded.shape[1] // BLOCK_K, *_OF_CODES[3:]).permute(_TO_LANES)
    lanes = lanes.reshape(*lanes.shape[:2], 32, 16, 4)
    words = []
    low = 0
    for width in fields:
        words.append(_to_words(lanes >> low & (1 << width) - 1, width, codebook))
        low += width
    return torch.cat(words, -1).reshape(padded.shape[0], -1)


def row_parts(w: Tensor) -> tuple[Tensor, ...]:
    """[N, K] in parts of whole row tiles, of AT_ONCE weights or so."""
    parts: tuple[Tensor, ...] = w.split(max(1, AT_ONCE // (TILE_ROWS * max(1, w.shape[1]))) * TILE_ROWS)
    return parts


def unpack(
    packed: Tensor, bits: int, rows: int, columns: int, *, planes: bool = False, codebook: bool = False
) -> Tensor:
    """The codes, uint8 [rows, columns], of what `pack` gave. Raises ValueError if the words are too few or too many."""
    tiles = _tiles(packed, bits, rows, columns)
    codes = torch.zeros(*tiles.shape[:2], 32, 16, 4, dtype=torch.uint8, device=packed.device)
    first = low = 0
    for width in _fields(bits, planes):
        values = _from_words(tiles[..., first : first + 64 * width], width, codebook)
        codes |= values.to(torch.uint8) << low
        first, low = first + 64 * width, low + width
    in_lanes = codes.view(*codes.shape[:2], 8, 4, 4, 2, 2, 2, 2)
    back = [_TO_LANES.index(i) for i in range(9)]
    return in_lanes.permute(back).reshape(packed.shape[0], -1)[:rows, :columns]


def pack_pairs(codes: Tensor) -> Tensor:
    """codes [N, ceil(K / 2)], 8 bits for two columns -> int32 [packed_rows(N), packed_words(4, K)]."""
    padded = _padded(codes, 8, BLOCK_K // 2)
    lanes = padded.view(-1, *_OF_PAIRS[:2], padded.shape[1] // (BLOCK_K // 2), *_OF_PAIRS[3:]).permute(_PAIRS_TO_LANES)
    return _to_words(lanes.reshape(*lanes.shape[:2], 32, 8, 4), 8).reshape(padded.shape[0], -1)


def unpack_pairs(packed: Tensor, rows: int, columns: int) -> Tensor:
    """The codes, uint8 [rows, ceil(columns / 2)], of what `pack_pairs` gave."""
    tiles = _tiles(packed, 4, rows, columns)
    in_lanes = _from_words(tiles, 8).to(torch.uint8).view(*tiles.shape[:2], 8, 4, 4, 2, 2, 2)
    back = [_PAIRS_TO_LANES.index(i) for i in range(8)]
    return in_lanes.permute(back).reshape(packed.shape[0], -1)[:rows, : -(-columns // 2)]


def _padded(codes: Tensor, bits: int, columns: int) -> Tensor:
    """Whole tiles, int32."""
    if codes.dim() != 2 or codes.is_floating_point():
        raise ValueError(f"codes: expected integers [N, K], got {codes.dtype} of shape {list(codes.shape)}")
    if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < 1 << bits:
        raise ValueError(f"codes: expected 0 to {(1 << bits) - 1}, got {int(codes.min())} to {int(codes.max())}")
    return pad(codes.to(torch.int32), (0, -codes.shape[1] % columns, 0, -codes.shape[0] % TILE_ROWS))


def _tiles(packed: Tensor, bits: int, rows: int, columns: int) -> Tensor:
    """[row tiles, k-blocks, words of a tile]."""
    want = [packed_rows(rows), packed_words(bits, columns)]
    if packed.dtype != torch.int32 or list(packed.shape) != want:
        raise ValueError(
            f"packed: expected int32 of shape {want} for {rows} x {columns} codes of {bits} bits, "
            f"got {packed.dtype} of shape {list(packed.shape)}"
        )
    return packed.reshape(want[0] // TILE_ROWS, -1, bits * TILE_ROWS * BLOCK_K // 32)


def _to_words(registers: Tensor, width: int, codebook: bool = False) -> Tensor:
    """[row tiles, k-blocks, lane, register, byte] of `width` bits -> [row tiles, k-blocks, words of the field]."""
    if width <= 2:
        registers = registers.unflatten(3, _REGISTERS).permute(0, 1, 2, *_ROWS_FIRST[width], 6).flatten(3, 5)
    shared = registers.unflatten(3, (-1, 8 // width))
    # No two codes share a bit: adding is as good as or, and wraps around where it must.
    words: Tensor = (shared << _shifts(width, registers.device, codebook)).sum((-1, -2), dtype=torch.int32)
    field: Tensor = words.unflatten(3, (-1, min(4, words.shape[3]))).transpose(2, 3).flatten(2)
    return field


def _from_words(words: Tensor, width: int, codebook: bool = False) -> Tensor:
    """The registers again."""
    side_by_side = 2 if width == 1 else 4
    of_lanes = words.unflatten(2, (-1, 32, side_by_side)).transpose(2, 3).flatten(3)
    values: Tensor = (of_lanes[..., None, None] >> _shifts(width, words.device, codebook) & (1 << width) - 1).flatten(
        3, 4
    )
    if width <= 2:
        order = _ROWS_FIRST[width]
        values = values.unflatten(3, [_REGISTERS[i - 3] for i in order])
        values = values.permute(0, 1, 2, *(3 + order.index(i) for i in (3, 4, 5)), 6).flatten(3, 5)
    return values


def _fields(bits: int, planes: bool) -> tuple[int, ...]:
    if bits not in _FIELDS:
        raise ValueError(f"bits: expected 1 to 8, got {bits}")
    return (1,) * bits if planes else _FIELDS[bits]


def _shifts(width: int, device: torch.device, codebook: bool) -> Tensor:
    """The first bit of each code of a word: [registers of a word, bytes]."""
    of_register, of_bytes = (16, (0, 8, 4, 12)) if codebook else (width, (0, 8, 16, 24))
    register = torch.arange(8 // width, dtype=torch.int32, device=device) * of_register
    return register.unsqueeze(1) + torch.tensor(of_bytes, dtype=torch.int32, device=device)
