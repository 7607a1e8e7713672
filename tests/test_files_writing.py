"""Checkpoints that this library writes for others: the same bits when read again, and as stock transformers reads them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import octofuse
from octofuse.models import quantize_
from test_files import model_of

needs_theirs = pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None, reason="needs compressed-tensors"
)
SCHEMES = ("w8a8-dynamic", "w8a8-static", "w8a8-static-tensor", "w8a16", "w8a16-g32-zp", "w4a16-g32", "w4a16",
           "w4a16-g64-zp", "w3a16-g32", "w2a16-g32-zp", "w6a16-g32-mse", "w8a16-fp8", "w8a16-fp8-g32",
           "w4a8", "w3a8-mse")  # fmt: skip
TOKENS = torch.randint(1, 97, (2, 11), generator=torch.Generator().manual_seed(1))

STOCK = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
assert "octofuse" not in sys.modules
with torch.no_grad():
    torch.save(model(torch.load(sys.argv[2])).logits, sys.argv[3])
"""


def quantised(kind: str, scheme: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    return quantize_(model_of(kind, dtype), scheme, [TOKENS], progress=False, **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_read_again_it_has_the_same_bits(scheme: str, dtype: torch.dtype, tmp_path: Path) -> None:
    for kind in ("llama", "qwen3", "opt") if scheme in ("w8a8-dynamic", "w4a16-g32") else ("llama",):
        model = quantised(kind, scheme, dtype)
        octofuse.save_pretrained(model, tmp_path / kind)
        again = octofuse.from_pretrained(tmp_path / kind)
        assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)
        octofuse.save_pretrained(again, tmp_path / f"{kind} again")
        first, second = (tmp_path / name / "model.safetensors" for name in (kind, f"{kind} again"))
        assert first.read_bytes() == second.read_bytes()
        assert (tmp_path / kind / "generation_config.json").is_file()


@needs_theirs
@pytest.mark.parametrize(
    "scheme", ["w8a8-dynamic", "w8a8-static", "w8a16", "w4a16-g32", "w3a16-g32", "w8a16-fp8", "w8a16-fp8-g32", "w4a8"]
)
def test_stock_transformers_reads_it(scheme: str, tmp_path: Path) -> None:
    """In a process without octofuse. Its int8 activations have a step of amax / 127.5, ours one of amax / 127."""
    model = quantised("llama", scheme)
    octofuse.save_pretrained(model, tmp_path / "model")
    torch.save(TOKENS, tmp_path / "tokens.pt")
    arguments = [str(tmp_path / name) for name in ("model", "tokens.pt", "logits.pt")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", STOCK, *arguments], check=True, env=environment, capture_output=True)
    want, got = model(TOKENS).logits, torch.load(tmp_path / "logits.pt")
    assert float((got - want).norm() / want.norm()) < (0.03 if "a8" in scheme else 1e-5)


def test_mixed_schemes_shards_and_heads(tmp_path: Path) -> None:
    exceptions = {"mlp.down_proj": "w8a8-dynamic", "layers.1.self_attn.q_proj": None, "lm_head": "w8a8-dynamic"}
    model = quantised("llama", "w4a16-g32", exceptions=exceptions)
    octofuse.save_pretrained(model, tmp_path / "model", max_shard_size=40_000)
    config = json.loads((tmp_path / "model/config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert config["ignore"] == ["model.layers.1.self_attn.q_proj"]
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    again = octofuse.from_pretrained(tmp_path / "model")
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.parametrize(
    ("kind", "scheme", "message"),
    [
        (
            "llama",
            "w4a16-g32-half",
            r"model\.layers\.0\..*: expected a scheme that compressed-tensors knows, got w4a16-g32-half; its zero lies",
        ),
        ("llama", "bcq-q3-g32", r"expected a scheme that compressed-tensors knows, got bcq-q3-g32"),
        ("llama", "w4a8-g32", r"expected a scheme that compressed-tensors knows, got w4a8-g32"),
        ("gpt2", "w8a8-dynamic", r"transformer\.h\.0\..*: expected nn\.Linear, got Conv1D"),
    ],
)
def test_what_the_format_cannot_say(kind: str, scheme: str, message: str, tmp_path: Path) -> None:
    model = quantised(kind, scheme)
    with pytest.raises(ValueError, match=message):
        octofuse.save_pretrained(model, tmp_path / "model", format="compressed-tensors")
    assert not list(tmp_path.iterdir())
    octofuse.save_pretrained(model, tmp_path / "model", max_shard_size=20_000)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    assert torch.equal(octofuse.from_pretrained(tmp_path / "model")(TOKENS).logits, model(TOKENS).logits)


STOCK_REFUSES = """
import sys
from transformers import AutoModelForCausalLM
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[1])
except RuntimeError:
    print("refused")
"""


@pytest.mark.parametrize("scheme", ["w8a8-dynamic", "w4a16-g32", "w2a16", "bcq-q2-g32"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_stock_transformers_refuses_the_own_format(kind: str, scheme: str, tmp_path: Path) -> None:
    """It would take integers for floats, or fill what is missing with random numbers, and only warn."""
    octofuse.save_pretrained(quantised(kind, scheme), tmp_path / "model", format="octofuse")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", STOCK_REFUSES, str(tmp_path / "model")]
    run = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
    assert run.stdout == "refused\n"


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="format: expected one of auto, compressed-tensors, octofuse, got 'gguf'"):
        octofuse.save_pretrained(nn.Linear(2, 2), tmp_path / "a", format="gguf")
    with pytest.raises(TypeError, match="model: expected a model of transformers, got Linear"):
        octofuse.save_pretrained(nn.Linear(2, 2), tmp_path / "a")
    with pytest.raises(ValueError, match="model: expected a model that quantize_ has changed"):
        octofuse.save_pretrained(model_of("llama"), tmp_path / "a")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("")
    with pytest.raises(FileExistsError, match="folder: expected a new or empty folder"):
        octofuse.save_pretrained(quantised("llama", "w8a16"), tmp_path / "full")
