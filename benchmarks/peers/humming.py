"""Humming's kernels (0.1.19), compiled for the layer and the number of tokens by nvcc, as its own rule for the GPU says.

One takes about 7 s of a core to compile, so `Ahead` compiles those of a whole table in threads before they are needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from peers.layer import GROUP, Kernel, Layer, has_int8_tokens

COLUMN = "Humming"


def load() -> None:
    os.environ.setdefault("HUMMING_COMPILER", "nvcc")
    os.environ.setdefault("HUMMING_DISABLE_PARALLEL_BUILD", "1")  # `Ahead` does it
    import humming.forward  # noqa: F401
    from humming.ops.utils import init_humming_launcher

    init_humming_launcher()


def kernels(family: str) -> list[Kernel]:
    return [Kernel(COLUMN, "int8" if has_int8_tokens(family) else "fp16", prepare, call, adds_bias=family == "w8a8")]


def config_of(family: str, n: int, k: int) -> Any:
    from humming import dtypes
    from humming.schema import HummingInputSchema, HummingWeightSchema
    from humming.transform import prepare_layer_config

    group = 0 if family in ("w8a8", "w4a8") else GROUP
    activations = "int8" if has_int8_tokens(family) else "float16"
    weight = HummingWeightSchema(b_dtype=dtypes.DataType.from_str(f"uint{family[1]}"), weight_scale_group_size=group)
    inputs = HummingInputSchema(a_dtype=dtypes.DataType.from_str(activations))
    return prepare_layer_config(n, k, weight, inputs, has_bias=family == "w8a8", torch_dtype=torch.float16)


def tuning_of(config: Any, m: int) -> dict[str, Any]:
    from humming.tune import get_heuristics_config

    found: dict[str, Any] = json.loads(json.dumps(get_heuristics_config(config, shape_m=m)))
    return found


def prepare(layer: Layer) -> tuple[Any, ...]:
    from humming import ops
    from humming.transform import transform_humming_tensors

    config = config_of(layer.family, layer.n, layer.k)
    codes = layer.codes.int() + (128 if layer.family == "w8a8" else 0)
    tensors = {"weight": ops.pack_weight(codes.contiguous(), layer.bits), "weight_scale": layer.scale.contiguous()}
    if layer.bias is not None:
        tensors["bias"] = layer.bias
    made = transform_humming_tensors(config, tensors)
    locks = torch.zeros(2048, dtype=torch.int32, device="cuda")
    tunings: dict[int, Any] = {}  # by tokens; all copies of the weight share it
    scales = made.get("weight_scale"), made.get("weight_scale_2")
    return config, tunings, made["weight"], *scales, made.get("bias"), locks


def call(x: Any, config: Any, tunings: dict[int, Any], w: Tensor, scale: Tensor, scale_2: Tensor, bias: Tensor,
         locks: Tensor) -> Tensor:  # fmt: skip
    from humming.forward import humming_forward

    x, x_scale = (x, None) if isinstance(x, Tensor) else x
    scales = {"weight_scale": scale, "weight_scale_2": scale_2, "input_scale": x_scale}
    m = x.shape[0]
    if m not in tunings:
        tunings[m] = tuning_of(config, m)
    more = {"tuning_config": tunings[m], "use_pdl": False}
    return humming_forward(config, inputs=x, weight=w, bias=bias, locks=locks, **scales, **more)


class Ahead:
    """Compiles the kernels of these rows, in their order, in threads."""

    def __init__(self, rows: Iterable[tuple[str, int, int, int]], threads: int) -> None:
        self.pool = ThreadPoolExecutor(max_workers=threads)
        self.of_kernel: dict[str, Future[Any]] = {}
        self.of_row: dict[tuple[str, int, int, int], Future[Any]] = {}
        for row in rows:
            family, m, n, k = row
            try:
                config = config_of(family, n, k)
                values = json.loads(config.to_str()) | tuning_of(config, m)
            except Exception as error:  # a layer that it has no kernel for
                self.of_row[row] = Future()
                self.of_row[row].set_exception(error)
                continue
            values.pop("num_sms", None)
            key = json.dumps(values, sort_keys=True)
            if key not in self.of_kernel:
                self.of_kernel[key] = self.pool.submit(compile_only, values)
            self.of_row[row] = self.of_kernel[key]

    def why_not(self, row: tuple[str, int, int, int], seconds: float) -> dict[str, str]:
        """Waits for the row's kernel; by column why there is none: it is not there by then, or what the compiler raised."""
        try:
            self.of_row[row].result(timeout=seconds)
        except Exception as error:
            return {COLUMN: f"{type(error).__name__}: {error}"}
        return {}

    def stop(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)


def compile_only(values: dict[str, Any]) -> None:
    """Into Humming's cache of files; who launches the kernel loads it from there."""
    from humming.kernel.humming import HummingKernel

    class Compiled(HummingKernel):  # type: ignore[misc]
        def register_kernel(self) -> None:
            """Not in this thread."""

    Compiled(**values)
