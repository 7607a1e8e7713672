"""Packed layers while they are trained: weights as differentiable functions of scales, codes and biases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from octofuse.nn import BCQLinear, PackedLinear, TwoLevelLinear, WeightOnlyLinear, replace_module
from octofuse.ops import quantize_per_token
from octofuse.quant import WeightOnly, grid
from octofuse.quant.bcq import sums_of
from octofuse.quant.packing import pack

INSIDE = 0.49  # of the way to the next level: what a number may start with beside its code
MOST_PLANES = 4  # whose codes are trained: each step tries all of 2^q


def has_trainable_codes(scheme: WeightOnly) -> bool:
    """Uniform grids, those of two levels too, and up to 4 planes; but what AWQ has folded into a layer before is not in
    the float weight."""
    if scheme.code == "bcq":
        return scheme.bits <= MOST_PLANES
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


def _grouped(weight: Tensor, groups: int, columns: int) -> Tensor:
    """`[N, K]` -> fp32 `[N, G, columns of a group]`: zeros behind the last column."""
    found: Tensor = pad(weight.float(), (0, groups * columns - weight.shape[1])).unflatten(1, (groups, columns))
    return found


class TrainedCodes(nn.Module):
    """Codes of a uniform grid as numbers that are rounded; they start where the float weight is, but with its codes."""

    def __init__(self, layer: WeightOnlyLinear | TwoLevelLinear, levels: Tensor, weight: Tensor) -> None:
        super().__init__()
        self.layer = layer
        self.most = (1 << layer.scheme.bits) - 1
        self.step, self.zero = (t.unsqueeze(-1) for t in _steps_and_zeros(layer))  # [N, G, 1]
        codes = levels / self.step + self.zero
        beside = (weight / layer.scale.t().float().unsqueeze(-1) - levels) / self.step
        self.numbers = nn.Parameter(codes + beside.nan_to_num(0.0).clamp(-INSIDE, INSIDE))  # a scale may be 0

    def codes(self) -> Tensor:
        rounded: Tensor = _Rounded.apply(self.numbers.clamp(-INSIDE, self.most + INSIDE))  # type: ignore[no-untyped-call]
        return rounded

    def forward(self, scales: Tensor) -> Tensor:
        """scales `[1, N, G]` -> the weight, `[N, G, columns of a group]`."""
        return scales[0].unsqueeze(-1) * ((self.codes() - self.zero) * self.step)

    def packed(self, scales: Tensor) -> Tensor:
        codes = self.codes().flatten(1)[:, : self.layer.in_features]
        return pack(codes.to(torch.uint8), self.layer.scheme.bits)


class TrainedPlanes(nn.Module):
    """Codes of planes as the numbers to which theirs are the nearest sums of +alpha and -alpha, in units of the distance
    from sum to sum; they start where the float weight is, but with its codes."""

    def __init__(self, layer: BCQLinear, first: Tensor, levels: Tensor, weight: Tensor) -> None:
        super().__init__()
        self.layer = layer
        sums = sums_of(first.permute(1, 2, 0)).sort(-1).values  # [N, G, 2^q]
        least = (sums[..., 1:] - sums[..., :-1]).amin(-1, keepdim=True)
        self.unit = (2 * first.abs().sum(0) / sums.shape[-1]).clamp(min=1e-12).unsqueeze(-1)  # [N, G, 1]
        values = (first.unsqueeze(-1) * levels).sum(0)
        beside = torch.maximum(torch.minimum(weight - values, INSIDE * least), -INSIDE * least)
        self.numbers = nn.Parameter((values + beside) / self.unit)

    def codes(self, alphas: Tensor) -> Tensor:
        """Which sum is the nearest, `[N, G, columns of a group]`."""
        with torch.no_grad():
            wanted = self.numbers * self.unit
            sums = sums_of(alphas.permute(1, 2, 0))
            found = torch.zeros_like(wanted)
            nearest = (wanted - sums[..., :1]).abs()
            for code in range(1, sums.shape[-1]):
                distance = (wanted - sums[..., code : code + 1]).abs()
                found.masked_fill_(distance < nearest, code)
                nearest = torch.minimum(nearest, distance)
            return found

    def forward(self, alphas: Tensor) -> Tensor:
        """alphas `[q, N, G]` -> the weight, `[N, G, columns of a group]`."""
        codes = self.codes(alphas).int()
        w = torch.zeros_like(self.numbers)
        for plane in range(len(alphas)):
            w = w + alphas[plane].unsqueeze(-1) * ((codes >> plane & 1) * 2 - 1)
        # Beyond the outermost sums a number stays where it is.
        reach = 1 + alphas.detach().abs().sum(0).unsqueeze(-1) / self.unit
        numbers = torch.maximum(torch.minimum(self.numbers, reach), -reach)
        return w + (numbers - numbers.detach()) * self.unit

    def packed(self, alphas: Tensor) -> Tensor:
        codes = self.codes(alphas).flatten(1)[:, : self.layer.in_features]
        return pack(codes.to(torch.uint8), self.layer.scheme.bits, planes=True)


class TrainedLinear(nn.Module):
    """A packed layer whose weight is a differentiable function of its scales: sum over planes of scale * level.

    weight: the float one, `[N, K]`, where codes move too (`has_trainable_codes`).
    """

    def __init__(self, layer: PackedLinear, weight: Tensor | None = None) -> None:
        super().__init__()
        self.layer = layer
        self.codes: TrainedCodes | TrainedPlanes | None = None
        self.levels: Tensor | None = None  # what scales multiply, where codes stay: [planes, N, G, columns of a group]
        scales: Tensor = getattr(layer, layer.scales)
        of_planes = scales if scales.dim() == 3 else scales.unsqueeze(1)  # [G, q, N]
        self.first = of_planes.permute(1, 2, 0).float()  # [q, N, G]
        levels = torch.stack([self._levels(of_planes, plane) for plane in range(of_planes.shape[1])])
        self.factor = nn.Parameter(torch.ones_like(self.first))
        if weight is None or not has_trainable_codes(layer.scheme):
            self.levels = levels
        elif isinstance(layer, BCQLinear):
            self.codes = TrainedPlanes(layer, self.first, levels, _grouped(weight, *levels.shape[2:]))
        elif isinstance(layer, WeightOnlyLinear | TwoLevelLinear):
            self.codes = TrainedCodes(layer, levels[0], _grouped(weight, *levels.shape[2:]))
        if layer.bias is not None:
            self.unit = float(layer.dequantized().float().square().mean().sqrt())  # a bias moves as far as weights do
            self.shift = nn.Parameter(torch.zeros_like(layer.bias, dtype=torch.float32))

    @staticmethod
    def bytes_of(layer: PackedLinear, *, codes: bool) -> int:
        """What training takes: in fp32 levels or numbers, their gradients and Adam's two means, what backward reads of
        each plane; the weight in 16 bits."""
        planes = layer.scheme.bits if isinstance(layer, BCQLinear) else 1
        trains = codes and has_trainable_codes(layer.scheme)
        return layer.in_features * layer.out_features * (4 * (planes + 4 * trains) + 2)

    def _levels(self, of_planes: Tensor, plane: int) -> Tensor:
        """What this plane's scales multiply, `[N, G, columns of a group]`: zeros behind the last column."""
        layer = self.layer
        ones = torch.zeros_like(of_planes)
        ones[:, plane] = 1
        levels = layer.dequantized(ones.reshape(getattr(layer, layer.scales).shape))
        return _grouped(levels, layer.groups, layer.scheme.group or layer.in_features)

    def bias(self) -> Tensor | None:
        return None if self.layer.bias is None else self.layer.bias.float() + self.unit * self.shift

    def weight(self) -> Tensor:
        """fp32 `[N, K]`."""
        scales = self.first * self.factor
        if self.codes is not None:
            w: Tensor = self.codes(scales)
        else:
            assert self.levels is not None
            w = (scales.unsqueeze(-1) * self.levels).sum(0)
        return w.flatten(1)[:, : self.layer.in_features]

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias()
        if self.layer.scheme.has_int8_tokens:  # with the gradient of the numbers themselves
            q, scale = quantize_per_token(x.detach().contiguous())
            x = x + ((q * scale.view(*x.shape[:-1], 1)).to(x.dtype) - x.detach())
        return linear(x, self.weight().to(x.dtype), None if bias is None else bias.to(x.dtype))

    def is_number(self, parameter: Tensor) -> bool:
        """Whether codes are what it is rounded to."""
        return self.codes is not None and parameter is self.codes.numbers

    def rate(self, steps: int) -> float:
        """How far the first of so many steps should move a scale, relative to itself; numbers of codes half as far.

        The fewer bits, the further apart levels are, and the less a move of one number changes the sum over a row. Few
        steps have to be longer.
        """
        if self.codes is None:
            return SCALES_RATE
        of_code = PLANES_RATE if isinstance(self.layer, BCQLinear) else GRID_RATE
        longer: float = min(2.0, max(1.0, (MANY_STEPS / steps) ** 0.5))
        return of_code / (1 << self.layer.scheme.bits) * longer

    @torch.no_grad()
    def trained(self) -> dict[str, Tensor]:
        """The layer's buffers with what was learnt."""
        before: Tensor = getattr(self.layer, self.layer.scales)
        scales = self.first * self.factor
        found = {self.layer.scales: scales.permute(2, 0, 1).to(before.dtype).reshape(before.shape).contiguous()}
        if self.codes is not None:
            found["packed"] = self.codes.packed(scales)
        bias = self.bias()
        return found if bias is None else found | {"bias": bias.to(before.dtype)}


# Rates that were found on models of 4 to 16 million parameters, 224 to 384 wide (docs/quantising.md).
SCALES_RATE = 2e-3  # where scales learn alone
GRID_RATE = 8e-3
PLANES_RATE = 24e-3
MANY_STEPS = 2000  # from which on steps are as long


@contextmanager
def lent(model: nn.Module, built: Mapping[str, TrainedLinear]) -> Iterator[None]:
    """The model with trained layers in the place of its own, and nothing else that learns; afterwards it is as it was."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        model.requires_grad_(False)
        for name, trained in built.items():
            replace_module(model, name, trained)
        yield
    finally:
        for name, trained in built.items():
            replace_module(model, name, trained.layer)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """In eval mode; afterwards every module is in its own again."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode
