"""distill_: scales of low-bit layers, and their codes, trained towards what the float model predicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div

from octofuse.models.descent import descend
from octofuse.models.trained import TrainedLinear, evaluating, has_trainable_codes, lent
from octofuse.nn import QUANTISED, PackedLinear
from octofuse.nn.linear import weight_of

Layers = dict[str, PackedLinear]  # by their names in the model
Buffers = dict[str, dict[str, Tensor]]  # of layers, by the same

JUDGED = 8  # one of so many batches is kept back,
MOST_JUDGED = 16  # so many at most


def distill_(
    model: nn.Module,
    teacher: nn.Module,
    batches: Iterable[Tensor],
    *,
    steps: int = 100,
    lr: float | None = None,
    codes: bool = False,
    progress: bool = True,
) -> tuple[float, float]:
    """Train scales and biases of the model's packed layers, in place, by the float model's own predictions.

    Sizes stay as they are, and so do codes unless they are asked for. Adam on the KL divergence of the two models' token
    probabilities, with a learning rate that falls to zero as a cosine. It takes a linear's weight in fp32 for every plane,
    with codes four times more, and activations. Where that is too much, `distill_blocks_` trains block by block. On a GPU a
    step is a CUDA graph, for batches of the commonest shape.

    Args:
        model: quantised by `quantize_` with schemes such as "bcq-q2-g128"; its other layers in floating point.
        teacher: the float model, on the same device.
        batches: input ids `[B, T]`, int64; one a step, over and over. Of 8 and more, one in eight (16 at most) is kept back
            and decides whether the model is better.
        steps, lr: how many steps; how far the first ones move a scale, relative to itself, and a bias, relative to weights.
            None: 2e-3 where scales learn alone, else by the number of bits (w4 5e-4, w3 1e-3, w2 2e-3; bcq-q2 6e-3; twice
            as much in 500 steps or fewer).
        codes: those of uniform grids, of two levels too (but for awq's), and of up to 4 planes move as well, each by up to
            half of lr a step. There are as many as weights: a text that is read more than a few times is learnt by heart
            (`octofuse.own_text` makes more of it).
        progress: show a bar.

    Returns:
        The mean KL divergence over the batches kept back (of fewer than 8, over all), in nats a token, before and after.
        Where that is not lower, or a loss is not finite, or anything fails, the model is as it was.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    with evaluating(model, teacher):
        training = Training(model, teacher, batches, steps, lr, codes)
        exchange(training.layers, _learnt(training, steps, lr, progress), training.is_better)
        return training.before, training.after


def _learnt(training: Training, steps: int, lr: float | None, progress: bool) -> Buffers:
    built = training.built(training.layers)
    with lent(training.model, built):
        descend(
            built.values(), training.learnt_from, training.loss,
            steps=steps, lr=lr, captures=True, description="distilling", progress=progress,
        )  # fmt: skip
        return {name: trained.trained() for name, trained in built.items()}


def training_bytes(model: nn.Module, *, codes: bool) -> int:
    """About what `distill_` takes beside both models and their activations."""
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    return sum(TrainedLinear.bytes_of(layer, codes=codes) for layer in layers)


class Training:
    """A model, the float one, and the batches: those to learn from, and those that decide."""

    def __init__(
        self,
        model: nn.Module,
        teacher: nn.Module,
        batches: Iterable[Tensor],
        steps: int,
        lr: float | None,
        codes: bool,
    ) -> None:
        """Raises ValueError, naming the argument, what was expected and what came."""
        self.model, self.teacher, self.codes = model, teacher, codes
        self.layers = {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}
        _check_models(model, teacher, self.layers, codes)
        _check_steps(steps, lr)
        self.learnt_from, self.judged = kept_back(_checked(batches, model))
        self.before = self.after = self.divergence()

    def built(self, layers: Layers) -> dict[str, TrainedLinear]:
        return {
            name: TrainedLinear(layer, weight_of(self.teacher.get_submodule(name)) if self.codes else None)
            for name, layer in layers.items()
        }

    def loss(self, ids: Tensor) -> Tensor:
        """The sum of the divergence over a batch's tokens: gradients of a mean would leave fp16."""
        with torch.no_grad():
            want = self.teacher(ids).logits.float().log_softmax(-1)
        return kl_div(self.model(ids).logits.float().log_softmax(-1), want, reduction="sum", log_target=True)

    @torch.no_grad()
    def divergence(self) -> float:
        total = sum(float(self.loss(batch)) for batch in self.judged)
        return total / sum(batch.numel() for batch in self.judged)

    def is_better(self) -> bool:
        """Whether the divergence is lower now than before; if so, that is what it is after."""
        now = self.divergence()
        if now < self.before:
            self.after = now
        return now < self.before


def exchange(layers: Layers, new: Buffers, is_better: Callable[[], bool]) -> Buffers:
    """The layers' old buffers in exchange for new ones; nothing, and no change, where these are not better or judging
    fails."""
    old = {name: {key: getattr(layers[name], key) for key in found} for name, found in new.items()}
    keeps = False
    try:
        assign(layers, new)
        keeps = is_better()
    finally:
        if not keeps:
            assign(layers, old)
    return old if keeps else {}


def _check_models(model: nn.Module, teacher: nn.Module, layers: Layers, codes: bool) -> None:
    others = {type(m).__name__ for m in model.modules() if isinstance(m, QUANTISED) and not isinstance(m, PackedLinear)}
    if not layers or others:
        found = ", ".join(sorted(others)) or "none"
        raise ValueError(f"model: expected packed layers and no other quantised ones, got {found}")
    if ordered := [name for name, layer in layers.items() if layer.order is not None]:
        raise ValueError(f"model: expected columns in their own order, got activation order in {ordered[0]}")
    if any(isinstance(module, QUANTISED) for module in teacher.modules()):
        raise ValueError("teacher: expected the float model, got a quantised one")
    for what, of in (("device", _device_of), ("vocabulary", _vocabulary_of)):
        if of(model) != of(teacher):
            raise ValueError(f"teacher: expected the model's {what}, {of(model)}, got {of(teacher)}")
    if codes and not any(has_trainable_codes(layer.scheme) for layer in layers.values()):
        found = ", ".join(sorted({layer.scheme.name for layer in layers.values()}))
        raise ValueError(
            f"codes: expected a layer with a uniform grid (but for awq's), two levels or up to 4 planes, got {found}"
        )
    if codes:
        check_layers(teacher, layers)


def check_layers(teacher: nn.Module, layers: Layers) -> None:
    """Raises ValueError for a float model without a linear for each of these."""
    modules = dict(teacher.named_modules())
    for name, layer in layers.items():
        want = [layer.out_features, layer.in_features]
        linear = modules.get(name)
        has_weight = linear is not None and isinstance(getattr(linear, "weight", None), Tensor)
        got = list(weight_of(linear).shape) if linear is not None and has_weight else "none"
        if got != want:
            raise ValueError(f"teacher: expected {name} with a weight of {want}, got {got}")


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _vocabulary_of(model: nn.Module) -> int | None:
    return getattr(getattr(model, "config", None), "vocab_size", None)


def _check_steps(steps: int, lr: float | None) -> None:
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps: expected at least 1, got {steps!r}")
    if lr is not None and not (isinstance(lr, int | float) and 0 < lr < float("inf")):
        raise ValueError(f"lr: expected None or a finite number above 0, got {lr!r}")


def _checked(batches: Iterable[Tensor], model: nn.Module) -> list[Tensor]:
    ids = list(batches)
    if not ids:
        raise ValueError("batches: expected at least one, got none")
    device = _device_of(model)
    for batch in ids:
        if not isinstance(batch, Tensor):
            raise ValueError(f"batches: expected tensors, got {type(batch).__name__}")
        if batch.dtype != torch.int64 or batch.dim() != 2 or batch.numel() == 0 or batch.device != device:
            got = f"{batch.dtype} {list(batch.shape)} on {batch.device}"
            raise ValueError(f"batches: expected int64 [B, T] of at least one token on {device}, got {got}")
    count = _vocabulary_of(model)
    ends = torch.stack([end for batch in ids for end in batch.aminmax()])
    least, most = (int(end) for end in ends.aminmax())
    if count is not None and not 0 <= least <= most < count:
        raise ValueError(f"batches: expected tokens from 0 to {count - 1}, got {least} to {most}")
    return ids


def kept_back(ids: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """What is learnt from, and what decides: batches from everywhere, since texts of different kinds follow each other."""
    if len(ids) < JUDGED:
        return ids, ids
    count = min(len(ids) // JUDGED, MOST_JUDGED)
    chosen = {i * len(ids) // count for i in range(count)}
    return [b for i, b in enumerate(ids) if i not in chosen], [b for i, b in enumerate(ids) if i in chosen]


def assign(layers: Layers, buffers: Buffers) -> None:
    for name, found in buffers.items():
        for key, value in found.items():
            setattr(layers[name], key, value)
