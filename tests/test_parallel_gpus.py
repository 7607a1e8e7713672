"""Ranks with a GPU each, and sums that ranks split."""

from __future__ import annotations

import copy
import os
import re
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from helpers import PROMPTS
from octofuse.generate import Generator
from octofuse.models import quantize_
from octofuse.nn import SummedLinear
from octofuse.parallel import FastSums, Group, shard_
from ranks import DeviceMesh, on_ranks
from test_engine_families import decoded_logits, on_gpu, tokens_of
from test_models_families import small
from test_parallel import FAMILIES, WIDE, WIDER, needs_gpus, quantised_as

# Of 96 columns a rank, which a group of 64 does not let cut, and a feed-forward that can be.
MIXED = {
    "hidden_size": 192,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 32,
    "intermediate_size": 512,
}


def differences_of_fast_sums(mesh: DeviceMesh, cases: list[tuple[str, str]]) -> list[tuple[str, float, int]]:
    """Of each case how far logits are from one rank's, and how many layers add up."""
    found = []
    for family, scheme in cases:
        kind, more = FAMILIES.get(family, ("llama", MIXED))
        if family in ("llama", "gpt2", "opt"):
            more = WIDER.get(kind, WIDE)
        model = small(kind, **more)
        quantize_(model, scheme, [tokens_of(2, 30)], progress=False)
        tokens = tokens_of(3, 20)
        if mesh.device_type == "cuda":
            model, tokens = on_gpu(model), tokens.cuda()
        want = decoded_logits(copy.deepcopy(model), tokens, 14)
        forward = copy.deepcopy(model)(tokens).logits
        shard_(model, FastSums(mesh))
        got = decoded_logits(model, tokens, 14)
        off = max(float((a - b).norm() / b.norm()) for a, b in ((got, want), (model(tokens).logits, forward)))
        ranks = Group(mesh).gather(got.reshape(1, -1), (got.numel(),) * mesh.size())
        assert torch.equal(ranks.view(mesh.size(), -1), got.reshape(1, -1).expand(mesh.size(), -1)), (
            "alike on all ranks"
        )
        found.append((f"{family}, {scheme}", off, sum(isinstance(m, SummedLinear) for m in model.modules())))
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_fast_sums(ranks: int, tmp_path: Path) -> None:
    """Close to one rank, by as much as tokens' scales differ where a rank quantises its part of a token."""
    cases = [("llama", scheme) for scheme in ("w8a8-dynamic", "w8a8-static", "fp8-dynamic", "w4a16-g32-zp", "w4a8-g32")]
    cases += [("gpt2", "w8a8-dynamic"), ("opt", "w4a16-g32"), ("gemma2", "w8a16"), ("granite", "w8a8-dynamic")]
    cases += [("gpt_neox", "w8a8-dynamic"), ("mixed", "w4a16-g64")]
    for found in on_ranks(ranks, tmp_path, differences_of_fast_sums, cases if ranks == 2 else cases[:4]):
        for name, off, layers in found:
            assert off < (1e-4 if "a16" in name else 0.06), name
            assert layers == (2 if "mixed" in name else 4), name


def differences_on_gpus(mesh: DeviceMesh, cases: list[tuple[str, str]]) -> list[str]:
    """Logits of the engine, of few tokens and many, and of the model's own forward; and tokens."""
    wrong = []
    for kind, scheme in cases:
        plain = small(kind, **WIDER.get(kind, WIDE))
        model = on_gpu(quantize_(plain, scheme, [tokens_of(2, 30)], progress=False))
        tokens = tokens_of(3, 20).cuda()
        whole = copy.deepcopy(model)
        want, new = decoded_logits(whole, tokens, 14), Generator(whole)(PROMPTS, 20)
        many = [prompt * 7 for prompt in PROMPTS] * 40  # more than fits an inbox, and than a call has rows
        new_of_many = Generator(whole)(many, 5)
        with torch.no_grad():
            forward = whole(tokens).logits
        generator = Generator(model, mesh=mesh)
        got = decoded_logits(model, tokens, 14)
        if not torch.equal(got, want):
            wrong.append(f"{kind}, {scheme}: logits {float((got - want).abs().max())}")
        if generator(PROMPTS, 20) != new:
            wrong.append(f"{kind}, {scheme}: tokens")
        if generator(many, 5) != new_of_many:
            wrong.append(f"{kind}, {scheme}: tokens of many")
        with torch.no_grad():
            own = model(tokens).logits
        if not torch.equal(own, forward):
            wrong.append(f"{kind}, {scheme}: its own forward {float((own - forward).abs().max())}")
    return wrong


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_gpus_give_the_bits_of_one(ranks: int, tmp_path: Path) -> None:
    """More of them than heads of keys and values, too; and a vocabulary that no number of them divides."""
    needs_gpus(ranks)
    eight_bits = ("w8a8-dynamic", "w8a8-static", "w8a8-static-tensor", "fp8-dynamic", "fp8-static", "llm-int8")
    cases = [("llama", scheme) for scheme in (*eight_bits, "w4a8-g128", "w3a8")]
    cases += [(kind, scheme) for kind in ("gpt2", "opt", "qwen3") for scheme in ("w8a8-dynamic", "fp8-static")]
    cases += [("qwen3", "w4a8"), ("gpt2", "w4a8-g32"), ("opt", "w8a8-static")]
    if ranks == 8:
        cases = [case for case in cases if case[0] in ("llama", "qwen3")]  # of eight heads
    assert on_ranks(ranks, tmp_path, differences_on_gpus, cases, device="cuda") == [[]] * ranks


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_fast_sums_on_gpus(ranks: int, tmp_path: Path) -> None:
    needs_gpus(ranks)
    cases = [("llama", scheme) for scheme in ("w8a8-dynamic", "w8a8-static", "fp8-dynamic", "w4a16-g32-zp", "w4a8-g32")]
    cases += [("gpt_neox", "w8a8-dynamic"), ("mixed", "w4a16-g64"), ("mixed", "w8a8-dynamic")]
    if ranks == 4:  # of six heads
        cases = [case for case in cases if case[0] != "mixed"]
    for found in on_ranks(ranks, tmp_path, differences_of_fast_sums, cases, device="cuda"):
        for name, off, layers in found:
            assert off < (5e-3 if "a16" in name else 0.06), name
            assert layers > 0, name


def left_alone_on_a_gpu(rank: int, folder: str) -> None:
    """Without a word to the others: rank 0 says what it found and ends at once, its device being unusable."""
    torch.cuda.set_device(rank)
    limit = timedelta(seconds=20)  # processes start within it too, on a busy machine
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=limit)
    generator = Generator(on_gpu(quantised_as("w8a8-dynamic")), mesh=init_device_mesh("cuda", (2,)))
    generator(PROMPTS, 8)
    if rank == 0:
        start = time.monotonic()
        try:
            generator(PROMPTS, 8)
        except RuntimeError as error:
            Path(folder, "found").write_text(f"{time.monotonic() - start} {error}")
    os._exit(0)


@pytest.mark.gpu
def test_a_rank_that_ends_on_gpus(tmp_path: Path) -> None:
    needs_gpus(2)
    mp.start_processes(left_alone_on_a_gpu, (str(tmp_path),), 2, start_method="spawn")
    seconds, _, said = (tmp_path / "found").read_text().partition(" ")
    assert re.match("rank 0 of 2: an exchange with other ranks failed: one has ended, or kept the others waiting", said)
    assert float(seconds) < 60
