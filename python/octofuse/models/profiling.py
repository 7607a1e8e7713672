"""What a model's linears really do in one prompt and one step: kernels, instructions, bytes, what was widened or copied.

A layer may have its weight in 8 bits and multiply in 16: `profile` says where. It looks at any module with in_features and
out_features (or transformers' Conv1D), whichever library made it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from octofuse.models.instructions import Instruction, instructions_of
from octofuse.models.watch import PHASES, Call, bandwidth_of, watch
from octofuse.nn.linear import is_conv1d

# Bits of a weight, scales included, from which on it counts as not quantised: in small layers scales weigh much.
PLAIN = 16
# Dense products a second of compute capability 9.0, by what an instruction multiplies (NVIDIA's data sheet).
RATES = {"16 bits": 989e12 / 2, "int8": 1979e12 / 2, "float8": 1979e12 / 2}


@dataclass(frozen=True)
class Kernel:
    name: str
    microseconds: float
    instruction: Instruction


@dataclass(frozen=True)
class LayerProfile:
    """One layer in one phase.

    tokens: rows of all its calls. stored: "int8", "4.3 bits", "bfloat16"; stored_bytes: weight and scales. moved_bytes:
    what its calls have to move at least, and twice each weight that was written wider. widened: such weights and copies of
    the input. floor: seconds that the bytes or the products take at best; None where the device's speed is not known.
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
        narrow = self.stored_bytes * 8 < PLAIN * self.n * self.k
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
        floats = {layer.name for layer in inner if layer.stored_bytes * 8 >= PLAIN * layer.n * layer.k}
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
            copies = [
                layer for layer in self.layers if layer.phase == phase and any("input" in w for w in layer.widened)
            ]
            if copies:
                size = sum(layer.tokens * layer.k for layer in copies)
                values = f"{size / 1e6:.1f} million" if size >= 1e5 else f"{size:,}"
                found.append(f"{phase}: {len(copies)} linears copy their input first, {values} values")
        return tuple(found)


@torch.no_grad()
def profile(model: nn.Module, ids: Tensor) -> Profile:
    """One prompt, ids int64 `[B, T]`, and one step behind it, with transformers' own cache.

    Raises ValueError for a model without linears and for ids of another shape, type or vocabulary, or too many.
    """
    layers = _linears(model)
    if not layers:
        raise ValueError(f"model: expected linear layers, got none in {type(model).__name__}")
    _expect_ids(model, ids)
    device = next(model.parameters()).device
    on_gpu = device.type == "cuda"
    seen = watch(model, ids.to(device), layers, {name: _sizes(layer) for name, layer in layers.items()}, on_gpu)
    names = {name for call in seen.calls.values() for name, _ in call.kernels}
    instructions = instructions_of(names)
    bandwidth = bandwidth_of(device)
    speed = (bandwidth, torch.cuda.get_device_capability(device) if on_gpu else None)
    found = []
    for (phase, name), call in seen.calls.items():
        kernels = tuple(Kernel(kernel, us, instructions[kernel]) for kernel, us in call.kernels)
        key = (phase, name)
        if key in seen.tokens:
            found.append(_layer(key, layers[name], seen.tokens[key], seen.dtypes[key], call, kernels, *speed))
    label = torch.cuda.get_device_name(device) if on_gpu else str(device)
    return Profile(
        label, bandwidth, claim_of(getattr(model, "config", None)), _heads_of(model), tuple(found), seen.totals
    )


def _expect_ids(model: Any, ids: Tensor) -> None:
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
        got = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"ids: expected an int64 tensor [B, T], got {got}")
    if ids.dim() != 2 or ids.numel() < 1:
        raise ValueError(f"ids: expected shape [B, T], both at least 1, got {list(ids.shape)}")
    config = getattr(model, "config", None)
    vocabulary, context = (getattr(config, name, None) for name in ("vocab_size", "max_position_embeddings"))
    least, most = int(ids.min()), int(ids.max())
    if least < 0 or (vocabulary is not None and most >= vocabulary):
        wrong = least if least < 0 else most
        raise ValueError(f"ids: expected numbers of at least 0 below the vocabulary's {vocabulary}, got {wrong}")
    if context is not None and ids.shape[1] >= context:
        raise ValueError(f"ids: expected at most {context - 1} tokens, one less than the context, got {ids.shape[1]}")


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
    if bits >= PLAIN:
        return dtype or f"{bits:.1f} bits", size
    return (dtype if dtype in ("int8", "float8_e4m3fn") else f"{bits:.1f} bits"), size


def claim_of(config: Any) -> str:
    """The method by which a model's config says that it is quantised, or ""."""
    found = getattr(config, "quantization_config", None)
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return str(getattr(method, "value", method) or "")


def _heads_of(model: Any) -> tuple[str, ...]:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return tuple(name for name, module in model.named_modules() if module is head and head is not None)


def _layer(
    key: tuple[str, str], layer: nn.Module, tokens: int, dtype: torch.dtype, call: Call, kernels: tuple[Kernel, ...],
    bandwidth: float | None, capability: tuple[int, int] | None,
) -> LayerProfile:  # fmt: skip
    n, k = _sizes(layer)
    stored, size = _stored(layer, n, k)
    narrow = size * 8 < PLAIN * n * k
    text = str(dtype).removeprefix("torch.")
    by_kernel = any("equantize" in kernel.name and "octofuse" not in kernel.name for kernel in kernels)
    written = call.count * n * k * dtype.itemsize if narrow and (call.weight_written or by_kernel) else 0
    copied = tokens * k * dtype.itemsize if call.input_copied else 0
    widened = [f"weight written as {text}, {written / 1e6:.1f} MB"] if written else []
    widened += [f"input copied as {text}, {copied / 1e6:.1f} MB"] if copied else []
    least = call.count * size + tokens * (n + k) * dtype.itemsize
    floor = None if bandwidth is None else least / bandwidth
    made = LayerProfile(
        key[1], type(layer).__name__, key[0], tokens, n, k, stored, size, least + 2 * written + 2 * copied, tuple(widened),
        kernels, call.microseconds, floor,
    )  # fmt: skip
    rate = RATES.get(made.instruction.operands)
    if floor is None or rate is None or capability != (9, 0):
        return made
    return replace(made, floor=max(floor, tokens * n * k / rate))
