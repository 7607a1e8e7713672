"""What a decoder computes: the numbers of its config, with the names that `models.blocks` has for its family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from octofuse.models.blocks import BLOCKS, Block, Names
from octofuse.nn import Norm
from octofuse.ops.activations import Activation

ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}

# Of transformers' kinds of rotary embeddings those whose angles depend on nothing but the position.
ROTARY = ("default", "linear", "llama3", "yarn", "longrope")

# Settings with which a model computes something else than its family's description says.
_USUAL = {
    "add_cross_attention": False,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
}


@dataclass(frozen=True)
class Heads:
    """Attention of one block: `queries` heads of `size` channels share `pairs` heads of keys and values, in groups.

    scaling: of scores. rotates: queries and keys are rotated by their positions. window: positions that a token sees, its
    own included; None: all before it. softcap: scores s become softcap * tanh(s / softcap); None: they stay.
    """

    queries: int
    pairs: int
    size: int
    scaling: float
    rotates: bool = False
    window: int | None = None
    softcap: float | None = None

    @property
    def width(self) -> int:
        return self.queries * self.size


@dataclass(frozen=True)
class Architecture:
    """What a model of a family computes; heads: of each block."""

    block: Block
    heads: tuple[Heads, ...]
    activation: Activation
    positions: int
    vocabulary: int
    parallel: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    logits_softcap: float | None = None

    @property
    def names(self) -> Names:
        assert self.block.names is not None
        return self.block.names

    def norm(self, module: nn.Module) -> Norm:
        return Norm.of(module, self.block.offset)


def decodes(model: nn.Module) -> bool:
    """Whether `octofuse.generate` takes the model."""
    try:
        architecture_of(model)
    except ValueError:
        return False
    return True


def architecture_of(model: nn.Module) -> Architecture:
    """Raises ValueError, naming what is not as expected, for models that `octofuse.generate` does not take."""
    _check_family(model)
    config: Any = model.config
    block = BLOCKS[_kind_of(model)]
    kind = "activation_function" if hasattr(config, "activation_function") else "hidden_act"
    activation = getattr(config, "hidden_activation", None) or getattr(config, kind)
    if activation not in ACTIVATIONS:
        raise ValueError(f"model: expected an activation of {', '.join(ACTIVATIONS)}, got {activation}")
    for name, usual in (_USUAL | dict(block.expects)).items():
        if (got := getattr(config, name, usual)) != usual:
            raise ValueError(f"model: expected {name}={usual}, got {got}")
    if getattr(config, "word_embed_proj_dim", config.hidden_size) != config.hidden_size:
        raise ValueError(
            f"model: expected embeddings of the model's width ({config.hidden_size}), got {config.word_embed_proj_dim}"
        )
    if model.training:
        raise ValueError("model: expected a model in eval mode, got one in training (model.eval())")
    rounded = config.hidden_size**0.5 if block.scales_embeddings else getattr(config, "embedding_multiplier", 1.0)
    return Architecture(
        block,
        tuple(_heads_of(config, index) for index in range(config.num_hidden_layers)),
        ACTIVATIONS[activation],
        _positions_of(config),
        config.vocab_size,
        parallel=bool(getattr(config, "use_parallel_residual", False)),
        embedding_multiplier=rounded,
        residual_multiplier=getattr(config, "residual_multiplier", 1.0),
        logits_multiplier=1.0 / getattr(config, "logits_scaling", 1.0),
        logits_softcap=getattr(config, "final_logit_softcapping", None),
    )


def rotary_of(model: nn.Module, architecture: Architecture) -> tuple[Tensor, float] | None:
    """The angle of a position in each pair of rotated channels, fp32, and what cosines and sines are multiplied by.

    Made anew from the config: model.half() rounds the model's own. None where nothing is rotated.
    """
    if not any(heads.rotates for heads in architecture.heads):
        return None
    body, _, _ = architecture.names.blocks.rpartition(".")
    rotary: Any = model.get_submodule(f"{body}.rotary_emb")
    fresh = type(rotary)(config=model.config)
    return fresh.inv_freq.float(), float(fresh.attention_scaling)


def _kind_of(model: nn.Module) -> str:
    return str(getattr(getattr(model, "config", None), "model_type", None))


def _check_family(model: nn.Module) -> None:
    block = BLOCKS.get(_kind_of(model))
    if block is not None and block.names is not None and hasattr(model, block.names.head):
        return
    known = ", ".join(kind for kind, block in BLOCKS.items() if block.names is not None)
    got = type(model).__name__
    if block is not None and block.experts:
        got += ", a mixture of experts"
    elif block is not None and block.names is not None:
        got += f", which has no {block.names.head}"
    raise ValueError(f"model: expected a causal language model of a family that is known ({known}), got {got}")


def _heads_of(config: Any, index: int) -> Heads:
    queries = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // queries
    scaling = getattr(config, "attention_multiplier", None) or size**-0.5
    if scalar := getattr(config, "query_pre_attn_scalar", None):
        scaling = scalar**-0.5
    rotary = getattr(config, "rope_parameters", None) is not None
    rotated_blocks = getattr(config, "no_rope_layers", None)  # 1: this block rotates
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if kinds is not None and kinds[index] != "sliding_attention":
        window = None
    return Heads(
        queries,
        getattr(config, "num_key_value_heads", None) or queries,
        size,
        scaling,
        rotates=rotary and (rotated_blocks is None or bool(rotated_blocks[index])),
        window=window,
        softcap=getattr(config, "attn_logit_softcapping", None),
    )


def _positions_of(config: Any) -> int:
    rotary = getattr(config, "rope_parameters", None) or {}
    kind = rotary.get("rope_type", "default")
    if kind not in ROTARY:
        raise ValueError(f"model: expected rotary embeddings of kind {', '.join(ROTARY)}, got {kind}")
    if kind == "longrope":  # beyond it transformers exchanges the angles of what is in the cache already
        return int(rotary.get("original_max_position_embeddings") or config.original_max_position_embeddings)
    return int(config.max_position_embeddings)
