"""distill_: scales of low-bit layers, and codes of uniform ones, trained towards what the float model predicts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, linear, pad

from octofuse.models.quantize import tracked
from octofuse.nn import QUANTISED, PackedLinear, TwoLevelLinear, WeightOnlyLinear, replace_module
from octofuse.nn.linear import weight_of
from octofuse.ops import quantize_per_token
from octofuse.quant import WeightOnly, grid
from octofuse.quant.packing import pack


def has_trainable_codes(scheme: WeightOnly) -> bool:
    """Uniform grids, those of two levels too; but what AWQ has folded into a layer before is not in the float weight."""
    return scheme.code in ("grid", "two_level") and scheme.method != "awq"


class _Rounded(torch.autograd.Function):
    """The nearest integers, with the gradient of the numbers themselves."""

    @staticmethod
    def forward(_: object, numbers: Tensor) -> Tensor:
        return numbers.round()

    @staticmethod
    def backward(_: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def _steps_and_zeros(layer: WeightOnlyLinear | TwoLevelLinear) -> tuple[Tensor, Tensor]:
    """A level is step * (code - zero): fp32 `[N, G]` each, of a grid's steps one for all."""
    if isinstance(layer, TwoLevelLinear):
        stored = layer.group_scale.t().int()
        return (stored & 0xFF).float(), (stored >> 8).float()
    one = torch.ones((), device=layer.scale.device)
    if layer.zero is not None:
        return one, layer.zero.t().float()
    of_all = grid.middle(layer.scheme.bits) if layer.scheme.zero is None else float(layer.scheme.zero)
    return one, torch.full_like(layer.scale.t(), of_all, dtype=torch.float32)


class TrainedCodes(nn.Module):
    """Codes of a uniform grid as numbers that are rounded; they start where the float weight is, but with its codes."""

    def __init__(self, layer: WeightOnlyLinear | TwoLevelLinear, levels: Tensor, weight: Tensor) -> None:
        super().__init__()
        self.layer = layer
        self.most = (1 << layer.scheme.bits) - 1
        self.step, self.zero = (t.unsqueeze(-1) for t in _steps_and_zeros(layer))  # [N, G, 1]
        codes = levels / self.step + self.zero
        padded = pad(weight.float(), (0, levels[0].numel() - weight.shape[1])).view_as(levels)
        beside = (padded / layer.scale.t().float().unsqueeze(-1) - levels) / self.step
        self.numbers = nn.Parameter(codes + beside.nan_to_num(0.0).clamp(-0.49, 0.49))  # a scale may be 0

    def codes(self) -> Tensor:
        rounded: Tensor = _Rounded.apply(self.numbers.clamp(-0.49, self.most + 0.49))  # type: ignore[no-untyped-call]
        return rounded

    def forward(self) -> Tensor:
        return (self.codes() - self.zero) * self.step

    def packed(self) -> Tensor:
        codes = self.codes().flatten(1)[:, : self.layer.in_features]
        return pack(codes.to(torch.uint8), self.layer.scheme.bits)


