"""Checkpoints of other libraries, small ones, written from what their formats say and by compressed-tensors itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from octofuse.nn import linear_layers
from octofuse.nn.linear import weight_of
from octofuse.quant.codebook import LEVELS

INPUT_SCALE = 0.03125  # of static activations


def write_folder(model: Any, folder: Path, tensors: dict[str, Tensor], quantization: dict[str, Any]) -> Path:
    """A transformers folder whose linears' tensors are these in place of `weight`."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {
        name: tensor for name, tensor in model.state_dict().items() if name.rpartition(".")[0] not in owners(tensors)
    }
    if model.config.tie_word_embeddings:
        kept.pop("lm_head.weight", None)
    stored = {name: tensor.detach().contiguous() for name, tensor in (kept | tensors).items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {"quantization_config": quantization, "architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return folder


def owners(tensors: dict[str, Tensor]) -> set[str]:
    return {name.rpartition(".")[0] for name in tensors}


def with_bias(name: str, layer: nn.Module) -> dict[str, Tensor]:
    bias = getattr(layer, "bias", None)
    return {} if bias is None else {f"{name}.bias": bias.detach()}


def bits_to_words(codes: Tensor, bits: int) -> Tensor:
    """Integers [R, C] -> int32 [R, ceil(C * bits / 32)], by strings of bits: slow, and unlike what reads them."""
    rows = []
    for row in codes.tolist():
        stream = "".join(format(code, f"0{bits}b")[::-1] for code in row)
        stream += "0" * (-len(stream) % 32)
        rows.append([int(stream[i : i + 32][::-1], 2) for i in range(0, len(stream), 32)])
    words = torch.tensor(rows, dtype=torch.int64)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


class Gptq:
    """Random codes of a GPTQ checkpoint, and what its reference makes of them: scale * (code - zero)."""

    def __init__(
        self, model: Any, bits: int, group: int, *, version: int = 1, order: bool = False, symmetric: bool = False
    ):
        g = torch.Generator().manual_seed(bits * 100 + group)
        self.tensors: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor] = {}
        dtype = model.dtype
        for name, layer in linear_layers(model).items():
            n, k = weight_of(layer).shape
            size = k if group == -1 else group
            codes = torch.randint(0, 1 << bits, (k, n), generator=g)
            zeros = torch.randint(0, 1 << bits, (-(-k // size), n), generator=g)
            if symmetric:
                zeros = torch.full_like(zeros, 1 << bits - 1)
            scales = (torch.rand(-(-k // size), n, generator=g) + 0.2).div(4 << bits).to(dtype)
            groups = torch.arange(k) // size
            if order:
                groups = groups[torch.randperm(k, generator=g)]
            stored = bits_to_words((zeros - 1) % 8 if version == 1 and bits == 3 else zeros, bits)
            if version == 1 and bits != 3:  # of all codes of a word at once
                stored = stored - sum(1 << shift for shift in range(0, 32, bits))
            self.tensors |= {
                f"{name}.qweight": bits_to_words(codes.t(), bits).t().contiguous(),
                f"{name}.qzeros": stored,
                f"{name}.scales": scales,
                f"{name}.g_idx": groups.to(torch.int32),
            } | with_bias(name, layer)
            self.weights[name] = ((codes - zeros[groups]).float() * scales[groups].float()).to(dtype).t()
        self.config = {
            "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": order, "sym": symmetric,
            "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
        }  # fmt: skip


class Awq:
    """Random codes of an AWQ checkpoint of version gemm."""

    def __init__(self, model: Any, group: int) -> None:
        g = torch.Generator().manual_seed(group)
        self.tensors: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor] = {}
        for name, layer in linear_layers(model).items():
            n, k = weight_of(layer).shape
            codes, zeros = (torch.randint(0, 16, (rows, n), generator=g) for rows in (k, k // group))
            scales = (torch.rand(k // group, n, generator=g) + 0.2).div(64).to(model.dtype)
            self.tensors |= {
                f"{name}.qweight": self.packed(codes),
                f"{name}.qzeros": self.packed(zeros),
                f"{name}.scales": scales,
            } | with_bias(name, layer)
            spread = [one.repeat_interleave(group, 0) for one in (zeros, scales)]
            self.weights[name] = ((codes - spread[0]).float() * spread[1].float()).to(model.dtype).t()
        self.config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}

    @staticmethod
    def packed(codes: Tensor) -> Tensor:
        """Nibble i of a word holds channel (0, 2, 4, 6, 1, 3, 5, 7)[i] of eight."""
        in_order = codes.unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1)
        return bits_to_words(in_order, 4)


class BitsAndBytes:
    """Random codes of a 4-bit checkpoint of bitsandbytes, and its weights: a level times a block's magnitude, in fp32."""

    def __init__(self, model: Any, code: str = "nf4", block: int = 64, *, double: bool = True) -> None:
        g = torch.Generator().manual_seed(block)
        levels, table = torch.tensor(LEVELS[code]), torch.linspace(-1, 1, 256)
        self.tensors: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor] = {}
        for name, layer in linear_layers(model).items():
            n, k = weight_of(layer).shape
            codes = torch.randint(0, 16, (n * k // 2, 2), generator=g)
            count = n * k // block
            state: dict[str, Any] = {"quant_type": code, "blocksize": block, "shape": [n, k]}
            own = {"absmax": torch.rand(count, generator=g) / 16}
            largest = own["absmax"]
            if double:
                state |= {"nested_blocksize": 256, "nested_offset": 0.0625}
                own = {
                    "absmax": torch.randint(0, 256, (count,), generator=g).to(torch.uint8),
                    "nested_absmax": torch.rand(-(-count // 256), generator=g) / 32,
                    "nested_quant_map": table.clone(),
                }
                spread = own["nested_absmax"].repeat_interleave(256)[:count]
                largest = table[own["absmax"].int()] * spread + 0.0625
            own |= {
                "quant_map": levels.clone(),
                f"quant_state.bitsandbytes__{code}": torch.tensor([*json.dumps(state).encode()]),
            }
            own[f"quant_state.bitsandbytes__{code}"] = own[f"quant_state.bitsandbytes__{code}"].to(torch.uint8)
            self.tensors[f"{name}.weight"] = (codes[:, 0] << 4 | codes[:, 1]).to(torch.uint8).unsqueeze(1)
            self.tensors |= {f"{name}.weight.{key}": tensor for key, tensor in own.items()} | with_bias(name, layer)
            self.weights[name] = levels[codes.view(n, k)] * largest.view(n, -1).repeat_interleave(block, 1)
        self.config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": code}


class BitsAndBytes8:
    """int8 weights with the largest magnitude of each row, as LLM.int8() stores them."""

    def __init__(self, model: Any, threshold: float = 6.0) -> None:
        g = torch.Generator().manual_seed(8)
        self.tensors: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor] = {}
        for name, layer in linear_layers(model).items():
            n, k = weight_of(layer).shape
            codes = torch.randint(-127, 128, (n, k), generator=g, dtype=torch.int8)
            largest = torch.rand(n, generator=g) / 16 + 0.01
            own = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
            self.tensors |= {f"{name}.{key}": tensor for key, tensor in own.items()} | with_bias(name, layer)
            self.weights[name] = codes * (largest / 127).unsqueeze(1)
        self.config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": threshold}


def compressed(
    model: Any, *, bits: int = 8, strategy: str = "channel", group: int | None = None, symmetric: bool = True,
    activations: dict[str, Any] | None = None, packed: bool = False, ignore: tuple[str, ...] = ("lm_head",),
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:  # fmt: skip
    """What compressed-tensors itself stores of the model's linears: tensors, quantization_config, and its own weights."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    tensors: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    low, high = -(1 << bits - 1), (1 << bits - 1) - 1
    for name, layer in linear_layers(model).items():
        w = layer.weight.detach().float()
        n, k = w.shape
        size = k if group is None else group
        parts = w.view(n, -1, size)
        if strategy == "tensor":
            scale = (w.abs().amax() / 127).view(1)
        elif symmetric:
            scale = parts.abs().amax(-1) / ((high - low) / 2)
        else:
            scale = (parts.amax(-1) - parts.amin(-1)).clamp(min=1e-6) / (high - low)
        scale = scale.to(model.dtype)
        zero = torch.zeros(n, k // size)
        if not symmetric:
            zero = (low - parts.amin(-1) / scale.float()).round().clamp(low, high)
        spread = scale.float().view(-1, 1, 1) if strategy == "tensor" else scale.float().unsqueeze(-1)
        q = (parts / spread + zero.unsqueeze(-1)).round().clamp(low, high)
        weights[name] = ((q - zero.unsqueeze(-1)) * spread).to(model.dtype).view(n, k)
        codes = q.view(n, k).to(torch.int8)
        own = {"weight_scale": scale, **({"weight": codes} if not packed else {})}
        if packed:
            own |= {"weight_packed": pack_to_int32(codes, bits), "weight_shape": torch.tensor([n, k])}
        if not symmetric:
            own["weight_zero_point"] = (
                pack_to_int32(zero.to(torch.int8), bits, packed_dim=0) if packed else zero.to(torch.int8)
            )
        if activations is not None and not activations["dynamic"]:
            own["input_scale"] = torch.tensor([INPUT_SCALE], dtype=model.dtype)
        tensors |= {f"{name}.{key}": tensor for key, tensor in own.items()} | with_bias(name, layer)
    form = "pack-quantized" if packed else "int-quantized"
    group_config = {
        "targets": ["Linear"],
        "weights": {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": group,
                    "dynamic": False},
        "input_activations": activations,
        "output_activations": None,
        "format": form,
    }  # fmt: skip
    config = {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": group_config}, "ignore": list(ignore), "kv_cache_scheme": None,
    }  # fmt: skip
    return tensors, config, weights
