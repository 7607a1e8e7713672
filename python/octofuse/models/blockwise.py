"""distill_blocks_: one block after the other, towards what the float model's blocks compute."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octofuse.models.descent import descend
from octofuse.models.distill import Buffers, Layers, Training, assign, check_layers, exchange
from octofuse.models.quantize import tracked
from octofuse.models.trained import evaluating, lent
from octofuse.nn import PackedLinear

HIDDEN = "hidden_states"  # a block's first argument, for models that name it


class _Call(NamedTuple):
    """What a block is called with behind the hidden states."""

    arguments: tuple[Any, ...]
    by_name: dict[str, Any]
    names_states: bool

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        y = block(**{HIDDEN: x}, **self.by_name) if self.names_states else block(x, *self.arguments, **self.by_name)
        return _states_of(y)


class _Sample(NamedTuple):
    """A batch in front of a block, `[B, T, width]`: what the model's block reads, and what the float one computes."""

    x: Tensor
    wanted: Tensor
    call: _Call


class _Way:
    """Batches on their way through a model's blocks."""

    def __init__(self, model: nn.Module, blocks: nn.ModuleList, ids: list[Tensor], progress: bool) -> None:
        found = [_calls_of(model, blocks, batch) for batch in tracked(ids, "reading", progress)]
        self.states = [x for x, _ in found]  # in front of the next block
        self.calls = [calls for _, calls in found]

    @torch.no_grad()
    def advance(self, block: nn.Module, index: int) -> None:
        for i, calls in enumerate(self.calls):
            self.states[i] = calls[index].run(block, self.states[i])


class _Ways:
    """Both models' ways: of the same batches."""

    def __init__(self, training: Training, name: str, ids: list[Tensor], progress: bool) -> None:
        self.own, self.exact = (
            _Way(model, model.get_submodule(name), ids, progress)  # type: ignore[arg-type]
            for model in (training.model, training.teacher)
        )

    def samples(self, exact: nn.Module, index: int) -> list[_Sample]:
        """exact: the float block, which is advanced by."""
        self.exact.advance(exact, index)
        calls = (calls[index] for calls in self.own.calls)
        return [_Sample(*of) for of in zip(self.own.states, self.exact.states, calls, strict=True)]


