"""Measuring kernels on the user's GPU, and the file that remembers what was fastest.

`tune` times every kernel that could win a shape and tells `select()`. The results go to one JSON file under
`cache_path()`, keyed by GPU, driver and library versions; the first call on a device reads it. A file that cannot be read
or written costs one warning: the table that ships serves instead. OCTOFUSE_TUNING=0 ignores the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octofuse import _C
from octofuse.ops import gemm
from octofuse.ops._guard import dtype_name
from octofuse.ops.explain import explain, tune_cublaslt
from octofuse.ops.linear import linear
from octofuse.ops.measure import device_time, overlap, settling

FORMAT = 1
WORTH_TIMING = 2.0  # times the lowest estimate
AT_LEAST = 6  # kernels, however far their estimates

Shape = tuple[int, int, int]
# device -> "M,N,K,dtype of the output" of int8, of float8 ",float8" or ",float8_fast" behind it -> kernel
_tuned: dict[int, dict[str, str]] = {}


@dataclass(frozen=True)
class Tuned:
    """One shape: what select() ran before, what it runs now, and the microseconds of both."""

    shape: Shape
    before: str
    before_us: float
    kernel: str
    us: float


def cache_path() -> Path:
    """OCTOFUSE_CACHE_DIR, or octofuse/ in XDG_CACHE_HOME or ~/.cache; then tuning.json."""
    given = os.environ.get("OCTOFUSE_CACHE_DIR")
    if given:
        return Path(given) / "tuning.json"
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(base):  # a user without a home
        base = tempfile.gettempdir()
    return Path(base) / "octofuse" / "tuning.json"


def device_key(device: int) -> str:
    """What a measurement depends on beside its shape."""
    import octofuse

    info = _C.device_info(device)
    build = _C.build_info()
    parts = (
        torch.cuda.get_device_name(device),
        f"sm_{info['compute_capability']}",
        f"{info['sm_count']} SMs",
        f"driver {_driver_version()}",
        f"octofuse {octofuse.__version__}",
        f"CUDA {build['cuda_version']}",
        f"cuBLASLt {_C.cublaslt_info()['version']}",
    )
    return "; ".join(parts)


def _driver_version() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", Path("/proc/driver/nvidia/version").read_text())
        if found:
            return found[1]
    return "unknown"


def load(device: int) -> int:
    """Reads the file and tells select(); returns how many shapes it holds for this device. Never raises for a bad file."""
    _tuned.setdefault(device, {})
    if os.environ.get("OCTOFUSE_TUNING") == "0":
        return 0
    with _degrading("could not be read"):
        found = _read(cache_path()).get(device_key(device), {})
        kernels = {shape: str(entry["kernel"]) for shape, entry in found.items()}
        _tell(device, kernels)
        for shape, entry in found.items():
            if "algorithm" in entry:
                m, n, k, out, _ = _parse(shape)
                _C.prefer_cublaslt(m, n, k, out == "int8", int(entry["algorithm"]), device)
        _tuned[device] = kernels
        return len(kernels)
    return 0


def entries(device: int) -> list[tuple[int, int, int, str, str]]:
    """(M, N, K, output dtype, kernel) of every tuned shape of a device; the kernel's name tells int8 from float8."""
    if device not in _tuned:
        load(device)
    return _table(_tuned[device])


