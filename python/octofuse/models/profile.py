"""What a model's linears really do in one prompt and one step: kernels, instructions, bytes, what was widened or copied.

A layer may have its weight in 8 bits and multiply in 16: `profile` says where. It looks at any module with in_features and
out_features (or transformers' Conv1D), whichever library made it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, record_function

from octofuse.models.instructions import Instruction, instructions_of
from octofuse.nn.linear import is_conv1d

PHASES = ("prompt", "step")
NARROW = 9.0  # bits of a weight, scales included, up to which it counts as quantised
# Dense products a second of compute capability 9.0, by what an instruction multiplies (NVIDIA's data sheet).
RATES = {"16 bits": 989e12 / 2, "int8": 1979e12 / 2, "float8": 1979e12 / 2}
_PREFIX = "octofuse.profile/"


@dataclass(frozen=True)
class Kernel:
    name: str
    microseconds: float
    instruction: Instruction


@dataclass(frozen=True)
class LayerProfile:
    """One layer in one phase.

    stored: "int8", "4.3 bits", "bfloat16"; stored_bytes: weight and scales. moved_bytes: what the call has to move at
    least, and twice each weight that was written wider. widened: such weights and copies of the input. floor: seconds that
    the bytes or the products take at best; None where the device's speed is not known.
    """

    name: str
    kind: str
    phase: str
    tokens: int
    n: int
    k: int
    stored: str
    stored_bytes: int
    moved_bytes: int
    widened: tuple[str, ...]
    kernels: tuple[Kernel, ...]
    microseconds: float
    floor: float | None

    @property
    def instruction(self) -> Instruction:
        """Of the kernel that takes longest among those on tensor cores, or of none."""
        on_tensor_cores = [kernel for kernel in self.kernels if kernel.instruction.name]
        if not on_tensor_cores:
            return Instruction("", "name")
        return max(on_tensor_cores, key=lambda kernel: kernel.microseconds).instruction

    @property
    def share(self) -> float | None:
        """Of the roofline: 1 is as fast as memory or tensor cores allow."""
        return None if self.floor is None or self.microseconds == 0 else self.floor * 1e6 / self.microseconds

    @property
    def verdict(self) -> str:
        """What the weight is in memory, and in fact."""
        narrow = self.stored_bytes * 8 <= NARROW * self.n * self.k
        weights = [text for text in self.widened if text.startswith("weight")]
        if narrow and weights:
            return f"{self.stored} in name only: {weights[0]} in every call"
        multiplied = self.instruction.operands
        if narrow and multiplied == "16 bits":
            return f"{self.stored} in memory, multiplied in 16 bits"
        if multiplied:
            return f"{self.stored} in memory, multiplied in {multiplied}"
        return f"{self.stored} in memory"


@dataclass(frozen=True)
class Profile:
    """device: as torch names it. bandwidth: bytes a second of a copy there, or None. claimed: what the model's
    quantization_config says, or "". heads: names of output heads. totals: microseconds of each phase, all modules included.
    """

    device: str
    bandwidth: float | None
    claimed: str
    heads: tuple[str, ...]
    layers: tuple[LayerProfile, ...]
    totals: dict[str, float] = field(default_factory=dict)

    @property
    def findings(self) -> tuple[str, ...]:
        """What a reader should know first."""
        found = []
        inner = [layer for layer in self.layers if layer.name not in self.heads]
        floats = {layer.name for layer in inner if layer.stored_bytes * 8 > NARROW * layer.n * layer.k}
        every = {layer.name for layer in inner}
        if self.claimed and floats:
            found.append(
                f"{self.claimed} in the config, but {len(floats)} of {len(every)} linears store 16 bits or more"
            )
        for phase in PHASES:
            lies = [layer for layer in self.layers if layer.phase == phase and "in name only" in layer.verdict]
            if lies:
                first = lies[0].widened[0]
                found.append(f"{phase}: {len(lies)} linears write their weight wider before every product ({first})")
        return tuple(found)


@torch.no_grad()
def profile(model: nn.Module, ids: Tensor) -> Profile:
    """One prompt, ids int64 `[B, T]`, and one step behind it, with transformers' own cache.

    Raises ValueError for a model without linears and for a prompt of no tokens.
    """
    layers = _linears(model)
    if not layers:
        raise ValueError(f"model: expected linear layers, got none in {type(model).__name__}")
    if ids.dim() != 2 or ids.shape[1] < 1:
        raise ValueError(f"ids: expected shape [B, T] with T of at least 1, got {list(ids.shape)}")
    device = next(model.parameters()).device
    on_gpu = device.type == "cuda"
    seen = _watch(model, ids.to(device), layers, on_gpu)
    names = {name for call in seen.calls.values() for name, _ in call.kernels}
    instructions = instructions_of(names)
    bandwidth = _bandwidth(device)
    found = []
    for (phase, name), call in seen.calls.items():
        kernels = tuple(Kernel(kernel, us, instructions[kernel]) for kernel, us in call.kernels)
        key = (phase, name)
        if key in seen.tokens:
            found.append(_layer(key, layers[name], seen.tokens[key], seen.dtypes[key], call, kernels, bandwidth))
    label = torch.cuda.get_device_name(device) if on_gpu else str(device)
    return Profile(label, bandwidth, _claim_of(model), _heads_of(model), tuple(found), seen.totals)


# ---- layers ----


def _linears(model: nn.Module) -> dict[str, nn.Module]:
    def is_linear(module: nn.Module) -> bool:
        sizes = (getattr(module, "in_features", None), getattr(module, "out_features", None))
        return is_conv1d(module) or all(type(size) is int for size in sizes)

    found = {name: module for name, module in model.named_modules() if name and is_linear(module)}
    return {name: module for name, module in found.items() if not any(o.startswith(f"{name}.") for o in found)}


def _sizes(layer: Any) -> tuple[int, int]:
    if is_conv1d(layer):
        k, n = layer.weight.shape
        return n, k
    return layer.out_features, layer.in_features


def _bytes(tensor: Tensor) -> int:
    """Of what a tensor really holds: subclasses hold tensors of their own."""
    if hasattr(tensor, "__tensor_flatten__") and type(tensor) not in (Tensor, nn.Parameter):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return sum(_bytes(part) for part in parts)
    return tensor.numel() * tensor.element_size()


def _stored(layer: nn.Module, n: int, k: int) -> tuple[str, int]:
    tensors = [t for name, t in [*layer.named_parameters(), *layer.named_buffers()] if not name.endswith("bias")]
    size = sum(_bytes(tensor) for tensor in tensors)
    state = getattr(getattr(layer, "weight", None), "quant_state", None)  # bitsandbytes keeps its scales there
    absmax = getattr(state, "absmax", None)
    size += _bytes(absmax) if isinstance(absmax, Tensor) else 0
    bits = size * 8 / (n * k)
    scheme = getattr(getattr(layer, "scheme", None), "name", None)
    if scheme is not None:
        return str(scheme), size
    weight = getattr(layer, "weight", None)
    dtype = str(weight.dtype).removeprefix("torch.") if isinstance(weight, Tensor) else ""
    if bits > NARROW:
        return dtype or f"{bits:.1f} bits", size
    return (dtype if dtype in ("int8", "float8_e4m3fn") else f"{bits:.1f} bits"), size


def _claim_of(model: Any) -> str:
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    method = config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None)
    return str(getattr(method, "value", method) or "")


def _heads_of(model: Any) -> tuple[str, ...]:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return tuple(name for name, module in model.named_modules() if module is head and head is not None)


def _layer(
    key: tuple[str, str], layer: nn.Module, tokens: int, dtype: torch.dtype, call: _Call, kernels: tuple[Kernel, ...],
    bandwidth: float | None,
) -> LayerProfile:  # fmt: skip
    n, k = _sizes(layer)
    stored, size = _stored(layer, n, k)
    narrow = size * 8 <= NARROW * n * k
    text = str(dtype).removeprefix("torch.")
    by_kernel = any("equantize" in kernel.name and "octofuse" not in kernel.name for kernel in kernels)
    written = n * k * dtype.itemsize if narrow and (call.weight_written or by_kernel) else 0
    copied = tokens * k * dtype.itemsize if call.input_copied else 0
    widened = [f"weight written as {text}, {written / 1e6:.1f} MB"] if written else []
    widened += [f"input copied as {text}, {copied / 1e6:.1f} MB"] if copied else []
    least = size + tokens * (n + k) * dtype.itemsize
    floor = None if bandwidth is None else least / bandwidth
    made = LayerProfile(
        key[1], type(layer).__name__, key[0], tokens, n, k, stored, size, least + 2 * written + 2 * copied, tuple(widened),
        kernels, call.microseconds, floor,
    )  # fmt: skip
    rate = RATES.get(made.instruction.operands)
    if floor is None or rate is None or torch.cuda.get_device_capability() != (9, 0):
        return made
    return replace(made, floor=max(floor, tokens * n * k / rate))


# ---- what is written ----

# Products of two floating-point matrices: whoever gives them a whole weight has written it down first.
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::linear", "aten::matmul", "aten::bmm", "mkldnn::_linear_pointwise")
_COPIES = ("aten::copy_", "aten::clone")


def _widened(events: Iterator[Any], tokens: int, n: int, k: int) -> tuple[bool, bool]:
    """Whether a product had a whole weight as its operand, and whether the input was copied."""
    weight = copied = False
    for event in events:
        shapes = [tuple(shape) for shape in event.input_shapes or () if shape]
        if event.name in _PRODUCTS:
            weight |= any(sorted(shape) == sorted((n, k)) for shape in shapes[1:])
        elif event.name in _COPIES and shapes:
            size = 1
            for extent in shapes[0]:
                size *= extent
            copied |= size == tokens * k and len(shapes[0]) > 1
    return weight, copied


def _inside(event: Any) -> Iterator[Any]:
    for child in event.cpu_children:
        yield child
        yield from _inside(child)


# ---- times ----


@dataclass
class _Call:
    """What a layer's call was seen to do."""

    microseconds: float
    kernels: list[tuple[str, float]]
    weight_written: bool
    input_copied: bool


