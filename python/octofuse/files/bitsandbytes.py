"""bitsandbytes' checkpoints.

8 bits, LLM.int8(): int8 weights and `SCB`, the largest magnitude of each row, 127 times its scale.

4 bits: codes of nf4 or fp4 side by side, a row after the other, the first of two in a byte's high bits, and the largest
magnitude of every block of columns. Those magnitudes may be quantised once more ("double quantisation"): a byte each, a
table of 256 values, a scale for every 256 of them and what was subtracted from all. Here they become scales of the layer's
dtype, so the levels are bitsandbytes' own and a weight is rounded as its one-token kernel rounds it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octofuse.files.formats import FLOATS, Format, Stored, Want, checked_scales
from octofuse.nn import CodebookLinear, eight_bit_class, empty_layer
from octofuse.quant import Scheme, WeightOnly, codebook
from octofuse.quant.affine import OUTLIERS
from octofuse.quant.packing import row_parts

# What follows "weight" in a file's names, with a dot between; here with an underscore, for no module has a tensor
# "weight.absmax".
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", "quant_state.bitsandbytes__")
RENAMES = {r"\.weight\." + re.escape(part): f".weight_{part.replace('.', '_')}" for part in _PARTS}
_STATE = "weight_quant_state_bitsandbytes__"


@dataclass(frozen=True)
class _FourBits(Stored):
    code: str  # nf4 or fp4

    def wants(self, n: int, k: int) -> dict[str, Want]:
        if k % 2 != 0:
            raise ValueError(f"weight: expected an even number of columns, got {k}")
        codes = n * k // 2
        floats = tuple((codes // dtype.itemsize, 1) for dtype in FLOATS)
        return {
            "weight": Want((torch.uint8, *FLOATS), ((codes, 1), *floats)),
            "weight_absmax": Want((torch.uint8, torch.float32), None),
            "weight_quant_map": Want((torch.float32,), ((1 << codebook.BITS,),)),
            "weight_nested_absmax": Want((torch.float32,), None, optional=True),
            "weight_nested_quant_map": Want((torch.float32,), ((256,),), optional=True),
            _STATE + self.code: Want((torch.uint8,), None),
        }

    def layer(self, tensors: Mapping[str, Tensor], n: int, k: int, dtype: torch.dtype) -> nn.Module:
        state = _state_of(tensors[_STATE + self.code], self.code, n, k)
        group = state["blocksize"]
        levels = torch.tensor(codebook.LEVELS[self.code], dtype=torch.float32)
        if not torch.equal(tensors["weight_quant_map"].cpu(), levels):
            raise ValueError(f"weight.quant_map: expected the levels of {self.code}, got others")
        stored = tensors["weight"].view(torch.uint8).reshape(-1)
        if stored.numel() != n * k // 2:
            raise ValueError(f"weight: expected {n * k // 2} bytes, got {stored.numel()}")
        codes = torch.stack([stored >> 4, stored & 15], -1).view(n, k)
        scheme = WeightOnly(codebook.BITS, group, self.code)  # type: ignore[arg-type]
        with torch.device("meta"):
            layer = empty_layer(k, n, bias=False, scheme=scheme, dtype=dtype)
        assert isinstance(layer, CodebookLinear)
        layer.packed = torch.cat([codebook.packed(part, self.code) for part in row_parts(codes)])
        scale = _magnitudes(tensors, state, n * k // group)  # one that was quantised once more may be a little below 0
        layer.scale = scale.view(n, k // group).to(dtype).t().contiguous()
        for values, got in ((scale, "NaN or Inf"), (layer.scale, "larger ones; ask for another dtype")):
            if not bool(torch.isfinite(values).all()):
                raise ValueError(f"weight.absmax: expected finite values that {dtype} holds, got {got}")
        return layer


def _state_of(stored: Tensor, code: str, n: int, k: int) -> dict[str, Any]:
    try:
        state = json.loads(bytes(stored.cpu().tolist()).decode())
    except ValueError:
        raise ValueError("weight.quant_state: expected JSON, got something else") from None
    size = state.get("blocksize") if isinstance(state, dict) else None
    for name, got, good in (
        ("quant_type", state.get("quant_type") if isinstance(state, dict) else None, lambda got: got == code),
        ("shape", state.get("shape") if isinstance(state, dict) else None, lambda got: got == [n, k]),
        ("blocksize", size, lambda got: type(got) is int and got > 0 and k % got == 0),
    ):
        if not good(got):
            expected = {"quant_type": repr(code), "shape": [n, k], "blocksize": f"one that divides {k} columns"}[name]
            raise ValueError(f"weight.quant_state: {name}: expected {expected}, got {got!r}")
    return state  # type: ignore[no-any-return]


def _magnitudes(tensors: Mapping[str, Tensor], state: Mapping[str, Any], count: int) -> Tensor:
    """fp32 `[count]`, as bitsandbytes has them: of a table's entry times a scale, rounded, plus an offset, rounded."""
    found = tensors["weight_absmax"].reshape(-1)
    if found.numel() != count:
        raise ValueError(f"weight.absmax: expected {count} values, got {found.numel()}")
    table, scales = tensors.get("weight_nested_quant_map"), tensors.get("weight_nested_absmax")
    if found.dtype == torch.float32:
        if table is not None or scales is not None:
            raise ValueError("weight.absmax: expected uint8 beside weight.nested_absmax, got float32")
        return found
    size, offset = state.get("nested_blocksize"), state.get("nested_offset")
    if table is None or scales is None:
        raise ValueError("weight.nested_absmax, weight.nested_quant_map: expected both for absmax in uint8, got None")
    if type(size) is not int or size < 1 or scales.numel() != -(-count // size):
        raise ValueError(
            f"weight.nested_absmax: expected one value for every {size!r} of {count}, got {scales.numel()}"
        )
    if not isinstance(offset, int | float):
        raise ValueError(f"weight.quant_state: nested_offset: expected a number, got {offset!r}")
    spread = scales.reshape(-1).repeat_interleave(size)[:count]
    return table[found.int()] * spread + offset


@dataclass(frozen=True)
class _EightBits(Stored):
    threshold: float

    def wants(self, n: int, k: int) -> dict[str, Want]:
        return {
            "weight": Want((torch.int8,), ((n, k),)),
            "SCB": Want(FLOATS, ((n,),)),
            "weight_format": Want((torch.uint8,), ((),), optional=True),
        }

    def layer(self, tensors: Mapping[str, Tensor], n: int, k: int, dtype: torch.dtype) -> nn.Module:
        form = tensors.get("weight_format")
        if form is not None and int(form) != 0:
            raise ValueError(f"weight_format: expected 0, rows, got {int(form)}, an order of old GPUs")
        scheme = Scheme(outliers=self.threshold or None)  # 0: without outliers
        layer = eight_bit_class(scheme)(k, n, bias=False, scheme=scheme, dtype=dtype, device="meta")
        layer.weight = tensors["weight"]
        layer.weight_scale = checked_scales("SCB", tensors["SCB"]).float() / 127
        return layer


class BitsAndBytes(Format):
    renames = RENAMES

    def __init__(self, config: Mapping[str, Any]) -> None:
        kinds = [name for name in ("load_in_4bit", "load_in_8bit") if config.get(name) is True]
        if len(kinds) != 1:
            raise ValueError(f"load_in_4bit, load_in_8bit: expected exactly one of the two, got {kinds}")
        self.threshold = config.get("llm_int8_threshold", OUTLIERS) if kinds == ["load_in_8bit"] else 0.0
        is_number = isinstance(self.threshold, int | float) and not isinstance(self.threshold, bool)
        if not is_number or not 0 <= self.threshold < float("inf"):
            raise ValueError(f"llm_int8_threshold: expected a number of at least 0, got {self.threshold!r}")

    def stored(self, names: tuple[str, ...], module: nn.Module, tensors: frozenset[str]) -> Stored | None:
        if "SCB" in tensors:
            return _EightBits(float(self.threshold))
        for code in codebook.LEVELS:
            if _STATE + code in tensors:
                return _FourBits(code)
        return None
