"""Models of real shapes with random weights: speed does not depend on their values. Nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from octofuse.models.architecture import architecture_of
from octofuse.nn import Int8Linear, PackedLinear, WeightOnlyLinear, empty_layer, linear_layers, replace_module
from octofuse.quant import scheme_named

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
# transformers' model_type, and what its config does not have by itself.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.1-8B": (
        "llama",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "rope_parameters": LLAMA3},
    ),
    "Llama-3.1-70B": (
        "llama",
        {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
         "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "rope_parameters": LLAMA3},
    ),
    "Llama-3.2-1B": (
        "llama",
        {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
         "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": True,
         "rope_parameters": LLAMA3 | {"factor": 32.0}},
    ),
    "Mistral-7B": (
        "mistral",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 32768, "sliding_window": None},
    ),
    "Qwen3-4B": (
        "qwen3",
        {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
         "tie_word_embeddings": True},
    ),
    "Qwen2.5-7B": (
        "qwen2",
        {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
         "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 32768},
    ),
    "OPT-30B": (
        "opt",
        {"hidden_size": 7168, "ffn_dim": 28672, "num_hidden_layers": 48, "num_attention_heads": 56, "vocab_size": 50272,
         "word_embed_proj_dim": 7168, "max_position_embeddings": 2048},
    ),
    "OPT-66B": (
        "opt",
        {"hidden_size": 9216, "ffn_dim": 36864, "num_hidden_layers": 64, "num_attention_heads": 72, "vocab_size": 50272,
         "word_embed_proj_dim": 9216, "max_position_embeddings": 2048},
    ),
    "OPT-1.3B": (
        "opt",
        {"hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 24, "num_attention_heads": 32, "vocab_size": 50272,
         "word_embed_proj_dim": 2048, "max_position_embeddings": 2048},
    ),
    "GPT-2 124M": ("gpt2", {"n_embd": 768, "n_layer": 12, "n_head": 12}),
    "GPT-2 XL": ("gpt2", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "tiny": (
        "llama",
        {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 512},
    ),
}  # fmt: skip


def config_of(name: str) -> Any:
    """Of a name in SHAPES, or of a folder with a config.json."""
    from transformers import AutoConfig

    if name in SHAPES:
        kind, sizes = SHAPES[name]
        return AutoConfig.for_model(kind, **sizes)
    folder = Path(name)
    if not (folder / "config.json").is_file():
        raise SystemExit(f"model: expected {', '.join(SHAPES)} or a folder with a config.json, got {name!r}")
    settings = json.loads((folder / "config.json").read_text())
    settings.pop("quantization_config", None)
    return AutoConfig.for_model(**settings)


def build(name: str, scheme: str | None, head: str | None, device: torch.device) -> nn.Module:
    """Random weights; scheme: of the blocks' linears, head: of the output head; None: fp16 (fp32 on a CPU)."""
    from transformers import AutoModelForCausalLM

    dtype = torch.float16 if device.type == "cuda" else torch.float32
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(name), dtype=dtype).eval()
        for layer, module in linear_layers(model).items() if scheme is not None else ():
            exchange(model, layer, module, scheme, dtype)
        if head is not None:
            exchange(model, "lm_head", model.lm_head, head, dtype)
            model.config.tie_word_embeddings = False
    model = model.to_empty(device=device).requires_grad_(False)
    if model.config.tie_word_embeddings:
        model.tie_weights()
    generator = torch.Generator(device).manual_seed(0)
    for module in model.modules():
        fill(module, generator)
    for layer, module in list(model.named_modules()):
        if layer.endswith("rotary_emb"):  # whose angles are no parameters
            replace_module(model, layer, type(module)(config=model.config).to(device))  # type: ignore[call-arg]
    architecture_of(model)
    return model


def exchange(model: nn.Module, name: str, layer: Any, scheme: str, dtype: torch.dtype) -> None:
    n, k = layer.weight.shape if isinstance(layer, nn.Linear) else reversed(layer.weight.shape)
    made = empty_layer(k, n, bias=layer.bias is not None, scheme=scheme_named(scheme), dtype=dtype)
    replace_module(model, name, made)


def fill(module: nn.Module, generator: torch.Generator) -> None:
    """With numbers that keep activations finite."""
    for name, parameter in module.named_parameters(recurse=False):
        if not parameter.is_floating_point():
            continue
        if parameter.dim() == 2:
            parameter.normal_(0, 0.7 * parameter.shape[-1] ** -0.5, generator=generator)
        else:
            parameter.fill_(1.0 if "norm" in type(module).__name__.lower() and name == "weight" else 0.0)
    if isinstance(module, Int8Linear):
        for rows in module.weight.split(4096):  # int64 in between
            rows.copy_(torch.randint(-127, 128, rows.shape, generator=generator, device=rows.device))
        module.weight_scale.fill_(0.01 * module.in_features**-0.5)
        if module.input_scale is not None:
            module.input_scale.fill_(4.0 / 127)
    elif isinstance(module, PackedLinear):
        for rows in module.packed.split(256):
            rows.copy_(torch.randint(-(2**31), 2**31, rows.shape, generator=generator, device=rows.device))
        scales = getattr(module, module.scales)
        scales.fill_(2.0 ** (1 - module.scheme.bits) * module.in_features**-0.5)
        if isinstance(module, WeightOnlyLinear) and module.zero is not None:
            module.zero.fill_(2 ** (module.scheme.bits - 1))
    if isinstance(module, (Int8Linear, PackedLinear)) and module.bias is not None:
        module.bias.zero_()
