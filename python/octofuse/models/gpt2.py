"""GPT-2: four linears per block. lm_head is tied to the token embedding and stays in floating point."""

from __future__ import annotations

from torch import nn

LINEARS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")


def matches(model: nn.Module) -> bool:
    return getattr(getattr(model, "config", None), "model_type", None) == "gpt2"


def linears(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks' linears (Conv1D in transformers) by qualified name."""
    return {name: module for name, module in model.named_modules() if name.endswith(LINEARS)}
