"""Tensor parallelism that transformers' `from_pretrained` is asked for: what it says, and who does it.

transformers would split weights by columns and by rows, and add up what ranks found. Quantised layers are split by
`octofuse.parallel` instead, which gives the bits of one device; `octofuse.parallel` puts its function here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

shard: Callable[[Any, Any], Any] | None = None  # (model, mesh) -> model, in place
device_of: Callable[[Any], torch.device] | None = None  # of this rank of a mesh
# (a sharded model, what writes it where it is whole)
saved: Callable[[nn.Module, Callable[[], None]], None] | None = None
A_PART = "model: expected a whole model, got one rank's part; octofuse.save_pretrained, called on all ranks, writes it"


class TensorParallel:
    """Of one `from_pretrained`; without a distributed_config it does nothing."""

    def __init__(self) -> None:
        self.wanted = False
        self.device_map: dict[str, Any] | None = None

    def keep(self, device_map: Any) -> Any:
        """What the model is read to, which `before` may change."""
        self.device_map = dict(device_map) if isinstance(device_map, dict) else None
        return device_map if self.device_map is None else self.device_map

    def before(self, model: Any) -> None:
        """ValueError for what is not served."""
        config: Any = getattr(model.config, "distributed_config", None)
        sizes = {name: getattr(config, name, None) or 1 for name in ("dp_size", "pp_size", "ep_size", "tp_size")}
        self.wanted = sizes.pop("tp_size") > 1
        for name, size in sizes.items():
            if size > 1:
                raise ValueError(f"distributed_config: expected tp_size alone for quantised layers, got {name}={size}")
        if not self.wanted:
            return
        if config.tp_plan not in (None, "auto"):
            raise ValueError(f"distributed_config: expected no tp_plan for quantised layers, got {config.tp_plan!r}")
        import transformers
        from transformers.quantizers.base import HfQuantizer

        if not hasattr(HfQuantizer, "update_parallel_plan"):
            raise ValueError(
                f"distributed_config: expected transformers 5.23 or later for quantised layers, got "
                f"{transformers.__version__}; octofuse.parallel.shard_ needs none"
            )
        if self.device_map is not None:  # files are mapped on the CPU, and a device gets its rank's part alone
            self.device_map.clear()
            self.device_map[""] = torch.device("cpu")

    def clear(self, model: Any, plan: dict[str, str]) -> None:
        """Leaves nothing of a plan that transformers would follow; it refuses an empty one."""
        if self.wanted and plan is model.tp_plan:
            plan.clear()
            plan[next(name for name, _ in model.named_parameters())] = "replicate"

    def after(self, model: Any, mesh: Any = None) -> nn.Module:
        """The model, or this rank's part of it on this rank's device. mesh: where transformers was not asked."""
        if self.wanted:
            manager = getattr(model, "_mesh_manager", None)
            mesh = model._device_mesh if manager is None else manager.get_mesh("tp")
        if mesh is None:
            return model  # type: ignore[no-any-return]
        assert shard is not None
        assert device_of is not None
        part: nn.Module = shard(model.eval(), mesh)
        return part.to(device_of(mesh)) if self.wanted else part
