"""The ranks that share a model, and what they tell each other."""

from __future__ import annotations

import atexit
import platform
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

import octofuse
from octofuse.ops._calls import RowsCall
from octofuse.ops._guard import refuse_gradients
from octofuse.ops.peers import MOST_RANKS, Inboxes
from octofuse.parallel.inboxes import make_inboxes

LIMIT = 600.0  # seconds, where a backend has no timeout of its own
GRACE = 5.0  # seconds that the device has to find that out first

# Newer versions of torch call it otherwise, and warn of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class FastSums:
    """A mesh whose ranks may split the sums of a linear: `octofuse.parallel.shard_` says which, and what that costs.

    mesh: a DeviceMesh of one dimension, or a process group.
    """

    mesh: Any


class Group:
    """A torch.distributed process group with this process in it.

    mesh: a DeviceMesh of one dimension, a process group, or FastSums of one. Raises TypeError for anything else, ValueError
    for a mesh of more dimensions, RuntimeError where torch.distributed was not initialised.
    """

    def __init__(self, mesh: Any) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "mesh: expected torch.distributed to be initialised, as torchrun and init_process_group do; it is not"
            )
        if isinstance(mesh, FastSums):
            mesh = mesh.mesh
        group = _process_group(mesh)
        # By name alone: what refers to a group keeps its threads running when it is destroyed.
        self._name: str = group.group_name
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.device_type = mesh.device_type if isinstance(mesh, DeviceMesh) else _device_type(group)
        if self.device_type == "cpu":
            _rest_at_exit()
        self._inboxes: Inboxes | None = None
        self._asked = False
        self._marks: deque[Any] = deque()
        if self.rank < 0:
            raise ValueError("mesh: expected one with this process in it, got one without")

    def __getstate__(self) -> dict[str, Any]:
        """A copy makes inboxes of its own: it would not count the calls of this one."""
        return vars(self) | {"_inboxes": None, "_asked": False, "_marks": deque()}

    @property
    def _group(self) -> Any:
        return distributed_c10d._resolve_process_group(self._name)  # type: ignore[arg-type,attr-defined]

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.ranks}"

    def gatherer(self, sizes: tuple[int, ...]) -> Gather:
        """What joins parts of these sizes along the last dimension."""
        return Gather(self, sizes)

    def gather(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """x `[..., sizes[rank]]` of every rank -> `[..., sum(sizes)]`, the same on all, bit for bit. CUDA graphs record
        it. RuntimeError where another rank is gone."""
        if x.shape[-1] != sizes[self.rank]:
            raise ValueError(f"x: expected {sizes[self.rank]} columns on {self}, got {x.shape[-1]}")
        refuse_gradients("a gather between ranks", x=x)
        shape = (*x.shape[:-1], sum(sizes))
        if x.numel() == 0:
            return x.new_empty(shape)
        if (inboxes := self._inboxes_on(x.device)) is not None and inboxes.takes(x, sizes):
            return inboxes.gather(x, sizes)
        width = x.element_size()
        own = x.reshape(-1, x.shape[-1]).contiguous().view(torch.uint8)  # not every backend knows every type
        most = max(sizes) * width
        if own.shape[1] < most:
            own = pad(own, (0, most - own.shape[1]))
        found = own.new_empty(self.ranks, *own.shape)
        with self._said(own):
            _all_gather(found.flatten(0, 1), own, group=self._group)
        if len(set(sizes)) == 1:
            joined = found.transpose(0, 1).reshape(own.shape[0], -1)
        else:
            joined = torch.cat([part[:, : size * width] for part, size in zip(found, sizes, strict=True)], -1)
        return joined.view(x.dtype).view(shape)

    def beside(self, x: Tensor) -> Tensor:
        """x of every rank, which all have in one shape, `[ranks, ...]`; as `gather` does it."""
        return self.gather(x.reshape(1, -1), (x.numel(),) * self.ranks).view(self.ranks, *x.shape)

    def add(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, in its dtype, the same on all; x may be overwritten. CUDA graphs record it. In fp32 in
        the ranks' order, but of large ones on GPUs, which NCCL adds. RuntimeError where another rank is gone."""
        call = RowsCall(x, "copy", None, None, None, 0.0, None, False, None, True)
        if (found := self.rows(call, (x.shape[-1],) * self.ranks, adds=True)) is not None:
            return found[0]
        if x.numel() == 0:
            return x
        if x.device.type == "cuda":
            with self._said(x):
                dist.all_reduce(x, group=self._group)
            return x
        total, *others = self.beside(x).float().unbind()
        for part in others:
            total = total + part
        return total.to(x.dtype)

    def rows(self, call: RowsCall, sizes: tuple[int, ...], *, adds: bool = False) -> list[Tensor] | None:
        """`nn.parted.Joint.rows` of parts that have so many columns."""
        x = call.x
        refuse_gradients("a sum over ranks" if adds else "a gather between ranks", x=x)
        inboxes = self._inboxes_on(x.device) if x.numel() > 0 else None
        if inboxes is None or not inboxes.takes_rows(call, sizes, adds=adds):
            return None
        return inboxes.rows(call, sizes, adds=adds)

    def _inboxes_on(self, device: torch.device) -> Inboxes | None:
        """Made at the first call that no graph records; None where ranks cannot write to each other's memory."""
        if device.type != "cuda" or not 1 < self.ranks <= MOST_RANKS:
            return None
        if not self._asked and not torch.cuda.is_current_stream_capturing():
            self._asked = True
            self._inboxes = make_inboxes(self._group, self.rank, self.ranks, device, self.limit)
        return self._inboxes

    @contextmanager
    def _said(self, own: Tensor) -> Iterator[None]:
        """What went wrong between ranks."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"{self}: could not gather {own.nbytes:,} bytes of every rank: one has ended or is out of reach ({error})"
            ) from error

    @contextmanager
    def together(self) -> Iterator[None]:
        """What one rank raises inside ends it on all: there as it is, elsewhere as a RuntimeError that says it."""
        wrong: Exception | None = None
        try:
            yield
        except Exception as error:
            wrong = error
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, None if wrong is None else f"{type(wrong).__name__}: {wrong}", group=self._group)
        if wrong is not None:
            raise wrong
        if (rank := next((rank for rank, said in enumerate(found) if said is not None), None)) is not None:
            raise RuntimeError(f"{self}: rank {rank} ended with {found[rank]}")

    def on_first(self, thing: Any) -> list[Any] | None:
        """Every rank's, on the first rank of the group; None on the others."""
        found: list[Any] | None = [None] * self.ranks if self.rank == 0 else None
        dist.gather_object(thing, found, dist.get_global_rank(self._group, 0), group=self._group)
        return found

    def broadcast(self, things: list[Any]) -> None:
        """The first rank's, into every rank's list."""
        dist.broadcast_object_list(things, dist.get_global_rank(self._group, 0), group=self._group)

    def mark(self, device: torch.device) -> None:
        """Where `settle` sees that the device gets on."""
        if device.type == "cuda":
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(device))
            self._marks.append(done)

    def settle(self, device: torch.device) -> None:
        """Waits for what this device was given, exchanges among it: RuntimeError where it takes longer than the group's
        time limit from one mark to the next, since then a rank has ended or does not make the same calls."""
        limit = self.limit
        try:
            self.mark(device)
            while self._marks:
                end = time.monotonic() + limit + GRACE
                while not self._marks[0].query():
                    if time.monotonic() > end:
                        raise RuntimeError("the device is still busy")
                self._marks.popleft()
        except RuntimeError as error:  # a kernel that has waited for so long is an error of the device
            raise RuntimeError(
                f"{self}: an exchange with other ranks failed: one has ended, or kept the others waiting for more than "
                f"{limit:g} seconds ({str(error).splitlines()[0]})"
            ) from error

    @property
    def limit(self) -> float:
        """Seconds that a rank may let the others wait: the process group's timeout."""
        options: Any = getattr(self._group._get_backend(torch.device(self.device_type)), "options", None)
        timeout: Any = getattr(options, "_timeout", None)
        return timeout.total_seconds() if timeout is not None else LIMIT

    def check_alike(self, described: dict[str, str]) -> None:
        """ValueError, on every rank, that names what differs between ranks; of the versions in any case."""
        own = {"octofuse": octofuse.__version__, "torch": torch.__version__, "python": platform.python_version()}
        if self.device_type == "cuda":
            own["the GPU"] = torch.cuda.get_device_name()
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, own | described, group=self._group)
        for name in found[0]:
            values = [one.get(name) for one in found]
            if len(set(values)) > 1:
                other = next(rank for rank, value in enumerate(values) if value != values[0])
                raise ValueError(
                    f"mesh: expected ranks that are alike, got {name} {values[0]} on rank 0 and {values[other]} on rank "
                    f"{other}"
                )


