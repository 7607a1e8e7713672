"""GPT-2: four linears per block. lm_head is tied to the token embedding and stays in floating point."""

from __future__ import annotations

from torch import nn

LINEARS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
# Norm and the linears that alone read it: the places where smoothing folds. attn.c_proj and mlp.c_proj follow no norm.
SMOOTHED = (("ln_1", "attn.c_attn"), ("ln_2", "mlp.c_fc"))


def matches(model: nn.Module) -> bool:
    return getattr(getattr(model, "config", None), "model_type", None) == "gpt2"


def linears(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks' linears (Conv1D in transformers) by qualified name."""
    return {name: module for name, module in model.named_modules() if name.endswith(LINEARS)}


def smoothed(model: nn.Module) -> dict[str, nn.Module]:
    """The norm that each smoothable linear reads, by the linear's qualified name."""
    modules = dict(model.named_modules())
    pairs = {}
    for name in linears(model):
        for norm, linear in SMOOTHED:
            if name.endswith(f".{linear}"):
                pairs[name] = modules[f"{name.removesuffix(linear)}{norm}"]
    return pairs
