"""Blocks of transformers' decoders, one description a family: smoothing, fusing and decoding read it.

Which linears read a norm, or attention's values, and nothing else does; and, of families that the engine runs, what the
parts of a model are called. The numbers, which a model's config has, are in `models.architecture`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from octofuse.nn.linear import is_conv1d

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATED = ("mlp.gate_proj", "mlp.up_proj")
_OUT = ("self_attn.v_proj", "self_attn.o_proj")


class Names(NamedTuple):
    """The parts of a decoder by their names, the first five of the model, the others inside a block:

    norm -> qkv -> attention -> projection + residual -> norm -> up -> activation -> down + residual.

    qkv: one linear, or queries, keys and values. interleaved: one linear has them head by head. up: one linear, or of a
    gated feed-forward gates and values, which one linear (gated) may hold too, gates first. query_norm and key_norm: over
    a head. after_attention and after_feed_forward: norms of what is added to the residual. No position_embeddings:
    queries and keys are rotated.
    """

    blocks: str = "model.layers"
    token_embeddings: str = "model.embed_tokens"
    position_embeddings: str | None = None
    last_norm: str = "model.norm"
    head: str = "lm_head"
    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = _QKV
    interleaved: bool = False
    query_norm: str | None = None
    key_norm: str | None = None
    projection: str = "self_attn.o_proj"
    after_attention: str | None = None
    feed_forward_norm: str = "post_attention_layernorm"
    up: tuple[str, ...] = _GATED
    gated: bool = True
    down: str = "mlp.down_proj"
    after_feed_forward: str | None = None

    @property
    def linears(self) -> tuple[str, ...]:
        """Of a block."""
        return (*self.qkv, self.projection, *self.up, self.down)


@dataclass(frozen=True)
class Block:
    """Names are those inside a block.

    norms: each with all that reads it. values: what makes attention's values, alone or behind queries and keys, and the
    linear that reads their sums. offset: what a norm adds to its weight. expects: the settings of the model's config
    with which all this holds. names: of families that the engine runs. experts: a mixture of them. scales_embeddings: by
    the root of the model's width. settings: of the config, those that this family reads and others have by accident.
    """

    norms: Mapping[str, tuple[str, ...]]
    values: tuple[str, str] | None = None
    offset: float = 0.0
    expects: Mapping[str, Any] = field(default_factory=dict)
    names: Names | None = None
    experts: bool = False
    scales_embeddings: bool = False
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """What produces the input of linears.

    linears: by qualified name; nothing else reads that input. tensors: their last dimension is the input's channels, and
    dividing all of them, the first with offset added, divides the input.
    """

    linears: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    offset: float = 0.0


_WINDOWS = ("sliding_window", "layer_types")
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
_GPT2 = Block(
    {"ln_1": ("attn.c_attn",), "ln_2": ("mlp.c_fc",)},
    ("attn.c_attn", "attn.c_proj"),
    names=Names(
        blocks="transformer.h", token_embeddings="transformer.wte", position_embeddings="transformer.wpe",
        last_norm="transformer.ln_f", attention_norm="ln_1", qkv=("attn.c_attn",), projection="attn.c_proj",
        feed_forward_norm="ln_2", up=("mlp.c_fc",), gated=False, down="mlp.c_proj",
    ),
)  # fmt: skip
_LLAMA = Block({"input_layernorm": _QKV, "post_attention_layernorm": _GATED}, _OUT, names=Names())
_EXPERTS = Block({"input_layernorm": _QKV}, _OUT, experts=True)  # which read the other norm
_GEMMA2 = Block(
    {"input_layernorm": _QKV, "pre_feedforward_layernorm": _GATED},
    _OUT,
    offset=1.0,
    scales_embeddings=True,
    settings=(
        *_WINDOWS,
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "query_pre_attn_scalar",
        "hidden_activation",
    ),
    names=Names(
        after_attention="post_attention_layernorm",
        feed_forward_norm="pre_feedforward_layernorm",
        after_feed_forward="post_feedforward_layernorm",
    ),
)

# By config.model_type.
BLOCKS = {
    "gpt2": _GPT2,
    "gpt_bigcode": Block(_GPT2.norms),
    "gpt_neo": Block(
        {"ln_1": tuple(f"attn.attention.{name}_proj" for name in "qkv"), "ln_2": ("mlp.c_fc",)},
        ("attn.attention.v_proj", "attn.attention.out_proj"),
    ),
    "gptj": Block(
        {"ln_1": ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.fc_in")}, ("attn.v_proj", "attn.out_proj")
    ),
    "gpt_neox": Block(
        {"input_layernorm": ("attention.query_key_value",), "post_attention_layernorm": ("mlp.dense_h_to_4h",)},
        names=Names(
            blocks="gpt_neox.layers",
            token_embeddings="gpt_neox.embed_in",
            last_norm="gpt_neox.final_layer_norm",
            qkv=("attention.query_key_value",),
            interleaved=True,
            projection="attention.dense",
            up=("mlp.dense_h_to_4h",),
            gated=False,
            down="mlp.dense_4h_to_h",
        ),
        settings=("use_parallel_residual",),
    ),
    "opt": Block(
        {"self_attn_layer_norm": _QKV, "final_layer_norm": ("fc1",)},
        ("self_attn.v_proj", "self_attn.out_proj"),
        expects={"do_layer_norm_before": True},
        names=Names(
            blocks="model.decoder.layers",
            token_embeddings="model.decoder.embed_tokens",
            position_embeddings="model.decoder.embed_positions",
            last_norm="model.decoder.final_layer_norm",
            attention_norm="self_attn_layer_norm",
            projection="self_attn.out_proj",
            feed_forward_norm="final_layer_norm",
            up=("fc1",),
            gated=False,
            down="fc2",
        ),
    ),
    "bloom": Block(
        {"input_layernorm": ("self_attention.query_key_value",), "post_attention_layernorm": ("mlp.dense_h_to_4h",)},
        expects={"apply_residual_connection_post_layernorm": False},
    ),
    "falcon": Block(  # one norm for both, or one for each
        {
            "input_layernorm": ("self_attention.query_key_value", "mlp.dense_h_to_4h"),
            "ln_attn": ("self_attention.query_key_value",),
            "ln_mlp": ("mlp.dense_h_to_4h",),
        },
        expects={"parallel_attn": True},
    ),
    "phi": Block({"input_layernorm": (*_QKV, "mlp.fc1")}, ("self_attn.v_proj", "self_attn.dense")),
    "phi3": Block(
        {"input_layernorm": ("self_attn.qkv_proj",), "post_attention_layernorm": ("mlp.gate_up_proj",)},
        ("self_attn.qkv_proj", "self_attn.o_proj"),
        names=Names(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",)),
        settings=("sliding_window",),
    ),
    "starcoder2": Block(
        {"input_layernorm": _QKV, "post_attention_layernorm": ("mlp.c_fc",)},
        _OUT,
        names=Names(up=("mlp.c_fc",), gated=False, down="mlp.c_proj"),
        settings=("sliding_window",),
    ),
    "llama": _LLAMA,
    "mistral": replace(_LLAMA, settings=("sliding_window",)),
    "qwen2": replace(_LLAMA, settings=_WINDOWS),
    "qwen3": replace(
        _LLAMA, names=Names(query_norm="self_attn.q_norm", key_norm="self_attn.k_norm"), settings=_WINDOWS
    ),
    "granite": replace(_LLAMA, settings=_MULTIPLIERS),
    "smollm3": replace(_LLAMA, settings=(*_WINDOWS, "no_rope_layers")),
    "stablelm": Block(_LLAMA.norms, _OUT, expects={"use_parallel_residual": False}),
    "cohere": Block({"input_layernorm": (*_QKV, *_GATED)}, _OUT),
    "mixtral": _EXPERTS,
    "qwen2_moe": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "nemotron": Block({"input_layernorm": _QKV, "post_attention_layernorm": ("mlp.up_proj",)}, _OUT, offset=1.0),
    "gemma": replace(_LLAMA, offset=1.0, scales_embeddings=True, settings=("use_bidirectional_attention",)),
    "gemma2": _GEMMA2,
    "gemma3_text": replace(_GEMMA2, names=None),  # which rotates local blocks by other angles
}


def block_of(model: nn.Module) -> Block:
    """What is known of the model's blocks. Raises ValueError for models, or settings of them, of which nothing is."""
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind not in BLOCKS:
        raise ValueError(
            f"scheme: smoothing folds into what stands before a linear, which is known for {', '.join(BLOCKS)}; "
            f"got {type(model).__name__}"
        )
    for name, usual in BLOCKS[kind].expects.items():
        if (got := getattr(config, name, usual)) != usual:
            raise ValueError(f"scheme: smoothing expects {kind} models with {name}={usual}, got {got}")
    return BLOCKS[kind]