@dataclass
class _Seen:
    tokens: dict[tuple[str, str], int] = field(default_factory=dict)
    dtypes: dict[tuple[str, str], torch.dtype] = field(default_factory=dict)
    calls: dict[tuple[str, str], _Call] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)


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
def _marks(layers: dict[str, nn.Module], seen: _Seen, phase: list[str]) -> Iterator[None]:
    """Each layer's call as a range of the profiler."""
    handles, open_ranges = [], []

    def begin(name: str, x: Any) -> None:
        if isinstance(x, Tensor):
            seen.tokens[phase[0], name] = x.numel() // max(1, x.shape[-1])
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


def _watch(model: Any, ids: Tensor, layers: dict[str, nn.Module], on_gpu: bool) -> _Seen:
    """The third prompt and step: the first ones plan, tune and allocate."""
    seen, now = _Seen(), [""]
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    for _ in range(2):
        for _ in _run(model, ids):
            pass
    profiling = torch.profiler.profile(activities=activities, record_shapes=True)
    with _ThroughDispatcher(), _marks(layers, seen, now), profiling as profiler:
        for phase in _run(model, ids):
            now[0] = phase
        if on_gpu:
            torch.cuda.synchronize()
    for event in profiler.events():
        phase = event.name.removeprefix(_PREFIX)
        if event.name.startswith(_PREFIX) and phase in PHASES and str(event.device_type).endswith("CPU"):
            seen.totals[phase] = _time_of(event, on_gpu)[0]
            for call in _marked(event):
                name = call.name.removeprefix(_PREFIX)
                microseconds, kernels = _time_of(call, on_gpu)
                written = _widened(_inside(call), seen.tokens.get((phase, name), 0), *_sizes(layers[name]))
                seen.calls[phase, name] = _Call(microseconds, kernels, *written)
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


def _bandwidth(device: torch.device) -> float | None:
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
