"""Blocks of transformers' decoders, one description a family: smoothing, fusing and decoding read it.

Which linears read a norm, or attention's values, and nothing else does; and, of families whose blocks run fused, what the
parts of a block are called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from octofuse.nn import Norm, fused_layer
from octofuse.nn.floating import Fused
from octofuse.nn.linear import is_conv1d
from octofuse.ops.activations import Activation


class Names(NamedTuple):
    """The parts of a block that runs fused, by their names inside it: norm -> qkv -> attention -> projection + residual ->
    norm -> up -> activation -> down + residual."""

    attention_norm: str
    qkv: str
    projection: str
    feed_forward_norm: str
    up: str
    down: str


class Parts(NamedTuple):
    """The same parts of one block, each linear with the verb `fused`."""

    attention_norm: Norm
    qkv: Fused
    projection: Fused
    feed_forward_norm: Norm
    up: Fused
    down: Fused


@dataclass(frozen=True)
class Block:
    """Names are those inside a block.

    norms: each with all that reads it. values: what makes attention's values, alone or behind queries and keys, and the
    linear that reads their sums. offset: what a norm adds to its weight. expects: the settings of the model's config
    with which all this holds. names: of a block that runs fused.
    """

    norms: Mapping[str, tuple[str, ...]]
    values: tuple[str, str] | None = None
    offset: float = 0.0
    expects: Mapping[str, Any] = field(default_factory=dict)
    names: Names | None = None


@dataclass(frozen=True)
class Source:
    """What produces the input of linears.

    linears: by qualified name; nothing else reads that input. tensors: their last dimension is the input's channels, and
    dividing all of them, the first with offset added, divides the input.
    """

    linears: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    offset: float = 0.0


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATED = ("mlp.gate_proj", "mlp.up_proj")
_OUT = ("self_attn.v_proj", "self_attn.o_proj")
_GPT2 = Block(
    {"ln_1": ("attn.c_attn",), "ln_2": ("mlp.c_fc",)},
    ("attn.c_attn", "attn.c_proj"),
    names=Names("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"),
)
_LLAMA = Block({"input_layernorm": _QKV, "post_attention_layernorm": _GATED}, _OUT)
_EXPERTS = Block({"input_layernorm": _QKV}, _OUT)  # which read the other norm
_GEMMA2 = Block({"input_layernorm": _QKV, "pre_feedforward_layernorm": _GATED}, _OUT, offset=1.0)

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
        {"input_layernorm": ("attention.query_key_value",), "post_attention_layernorm": ("mlp.dense_h_to_4h",)}
    ),
    "opt": Block(
        {"self_attn_layer_norm": _QKV, "final_layer_norm": ("fc1",)},
        ("self_attn.v_proj", "self_attn.out_proj"),
        expects={"do_layer_norm_before": True},
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
    ),
    "starcoder2": Block({"input_layernorm": _QKV, "post_attention_layernorm": ("mlp.c_fc",)}, _OUT),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "granite": _LLAMA,
    "smollm3": _LLAMA,
    "stablelm": Block(_LLAMA.norms, _OUT, expects={"use_parallel_residual": False}),
    "cohere": Block({"input_layernorm": (*_QKV, *_GATED)}, _OUT),
    "mixtral": _EXPERTS,
    "qwen2_moe": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "nemotron": Block({"input_layernorm": _QKV, "post_attention_layernorm": ("mlp.up_proj",)}, _OUT, offset=1.0),
    "gemma": Block(_LLAMA.norms, _OUT, offset=1.0),
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2,
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


def parts_of(block: nn.Module, names: Names, *, transposes: bool = False) -> Parts:
    """The parts of a block; transposes: see `nn.FloatingLinear`."""

    def part(name: str) -> Any:  # get_submodule takes twice as long, and fused blocks ask at every call
        found: Any = block
        for step in name.split("."):
            found = getattr(found, step)
        return found

    def linear(name: str) -> Fused:
        return fused_layer(part(name), transposes=transposes)

    def norm(name: str) -> Norm:
        return Norm.of(part(name))

    return Parts(
        norm(names.attention_norm), linear(names.qkv), linear(names.projection),
        norm(names.feed_forward_norm), linear(names.up), linear(names.down),
    )  # fmt: skip


def attended(parts: Parts, x: Tensor, attend: Callable[[Tensor, Tensor | None], Tensor]) -> Tensor:
    """x + projection(attention(norm(x))), x `[..., width]`.

    attend(qkv, scale) -> `[..., heads * head size]`; it may quantise by the scale, if there is one.
    """
    qkv = parts.qkv.fused(x, norm=parts.attention_norm)
    return parts.projection.fused(attend(qkv, parts.projection.input_scale), residual=x)


def fed_forward(parts: Parts, x: Tensor, activation: Activation) -> Tensor:
    """x + down(activation(up(norm(x)))). Between up and down activations are int8 where down has a static scale."""
    hidden = parts.up.fused(x, norm=parts.feed_forward_norm, activation=activation, out_scale=parts.down.input_scale)
    return parts.down.fused(hidden, residual=x)


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
