"""Finding and exchanging modules inside a model."""

from __future__ import annotations

from torch import nn

from octofuse.nn.linear import is_conv1d


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Every nn.Linear and Conv1D by qualified name; output heads, and linears that are not called, are left out."""
    heads = output_heads(model)
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if (isinstance(module, nn.Linear) or is_conv1d(module)) and name not in heads and _is_called(model, name):
            found[name] = module
    return found


def _is_called(model: nn.Module, name: str) -> bool:
    """False where the module around a linear reads its weight instead: torch's own attention and encoder layers, and the
    steps of transformers' state-space mixers."""
    above, _, own = name.rpartition(".")
    parent = model.get_submodule(above)
    mixes = own == "dt_proj" and hasattr(parent, "A_log")
    return not (mixes or isinstance(parent, (nn.MultiheadAttention, nn.TransformerEncoderLayer)))


def output_heads(model: nn.Module) -> dict[str, nn.Module]:
    """Every nn.Linear that makes a transformers model's logits over its vocabulary, by qualified name: what the model
    says, or shares its weight with an embedding."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    named = getattr(model, "get_output_embeddings", lambda: None)()
    linears = ((name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear))
    return {name: m for name, m in linears if m is named or id(m.weight) in embeddings}


def replace_module(model: nn.Module, name: str, replacement: nn.Module) -> None:
    """Put `replacement` where `model.get_submodule(name)` is."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, replacement)
