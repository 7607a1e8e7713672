"""`octofuse explain`: a weight that is 8 bits in name and wider in fact is found, whoever quantised it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, ViTConfig, ViTModel
from typer.testing import CliRunner

import octofuse
from octofuse.assets import EMBEDDED
from octofuse.cli import app
from octofuse.models import profile, quantize_
from octofuse.models.instructions import Instruction, instructions_of, of_listing
from octofuse.nn import linear_layers, replace_module
from test_files import model_of

IDS = torch.arange(12).unsqueeze(0)


class Liar(nn.Module):
    """int8 in a buffer, and a product in floating point of the whole weight."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.register_buffer("codes", (layer.weight.detach() * 100).round().to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.codes.to(x.dtype) / 100)


def test_a_lie_is_found() -> None:
    model = model_of("llama")
    for name, layer in linear_layers(model).items():
        replace_module(model, name, Liar(layer))  # type: ignore[arg-type]
    found = profile(model, IDS)
    inner = [layer for layer in found.layers if layer.name not in found.heads]
    assert len(inner) == 2 * len([m for m in model.modules() if isinstance(m, Liar)])
    for layer in inner:
        n, k = layer.n, layer.k
        assert layer.tokens == (12 if layer.phase == "prompt" else 1)
        assert layer.stored_bytes == n * k
        assert layer.verdict.endswith(
            f"in name only: weight written as float32, {n * k * 4 / 1e6:.1f} MB in every call"
        )
        assert layer.moved_bytes == n * k + layer.tokens * (n + k) * 4 + 2 * n * k * 4
        assert layer.microseconds > 0
    assert len(found.findings) == 2
    assert "write their weight wider before every product" in found.findings[0]


@pytest.mark.parametrize("scheme", ["w8a8-dynamic", "w4a16-g32", "nf4", "llm-int8", "bcq-q2-g32", "w8a16-fp8"])
def test_the_truth_is_told(scheme: str) -> None:
    found = profile(quantize_(model_of("llama"), scheme, progress=False), IDS)
    if scheme != "llm-int8":  # composed of torch's ops on a CPU, with a copy
        assert found.findings == ()
    for layer in found.layers:
        if layer.name not in found.heads:
            assert layer.verdict == f"{scheme} in memory"
            assert layer.widened == () or scheme == "llm-int8"


def test_small_layers_whose_scales_weigh_much_are_quantised_all_the_same() -> None:
    """224 columns are stored as 256: more than 9 bits a weight."""
    model = quantize_(AutoModelForCausalLM.from_pretrained(EMBEDDED), "w8a16", progress=False)
    model.config.quantization_config = {"quant_method": "octofuse"}
    found = profile(model, IDS)
    inner = [layer for layer in found.layers if layer.name not in found.heads]
    assert max(layer.stored_bytes * 8 / layer.n / layer.k for layer in inner) > 9
    assert found.findings == ()


def test_a_claim_that_the_weights_do_not_keep() -> None:
    """As a checkpoint that was decompressed on loading."""
    model = model_of("llama")
    model.config.quantization_config = {"quant_method": "compressed-tensors"}
    found = profile(model, IDS)
    count = len(linear_layers(model))
    want = f"compressed-tensors in the config, but {count} of {count} linears store 16 bits or more"
    assert found.findings == (want,)


@pytest.mark.gpu
def test_instructions_on_a_gpu() -> None:
    """int8 layers multiply int8 on tensor cores, for a prompt; a plain model 16 bits."""
    model = model_of("llama", torch.float16).cuda()
    plain = profile(model, IDS.repeat(1, 4))
    ours = profile(quantize_(model, "w8a8-dynamic", progress=False), IDS.repeat(1, 4))
    for found, operands in ((plain, "16 bits"), (ours, "int8")):
        prompts = [layer for layer in found.layers if layer.phase == "prompt" and layer.name not in found.heads]
        assert prompts
        assert {layer.instruction.operands for layer in prompts} == {operands}
        assert all(layer.share is not None and 0 < layer.share < 1.5 for layer in prompts)
        assert all(layer.kernels for layer in prompts)


def test_instructions_of_listings_and_names() -> None:
    listing = "IGMMA.64x128x32.S8.S8 R24, gdesc\n FFMA R1\n IGMMA.64x128x32.S8.S8 R25\n HMMA.16816.F32 R1"
    assert of_listing(listing) == "IGMMA.64x128x32.S8.S8"
    assert of_listing("FFMA R1, R2") == ""
    names = {
        "sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas":
            "16 bits",
        "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT": "16 bits",
        "nvjet_sm90_qsh_128x256": "float8",
        "cutlass_80_tensorop_s8_i16832gemm_s8_128x128_64x3_tn_align16": "int8",
        "ampere_fp16_s16816gemm_fp16_64x64_sliced1x2_ldg8_f2f_stages_64x5_tn": "16 bits",
        "void at::native::vectorized_elementwise_kernel<4>": "",
    }  # fmt: skip
    found = instructions_of(names)
    assert {name: found[name].operands for name in names} == names
    assert all(code.source == "name" for code in found.values())
    assert Instruction("", "name").operands == ""


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = CliRunner()
    plot = tmp_path / "p.png"
    result = run.invoke(app, ["explain", "embedded", "--tokens", "16", "--device", "cpu", "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    assert "Nothing is widened or copied in secret." in result.output
    assert plot.stat().st_size > 1000
    result = run.invoke(app, ["explain", "embedded", "--tokens", "16", "--device", "cpu", "--json"])
    found: dict[str, Any] = json.loads(result.stdout[result.stdout.index("{") :])
    assert {layer["phase"] for layer in found["layers"]} == {"prompt", "step"}
    assert all(layer["verdict"] == "float32 in memory" for layer in found["layers"])
    result = run.invoke(app, ["explain", "embedded", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert "a prompt of 511 tokens" in result.output, "the model's own limit"
    own, other = tmp_path / "own", tmp_path / "other"
    octofuse.save_pretrained(quantize_(model_of("llama"), "nf4", progress=False), own)
    ViTModel(ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)).save_pretrained(
        other
    )
    for arguments, message in (
        (["explain", "embedded", "--tokens", "100000"], "tokens: expected at most"),
        (["explain", str(tmp_path / "none")], "model"),
        (["explain", "embedded", "--plot", "p.txt"], "plot"),
        (["explain", str(own), "--stock"], "stock: "),
        (["explain", str(other)], "model: expected a causal language model, got one of vit"),
    ):
        result = run.invoke(app, [*arguments, "--device", "cpu"])
        assert result.exit_code == 1
        assert message in result.output


def test_models_that_cannot_be_profiled() -> None:
    with pytest.raises(ValueError, match="model: expected linear layers, got none in ReLU"):
        profile(nn.ReLU(), IDS)
    with pytest.raises(ValueError, match=r"ids: expected shape \[B, T\], both at least 1, got \[3\]"):
        profile(model_of("llama"), torch.arange(3))
    for ids, message in (
        ([[1, 2]], r"ids: expected an int64 tensor \[B, T\], got list"),
        (torch.ones(0, 4, dtype=torch.long), r"ids: expected shape .* got \[0, 4\]"),
        (torch.rand(1, 2), "ids: expected an int64 tensor .* got torch.float32"),
        (torch.tensor([[1, -1]]), "ids: expected numbers of at least 0 below .* got -1"),
        (torch.tensor([[1, 10**6]]), "ids: expected numbers .* got 1000000"),
        (torch.ones(1, 10**5, dtype=torch.long), "ids: expected at most .* got 100000"),
    ):
        with pytest.raises(ValueError, match=message):
            profile(model_of("llama"), ids)
