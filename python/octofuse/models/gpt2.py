"""GPT-2: four linears per block. lm_head is tied to the token embedding and stays in floating point."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

LINEARS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
# Norm and the linear that alone reads it.
NORMED = (("ln_1", "attn.c_attn"), ("ln_2", "mlp.c_fc"))


def matches(model: nn.Module) -> bool:
    return getattr(getattr(model, "config", None), "model_type", None) == "gpt2"


def linears(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks' linears (Conv1D in transformers) by qualified name."""
    return {name: module for name, module in model.named_modules() if name.endswith(LINEARS)}


def smoothed(model: nn.Module) -> dict[str, tuple[Tensor, ...]]:
    """The linears that a norm feeds, by qualified name, with the tensors that produce their input channels.

    The channels are each tensor's last dimension; dividing all of them divides the linear's input.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    found: dict[str, tuple[Tensor, ...]] = {}
    for name in linears(model):
        for norm, linear in NORMED:
            if name.endswith(f".{linear}"):
                before = modules[f"{name.removesuffix(linear)}{norm}"]
                found[name] = (before.weight, before.bias)
    return found


def smoothed_values(model: nn.Module) -> dict[str, tuple[Tensor, ...]]:
    """The same for attn.c_proj: it reads sums of values, weighted alike for all channels of a head, so c_attn's values
    produce its channels. Before mlp.c_proj stands gelu, which no factor passes.
    """
    found: dict[str, tuple[Tensor, ...]] = {}
    for name in linears(model):
        if name.endswith(".attn.c_proj"):
            before: Any = model.get_submodule(name.removesuffix("c_proj") + "c_attn")
            values = 2 * before.bias.shape[0] // 3
            found[name] = (before.weight[:, values:], before.bias[values:])
    return found
