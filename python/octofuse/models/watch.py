"""A prompt and a step under torch's profiler: each layer's time and kernels, and what it wrote besides its output."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, record_function

PHASES = ("prompt", "step")
Sizes = dict[str, tuple[int, int]]  # N and K of each layer
_PREFIX = "octofuse.profile/"

# ---- what is written ----

# Products of floating-point matrices, and where their weight stands: whoever gives them a whole one has written it first.
_PRODUCTS = {"aten::mm": 1, "aten::addmm": 2, "aten::bmm": 1, "mkldnn::_linear_pointwise": 1}
_COPIES = ("aten::copy_", "aten::clone")


def _widened(call: Any, tokens: int, n: int, k: int) -> tuple[bool, bool]:
    """Whether a product had a whole weight as its operand, and whether the input was copied in front of it."""
    weight = copied = multiplied = False

    def look(event: Any) -> None:
        nonlocal weight, copied, multiplied
        for child in event.cpu_children:
            shapes = [tuple(shape) for shape in child.input_shapes or ()]
            at = _PRODUCTS.get(child.name)
            if at is not None:
                multiplied = True
                weight |= len(shapes) > at and sorted(shapes[at][-2:]) == sorted((n, k))
                continue
            if child.name in _COPIES and shapes and not multiplied:
                copied |= len(shapes[0]) > 1 and shapes[0][-1] == k and math.prod(shapes[0]) == tokens * k
            look(child)

    look(call)
    return weight, copied


# ---- times ----


@dataclass
class Call:
    """What a layer's calls of a phase were seen to do."""

    microseconds: float
    kernels: list[tuple[str, float]]
    weight_written: bool
    input_copied: bool
    count: int = 1


@dataclass
class Seen:
    tokens: dict[tuple[str, str], int] = field(default_factory=dict)
    dtypes: dict[tuple[str, str], torch.dtype] = field(default_factory=dict)
    calls: dict[tuple[str, str], Call] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)

    def add(
        self, key: tuple[str, str], spent: tuple[float, list[tuple[str, float]]], call: Any, sizes: tuple[int, int]
    ) -> None:
        """A layer may be called more than once."""
        weight, copied = _widened(call, self.tokens.get(key, 0), *sizes)
        if (known := self.calls.get(key)) is None:
            self.calls[key] = Call(*spent, weight, copied)
            return
        known.microseconds += spent[0]
        known.kernels += spent[1]
        known.weight_written |= weight
        known.input_copied |= copied
        known.count += 1


def _run(model: Any, ids: Tensor) -> Iterator[str]:
    """A prompt, and then a step; gives each one's name before it runs."""
    cache = None
    name = "past_key_values" if "past_key_values" in signature(model.forward).parameters else "cache"
    for phase, tokens in zip(PHASES, (ids, ids[:, -1:]), strict=True):
        yield phase
        with record_function(_PREFIX + phase):
            output = model(tokens, use_cache=True, **({} if cache is None else {name: cache}))
        cache = output.past_key_values


@contextmanager
def _marks(layers: dict[str, nn.Module], seen: Seen, phase: list[str]) -> Iterator[None]:
    """Each layer's call as a range of the profiler."""
    handles, open_ranges = [], []

    def begin(name: str, x: Any) -> None:
        if isinstance(x, Tensor):
            seen.tokens[phase[0], name] = seen.tokens.get((phase[0], name), 0) + x.numel() // max(1, x.shape[-1])
            seen.dtypes[phase[0], name] = x.dtype
        opened = record_function(_PREFIX + name)
        opened.__enter__()
        open_ranges.append(opened)

    for name, layer in layers.items():
        handles.append(
            layer.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: begin(name, args[0] if args else next(iter(kwargs.values()), None)),
                with_kwargs=True,
            )
        )
        handles.append(
            layer.register_forward_hook(lambda *_: open_ranges.pop().__exit__(None, None, None), always_call=True)
        )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _ThroughDispatcher(TorchFunctionMode):
    """Changes nothing, but this library's ops then pass torch's dispatcher, by which a profiler knows whose a kernel is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def watch(model: Any, ids: Tensor, layers: dict[str, nn.Module], sizes: Sizes, on_gpu: bool) -> Seen:
    """The third prompt and step: the first ones plan, tune and allocate."""
    seen, now = Seen(), [""]
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    for _ in range(2):
        for _ in _run(model, ids):
            pass
    profiling = torch.profiler.profile(activities=activities, record_shapes=True)
    with _ThroughDispatcher(), _marks(layers, seen, now), profiling as profiler:
        for phase in _run(model, ids):
            now[0] = phase
        for index in range(torch.cuda.device_count()) if on_gpu else ():
            torch.cuda.synchronize(index)
    for event in profiler.events():
        phase = event.name.removeprefix(_PREFIX)
        if event.name.startswith(_PREFIX) and phase in PHASES and str(event.device_type).endswith("CPU"):
            seen.totals[phase] = _time_of(event, on_gpu)[0]
            for call in _marked(event):
                name = call.name.removeprefix(_PREFIX)
                seen.add((phase, name), _time_of(call, on_gpu), call, sizes[name])
    return seen


def _time_of(event: Any, on_gpu: bool) -> tuple[float, list[tuple[str, float]]]:
    """Microseconds, and on a GPU the kernels that they are of."""
    if not on_gpu:
        return float(event.cpu_time_total), []
    kernels = _kernels_of(event)
    return sum(us for _, us in kernels), kernels


def _marked(event: Any) -> Iterator[Any]:
    for child in event.cpu_children:
        if child.name.startswith(_PREFIX):
            yield child
        else:
            yield from _marked(child)


def _kernels_of(event: Any) -> list[tuple[str, float]]:
    own = [(kernel.name, float(kernel.duration)) for kernel in event.kernels]
    for child in event.cpu_children:
        own += _kernels_of(child)
    return own


def bandwidth_of(device: torch.device) -> float | None:
    """Bytes a second of a copy, read and written."""
    if device.type != "cuda":
        return None
    source = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(8):
            target.copy_(source)
        torch.cuda.synchronize(device)
        best = min(best, (time.perf_counter() - began) / 8)
    return 2 * source.numel() / best
