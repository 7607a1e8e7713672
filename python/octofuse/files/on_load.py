"""Quantising while transformers loads a floating-point checkpoint: a linear becomes its layer once its weight is read.

So no more lies in memory than the quantised model, and one linear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps

from octofuse.files.headers import read_headers
from octofuse.files.loading import Later, check_tensor, renamed
from octofuse.nn import linear_layers, output_heads, quantised_layer, replace_module, rows_of
from octofuse.nn.linear import is_conv1d
from octofuse.nn.plan import schemes_of
from octofuse.quant import AnyScheme, Scheme, scheme_named
from octofuse.quant.affine import BLOCK


def bytes_a_weight(scheme: AnyScheme) -> float:
    """Scales of groups included."""
    if isinstance(scheme, Scheme):
        return 1.0
    bits = 4 if scheme.code == "sparse12" else scheme.bits
    scales = 16 * bits if scheme.code == "bcq" else 24 if scheme.zero_points else 16
    return (bits + (0 if scheme.group is None else scales / scheme.group)) / 8


class Unquantised(Later):
    """A floating-point linear of a model that ranks will share: each quantises its own outputs alone."""

    def __init__(self, name: str, linear: nn.Module, scheme: AnyScheme) -> None:
        weight: Any = linear.weight
        outputs, inputs = reversed(weight.shape) if is_conv1d(linear) else weight.shape
        super().__init__(inputs, outputs)
        self.name, self.linear, self.scheme = name, linear, scheme

    def layer(self) -> nn.Module:
        return _quantised(self.name, self.linear, self.scheme)

    def part(self, rows: Sequence[range], *, shares: bool = False) -> nn.Module:
        """Of some outputs of the floating-point weight, unless more than an output is looked at to quantise it."""
        if not self._by_outputs:
            return super().part(rows, shares=shares)
        made: Any = _quantised(self.name, rows_of(self.linear, rows), self.scheme)
        made.is_conv1d = is_conv1d(self.linear)
        return made  # type: ignore[no-any-return]

    @property
    def _by_outputs(self) -> bool:
        """Blocks are never cut, but for one that is all of a weight; binary codes stop where all of them have settled."""
        if isinstance(self.scheme, Scheme):
            one_block = self.scheme.weights == "block" and self.out_features <= BLOCK
            return self.scheme.weights != "tensor" and not one_block
        return self.scheme.code != "bcq"

    @property
    def unit(self) -> int | None:
        return BLOCK if isinstance(self.scheme, Scheme) and self.scheme.weights == "block" else None


class OnLoad:
    """Has the methods of `loading.Reader`, and what transformers asks a quantizer for every tensor.

    for_ranks: the model is read in floating point, mapped where it stays in the file's dtype, and its linears wait for
    whoever takes a rank's part of them.
    """

    def __init__(self, scheme: str, exceptions: Mapping[str, str | None]) -> None:
        self.scheme, self.exceptions = scheme_named(scheme), exceptions
        self.for_ranks = False
        self.plan: dict[str, AnyScheme] = {}
        self.heads: set[str] = set()

    def before(self, model: Any, files: list[Path], dtype: torch.dtype) -> None:
        layers = linear_layers(model)
        if not layers:
            raise ValueError(f"model: expected linear layers to quantise, got none in {type(model).__name__}")
        self.heads = {name for name in output_heads(model) if name in self.exceptions}
        self.plan = schemes_of([*layers, *sorted(self.heads)], self.scheme, self.exceptions)
        if all(file.suffix == ".safetensors" for file in files):  # transformers looks at what it stores itself alone
            headers, _ = renamed(model, read_headers(files))
            for name in layers.keys() & self.plan.keys():
                if (header := headers.get(f"{name}.weight")) is not None:
                    check_tensor(header, f"{name}.weight", layers[name].weight)  # type: ignore[arg-type]

    def needs(self, tensor: str) -> bool:
        """Whether a tensor is to be quantised as it is read. A head may share its weight: it comes at the end."""
        name, _, own = tensor.rpartition(".")
        return own == "weight" and name in self.plan and name not in self.heads and not self.for_ranks

    def element_size(self, tensor: str) -> float:
        return bytes_a_weight(self.plan[tensor.rpartition(".")[0]])

    @torch.inference_mode(False)  # else their tensors could never be loaded into again
    def quantise(self, model: nn.Module, name: str, weight: Tensor) -> None:
        layer: Any = model.get_submodule(name)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        _exchange(model, name, layer, self.plan[name])

    @torch.inference_mode(False)
    def after(self, model: Any) -> None:
        for name in sorted(self.heads & self.plan.keys()):
            model.config.tie_word_embeddings = False
            if not self.for_ranks:
                _exchange(model, name, model.get_submodule(name), self.plan[name])
        for name, scheme in self.plan.items() if self.for_ranks else ():
            replace_module(model, name, Unquantised(name, model.get_submodule(name), scheme))
        model.requires_grad_(False)


def _quantised(name: str, layer: nn.Module, scheme: AnyScheme) -> nn.Module:
    try:
        return quantised_layer(layer, scheme)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _exchange(model: nn.Module, name: str, layer: nn.Module, scheme: AnyScheme) -> None:
    built = _quantised(name, layer, scheme)
    for tensor in built.state_dict(keep_vars=True).values():  # some models initialise tensors by their names
        tensor._is_hf_initialized = True
    replace_module(model, name, built)


class QuantiseOp(ConversionOps):  # type: ignore[misc]
    """What transformers calls with a tensor that `OnLoad.needs`."""

    def __init__(self, on_load: OnLoad) -> None:
        self.on_load = on_load

    def convert(
        self, input_dict: dict[str, Any], *, model: nn.Module, missing_keys: Any = None, **more: Any
    ) -> dict[str, Any]:
        left = {}
        for name, found in input_dict.items():
            if not self.on_load.needs(name):
                left[name] = found
                continue
            self.on_load.quantise(model, name.rpartition(".")[0], found[0] if isinstance(found, list) else found)
            if missing_keys is not None:
                missing_keys.discard(name)
        return left
