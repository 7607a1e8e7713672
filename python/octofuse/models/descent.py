"""The steps of a training: Adam with a rate that falls as a cosine, on a GPU each step as a CUDA graph."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from octofuse.models.quantize import tracked
from octofuse.models.trained import TrainedLinear

WARM_UP = 20  # steps at most (a tenth of few) in which the rate rises: Adam's first ones are long whatever the gradient
LOOK_EVERY = 50  # steps after which a GPU's loss is looked at: each look waits for it


class _Steps:
    """Steps for batches of ids, one at a time. On a GPU what one does is captured for the batches of one shape, and from
    the third of these on replayed: the first makes what is made once, the second shows whether the device is waited for,
    as a model does that looks at a tensor's values, a mixture of experts for example. That one goes on without."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Any], Tensor],
        shape: torch.Size | None,
        device: torch.device,
    ) -> None:
        """shape: of the batches that are captured; None: none are."""
        self.optimizer, self.loss, self.shape = optimizer, loss, shape
        self.stream = None if shape is None else torch.cuda.Stream(device)
        self.batches_seen = 0
        self.captured: tuple[torch.cuda.CUDAGraph, Tensor, Tensor] | None = None

    def run(self, batch: Any) -> Tensor:
        if self.shape is None or batch.shape != self.shape:
            return self._step(batch)
        self.batches_seen += 1
        if self.batches_seen == 2:
            return self._step_that_may_wait(batch)
        if self.batches_seen == 3:
            self._capture(batch)
        if self.captured is None:
            return self._step(batch)
        graph, ids, loss = self.captured
        ids.copy_(batch)
        graph.replay()
        return loss

    def inside(self) -> AbstractContextManager[Any]:
        """Every step is on one stream: gradients are added up on the stream on which a parameter was first used."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _step(self, batch: Any) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.enable_grad():
            loss = self.loss(batch)
            if not loss.is_cuda and not torch.isfinite(loss):
                return loss
            loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def _step_that_may_wait(self, batch: Tensor) -> Tensor:
        """Finds out without a capture: one in which something waits fails, and leaves torch's generator and allocator in
        it. Torch's mode is the process's: what another thread waits for meanwhile raises as well."""
        before = torch.cuda.get_sync_debug_mode()
        try:
            _set_sync_debug_mode("error")
            return self._step(batch)
        except RuntimeError:
            self.shape = None
        finally:
            _set_sync_debug_mode(before)
        return self._step(batch)

    def _capture(self, batch: Tensor) -> None:
        graph, ids = torch.cuda.CUDAGraph(), batch.clone()
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                loss = self._step(ids)
        except RuntimeError:  # what does not ask torch to wait, but the device itself
            self.shape = None
            # Torch's generator would believe that it is in the capture still.
            generator = torch.cuda.default_generators[batch.device.index]
            generator.graphsafe_set_state(generator.clone_state())
        else:
            self.captured = (graph, ids, loss)


def _set_sync_debug_mode(mode: int | str) -> None:
    """Without torch's warning that this mode is a prototype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)


def descend(
    layers: Iterable[TrainedLinear],
    batches: Sequence[Any],
    loss: Callable[[Any], Tensor],
    *,
    steps: int,
    lr: float | None,
    captures: bool = False,
    description: str,
    progress: bool,
) -> None:
    """Train the layers, a batch a step, over and over. It ends where a loss is not finite, on a GPU some steps later: what
    was learnt is judged afterwards.

    lr: of scales and biases; None: each layer's own rate (`TrainedLinear.rate`). captures: where layers are on a GPU;
    batches are tensors then.
    """
    by_rate: dict[float, list[Tensor]] = {}
    for layer in layers:
        rate = layer.rate(steps) if lr is None else lr
        for parameter in layer.parameters():
            by_rate.setdefault(rate / 2 if layer.is_number(parameter) else rate, []).append(parameter)
    device = next(iter(by_rate.values()))[0].device
    on_gpu = device.type == "cuda"  # where a graph reads the rates anew at every replay
    groups = [{"params": some, "lr": torch.zeros((), device=device) if on_gpu else 0.0} for some in by_rate.values()]
    # One pass over everything: on a CPU a sixth of the time.
    optimizer = torch.optim.Adam(groups, capturable=on_gpu, fused=not on_gpu)
    shape = Counter(batch.shape for batch in batches).most_common(1)[0][0] if captures and on_gpu else None
    runner = _Steps(optimizer, loss, shape, device)
    if runner.stream is not None:
        runner.stream.wait_stream(torch.cuda.current_stream(device))
    rise = max(1, min(WARM_UP, steps // 10))
    with runner.inside():
        for step in tracked(range(steps), description, progress):
            part = min(1.0, (step + 1) / rise) * (1 + math.cos(math.pi * step / steps)) / 2
            for group, rate in zip(optimizer.param_groups, by_rate, strict=True):
                _set(group, rate * part)
            found = runner.run(batches[step % len(batches)])
            if (not on_gpu or step % LOOK_EVERY == 0) and not torch.isfinite(found):
                break
    if runner.stream is not None:
        torch.cuda.current_stream(device).wait_stream(runner.stream)


def _set(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
