"""CPU engines besides `_C`'s own, `cpu`: `onednn` (AVX-512 VNNI or AMX through torch) and `reference` (plain torch).

All give the accumulators exactly and compute the same formula behind them, so their bits are the same. "auto" is `cpu`;
where the CPU has AMX, whose tiles oneDNN knows, `onednn` for calls of at least AMX_PRODUCTS products (M * N * K) a thread.
oneDNN reads its own copy of a weight, which is made at the first such call and lives as long as the weight.
"""

from __future__ import annotations

import functools
import math
import platform
import weakref
from pathlib import Path

import torch
from torch import Tensor

from octofuse import _C, reference

ENGINES = ("cpu", "onednn", "reference")
AMX_PRODUCTS = 2e7  # a thread: where both took the same time on a Xeon with AMX, with 2 and with 16 threads


@functools.cache
def why_not_onednn() -> str:
    """Empty if torch's oneDNN multiplies int8 exactly on this CPU, else the reason.

    Without VNNI the library's u8 x s8 product saturates its 16-bit partial sums: the probe's extreme values find that.
    """
    if not hasattr(torch.ops.onednn, "qlinear_prepack"):
        return "this torch was built without oneDNN"
    if not torch.cpu._is_vnni_supported():
        return "needs a CPU with AVX-512 VNNI"
    generator = torch.Generator().manual_seed(0)
    for m, n, k in ((3, 5, 7), (17, 33, 300), (2, 16, 131071)):
        x = torch.randint(-128, 128, (m, k), dtype=torch.int8, generator=generator)
        w = torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=generator)
        for left, right in ((x, w), (x.clone().fill_(-128), w.clone().fill_(-128)), (x, w.clone().fill_(127))):
            if not torch.equal(_onednn_product(left, _pack(right)), reference.accumulate(left, right).float()):
                return "its int8 product is not exact on this CPU"
    return ""


def name() -> str:
    """This machine's processor, as it calls itself."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def isa() -> str:
    """The instruction set of the engine `cpu`, such as "avx2"; "portable" where this CPU has none that is known."""
    return str(_C.cpu_info()["isa"])


def has_amx() -> bool:
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())


if has_amx():
    _C.prefer_onednn(AMX_PRODUCTS)


def select(engine: str, products: int = 1) -> str:
    """The CPU engine that serves `engine` for a call of M * N * K products; ValueError with the reason if none does."""
    if engine in ("cpu", "reference"):
        return engine
    if engine == "auto":
        if not has_amx() or products < AMX_PRODUCTS * torch.get_num_threads():
            return "cpu"
        if why_not_onednn():
            _C.prefer_onednn(math.inf)
            return "cpu"
        return "onednn"
    if engine == "onednn":
        reason = why_not_onednn()
        if not reason:
            return engine
        raise ValueError(f"engine: expected one that can serve this call, got 'onednn'; onednn: {reason}")
    names = ", ".join(map(repr, ENGINES))
    raise ValueError(f"engine: expected one of 'auto', {names} for CPU tensors, got {engine!r}")


class Threads:
    """On a CPU, for the time of a call: no more of torch's threads than other processes leave cores for.

    A parallel region of OpenMP ends when all of its threads have come by: one that waits for a core holds up the others.
    """

    def __init__(self, device: torch.device) -> None:
        self.crowded = False  # since then, at some time
        self.most = torch.get_num_threads() if device.type == "cpu" else 1

    def __enter__(self) -> Threads:
        self.adjust()
        return self

    def __exit__(self, *_: object) -> None:
        if self.most > 1:
            torch.set_num_threads(self.most)

    def adjust(self) -> None:
        if self.most == 1:
            return
        count = min(self.most, _C.free_cores())
        self.crowded |= count < self.most
        if count != torch.get_num_threads():
            torch.set_num_threads(count)


def accumulate(x: Tensor, w: Tensor, engine: str) -> Tensor:
    """x [M, K], w [N, K] int8 -> [M, N]: int32 accumulators, or (oneDNN) their one rounding to fp32."""
    if engine == "onednn":
        return _onednn_product(x, _packed(w))
    return reference.accumulate(x, w)


def select_raw(engine: str) -> str:
    """int32 outputs come from the reference: oneDNN writes fp32, which rounds above 2^24."""
    if engine == "onednn":
        raise ValueError("engine: expected one that can serve this call, got 'onednn'; onednn: it has no int32 output")
    return "cpu" if engine == "auto" else select(engine)


def _pack(w: Tensor) -> Tensor:
    packed: Tensor = torch.ops.onednn.qlinear_prepack(w.contiguous(), None)  # it reads past strides
    return packed


# Packing costs about as much as a product with a few hundred rows, so each weight is packed once. The key is the tensor
# object, which `del` ends; the version tells an in-place change.
_PACKED: dict[int, tuple[weakref.ref[Tensor], int, int, Tensor]] = {}


def _packed(w: Tensor) -> Tensor:
    if w.is_inference():  # carries no version counter: a change could not be seen
        return _pack(w)
    entry = _PACKED.get(id(w))
    if entry is not None and entry[0]() is w and entry[1:3] == (w._version, w.data_ptr()):
        return entry[3]
    packed = _pack(w)
    key = id(w)
    _PACKED[key] = (weakref.ref(w, lambda _: _PACKED.pop(key, None)), w._version, w.data_ptr(), packed)
    return packed


def _onednn_product(x: Tensor, packed: Tensor) -> Tensor:
    """float(acc), rounded once.

    x goes in as uint8 with zero point 128: with int8 activations the library falls back to a scalar loop on CPUs without
    AMX, a thousand times slower.
    """
    n = packed.shape[1]
    shifted = (x.contiguous().to(torch.int16) + 128).to(torch.uint8)
    ones, zeros = _units(n)
    product: Tensor = torch.ops.onednn.qlinear_pointwise(
        shifted, 1.0, 128, packed, ones, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return product


@functools.lru_cache(maxsize=64)
def _units(n: int) -> tuple[Tensor, Tensor]:
    return torch.ones(n), torch.zeros(n, dtype=torch.int32)
