"""Models over several ranks: the bits of one, whatever their number; plans; and what is refused."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import octofuse
from helpers import PROMPTS
from octofuse.generate import Generator
from octofuse.models import quantize_
from octofuse.models.architecture import Heads
from octofuse.nn import columns_of, cuts_columns, parted, quantised_layer, rows_of
from octofuse.nn.parted import Parted
from octofuse.parallel import FastSums, Group, shard_
from octofuse.parallel.plan import HeadShare, part, split
from octofuse.quant import scheme_named
from ranks import DeviceMesh, on_ranks
from test_engine_families import decoded_logits, made, tokens_of
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
    "gpt2, three heads": ("gpt2", {"n_head": 3, "n_embd": 48}),
    "llama, three pairs": (
        "llama",
        {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8},
    ),
    "granite": ("granite", {"residual_multiplier": 0.5}),
}
SCHEMES = ("w8a8-dynamic", "w8a8-static", "w8a8-static-tensor", "fp8-dynamic", "fp8-static", "fp8-delayed", "llm-int8",
           "w8a16", "w4a16-g32-zp", "w3a16", "bcq-q2-g32", "sparse12-w7", "nf4", "w8a16-fp8", "w4a8-g32",
           "w3a8")  # fmt: skip


def model_of(family: str, scheme: str | None) -> Any:
    model = made(*FAMILIES[family])
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
CASES += [
    ("gpt2", "w8a8-static"),
    ("gpt2", "fp8-static"),
    ("opt", "fp8-static"),
    ("gpt_neox", "fp8-static"),
    ("phi3", "w4a16-g32-zp"),
    ("gpt_neox", "bcq-q2-g32"),
    ("qwen3", "fp8-dynamic"),
    ("gpt2", "w4a8-g32"),
    ("qwen3", "w4a8"),
]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_number_of_ranks_gives_the_same_bits(ranks: int, tmp_path: Path) -> None:
    cases = CASES if ranks == 2 else [*CASES[::3], ("llama", "w4a8-g32")]
    if ranks == 4:
        cases = [case for case in cases if "three" not in case[0]]
    if ranks == 8:
        cases = [case for case in CASES[::2] if FAMILIES[case[0]][1] is GQA]  # of eight heads
    assert on_ranks(ranks, tmp_path, differences, cases) == [[]] * ranks


WIDE = {"hidden_size": 256, "intermediate_size": 528, "num_attention_heads": 4, "head_dim": 64, "num_key_value_heads": 2,
        "vocab_size": 1001}  # fmt: skip
WIDER: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 256, "vocab_size": 1001},
    "opt": WIDE | {"ffn_dim": 528, "word_embed_proj_dim": 256, "num_key_value_heads": 4},
}


def needs_gpus(count: int) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")


def differences_of_many(mesh: DeviceMesh, cases: list[tuple[str, str]]) -> list[str]:
    """Prompts whose parts are quantised before they travel; of three pairs of heads ranks have unlike parts."""
    wrong = []
    for kind, scheme in cases:
        family, more = FAMILIES[kind]
        uneven = "three" in kind
        plain = small(family, **(more if uneven else WIDER.get(kind, WIDE)))
        model = quantize_(plain, scheme, [tokens_of(2, 30)], progress=False)
        many = [prompt * 7 for prompt in PROMPTS] * 6
        # Between what the ranks have: they decide alike none the less.
        parted.MANY = len(many) * 64 * 24 if uneven else 1 << 16
        want = Generator(copy.deepcopy(model))(many, 3)
        generator = Generator(model, mesh=mesh)
        with patch.object(Parted, "_quantised_before", autospec=True, side_effect=Parted._quantised_before) as seen:
            got = generator(many, 3)
        if got != want:
            wrong.append(f"{kind}, {scheme}: tokens")
        if not seen.called:
            wrong.append(f"{kind}, {scheme}: nothing was quantised before")
    return wrong


def test_many_tokens_travel_in_eight_bits(tmp_path: Path) -> None:
    cases = [("llama", scheme) for scheme in ("w8a8-dynamic", "w8a8-static", "fp8-dynamic", "w4a8-g32")]
    cases += [("opt", "w8a8-dynamic"), ("opt", "fp8-static"), ("llama, three pairs", "w8a8-dynamic")]
    assert on_ranks(2, tmp_path, differences_of_many, cases) == [[]] * 2


def test_plans() -> None:
    assert split(96, 4) == (24,) * 4
    assert split(97, 4) == (32, 32, 32, 1)
    assert split(50257, 2) == (25136, 25121)
    assert split(5, 4) == (2, 1, 1, 1)
    assert split(300, 2, 128) == (256, 44)
    assert [part((3, 4, 5), rank) for rank in range(3)] == [range(3), range(3, 7), range(7, 12)]
    with pytest.raises(ValueError, match="mesh: expected at most 2 ranks for 200 outputs in blocks of 128, got 3"):
        split(200, 3, 128)
    shares = [HeadShare(Heads(6, 3, 8, 1.0), rank, 2) for rank in range(2)]
    assert [(share.heads.queries, share.heads.pairs) for share in shares] == [(4, 2), (2, 1)]
    assert [share.rows(1, False) for share in shares] == [
        [[range(32), range(48, 64), range(72, 88)]],
        [[range(32, 48), range(64, 72), range(88, 96)]],
    ]
    shares = [HeadShare(Heads(8, 2, 8, 1.0), rank, 4) for rank in range(4)]
    assert [share.pairs for share in shares] == [range(8), range(8), range(8, 16), range(8, 16)]
    assert [share.heads.queries for share in shares] == [2] * 4
    with pytest.raises(
        ValueError, match="mesh: expected at most 2 ranks for as many heads of keys and values, or a mul"
    ):
        HeadShare(Heads(6, 2, 8, 1.0), 0, 4)


@pytest.mark.parametrize("runs", [[range(16)], [range(16, 40)], [range(3, 21), range(30, 37)]])
@pytest.mark.parametrize("scheme", [*SCHEMES, "fp8-block128"])
def test_rows_are_those_of_the_whole(scheme: str, runs: list[range]) -> None:
    if scheme == "fp8-block128":
        runs = [range(128, 300)] if len(runs) == 1 else [range(128), range(256, 300)]
    plain = nn.Linear(128, 300 if scheme == "fp8-block128" else 40)
    whole: Any = quantised_layer(plain, scheme_named(scheme), amax=torch.tensor(3.0))
    x = torch.randn(3, 128)
    want = torch.cat([whole(x)[:, run.start : run.stop] for run in runs], -1)
    if scheme == "fp8-delayed":
        whole.amax_history.zero_()
    assert torch.equal(rows_of(whole, runs)(x), want)


@pytest.mark.parametrize("runs", [[range(64), range(64, 128)], [range(96), range(96, 128)]])
@pytest.mark.parametrize("scheme", [*SCHEMES, "fp8-block128"])
def test_columns_add_up_to_the_whole(scheme: str, runs: list[range]) -> None:
    if scheme in ("nf4", "fp8-block128"):
        runs = [range(128), range(128, 200)]  # whole groups of 64, and blocks
    width = runs[-1].stop
    plain = nn.Linear(width, 40)
    whole: Any = quantised_layer(plain, scheme_named(scheme), amax=torch.tensor(3.0))
    assert cuts_columns(whole, runs)
    x = torch.randn(3, width)
    parts = [columns_of(whole, run, bias=run.start == 0) for run in runs]
    assert [part.bias is None for part in parts] == [run.start > 0 for run in runs]
    got = sum(part(x[:, run.start : run.stop].contiguous()) for part, run in zip(parts, runs, strict=True))
    # Tokens that are quantised get a scale for each part.
    limit = 1e-5 if "a16" in scheme or "static" in scheme or scheme[0] not in "wfl" else 0.05
    assert (got - whole(x)).abs().max() <= limit * whole(x).abs().max()


def test_columns_that_cannot_be_cut() -> None:
    packed: Any = quantised_layer(nn.Linear(128, 40), scheme_named("w4a16-g32"))
    assert not cuts_columns(packed, [range(48), range(48, 128)])
    packed.order = torch.arange(128, dtype=torch.int32)
    assert not cuts_columns(packed, [range(64), range(64, 128)])
    with pytest.raises(TypeError, match="layer: expected a linear in floating point or of this library, got ReLU"):
        columns_of(nn.ReLU(), range(2), bias=True)


# ---- what is refused ----


ODD_BLOCKS = {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 32,
              "intermediate_size": 256}  # fmt: skip


def quantised_as(scheme: str, seed: int = 0) -> Any:
    model = small("llama")
    with torch.no_grad():
        model.model.norm.weight[0] += seed
    return quantize_(model, scheme, progress=False)


def refusals(mesh: DeviceMesh) -> list[str]:
    """The message of each mistake."""
    rank = mesh.get_rank()

    def message(call: Callable[[], Any]) -> str:
        with pytest.raises((TypeError, ValueError, RuntimeError)) as found:
            call()
        return str(found.value)

    model = model_of("llama", "w8a8-dynamic")
    found = [message(lambda: shard_(model, "two"))]
    found.append(message(lambda: shard_(small("llama", num_attention_heads=1, num_key_value_heads=1), mesh)))
    other = small("llama", intermediate_size=48 + 16 * rank)
    found.append(message(lambda: shard_(other, mesh)))
    assert isinstance(other.model.layers[0].mlp.down_proj, nn.Linear), "nothing was changed"
    for wrong in (quantised_as("nf4" if rank else "fp4"), quantised_as("nf4", seed=rank)):
        found.append(message(lambda wrong=wrong: shard_(wrong, mesh)))
    blocks = quantize_(small("llama", **ODD_BLOCKS), "fp8-block128", progress=False)
    found.append(message(lambda: shard_(blocks, mesh)))
    found.append(message(lambda: shard_(quantised_as("w8a16"), FastSums(mesh) if rank else mesh)))
    found.append(message(lambda: Generator(model, cache="int4", mesh=mesh)))
    shard_(model, mesh)
    found.append(message(lambda: model.save_pretrained("nowhere")))
    found.append(message(lambda: quantize_(model, "w8a16", progress=False)))
    found.append(message(lambda: shard_(model, mesh)))
    found.append(message(lambda: Group(mesh).gather(torch.ones(2, 3), (4, 4))))
    return found


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"mesh: expected torch\.distributed to be initialised"):
        Generator(model_of("llama", "w8a8-dynamic"), mesh="x")
    patterns = (
        "mesh: expected a DeviceMesh or a process group, got str",
        "mesh: expected at most 1 ranks for as many heads of keys and values, or a multiple of 1 that divides 1 heads",
        "mesh: expected ranks that are alike, got the model LlamaForCausalLM .* on rank 0 and LlamaForCausalLM .* on rank ",
        "mesh: expected ranks that are alike, got the model",
        "mesh: expected ranks that are alike, got the model",
        "rows: expected whole blocks of 128 of a weight with a scale for each, got 0 to 96",
        "mesh: expected ranks that are alike, got fast sums False on rank 0 and True on rank 1",
        "cache: expected None, 'int8', 'fp8' or 'fp8-static', got 'int4'",
        "model: expected a whole model, got one rank's part; octofuse.save_pretrained, called on all ranks, writes it",
        "model: expected a floating-point model",
        r"model: expected a whole model, got a part of one \(rank . of 2\)",
        "x: expected 4 columns on rank . of 2, got 3",
    )
    for found in on_ranks(2, tmp_path, refusals):
        assert len(found) == len(patterns)
        for text, pattern in zip(found, patterns, strict=True):
            assert re.match(pattern, text), text


def written(mesh: DeviceMesh, cases: list[tuple[str, str]], folder: str) -> list[str]:
    """What is wrong of models that all ranks have saved together, and of these models afterwards."""
    wrong = []
    for number, (family, scheme) in enumerate(cases):
        model = model_of(family, scheme)
        tokens = tokens_of(2, 12)
        want = decoded_logits(copy.deepcopy(model), tokens, 6)
        shard_(model, mesh)
        path = f"{folder}/{number}"
        octofuse.save_pretrained(model, path)
        if not torch.equal(decoded_logits(octofuse.from_pretrained(path), tokens, 6), want):
            wrong.append(f"{family}, {scheme}: read again")
        if not torch.equal(decoded_logits(model, tokens, 6), want):
            wrong.append(f"{family}, {scheme}: afterwards")
        try:
            octofuse.save_pretrained(model, path)
            wrong.append("wrote to a folder that is not empty")
        except (FileExistsError, RuntimeError) as error:
            said = (
                "folder: expected",
                "rank 1 of 2: rank 0 could not save the model: FileExistsError: folder: expected",
            )
            wrong += [] if str(error).startswith(said[mesh.get_rank()]) else [str(error)]
    fast = shard_(model_of("llama", "w8a8-dynamic"), FastSums(mesh))
    with pytest.raises(ValueError, match="model: expected exact sums, got one sharded with FastSums"):
        octofuse.save_pretrained(fast, f"{folder}/fast")
    return wrong


def test_sharded_models_are_saved(tmp_path: Path) -> None:
    cases = [("llama", scheme) for scheme in SCHEMES if scheme != "fp8-delayed"]
    cases += [
        ("gpt2", "w8a8-dynamic"),
        ("llama, tied", "w4a16-g32-zp"),
        ("phi3", "w4a16-g32-zp"),
        ("gpt_neox", "w8a8-static"),
    ]
    cases += [("llama, three pairs", "w3a16"), ("gpt2, three heads", "w8a8-dynamic")]
    assert on_ranks(2, tmp_path, written, cases, str(tmp_path)) == [[], []]


def written_by_pairs(mesh: DeviceMesh, folder: str) -> bool:
    """Whether the second pair of ranks, without the first of all processes, writes its model as well."""
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pairs", "own"))
    model, tokens = model_of("llama", "w8a8-dynamic"), tokens_of(2, 12)
    want = decoded_logits(copy.deepcopy(model), tokens, 6)
    shard_(model, pairs["own"])
    path = f"{folder}/of pair {mesh.get_rank() // 2}"
    octofuse.save_pretrained(model, path)
    return torch.equal(decoded_logits(octofuse.from_pretrained(path), tokens, 6), want)


def test_every_group_saves_its_model(tmp_path: Path) -> None:
    assert on_ranks(4, tmp_path, written_by_pairs, str(tmp_path)) == [True] * 4


def left_alone(mesh: DeviceMesh) -> str:
    generator = Generator(model_of("llama", "w8a8-dynamic"), mesh=mesh)
    if mesh.get_rank() == 1:
        return "gone"  # which ends its process
    time.sleep(1)
    with pytest.raises(RuntimeError) as found:
        generator(PROMPTS, 8)
    return str(found.value)


def test_a_rank_that_ends_does_not_leave_the_others_waiting(tmp_path: Path) -> None:
    start = time.perf_counter()
    first, other = on_ranks(2, tmp_path, left_alone)
    assert other == "gone"
    assert re.match("rank 0 of 2: could not gather .* bytes of every rank: one has ended or is out of reach", first)
    assert time.perf_counter() - start < 120


def test_the_command_on_two_ranks() -> None:
    arguments = ["-m", "octofuse", "generate", "embedded", "def main():", "--new-tokens", "24", "--device", "cpu"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    alone = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True, env=environment)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    both = subprocess.run([*run, *arguments], capture_output=True, text=True, check=True, env=environment)
    assert both.stdout == alone.stdout
