"""quantize_: exchange a model's linears for quantised ones, in place."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from octofuse.files import attach, is_of_transformers
from octofuse.models.blocks import Source, normed, valued
from octofuse.models.smooth import fold, folded, scales_for
from octofuse.nn import (
    PARALLEL,
    QUANTISED,
    PackedLinear,
    linear_layers,
    output_heads,
    quantised_layer,
    replace_module,
)
from octofuse.nn.linear import is_conv1d, weight_of
from octofuse.nn.plan import Exceptions, schemes_of
from octofuse.ops import cpu
from octofuse.quant import AmaxObserver, AnyScheme, Histogram, Scheme, observe, scheme_named
from octofuse.quant.affine import PERCENTILE
from octofuse.quant.calibrate import clipped_amax, range_losses

_LOG = logging.getLogger("octofuse")
SAMPLES = 2048  # rows of each layer's input that a search of alpha or of a range looks at: fewer lose twice as much


Model = TypeVar("Model", bound=nn.Module)


def quantize_(
    model: Model,
    scheme: str | AnyScheme = "w8a8-dynamic",
    calibration: Iterable[Any] | None = None,
    *,
    exceptions: Exceptions | None = None,
    progress: bool = True,
) -> Model:
    """Quantise the model's linears in place and return it, its parameters frozen; quantised layers have a gradient for
    their input alone.

    Args:
        model: a transformers model, or any module with nn.Linear or Conv1D layers.
        scheme: a `Scheme`, a `WeightOnly` or a name that `quant.scheme_named` knows.
        calibration: batches, read once: input ids `[B, T]` on any device (or whatever the model takes as its one
            argument), or mappings of arguments by name (what a tokenizer returns). Static and smoothed schemes, gptq
            and awq need them, others do not look.
        exceptions: other schemes for single layers, by the end of a layer's name ("mlp.c_proj") or a pattern
            ("transformer.h.0.*"); None leaves a layer in floating point. The first that matches counts. An output head
            ("lm_head") is quantised if it is named here, and untied by that where the embedding shares its weight.
        progress: show a bar.

    Raises: ValueError if there is nothing to quantise, the model is already quantised, or calibration is missing or saw
    NaN; the model is then as it was.
    """
    chosen = scheme_named(scheme)
    if isinstance(model, nn.Linear) or is_conv1d(model):
        raise ValueError(
            f"model: expected a module around the layers to exchange, got a {type(model).__name__} itself; "
            "octofuse.nn.quantised_layer(layer, scheme_named(name)) makes one layer"
        )
    layers = linear_layers(model)
    heads = {name: head for name, head in output_heads(model).items() if name in (exceptions or {})}
    if any(isinstance(module, (*QUANTISED, *PARALLEL)) for module in model.modules()):
        raise ValueError("model: expected a floating-point model, got one that octofuse has quantised already")
    if not layers:
        raise ValueError(f"model: expected linear layers to quantise, got none in {type(model).__name__}")
    layers = layers | heads
    plan = schemes_of(layers, chosen, exceptions or {})
    layers = {name: layers[name] for name in plan}
    sources = smoothed_sources(model, plan)
    found = Calibrated()
    if any(own.needs_calibration for own in plan.values()):
        found = calibrated(model, layers, sources, plan, calibration, progress)
    touched = folded(model, sources)
    before = [t.detach().clone() for t in touched]
    # Built first and exchanged after, so that a failure half-way leaves the model whole.
    try:
        fold(model, sources, found.scales)
        names = tracked(list(layers), f"quantising ({chosen.name})", progress)
        built = {
            name: quantised_layer(
                layers[name], plan[name], amax=found.amax.get(name), moments=found.moments.pop(name, None)
            )
            for name in names
        }
    except BaseException:
        with torch.no_grad():
            for tensor, value in zip(touched, before, strict=True):
                tensor.copy_(value)
        raise
    for name, replacement in built.items():
        replace_module(model, name, replacement)
    if any(name in built for name in heads):
        model.config.tie_word_embeddings = False  # type: ignore[union-attr]
    _release_joined(model)
    model.requires_grad_(False)
    if any(is_of_transformers(module) for module in model.modules()):
        attach(model)  # their save_pretrained would not say what they write
    return model


def _release_joined(model: nn.Module) -> None:
    """A linear that stays in floating point gets memory of its own where the generator had joined it with others, which
    are exchanged: it would keep theirs alive."""
    for layer in linear_layers(model).values():
        weight: Any = layer.weight
        if weight.untyped_storage().nbytes() > weight.nbytes:
            weight.data = weight.data.clone()


@dataclass
class Calibrated:
    """What calibration says: of each layer the input's amax after smoothing and its second moments, where asked for; of
    each source the scales."""

    amax: dict[str, Tensor] = field(default_factory=dict)
    scales: list[Tensor] = field(default_factory=list)
    moments: dict[str, Tensor] = field(default_factory=dict)


def smoothed_sources(model: nn.Module, plan: Mapping[str, AnyScheme]) -> list[Source]:
    """What can take the scales of layers that their schemes smooth."""
    if all(scheme.smoothing is None for scheme in plan.values()):
        return []
    found = [s for s in normed(model) if any(n in plan and plan[n].smoothing is not None for n in s.linears)]
    if asking := next((scheme for scheme in plan.values() if scheme.smooth_values), None):
        values = valued(model)
        if not values:
            raise ValueError(
                f"scheme: {asking.name} scales attention's values, which {type(model).__name__} cannot take"
            )
        found += [s for s in values if any(n in plan and plan[n].smooth_values for n in s.linears)]
    return found


def calibrated(
    model: nn.Module,
    layers: dict[str, nn.Module],
    sources: Sequence[Source],
    plan: Mapping[str, AnyScheme],
    calibration: Iterable[Any] | None,
    progress: bool,
) -> Calibrated:
    """One pass over the batches."""
    schemes = list(plan.values())
    if calibration is None:
        name = next(scheme.name for scheme in schemes if scheme.needs_calibration)
        raise ValueError(f"calibration: expected batches for the scheme {name}, got None")
    was_training = model.training
    model.eval()
    try:
        by_values = any(scheme.clipping in ("percentile", "entropy") for scheme in schemes)
        # A histogram of what a layer reads says nothing of what it would read smoothed: there, rows are kept instead.
        searches = any(s.smoothing in ("search", "awq") or s.clipping == "mse" for s in schemes)
        samples = SAMPLES if searches or by_values else 0
        second = [name for name, own in plan.items() if not isinstance(own, Scheme) and own.method == "gptq"]
        observers = observe(
            layers,
            tracked(calibration, "calibrating", progress),
            partial(_run, model),
            per_channel=bool(sources),
            samples=samples,
            histogram=by_values,
            moments=second,
        )
    finally:
        model.train(was_training)
    for observer in observers.values():
        observer.result()  # names the first layer that saw nothing, NaN or Inf
    shown = tracked(sources, "finding scales", progress)
    scales = [_scales_of(source, layers, observers, plan) for source in shown]
    smooth = {name: s for source, s in zip(sources, scales, strict=True) for name in source.linears}
    names = tracked([name for name in layers if plan[name].is_static], "finding ranges", progress)
    ranges = {name: _range_of(layers[name], observers[name], smooth.get(name), plan[name]) for name in names}
    _tell_of_maxima(ranges, observers, smooth, plan)
    moments = {name: m for name in second if (m := observers[name].moments) is not None}
    for name in moments.keys() & smooth.keys():  # beside a layer that is smoothed
        moments[name] /= smooth[name].outer(smooth[name])
    return Calibrated(ranges, scales, moments)


def _run(model: nn.Module, batch: Any) -> None:
    """Call the model with a batch; a mapping's values are keywords, as transformers' own models take them."""
    device = next(model.parameters()).device
    if isinstance(batch, Mapping):
        model(**{name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()})
    else:
        model(batch.to(device) if isinstance(batch, Tensor) else batch)


def _scales_of(
    source: Source,
    layers: Mapping[str, nn.Module],
    observers: Mapping[str, AmaxObserver],
    plan: Mapping[str, AnyScheme],
) -> Tensor:
    """One for each channel, as the first of its linears that is smoothed asks for it."""
    names = [name for name in source.linears if name in plan and plan[name].smoothing is not None]
    weights = torch.cat([weight_of(layers[name]) for name in names])
    return scales_for(weights, observers[names[0]], plan[names[0]])


def _range_of(layer: nn.Module, observer: AmaxObserver, scales: Tensor | None, scheme: AnyScheme) -> Tensor:
    """The largest |x|, fp32 [], that the layer's static scale has to cover, smoothing included.

    What a percentile or the entropy would clip stays in where the layer's output is worse without it.
    """
    smooth = torch.ones((), device=observer.result().device) if scales is None else scales
    amax = (observer.result() / smooth).amax()
    if scheme.clipping == "max":
        return amax
    rows, weight = torch.cat(observer.samples).float() / smooth, weight_of(layer).float() * smooth
    if scheme.clipping in ("percentile", "entropy"):
        values = observer.histogram
        if scales is not None or values is None:
            values = Histogram()
            values.add(rows)
        clipped = values.entropy() if scheme.clipping == "entropy" else values.percentile(PERCENTILE)
        clipped = torch.minimum(clipped.to(amax.device), amax)
        loss, plain = range_losses(rows, weight, (clipped, amax))
        return clipped if loss <= plain else amax
    return clipped_amax(rows, weight, amax)


def _tell_of_maxima(
    ranges: Mapping[str, Tensor],
    observers: Mapping[str, AmaxObserver],
    smooth: Mapping[str, Tensor],
    plan: Mapping[str, AnyScheme],
) -> None:
    """Log how many layers of a clipping scheme took the plain maximum."""
    clipped = [name for name in ranges if plan[name].clipping in ("percentile", "entropy")]
    kept = [name for name in clipped if ranges[name] == (observers[name].result() / smooth.get(name, 1.0)).amax()]
    if kept:
        _LOG.warning(
            "%s: %d of %d layers take the plain maximum: on the calibration batches clipping lost",
            plan[kept[0]].clipping, len(kept), len(clipped),
        )  # fmt: skip


def weight_bytes(model: nn.Module) -> int:
    """Bytes of every parameter and persistent buffer, tied ones once: what a checkpoint holds."""
    # Without values they have no address.
    tensors = {tensor.data_ptr() or id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def fallbacks(model: nn.Module) -> list[str]:
    """One sentence for each way in which quantised layers run slower here than their kernels would, none if they do not."""
    layers = [module for module in model.modules() if isinstance(module, QUANTISED)]
    devices = {next(layer.parameters()).device.type for layer in layers}
    notes = []
    if "cpu" in devices and cpu.isa() == "portable":
        notes.append("this CPU has none of the instruction sets that octofuse knows: int8 may be slower than fp32")
    slow = [layer for layer in layers if isinstance(layer, PackedLinear) and _is_dequantized(layer)]
    if slow:
        notes.append(
            f"{len(slow)} layers in fp32 have no kernel on a GPU and are dequantised at every call: model.half()"
        )
    return notes


def _is_dequantized(layer: PackedLinear) -> bool:
    scales = getattr(layer, layer.scales)
    return bool(scales.is_cuda and scales.dtype == torch.float32)


def tracked(items: Iterable[Any], description: str, show: bool) -> Iterable[Any]:
    from rich.console import Console

    console = Console(stderr=True)
    if not (show and console.is_terminal):  # a bar in a file is a pile of blank lines
        return items
    from rich.progress import track

    return track(items, description=description, console=console, transient=True)
