"""Which scheme for a model: size, speed and loss of each, and the one to take. A config is enough."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch
from torch import nn

from octofuse.models.architecture import architecture_of
from octofuse.models.frontier import FLOAT
from octofuse.models.quantize import weight_bytes
from octofuse.models.speed import Shape, measured_gpus, prompt_seconds, step_seconds, was_timed
from octofuse.nn import empty_layer, linear_layers, output_heads, replace_module
from octofuse.nn.linear import is_conv1d
from octofuse.quant import scheme_named

SCHEMES = (
    FLOAT, "w8a8-dynamic", "w8a8-static-mse-smooth", "llm-int8", "fp8-dynamic", "w8a16", "w4a16-g128",
    "w4a16-g128-zp-gptq", "nf4", "w3a16-g128-gptq", "w4a8-g128-mse", "bcq-q4-g128", "bcq-q3-g128", "bcq-q2-g128",
)  # fmt: skip
MAX_LOSS = 0.03
AS_FAST = 0.05  # a difference in speed that estimates do not tell apart
AS_GOOD = 0.0025  # a difference in loss that says little of another model


@dataclass(frozen=True)
class Advice:
    """One scheme for a model.

    weights, cache: bytes; the cache in fp16, of all sequences. tokens_per_second: of all sequences together, at the end of
    the context. prompt_seconds: of all prompts. loss: of perplexity, 0.01: one percent more; None: nothing is known.
    speed_from: "timed" (here), "decoders" (estimated from measured decoders) or "linears" (from measured linears).
    loss_from: "measured" or "embedded" (that of the embedded GPT-2, which is small: larger models lose less).
    """

    scheme: str
    weights: int
    cache: int
    tokens_per_second: float
    prompt_seconds: float
    loss: float | None
    fits: bool
    speed_from: str
    loss_from: str

    @property
    def bytes(self) -> int:
        return self.weights + self.cache


@dataclass(frozen=True)
class Timed:
    """What was measured of a scheme; None: it was not."""

    tokens_per_second: float | None = None
    prompt_seconds: float | None = None
    loss: float | None = None


def advise(
    config: Any,
    *,
    gpu: str = "H200",
    schemes: Sequence[str] = SCHEMES,
    budget: float | None = None,
    batch: int = 1,
    context: int = 2048,
    timed: Mapping[str, Timed] | None = None,
) -> list[Advice]:
    """Size, speed and loss of each scheme, in the order of `schemes`.

    Args:
        config: transformers' config of a causal language model that `octofuse.generate` takes. No weights are read.
        gpu: one of `speed.measured_gpus()`.
        schemes: names that `quant.scheme_named` knows, or "float": fp16. The output head stays in fp16.
        budget: bytes for weights and cache; None: the GPU's memory.
        batch: sequences at a time; context: tokens of each, prompt and new ones.
        timed: by scheme, what was measured and counts instead of what is estimated.

    Raises:
        ValueError: naming the argument, or what of the model is not as expected.
    """
    gpus = measured_gpus()
    if gpu not in gpus:
        raise ValueError(f"gpu: expected one of {', '.join(gpus)}, got {gpu!r}")
    for name, value in (("batch", batch), ("context", context)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value!r}")
    if budget is not None and not budget > 0:
        raise ValueError(f"budget: expected more than 0 bytes, got {budget!r}")
    plain = empty_model(config)
    architecture = architecture_of(plain)
    most = architecture.positions
    if context > most:
        raise ValueError(f"context: expected at most {most}, the model's, got {context}")
    # With sliding windows a step reads no more than these of the cache.
    seen = sum(min(context, heads.window or context) for heads in architecture.heads) // len(architecture.heads)
    room = gpus[gpu]["memory GB"] * 1e9 if budget is None else budget
    found = []
    for name in schemes:
        scheme = None if name == FLOAT else scheme_named(name)
        model = quantised_on_meta(plain, name)
        shape = shape_of(model)
        weights, of_cache = weight_bytes(model), shape.cache_bytes * batch * context
        own = (timed or {}).get(name, Timed())
        estimated = own.tokens_per_second is None or own.prompt_seconds is None
        loss, loss_from = (embedded_loss(name), "embedded") if own.loss is None else (own.loss, "measured")
        found.append(
            Advice(
                name, weights, of_cache,
                own.tokens_per_second or batch / step_seconds(gpu, scheme, shape, batch, seen),
                own.prompt_seconds or prompt_seconds(gpu, scheme, shape, batch, context),
                loss, weights + of_cache <= room,
                "timed" if not estimated else "decoders" if was_timed(gpu, scheme) else "linears", loss_from,
            )
        )  # fmt: skip
    return found


def recommended(found: Sequence[Advice], max_loss: float = MAX_LOSS) -> tuple[Advice | None, str]:
    """Of those that fit, lose at most `max_loss` and are within AS_FAST of the fastest, the one that loses least, or of
    those within AS_GOOD of it the one with the shortest prompt; and why. None where there is none.

    Speed is that of new tokens, behind the prompt.
    """
    fitting = [one for one in found if one.fits]
    if not fitting:
        least = min(found, key=lambda one: one.bytes)
        return None, f"none fits: the smallest, {least.scheme}, takes {least.bytes / 1e9:.2f} GB with its cache"
    good = [one for one in fitting if one.loss is not None and one.loss <= max_loss]
    if not good:
        known = [one for one in fitting if one.loss is not None]
        if not known:
            return None, "what those that fit lose is not known"
        least = min(known, key=lost_by)
        lost = f"{least.scheme} loses {percent(lost_by(least))}, least of all"
        return None, f"none that fits loses at most {percent(max_loss)}: {lost}"
    fastest = max(one.tokens_per_second for one in good)
    alike = [one for one in good if one.tokens_per_second >= (1 - AS_FAST) * fastest]
    least_loss = min(lost_by(one) for one in alike)
    as_good = [one for one in alike if lost_by(one) <= least_loss + AS_GOOD]
    best = min(as_good, key=lambda one: (one.prompt_seconds, one.loss, one.bytes))
    plain = next((one for one in found if one.scheme == FLOAT), None)
    gain = "" if plain is None or plain is best else f", {best.tokens_per_second / plain.tokens_per_second:.1f}x float"
    if len(good) == 1:
        return best, f"the only one that fits and loses at most {percent(max_loss)}{gain}"
    among = f"the fastest of {len(good)} that fit and lose at most {percent(max_loss)}"
    if best.tokens_per_second < fastest:
        first = max(good, key=lambda one: one.tokens_per_second)
        reason = "loses less" if lost_by(best) < lost_by(first) else "has the shorter prompt"
        among = f"within {AS_FAST:.0%} of {among}, and {reason}"
    return best, f"{among}{gain}"


def lost_by(one: Advice) -> float:
    """Of one whose loss is known."""
    assert one.loss is not None
    return one.loss


def percent(share: float) -> str:
    """0.03: 3%; 0.0001: 0.01%; 1.344: 134%."""
    return f"{100 * share:.3g}%"


def expect_causal(argument: str, config: Any) -> None:
    """ValueError for the config of another kind of model."""
    from transformers import AutoModelForCausalLM

    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"{argument}: expected a causal language model, got one of {config.model_type}")


def empty_model(config: Any) -> nn.Module:
    """A model of this config in fp16 without its weights. ValueError for one that `octofuse.generate` does not take."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    expect_causal("config", config)
    try:
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float16).eval()
    except Exception as error:  # of many kinds, by which of its numbers do not fit each other
        raise ValueError(f"config: expected one that a model can be made of: {error}") from error
    if not architecture_of(model).heads:
        raise ValueError("config: expected at least one block, got none")
    return model


