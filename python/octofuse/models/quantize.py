"""quantize_: exchange a model's linears for int8 ones, in place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from octofuse.models import gpt2
from octofuse.nn import Int8Linear, linear_layers, replace_module
from octofuse.quant import Scheme, calibrate, scheme_named

FAMILIES = (gpt2,)


def target_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that quantize_ exchanges: the family's list, or every linear that is no tied output head."""
    for family in FAMILIES:
        if family.matches(model):
            layers: dict[str, nn.Module] = family.linears(model)
            return layers
    return linear_layers(model)


def quantize_(
    model: nn.Module,
    scheme: str | Scheme = "w8a8-dynamic",
    calibration: Iterable[Any] | None = None,
    *,
    progress: bool = True,
) -> nn.Module:
    """Quantise the model's linears in place and return it.

    Args:
        model: GPT-2 in any size, or any module with nn.Linear or Conv1D layers.
        scheme: a `Scheme` or a name of `quant.affine.SCHEMES`.
        calibration: batches of input ids `[B, T]` (or whatever the model takes as its one argument); static schemes
            need them, dynamic ones do not look.
        progress: show a bar.

    Raises: ValueError if there is nothing to quantise, the model is already quantised, or calibration is missing or saw
    NaN; the model is then as it was.
    """
    chosen = scheme_named(scheme)
    layers = target_layers(model)
    if any(isinstance(module, Int8Linear) for module in model.modules()):
        raise ValueError("model: expected a floating-point model, got one that octofuse has quantised already")
    if not layers:
        raise ValueError(f"model: expected linear layers to quantise, got none in {type(model).__name__}")
    amax: dict[str, Tensor] = {}
    if chosen.needs_calibration:
        if calibration is None:
            raise ValueError(f"calibration: expected batches for the static scheme {chosen.name}, got None")
        was_training = model.training
        model.eval()
        try:
            amax = calibrate(layers, _track(calibration, "calibrating", progress), model)
        finally:
            model.train(was_training)
    # Built first and exchanged after, so that a failure half-way leaves the model whole.
    names = _track(list(layers), f"quantising ({chosen.name})", progress)
    built = {name: Int8Linear.from_float(layers[name], chosen, amax.get(name)) for name in names}
    for name, replacement in built.items():
        replace_module(model, name, replacement)
    return model


def weight_bytes(model: nn.Module) -> int:
    """Bytes of every parameter and persistent buffer, tied ones once: what a checkpoint holds."""
    tensors = {tensor.data_ptr(): tensor for tensor in model.state_dict().values()}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _track(items: Iterable[Any], description: str, show: bool) -> Iterable[Any]:
    if not show:
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, description=description, console=Console(stderr=True), transient=True)
