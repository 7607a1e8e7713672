"""Codes of 2 to 8 bits in 32-bit words, as other libraries pack them: a stream of bits, the lowest first."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

_OF_PERIOD = 32  # codes that fill whole words, `bits` of them, whatever the bits


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 `[R, ceil(count * bits / 32)]` -> the codes, uint8 `[R, count]`."""
    rows, mask = words.shape[0], (1 << bits) - 1
    periods = -(-count // _OF_PERIOD)
    of_period = pad(words, (0, periods * bits - words.shape[1])).view(rows, periods, bits)
    codes = torch.empty(rows, periods, _OF_PERIOD, dtype=torch.uint8, device=words.device)
    for i in range(_OF_PERIOD):
        word, shift = divmod(i * bits, 32)
        value = of_period[..., word] >> shift
        beyond = shift + bits - 32
        if beyond > 0:  # the rest is in the next word; >> has filled up with the sign
            value = (value & (1 << bits - beyond) - 1) | (of_period[..., word + 1] << bits - beyond)
        codes[..., i] = (value & mask).to(torch.uint8)
    return codes.flatten(1)[:, :count]


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Codes `[R, C]`, 0 to 2^bits - 1 -> int32 `[R, ceil(C * bits / 32)]`."""
    rows, count = codes.shape
    periods = -(-count // _OF_PERIOD)
    of_period = pad(codes.to(torch.int32), (0, periods * _OF_PERIOD - count)).view(rows, periods, _OF_PERIOD)
    words = torch.zeros(rows, periods, bits, dtype=torch.int32, device=codes.device)
    for i in range(_OF_PERIOD):
        word, shift = divmod(i * bits, 32)
        words[..., word] |= of_period[..., i] << shift
        if shift + bits > 32:
            words[..., word + 1] |= of_period[..., i] >> 32 - shift
    return words.flatten(1)[:, : words_of(count, bits)]


def words_of(count: int, bits: int) -> int:
    return -(-count * bits // 32)