def quantised_on_meta(plain: nn.Module, name: str) -> nn.Module:
    """As `quantize_` leaves a model, without values."""
    model = copy.deepcopy(plain)
    for layer_name, layer in linear_layers(model).items() if name != FLOAT else ():
        k, n = layer.weight.shape if is_conv1d(layer) else reversed(layer.weight.shape)  # type: ignore[union-attr,misc,arg-type]
        bias = getattr(layer, "bias", None) is not None
        with torch.device("meta"):
            made = empty_layer(int(k), int(n), bias=bias, scheme=scheme_named(name), dtype=torch.float16)
        replace_module(model, layer_name, made)
    return model


def shape_of(model: nn.Module) -> Shape:
    architecture = architecture_of(model)
    heads = architecture.heads[0]
    blocks: Any = model.get_submodule(architecture.names.blocks)
    head = sum(weight_bytes(layer) for layer in output_heads(model).values())
    numbers = sum(
        layer.in_features * layer.out_features if hasattr(layer, "in_features") else layer.weight.numel()
        for layer in blocks.modules()
        if isinstance(layer, nn.Linear) or is_conv1d(layer) or hasattr(layer, "scheme")
    )
    of_token = len(architecture.heads) * 2 * heads.pairs * heads.size * 2
    return Shape(len(architecture.heads), weight_bytes(blocks) + head, numbers, of_token, heads.width, head)


def embedded_loss(name: str) -> float | None:
    """What benchmarks/bench_schemes.py found of the embedded GPT-2."""
    if name == FLOAT:
        return 0.0
    known = json.loads(files("octofuse.assets").joinpath("schemes.json").read_text())
    row = known["schemes"].get(name)
    loss: float | None = known["more costs"].get(name) if row is None else row["cost"]
    return loss
