"""Which models the fused blocks and `octofuse.generate` take."""

from __future__ import annotations

from typing import Any

from torch import nn

from octofuse.ops.activations import Activation

ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def check_decoder(model: nn.Module) -> None:
    """Raises ValueError unless `model` is a GPT2LMHeadModel, in eval mode, of a variant that the fused blocks compute."""
    if not matches(model) or not hasattr(model, "lm_head"):
        raise ValueError(f"model: expected a transformers GPT2LMHeadModel, got {type(model).__name__}")
    config: Any = model.config
    if config.activation_function not in ACTIVATIONS:
        raise ValueError(f"model: expected an activation of {', '.join(ACTIVATIONS)}, got {config.activation_function}")
    for name, usual in (("add_cross_attention", False), ("scale_attn_weights", True),
                        ("scale_attn_by_inverse_layer_idx", False), ("reorder_and_upcast_attn", False)):  # fmt: skip
        if getattr(config, name, usual) != usual:
            raise ValueError(f"model: expected {name}={usual}, got {not usual}")
    if model.training:
        raise ValueError("model: expected a model in eval mode, got one in training (model.eval())")


def matches(model: nn.Module) -> bool:
    return getattr(getattr(model, "config", None), "model_type", None) == "gpt2"
