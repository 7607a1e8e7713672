"""What a decoder computes: the numbers of its config, with the names that `models.blocks` has for its family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from octofuse.files.loading import Later
from octofuse.models.blocks import BLOCKS, Block, Names
from octofuse.nn import PARALLEL, QUANTISED, Norm
from octofuse.nn.linear import is_conv1d
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
    "_remove_final_layer_norm": False,
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
    read = _reader(config, block)
    activation = read("hidden_activation") or getattr(config, "activation_function", None) or config.hidden_act
    if activation not in ACTIVATIONS:
        raise ValueError(f"model: expected an activation of {', '.join(ACTIVATIONS)}, got {activation}")
    for name, usual in (_USUAL | dict(block.expects)).items():
        if (got := getattr(config, name, usual)) != usual:
            raise ValueError(f"model: expected {name}={usual}, got {got}")
    if read("use_bidirectional_attention"):
        raise ValueError("model: expected use_bidirectional_attention=False, got True")
    if getattr(config, "word_embed_proj_dim", config.hidden_size) != config.hidden_size:
        raise ValueError(
            f"model: expected embeddings of the model's width ({config.hidden_size}), got {config.word_embed_proj_dim}"
        )
    if model.training:
        raise ValueError("model: expected a model in eval mode, got one in training (model.eval())")
    _check_layers(model, block)
    return Architecture(
        block,
        tuple(_heads_of(config, block, index) for index in range(config.num_hidden_layers)),
        ACTIVATIONS[activation],
        _positions_of(config),
        config.vocab_size,
        parallel=bool(read("use_parallel_residual")),
        embedding_multiplier=config.hidden_size**0.5
        if block.scales_embeddings
        else read("embedding_multiplier") or 1.0,
        residual_multiplier=read("residual_multiplier") or 1.0,
        logits_multiplier=1.0 / (read("logits_scaling") or 1.0),
        logits_softcap=read("final_logit_softcapping"),
    )


def _reader(config: Any, block: Block) -> Callable[[str], Any]:
    """A setting of the config, None where the family does not read it: configs keep what others of their kin have."""
    return lambda name: getattr(config, name, None) if name in block.settings else None


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


def _check_layers(model: nn.Module, block: Block) -> None:
    """The engine multiplies by a layer's tensors: what is wrapped around them, or lies elsewhere, would be lost."""
    names = block.names
    assert names is not None
    blocks: Any = model.get_submodule(names.blocks)
    for index, one in enumerate(blocks):
        for name in names.linears:
            layer = one.get_submodule(name)
            if isinstance(layer, PARALLEL):
                layer = layer.layer
            if not (type(layer) is nn.Linear or is_conv1d(layer) or isinstance(layer, (*QUANTISED, Later))):
                raise ValueError(
                    f"model: expected {names.blocks}.{index}.{name} to be an nn.Linear, a Conv1D or a layer that "
                    f"quantize_ has made, got {type(layer).__name__} (adapters have to be merged first)"
                )
    devices = {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) > 1:
        raise ValueError(f"model: expected all tensors on one device, got them on {', '.join(sorted(devices))}")


def _heads_of(config: Any, block: Block, index: int) -> Heads:
    read = _reader(config, block)
    queries = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // queries
    scalar = read("query_pre_attn_scalar") or size
    rotary = getattr(config, "rope_parameters", None) is not None
    rotated_blocks, kinds = read("no_rope_layers"), read("layer_types")  # 1: this block rotates
    everywhere = kinds is None or kinds[index] == "sliding_attention"
    return Heads(
        queries,
        getattr(config, "num_key_value_heads", None) or queries,
        size,
        read("attention_multiplier") or scalar**-0.5,
        rotates=rotary and (rotated_blocks is None or bool(rotated_blocks[index])),
        window=read("sliding_window") if everywhere else None,
        softcap=read("attn_logit_softcapping"),
    )


def _positions_of(config: Any) -> int:
    rotary = getattr(config, "rope_parameters", None) or {}
    kind = rotary.get("rope_type", "default")
    if kind not in ROTARY:
        raise ValueError(f"model: expected rotary embeddings of kind {', '.join(ROTARY)}, got {kind}")
    if kind == "longrope":  # beyond it transformers exchanges the angles of what is in the cache already
        return int(rotary.get("original_max_position_embeddings") or config.original_max_position_embeddings)
    most = int(config.max_position_embeddings)
    if kind == "yarn" and rotary.get("original_max_position_embeddings"):  # it may be named without raising the other
        most = max(most, int(rotary["factor"] * rotary["original_max_position_embeddings"]))
    return most