@dataclass(frozen=True)
class Gather:
    """Parts of these columns, as `nn.parted.Joint` has them."""

    group: Group
    sizes: tuple[int, ...]
    adds = False

    @property
    def widest(self) -> int:
        return max(self.sizes)

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.gather(x, self.sizes)

    def beside(self, x: Tensor) -> Tensor:
        return self.group.beside(x)

    def rows(self, call: RowsCall) -> list[Tensor] | None:
        return self.group.rows(call, self.sizes)


@dataclass(frozen=True)
class Sum:
    """Summands, as `nn.parted.Joint` has them."""

    group: Group
    adds = True
    widest = 0

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.add(x)

    def beside(self, x: Tensor) -> Tensor:
        return self.group.beside(x)

    def rows(self, call: RowsCall) -> list[Tensor] | None:
        return self.group.rows(call, (call.x.shape[-1],) * self.group.ranks, adds=True)


def device_of(mesh: Any) -> torch.device:
    """Of this process."""
    kind = Group(mesh).device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _process_group(mesh: Any) -> Any:
    if isinstance(mesh, dist.ProcessGroup):
        return mesh
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a DeviceMesh or a process group, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f"mesh: expected one dimension, got {mesh.ndim}; a part of it, mesh['tp'], is one")
    return mesh.get_group()


def _device_type(group: Any) -> str:
    return "cuda" if "nccl" in str(dist.get_backend(group)) else "cpu"


@cache
def _rest_at_exit() -> None:
    """gloo's threads drop the tensors of the last collectives a moment later, for which they take the interpreter's lock:
    one that does so while the interpreter ends aborts the process."""
    atexit.register(time.sleep, 0.1)