def normed(model: nn.Module) -> list[Source]:
    """Every norm that linears alone read."""
    block, modules = block_of(model), dict(model.named_modules())
    found = []
    for name, module in modules.items():
        inside, _, norm = name.rpartition(".")
        linears = tuple(f"{inside}.{linear}" for linear in block.norms.get(norm, ()))
        if linears and all(linear in modules for linear in linears):
            tensors = (module.weight, getattr(module, "bias", None))
            found.append(Source(linears, tuple(t for t in tensors if isinstance(t, Tensor)), block.offset))
    return found


def valued(model: nn.Module) -> list[Source]:
    """What makes attention's values, for the linear that reads their sums: these weight all channels of a head alike.

    Where heads share keys and values, a channel is read several times and left alone.
    """
    block, modules = block_of(model), dict(model.named_modules())
    if block.values is None:
        return []
    producer, reader = block.values
    found = []
    for name in modules:
        if not name.endswith(f".{reader}"):
            continue
        before: Any = modules[name.removesuffix(reader) + producer]
        after: Any = modules[name]
        weight = before.weight if is_conv1d(before) else before.weight.t()
        channels = after.weight.shape[0] if is_conv1d(after) else after.weight.shape[1]
        if weight.shape[1] not in (channels, 3 * channels):
            continue
        tensors = (weight, before.bias)
        found.append(Source((name,), tuple(t[..., -channels:] for t in tensors if t is not None)))
    return found