def distill_blocks_(
    model: nn.Module,
    teacher: nn.Module,
    batches: Iterable[Tensor],
    *,
    steps: int = 200,
    lr: float | None = None,
    codes: bool = False,
    progress: bool = True,
) -> tuple[float, float]:
    """Train packed layers in place, block by block: each block's outputs, of what the blocks before it make of the text,
    towards the float model's.

    What `distill_` takes for all layers this takes for those of one block, beside two hidden states `[B, T, width]` of
    every batch. It is for models of which the whole does not fit.

    Args:
        model, teacher, batches, lr, codes, progress: as `distill_` has them. Blocks run once each, one after the other, on
            hidden states, as those of most causal language models do; layers outside them stay as they are.
        steps: for each block.

    Returns:
        What `distill_` does, from the same batches kept back. A block that is not better on these stays as it was, and the
        whole model where that is not.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    with evaluating(model, teacher):
        training = Training(model, teacher, batches, steps, lr, codes)
        _check_alike(model, teacher, training.layers)
        old: Buffers = {}
        keeps = False
        try:
            _train_blocks(training, old, steps, lr, progress)
            keeps = training.is_better()
        finally:
            if not keeps:
                assign(training.layers, old)
        return training.before, training.after


def _check_alike(model: nn.Module, teacher: nn.Module, layers: Layers) -> None:
    check_layers(teacher, layers)
    name, blocks = _blocks_of(model)
    theirs: Any = teacher.get_submodule(name)
    if len(theirs) != len(blocks):
        raise ValueError(f"teacher: expected as many blocks as the model has, {len(blocks)}, got {len(theirs)}")


def check_blocks(model: nn.Module, ids: Tensor) -> int:
    """The number of blocks. Raises ValueError, as `distill_blocks_` does, where they do not run one after the other."""
    with evaluating(model):
        blocks = _blocks_of(model)[1]
        _calls_of(model, blocks, ids[:1])
    return len(blocks)


def _train_blocks(training: Training, old: Buffers, steps: int, lr: float | None, progress: bool) -> None:
    """old: gets what layers had before."""
    name, blocks = _blocks_of(training.model)
    theirs: Any = training.teacher.get_submodule(name)
    text, judges = (_Ways(training, name, ids, progress) for ids in (training.learnt_from, training.judged))
    for index, (block, exact) in enumerate(zip(blocks, theirs, strict=True)):
        samples, judged = text.samples(exact, index), judges.samples(exact, index)
        own = {key: layer for key, layer in training.layers.items() if key.startswith(f"{name}.{index}.")}
        if own:
            shown = f"block {index + 1} of {len(blocks)}"
            before = _mean_loss(block, judged)
            learnt = _learnt(training, block, own, samples, steps=steps, lr=lr, description=shown, progress=progress)
            old |= exchange(own, learnt, partial(_is_better, block, judged, before))
        text.own.advance(block, index)
        judges.own.advance(block, index)
        del samples, judged  # these hold states that the next block's would be beside


def _learnt(training: Training, block: nn.Module, own: Layers, samples: list[_Sample], **how: Any) -> Buffers:
    built = training.built(own)
    with lent(training.model, built):
        descend(built.values(), samples, lambda sample: _loss(block, sample), **how)
        return {key: trained.trained() for key, trained in built.items()}


def _loss(block: nn.Module, sample: _Sample) -> Tensor:
    """The sum over tokens of how far the outputs are from those wanted, relative to what the block adds: a token of large
    numbers counts as much as any other."""
    y = sample.call.run(block, sample.x)
    wanted = sample.wanted.float()
    adds = (wanted - sample.x.float()).square().mean(-1)
    return ((y.float() - wanted).square().mean(-1) / adds.clamp(min=1e-12)).sum()


@torch.no_grad()
def _mean_loss(block: nn.Module, samples: list[_Sample]) -> float:
    return sum(float(_loss(block, sample)) for sample in samples) / len(samples)


def _is_better(block: nn.Module, samples: list[_Sample], before: float) -> bool:
    return _mean_loss(block, samples) < before


def _blocks_of(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The list of modules in which most packed layers are, the outermost of such."""
    layers = [name for name, module in model.named_modules() if isinstance(module, PackedLinear)]
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    counts = {name: sum(layer.startswith(f"{name}.") for layer in layers) for name in lists}
    if not counts or (most := max(counts.values())) == 0:
        raise ValueError(f"model: expected packed layers in a list of blocks, got none in {type(model).__name__}")
    found = min((name for name, count in counts.items() if count == most), key=len)
    return found, lists[found]


@torch.no_grad()
def _calls_of(model: nn.Module, blocks: nn.ModuleList, ids: Tensor) -> tuple[Tensor, list[_Call]]:
    """The hidden states in front of the first block, and the rest of what each block is called with."""
    first: list[Tensor] = []
    calls: list[_Call] = []
    last: list[Tensor] = []  # what the block before has made

    def read(block: nn.Module, arguments: tuple[Any, ...], by_name: dict[str, Any]) -> None:
        x = arguments[0] if arguments else by_name.get(HIDDEN)
        follows = not last or (isinstance(x, Tensor) and (x is last[0] or torch.equal(x, last[0])))
        if not isinstance(x, Tensor) or not follows or len(calls) == len(blocks) or block is not blocks[len(calls)]:
            raise _unlike(model, block)
        if not calls:
            first.append(x)
        others = {name: value for name, value in by_name.items() if arguments or name != HIDDEN}
        calls.append(_Call(arguments[1:], others, not arguments))

    def write(_: nn.Module, __: tuple[Any, ...], made: Any) -> None:
        last[:] = [_states_of(made)]

    handles = [block.register_forward_pre_hook(read, with_kwargs=True) for block in dict.fromkeys(blocks)]
    handles += [block.register_forward_hook(write) for block in dict.fromkeys(blocks)]
    try:
        model(ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    if len(calls) < len(blocks):
        raise _unlike(model, blocks[len(calls)])
    return first[0], calls


def _unlike(model: nn.Module, block: nn.Module) -> ValueError:
    return ValueError(
        "model: expected blocks that run once each, one on the hidden states that the other has made, got "
        f"{type(model).__name__} with a {type(block).__name__} that does not: distill_ trains all of them at once"
    )


def _states_of(made: Any) -> Tensor:
    found: Tensor = made if isinstance(made, Tensor) else made[0]
    return found