def tune(
    shapes: Iterable[Shape],
    *,
    device: torch.device | str | int | None = None,
    out_dtype: torch.dtype = torch.float16,
    dtype: torch.dtype = torch.int8,
    fast_accumulate: bool = False,
    save: bool = True,
    on_shape: Callable[[Tuned], None] | None = None,
) -> list[Tuned]:
    """Times the kernels that could win each (M, N, K) and uses the fastest from now on.

    Args:
        shapes: (M, N, K), each at least 1.
        device: a CUDA device; default: the current one.
        out_dtype: fp16, bf16, fp32 or int8 outputs of the fused linears, or int32: the raw product, where cuBLASLt's
            algorithms are timed as well. Of float8 operands fp16, bf16, fp32 or float8_e4m3fn.
        dtype: of the operands: int8 or float8_e4m3fn.
        fast_accumulate: of float8, the sums that `linear` calls so, as layers have them with scales by row or tensor.
        save: also write the results to `cache_path()`.
        on_shape: called after each shape.

    Raises ValueError for a shape below 1 or another dtype, RuntimeError without a GPU or during graph capture.
    """
    kind = _kind(dtype, fast_accumulate, out_dtype)
    wanted = [tuple(shape) for shape in shapes]
    for shape in wanted:
        if len(shape) != 3 or not all(isinstance(v, int) and v >= 1 for v in shape):
            raise ValueError(f"shapes: expected (M, N, K) of integers of at least 1, got {shape}")
    if not torch.cuda.is_available() or not _C.build_info()["cuda"]:
        raise RuntimeError("tune: needs a CUDA device and an octofuse built with CUDA")
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("tune: the stream is being captured; tune before the capture")
    chosen = torch.device("cuda" if device is None else device if not isinstance(device, int) else f"cuda:{device}")
    if chosen.type != "cuda":
        raise ValueError(f"device: expected a CUDA device, got {chosen}")
    index = torch.cuda.current_device() if chosen.index is None else chosen.index
    if kind.arithmetic != "int8" and torch.cuda.get_device_capability(index) != (9, 0):
        raise ValueError("dtype: expected int8, since cuBLASLt alone multiplies float8 on this GPU, got float8_e4m3fn")
    results = []
    entries(index)  # what the file holds stays known beside what is new
    with torch.cuda.device(index), overlap(False):
        for m, n, k in wanted:
            found, entry = _tune_one((m, n, k), kind, index)
            key = kind.key((m, n, k))
            _tuned[index][key] = found.kernel
            _tell(index, _tuned[index])
            if save:
                with _degrading("could not be written"):
                    _write(cache_path(), device_key(index), {key: entry})
            results.append(found)
            if on_shape is not None:
                on_shape(found)
    return results