class TrainedLinear(nn.Module):
    """A packed layer whose weight is a differentiable function of its scales: sum over planes of scale * level.

    weight: the float one, `[N, K]`, where codes move too (`has_trainable_codes`).
    """

    def __init__(self, layer: PackedLinear, weight: Tensor | None = None) -> None:
        super().__init__()
        self.layer = layer
        scales: Tensor = getattr(layer, layer.scales)
        of_planes = scales if scales.dim() == 3 else scales.unsqueeze(1)  # [G, q, N]
        self.first = of_planes.permute(1, 2, 0).float()  # [q, N, G]
        self.levels = torch.stack([self._levels(of_planes, plane) for plane in range(of_planes.shape[1])])
        self.factor = nn.Parameter(torch.ones_like(self.first))
        self.codes: TrainedCodes | None = None
        if isinstance(layer, WeightOnlyLinear | TwoLevelLinear) and has_trainable_codes(layer.scheme):
            self.codes = None if weight is None else TrainedCodes(layer, self.levels[0], weight)
        if layer.bias is not None:
            self.unit = float(layer.dequantized().float().square().mean().sqrt())  # a bias moves as far as weights do
            self.shift = nn.Parameter(torch.zeros_like(layer.bias, dtype=torch.float32))

    def _levels(self, of_planes: Tensor, plane: int) -> Tensor:
        """What this plane's scales multiply, `[N, G, columns of a group]`: zeros behind the last column."""
        layer = self.layer
        ones = torch.zeros_like(of_planes)
        ones[:, plane] = 1
        levels = layer.dequantized(ones.reshape(getattr(layer, layer.scales).shape))
        columns = layer.groups * (layer.scheme.group or layer.in_features)
        grouped: Tensor = pad(levels, (0, columns - layer.in_features)).unflatten(1, (layer.groups, -1))
        return grouped

    def bias(self) -> Tensor | None:
        return None if self.layer.bias is None else self.layer.bias.float() + self.unit * self.shift

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias()
        if self.layer.scheme.has_int8_tokens:  # with the gradient of the numbers themselves
            q, scale = quantize_per_token(x.detach().contiguous())
            x = x + ((q * scale.view(*x.shape[:-1], 1)).to(x.dtype) - x.detach())
        levels = self.levels if self.codes is None else self.codes().unsqueeze(0)
        w = ((self.first * self.factor).unsqueeze(-1) * levels).sum(0).flatten(1)[:, : self.layer.in_features]
        return linear(x, w.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @torch.no_grad()
    def trained(self) -> dict[str, Tensor]:
        """The layer's buffers with what was learnt."""
        before: Tensor = getattr(self.layer, self.layer.scales)
        scale = (self.first * self.factor).permute(2, 0, 1).to(before.dtype)
        found = {self.layer.scales: scale.reshape(before.shape).contiguous()}
        if self.codes is not None:
            found["packed"] = self.codes.packed()
        bias = self.bias()
        return found if bias is None else found | {"bias": bias.to(before.dtype)}


def distill_(
    model: nn.Module,
    teacher: nn.Module,
    batches: Iterable[Tensor],
    *,
    steps: int = 100,
    lr: float = 2e-3,
    codes: bool = False,
    progress: bool = True,
) -> tuple[float, float]:
    """Train scales and biases of the model's packed layers, in place, by the float model's own predictions.

    Sizes stay as they are, and so do codes unless they are asked for. Adam on the KL divergence of the two models' token
    probabilities, with a learning rate that falls to zero as a cosine. It takes a linear's weight in fp32 for every plane
    (with codes three times that), and activations.

    Args:
        model: quantised by `quantize_` with schemes such as "bcq-q2-g128"; its other layers in floating point.
        teacher: the float model, on the same device.
        batches: input ids `[B, T]`, int64; one a step, over and over.
        steps, lr: how many steps; how far the first ones move a scale, relative to itself, and a bias, relative to weights.
        codes: those of uniform grids, of two levels too (but for awq's), move as well, each by up to half of lr a step.
            There are as many as weights: a text that is read more than a few times is learnt by heart (`octofuse.own_text`
            makes more of it).
        progress: show a bar.

    Returns:
        The mean KL divergence over all batches, in nats a token, before and after. Where that is not lower, or a loss is
        not finite, or anything fails, the model is as it was.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    others = {type(m).__name__ for m in model.modules() if isinstance(m, QUANTISED) and not isinstance(m, PackedLinear)}
    if not layers or others:
        found = ", ".join(sorted(others)) or "none"
        raise ValueError(f"model: expected packed layers and no other quantised ones, got {found}")
    if ordered := [name for name, layer in layers.items() if layer.order is not None]:
        raise ValueError(f"model: expected columns in their own order, got activation order in {ordered[0]}")
    if any(isinstance(module, QUANTISED) for module in teacher.modules()):
        raise ValueError("teacher: expected the float model, got a quantised one")
    ids = list(batches)
    if not ids:
        raise ValueError("batches: expected at least one, got none")
    if steps < 1 or lr <= 0:
        raise ValueError(f"steps, lr: expected at least 1 and more than 0, got {steps} and {lr}")
    if codes and not any(has_trainable_codes(layer.scheme) for layer in layers.values()):
        found = ", ".join(sorted({layer.scheme.name for layer in layers.values()}))
        raise ValueError(f"codes: expected a layer with a uniform grid (but for awq's), got {found}")
    before = _mean_divergence(model, teacher, ids)
    built = {
        name: TrainedLinear(layer, weight_of(teacher.get_submodule(name)) if codes else None)
        for name, layer in layers.items()
    }
    learnt = _train(model, teacher, built, ids, steps, lr, progress)
    old = {name: {key: getattr(layers[name], key) for key in learnt[name]} for name in layers}
    _assign(layers, learnt)
    after = _mean_divergence(model, teacher, ids)
    if after < before:
        return before, after
    _assign(layers, old)
    return before, before


def _train(
    model: nn.Module,
    teacher: nn.Module,
    built: dict[str, TrainedLinear],
    ids: list[Tensor],
    steps: int,
    lr: float,
    progress: bool,
) -> dict[str, dict[str, Tensor]]:
    """What was learnt for each layer; the model itself is only borrowed."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    training = model.training
    try:
        model.requires_grad_(False).eval()
        for name, trained in built.items():
            replace_module(model, name, trained)
        numbers = [trained.codes.numbers for trained in built.values() if trained.codes is not None]
        chosen = set(map(id, numbers))
        others = [p for trained in built.values() for p in trained.parameters() if id(p) not in chosen]
        groups: list[dict[str, Any]] = [{"params": others}]
        if numbers:
            groups.append({"params": numbers, "lr": lr / 2})
        optimizer = torch.optim.Adam(groups, lr=lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for step in tracked(range(steps), "distilling", progress):
            optimizer.zero_grad()
            with torch.enable_grad():
                loss = _divergence(model, teacher, ids[step % len(ids)])
                if not torch.isfinite(loss):
                    break  # what was learnt is judged afterwards
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
        return {name: trained.trained() for name, trained in built.items()}
    finally:
        for name, trained in built.items():
            replace_module(model, name, trained.layer)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        model.train(training)


def _assign(layers: dict[str, PackedLinear], buffers: dict[str, dict[str, Tensor]]) -> None:
    for name, layer in layers.items():
        for key, value in buffers[name].items():
            setattr(layer, key, value)


def _divergence(model: nn.Module, teacher: nn.Module, ids: Tensor) -> Tensor:
    """The sum over a batch's tokens: gradients of a mean would leave fp16."""
    with torch.no_grad():
        want = teacher(ids).logits.float().log_softmax(-1)
    return kl_div(model(ids).logits.float().log_softmax(-1), want, reduction="sum", log_target=True)


@torch.no_grad()
def _mean_divergence(model: nn.Module, teacher: nn.Module, ids: list[Tensor]) -> float:
    total = sum(float(_divergence(model, teacher, batch)) for batch in ids)
    return total / sum(batch.numel() for batch in ids)
