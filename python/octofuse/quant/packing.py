"""How codes of 1 to 8 bits lie in 32-bit words: the one description, for layers, checkpoints and kernels.

A row of K codes is filled up with zeros to a multiple of 128 and cut into chunks of 32. A code is cut into fields of 8,
4, 2 or 1 bits, the low bits first: 7 = 4 + 2 + 1, 6 = 4 + 2, 5 = 4 + 1, 3 = 2 + 1; or, `planes`, into single bits. A row
holds its fields one after the other, and each of them for one chunk after the other: f words for a field of f bits, 32 /
f codes in a word. So b bits a code are b words a chunk, whatever b is; every field of every row starts at a multiple of
16 bytes; and 32 lanes that take a chunk each read consecutive bytes of each field.

Inside a word, code v of a field below 8 bits stands at bit v // 2 * f + v % 2 * 16: a shift and a mask give a pair of
neighbours, one in each half of the word. Bytes stand in their own order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

CHUNK = 32
ROW = 128  # codes of a row are filled up to a multiple of this

_FIELDS = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}


def packed_words(bits: int, columns: int) -> int:
    """32-bit words of a row."""
    return bits * -(-columns // ROW) * (ROW // CHUNK)


def pack(codes: Tensor, bits: int, *, planes: bool = False) -> Tensor:
    """codes [N, K], of any integer type, 0 to 2^bits - 1 -> int32 [N, packed_words(bits, K)].

    Raises ValueError for codes that do not fit.
    """
    fields = _fields(bits, planes)
    if codes.dim() != 2 or codes.is_floating_point():
        raise ValueError(f"codes: expected integers [N, K], got {codes.dtype} of shape {list(codes.shape)}")
    if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < 1 << bits:
        raise ValueError(f"codes: expected 0 to {(1 << bits) - 1}, got {int(codes.min())} to {int(codes.max())}")
    rows, columns = codes.shape
    padded = pad(codes.to(torch.int32), (0, -columns % ROW))
    parts = []
    low = 0
    for width in fields:
        values = (padded >> low & (1 << width) - 1).view(rows, -1, CHUNK // width)
        # No two codes share a bit: adding is as good as or, and wraps around where it must.
        parts.append((values << _shifts(width, codes.device)).sum(-1, dtype=torch.int32))
        low += width
    return torch.cat(parts, 1)


def unpack(packed: Tensor, bits: int, columns: int, *, planes: bool = False) -> Tensor:
    """The codes, uint8 [N, columns], of what `pack` gave. Raises ValueError if the words are too few or too many."""
    fields = _fields(bits, planes)
    if packed.dim() != 2 or packed.dtype != torch.int32 or packed.shape[1] != packed_words(bits, columns):
        raise ValueError(
            f"packed: expected int32 [N, {packed_words(bits, columns)}] for {columns} codes of {bits} bits, "
            f"got {packed.dtype} of shape {list(packed.shape)}"
        )
    chunks = packed.shape[1] // bits
    codes = torch.zeros(packed.shape[0], chunks * CHUNK, dtype=torch.uint8, device=packed.device)
    first = low = 0
    for width in fields:
        words = packed[:, first : first + chunks * width].unsqueeze(-1)
        values = (words >> _shifts(width, packed.device)).bitwise_and_((1 << width) - 1)
        codes |= values.flatten(1).to(torch.uint8) << low
        first, low = first + chunks * width, low + width
    return codes[:, :columns]


def _fields(bits: int, planes: bool) -> tuple[int, ...]:
    if bits not in _FIELDS:
        raise ValueError(f"bits: expected 1 to 8, got {bits}")
    return (1,) * bits if planes else _FIELDS[bits]


def _shifts(width: int, device: torch.device) -> Tensor:
    """The first bit of each code of a word."""
    code = torch.arange(CHUNK // width, dtype=torch.int32, device=device)
    return code * width if width == 8 else code // 2 * width + code % 2 * 16
