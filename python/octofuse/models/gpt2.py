"""GPT-2: four linears per block. lm_head is tied to the token embedding and stays in floating point."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

LINEARS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
# Norm and the linear that alone reads it.
NORMED = (("ln_1", "attn.c_attn"), ("ln_2", "mlp.c_fc"))


ACTIVATIONS = {
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
