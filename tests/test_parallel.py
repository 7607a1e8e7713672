"""Models over several ranks: the bits of one, whatever their number; plans; and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import PROMPTS
from octofuse.generate import Generator
from octofuse.models import quantize_
from octofuse.parallel import shard_
from ranks import DeviceMesh, on_ranks
from test_engine_families import decoded_logits, on_gpu, tokens_of
from test_models_families import small

GQA = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", GQA),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", GQA | {"attention_bias": True}),
    "opt": ("opt", {}),
    "gpt2": ("gpt2", {}),
    "phi3": ("phi3", GQA),
    "gpt_neox": ("gpt_neox", {}),
    "gemma2": ("gemma2", GQA),
    "granite": ("granite", {"residual_multiplier": 0.5}),
}
SCHEMES = ("w8a8-dynamic", "w8a8-static", "w8a8-static-tensor", "fp8-dynamic", "fp8-static", "fp8-delayed", "llm-int8",
           "w8a16", "w4a16-g32-zp", "w3a16", "bcq-q2-g32", "sparse12-w7", "nf4", "w8a16-fp8")  # fmt: skip


def model_of(family: str, scheme: str | None) -> Any:
    kind, settings = FAMILIES[family]
    model = small(kind, **settings)
    with torch.no_grad():
        for parameter in model.parameters():  # random models are all but linear otherwise
            if parameter.dim() == 2:
                parameter.mul_(4.0)
    if scheme is None:
        return model
    exceptions = {"lm_head": "w8a8-dynamic"} if scheme == "w8a8-dynamic" and family != "llama, tied" else None
    return quantize_(model, scheme, [tokens_of(2, 30)], exceptions=exceptions, progress=False)


def differences(mesh: DeviceMesh, cases: list[tuple[str, str]]) -> list[str]:
    """Cases whose logits or tokens over all ranks are not those of one."""
    wrong = []
    for family, scheme in cases:
        model = model_of(family, scheme)
        tokens = tokens_of(3, 20)
        whole = copy.deepcopy(model)
        want, new = decoded_logits(whole, tokens, 14), Generator(whole)(PROMPTS, 7)
        shard_(model, mesh)
        got = decoded_logits(model, tokens, 14)
        if not torch.equal(got, want):
            wrong.append(f"{family}, {scheme}: logits {float((got - want).abs().max())}")
        if Generator(model)(PROMPTS, 7) != new:
            wrong.append(f"{family}, {scheme}: tokens")
    return wrong


CASES = [("llama", scheme) for scheme in SCHEMES] + [(family, "w8a8-dynamic") for family in FAMILIES]
CASES += [("gpt2", "w8a8-static"), ("phi3", "w4a16-g32-zp"), ("gpt_neox", "bcq-q2-g32"), ("qwen3", "fp8-dynamic")]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_number_of_ranks_gives_the_same_bits(ranks: int, tmp_path: Path) -> None:
    cases = CASES if ranks == 2 else CASES[::3]
    assert on_ranks(ranks, tmp_path, differences, cases) == [[]] * ranks


WIDE = {"hidden_size": 256, "intermediate_size": 528, "num_attention_heads": 4, "head_dim": 64, "num_key_value_heads": 2,
        "vocab_size": 1001}  # fmt: skip
WIDER: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 256, "vocab_size": 1001},
    "opt": WIDE | {"ffn_dim": 528, "word_embed_proj_dim": 256},
}


def differences_on_gpus(mesh: DeviceMesh, cases: list[tuple[str, str]]) -> list[str]:
    wrong = []
    for kind, scheme in cases:
        made = small(kind, **WIDER.get(kind, WIDE))
        model = on_gpu(quantize_(made, scheme, [tokens_of(2, 30)], progress=False))
        tokens = tokens_of(3, 20).cuda()
        whole = copy.deepcopy(model)
        want, new = decoded_logits(whole, tokens, 14), Generator(whole)(PROMPTS, 20)
        generator = Generator(model, mesh=mesh)
        got = decoded_logits(model, tokens, 14)
        if not torch.equal(got, want):
            wrong.append(f"{kind}, {scheme}: logits {float((got - want).abs().max())}")
        if generator(PROMPTS, 20) != new:
            wrong.append(f"{kind}, {scheme}: tokens")
    return wrong


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_give_the_bits_of_one(tmp_path: Path) -> None:
    cases = [("llama", scheme) for scheme in ("w8a8-dynamic", "w8a8-static", "fp8-dynamic", "fp8-static", "llm-int8")]
    cases += [(kind, "w8a8-dynamic") for kind in ("gpt2", "opt", "qwen3")]
    assert on_ranks(2, tmp_path, differences_on_gpus, cases, device="cuda") == [[], []]
