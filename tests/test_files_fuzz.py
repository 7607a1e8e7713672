"""Mutated headers and settings of checkpoints: each is refused by a ValueError, or is what it was.

OCTOFUSE_FUZZ=1000000 tries so many; 20,000 by default.
"""

from __future__ import annotations

import copy
import json
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save

from checkpoints import Awq, Gptq
from octofuse.files.headers import read_headers, weight_files
from octofuse.files.loading import FORMATS, Linear, Reader, check_tensor, planned
from octofuse.files.writing import config_of, tensors_of
from octofuse.models import quantize_
from octofuse.nn import linear_layers, output_heads
from test_files import model_of

COUNT = int(os.environ.get("OCTOFUSE_FUZZ", "20000"))
REFUSALS = (ValueError, FileNotFoundError)
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 4, 4.0, 8, 16, 64, 1 << 40, 0.5, float("nan"), "", "gptq", "int", "../x", "re:(", [],
    {}, [None], {"weights": None}, [[]],
)  # fmt: skip


def mutated_bytes(header: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, taken out or put in, digits more often than others."""
    changed = bytearray(header)
    for _ in range(rng.randint(1, 3)):
        digits = [i for i, byte in enumerate(changed) if 48 <= byte <= 57]
        at = rng.choice(digits) if digits and rng.random() < 0.6 else rng.randrange(len(changed))
        kind = rng.random()
        if kind < 0.6:
            changed[at] = rng.randrange(48, 58) if 48 <= changed[at] <= 57 else rng.randrange(256)
        elif kind < 0.8:
            del changed[at]
        else:
            changed.insert(at, rng.randrange(256))
    return bytes(changed)


def mutated_config(config: Any, rng: random.Random) -> Any:
    """One value, at any depth, exchanged or taken out."""
    changed = copy.deepcopy(config)
    inside, key = None, None
    at = changed
    while isinstance(at, (dict, list)) and at and (inside is None or rng.random() < 0.7):
        inside, key = at, rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(len(at))
        at = inside[key]
    if rng.random() < 0.2 and isinstance(inside, dict):
        del inside[key]
    elif inside is not None:
        inside[key] = rng.choice(VALUES)
    return changed


def test_mutated_headers(tmp_path: Path) -> None:
    model = model_of("llama")
    linears = {n: Linear(m, *m.weight.shape) for n, m in (linear_layers(model) | output_heads(model)).items()}
    rng = random.Random(1)
    quantised = quantize_(model_of("llama"), "w4a16-g32-zp", progress=False)
    ours = SimpleNamespace(config=config_of(quantised, "octofuse"), tensors=tensors_of(quantised, "octofuse"))
    for written in (Gptq(model, 4, 32), Awq(model, 32), ours):
        kept = {n: t for n, t in model.state_dict().items() if n.rpartition(".")[0] not in linears}
        whole = save(
            {n: t.contiguous() for n, t in (kept | written.tensors | {"lm_head.weight": model.lm_head.weight}).items()}
        )
        length = int.from_bytes(whole[:8], "little")
        header, data = whole[8 : 8 + length], whole[8 + length :]
        path = tmp_path / "model.safetensors"
        path.write_bytes(whole)
        wanted = read_headers([path])
        form = FORMATS[written.config["quant_method"]](written.config)
        refused = 0
        for _ in range(COUNT // 4):
            changed = mutated_bytes(header, rng)
            size = len(changed) if rng.random() < 0.9 else rng.choice((0, 1, length, 1 << 40, (1 << 64) - 1))
            path.write_bytes(size.to_bytes(8, "little") + changed + data)
            try:
                found = read_headers([path])
                planned(form, linears, found, "model.", {})
                for name, tensor in kept.items():
                    if name in found:
                        check_tensor(found[name], name, tensor)
            except REFUSALS:
                refused += 1
                continue
            # What is left is the same, or named otherwise: transformers then reports a tensor that is missing.
            for name in wanted.keys() & found.keys():
                assert found[name].shape == wanted[name].shape, changed
                assert found[name].dtype is not None, changed
                assert found[name].dtype.is_floating_point == wanted[name].dtype.is_floating_point, changed
        assert refused > COUNT // 8


def test_mutated_settings() -> None:
    model = model_of("llama")
    linears = {n: Linear(m, *m.weight.shape) for n, m in linear_layers(model).items()}
    group = {
        "targets": ["Linear"], "format": "pack-quantized", "output_activations": None, "input_activations": None,
        "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
    }  # fmt: skip
    compressed = {"quant_method": "compressed-tensors", "config_groups": {"a": group}, "ignore": ["lm_head", "re:.*up"]}
    layers = {"lm_head": "w8a8-dynamic", "model.layers.0.mlp.up_proj": None}
    own = {"quant_method": "octofuse", "version": 5, "scheme": "w4a16-g32", "layers": layers}
    rng = random.Random(2)
    for config in (Gptq(model, 4, 32).config, Awq(model, 32).config, compressed, own):
        for _ in range(COUNT // 8):
            changed = mutated_config(config, rng)
            if changed.get("quant_method") != config["quant_method"]:
                continue
            try:
                form = Reader(changed).format
                for name, linear in linears.items():
                    stored = form.stored((name,), linear.module, frozenset({"qweight"}))
                    if stored is not None:
                        stored.wants(linear.n, linear.k)
            except ValueError:
                continue


def test_mutated_indexes(tmp_path: Path) -> None:
    whole = save({"a.weight": torch.zeros(2), "b.weight": torch.zeros(3)})
    (tmp_path / "model-1.safetensors").write_bytes(whole)
    index = {
        "metadata": {"total_size": 20},
        "weight_map": dict.fromkeys(("a.weight", "b.weight"), "model-1.safetensors"),
    }
    text = json.dumps(index).encode()
    rng = random.Random(3)
    for i in range(COUNT // 8):
        changed = mutated_bytes(text, rng) if i % 2 else json.dumps(mutated_config(index, rng)).encode()
        (tmp_path / "model.safetensors.index.json").write_bytes(changed)
        try:
            found = weight_files(tmp_path)
        except REFUSALS:
            continue
        assert found == [tmp_path / "model-1.safetensors"]