@dataclass(frozen=True)
class _Kind:
    """What a call's choice depends on beside its shape."""

    out: torch.dtype
    arithmetic: str  # as `_C` calls it

    @property
    def raw(self) -> bool:
        return self.out == torch.int32

    def key(self, shape: Shape) -> str:
        suffix = "" if self.arithmetic == "int8" else f",{self.arithmetic}"
        return ",".join(map(str, shape)) + f",{dtype_name(self.out)}{suffix}"

    def operands(self, m: int, n: int, k: int) -> list[tuple[Tensor, ...]]:
        """Sets that together exceed the L2 cache twice: weights then come from memory, as in a model."""
        cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        count = max(2, min(64, -(-2 * cache // (n * k + m * k))))
        dtype = torch.int8 if self.arithmetic == "int8" else torch.float8_e4m3fn

        def values(rows: int) -> Tensor:
            if dtype == torch.int8:
                return torch.randint(-128, 128, (rows, k), dtype=dtype, device="cuda")
            return torch.randn(rows, k, dtype=torch.float16, device="cuda").to(dtype)

        def scale(*shape: int) -> Tensor:
            return torch.rand(*shape, device="cuda")

        return [(values(m), values(n), scale(m, 1), scale(n), scale(n)) for _ in range(count)]

    def call(self, s: tuple[Tensor, ...], engine: str) -> Tensor:
        if self.arithmetic != "int8":
            out_scale = 1.0 if self.out == torch.float8_e4m3fn else None
            fast = self.arithmetic == "float8_fast"
            return linear(*s, out_dtype=self.out, out_scale=out_scale, engine=engine, fast_accumulate=fast)
        if self.raw:
            return gemm.i8i32_matmul(s[0], s[1], engine=engine)
        if self.out == torch.int8:
            return gemm.i8i8_linear(*s, out_scale=1.0, engine=engine)
        return gemm.i8f16_linear(*s, out_dtype=self.out, engine=engine)


def _kind(dtype: torch.dtype, fast: bool, out: torch.dtype) -> _Kind:
    outputs = {"int8": ("float16", "bfloat16", "float32", "int8", "int32"),
               "float8_e4m3fn": ("float16", "bfloat16", "float32", "float8_e4m3fn")}  # fmt: skip
    operands = dtype_name(dtype, "dtype")
    if operands not in outputs:
        raise ValueError(f"dtype: expected int8 or float8_e4m3fn, got {operands}")
    if fast and operands == "int8":
        raise ValueError("fast_accumulate: expected False for int8, whose sums are exact, got True")
    *others, last = outputs[operands]
    if (name := dtype_name(out)) not in outputs[operands]:
        raise ValueError(f"out_dtype: expected {', '.join(others)} or {last} for {operands}, got {name}")
    return _Kind(out, "int8" if operands == "int8" else "float8_fast" if fast else "float8")


def check_kind(dtype: torch.dtype, fast_accumulate: bool, out_dtype: torch.dtype) -> None:
    """Raises what `tune` would."""
    _kind(dtype, fast_accumulate, out_dtype)


def _tune_one(shape: Shape, kind: _Kind, device: int) -> tuple[Tuned, dict[str, Any]]:
    sets = kind.operands(*shape)
    entry: dict[str, Any] = {}
    worth = _worth_timing(shape, kind, device)
    if "cublaslt" in worth:
        times = tune_cublaslt(sets[0][0], sets[0][1])
        entry["algorithm"] = min(times, key=lambda index: times[index])

    def time_of(engine: str, settle: float) -> float:
        calls = [functools.partial(kind.call, s, engine) for s in sets]
        return device_time(calls, repeats=2 if settle else 7, settle=settle)

    fast = kind.arithmetic == "float8_fast"
    before = explain(sets[0][0], sets[0][1], out_dtype=kind.out, fast_accumulate=fast).chosen
    before_us = time_of(before, 0.0)
    settle = settling(before_us * 1e-6)
    if settle:
        before_us = time_of(before, settle)
    best, best_us = before, before_us
    for name in worth:
        if name != before and (us := time_of(name, settle)) < best_us:
            best, best_us = name, us
    entry |= {"kernel": best, "us": round(best_us, 3)}
    return Tuned(shape, before, before_us, best, best_us), entry


def _worth_timing(shape: Shape, kind: _Kind, device: int) -> list[str]:
    """Of float8 this library's kernels alone: how cuBLASLt adds up may depend on M."""
    found = _C.estimates(*shape, dtype_name(kind.out), kind.raw, device, kind.arithmetic)
    estimates = sorted(found, key=lambda pair: pair[1])
    real = [(name, us) for name, us in estimates if us < 1e6]
    worth = [name for i, (name, us) in enumerate(real) if i < AT_LEAST or us <= WORTH_TIMING * real[0][1]]
    return worth + [name for name, us in estimates if kind.raw and name == "cublaslt"]


def _tell(device: int, kernels: dict[str, str]) -> None:
    _C.set_tuned(device, _table(kernels))


def _table(kernels: dict[str, str]) -> list[tuple[int, int, int, str, str]]:
    return [(*_parse(shape)[:4], kernel) for shape, kernel in kernels.items()]


def _parse(shape: str) -> tuple[int, int, int, str, str]:
    m, n, k, out, *arithmetic = shape.split(",")
    return int(m), int(n), int(k), out, arithmetic[0] if arithmetic else "int8"


_warned = False


@contextlib.contextmanager
def _degrading(what: str) -> Iterator[None]:
    """The cache is a convenience: whatever is wrong with the file, calls go on, after one warning a process."""
    global _warned
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        if not _warned:
            _warned = True
            warnings.warn(
                f"octofuse: {cache_path()} {what} ({error}); the table that ships is used", RuntimeWarning, stacklevel=3
            )


def _read(path: Path) -> dict[str, Any]:
    """The devices of the file; nothing if there is none or it has another format. ValueError if it is not such JSON."""
    if not path.exists():
        return {}
    record = json.loads(path.read_text(encoding="utf-8"))
    if record["format"] != FORMAT:
        return {}
    devices: dict[str, Any] = record["devices"]
    if not isinstance(devices, dict) or not all(isinstance(shapes, dict) for shapes in devices.values()):
        raise ValueError("devices: expected one object for each device")
    return devices


def _write(path: Path, key: str, new: dict[str, Any]) -> None:
    """Adds to the file: under a lock, so that two processes lose nothing, and by rename, so that none reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / (path.name + ".lock")).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            devices = _read(path)
        except (ValueError, KeyError, TypeError):
            devices = {}  # it was corrupt: what is measured now replaces it
        devices.setdefault(key, {}).update(new)
        text = json.dumps({"format": FORMAT, "devices": devices}, indent=1, sort_keys=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
