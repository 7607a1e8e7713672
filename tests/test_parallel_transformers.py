"""transformers' own forward, `generate` and `from_pretrained` over several ranks: the bits of one."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import octofuse
from checkpoints import Gptq, write_folder
from octofuse.models import QuantizedStaticCache, quantize_
from octofuse.nn import GatheredLinear
from octofuse.parallel import shard_
from ranks import DeviceMesh, on_ranks
from test_engine_families import tokens_of
from test_models_families import small
from test_parallel import FAMILIES, model_of, needs_gpus

base = pytest.importorskip("transformers.quantizers.base")
needs_plans = pytest.mark.skipif(
    not hasattr(base.HfQuantizer, "update_parallel_plan"), reason="needs transformers 5.23 or later"
)
TOKENS = tokens_of(3, 20)


def outputs(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and what its own generate adds to a prompt."""
    tokens = TOKENS.to(model.device)
    with torch.no_grad():
        return model(tokens).logits, model.generate(tokens[:1, :5], max_new_tokens=6, do_sample=False)


def own_forward(mesh: DeviceMesh, cases: list[tuple[str, str, str]]) -> list[str]:
    """Cases that differ from one rank's."""
    wrong = []
    for family, scheme, attention in cases:
        model = model_of(family, scheme)
        model.set_attn_implementation(attention)
        want = outputs(copy.deepcopy(model))
        got = outputs(shard_(model, mesh))
        # Torch's activation functions may differ by an ulp for another number of columns, which int8 rounds away.
        exact = (
            torch.equal(got[0], want[0]) if scheme.startswith("w8a8") else torch.allclose(got[0], want[0], atol=1e-5)
        )
        if not exact or not torch.equal(got[1], want[1]):
            wrong.append(f"{family}, {scheme}, {attention}")
    return wrong


def test_its_forward_has_the_same_bits(tmp_path: Path) -> None:
    cases = [(family, "w8a8-dynamic", "eager" if family == "gemma2" else "sdpa") for family in FAMILIES]
    cases += [(family, "w4a16-g32-zp", "eager") for family in FAMILIES]
    assert on_ranks(2, tmp_path / "2", own_forward, cases) == [[]] * 2
    fewer = [case for case in cases if case[0] in ("llama", "opt", "phi3")]  # more ranks than heads of keys
    assert on_ranks(4, tmp_path / "4", own_forward, fewer) == [[]] * 4


def later(mesh: DeviceMesh) -> list[str]:
    """What is wrong of a sharded model whose way to attend changes, and of one that is to be trained."""
    model = model_of("llama", "w8a8-dynamic")
    whole = copy.deepcopy(model)
    shard_(model, mesh)
    wrong = []
    for attention in ("eager", "sdpa", "octofuse"):
        for one in (model, whole):
            one.set_attn_implementation(attention)
        caches = [{}, {}]
        if attention == "octofuse":
            caches = [{"past_key_values": QuantizedStaticCache(model.config, 32)} for _ in range(2)]
        got, want = (one(TOKENS, **cache).logits for one, cache in zip((model, whole), caches, strict=True))
        if not torch.equal(got, want):
            wrong.append(attention)
    if any(parameter.requires_grad for parameter in model.parameters()):
        wrong.append("gradients")
    embedded = model.get_input_embeddings()(TOKENS).requires_grad_()
    with pytest.raises(ValueError, match="x: expected a tensor that needs no gradient"):
        model(inputs_embeds=embedded)
    return wrong


def test_what_is_done_to_a_sharded_model(tmp_path: Path) -> None:
    assert on_ranks(2, tmp_path, later) == [[]] * 2


def loaded(mesh: DeviceMesh, folder: str) -> list[str]:
    """What is wrong of models that `from_pretrained` has split."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    octofuse.enable()
    ranks = {"distributed_config": DistributedConfig(tp_size=mesh.size())}
    wrong = []
    for path in sorted(Path(folder).iterdir()):
        scheme = path.name.partition(" ")[2]
        more = {"quantization_config": octofuse.OctofuseConfig(scheme)} if scheme else {}
        want = outputs(AutoModelForCausalLM.from_pretrained(path, **more).to(mesh.device_type))
        model = AutoModelForCausalLM.from_pretrained(path, **more, **ranks)
        if model.device.type != mesh.device_type:
            wrong.append(f"{path.name}: on {model.device}")
        if not any(isinstance(module, GatheredLinear) for module in model.modules()):
            wrong.append(f"{path.name}: whole")
        if not torch.allclose(outputs(model)[0], want[0], atol=1e-5 if "w4" in scheme else 0, rtol=0):
            wrong.append(path.name)
        if not torch.equal(outputs(model)[1], want[1]):
            wrong.append(f"{path.name}: tokens")
    if mesh.device_type == "cuda":
        return wrong
    octofuse.save_pretrained(model, f"{folder}-saved")  # by all ranks together
    again = AutoModelForCausalLM.from_pretrained(f"{folder}-saved")
    if not torch.equal(outputs(again)[0], outputs(model)[0]):
        wrong.append(f"{path.name}: saved")
    heads = {"quantization_config": octofuse.OctofuseConfig("w8a8-dynamic", {"lm_head": "w8a8-dynamic"})}
    path = Path(folder) / "llama w8a8-dynamic"
    model, whole = (AutoModelForCausalLM.from_pretrained(path, **heads, **own) for own in (ranks, {}))
    if not isinstance(model.lm_head, GatheredLinear) or not torch.equal(model(TOKENS).logits, whole(TOKENS).logits):
        wrong.append("a head that is quantised on load")
    return wrong


@needs_plans
def test_transformers_loads_parts(tmp_path: Path) -> None:
    """Prequantised and on load, also of families for which transformers has no plan."""
    write_models(tmp_path / "models")
    assert on_ranks(2, tmp_path / "ranks", loaded, str(tmp_path / "models")) == [[]] * 2


@pytest.mark.gpu
@needs_plans
@pytest.mark.parametrize("ranks", [2, 4])
def test_transformers_loads_parts_on_gpus(ranks: int, tmp_path: Path) -> None:
    needs_gpus(ranks)
    write_models(tmp_path / "models")
    assert on_ranks(ranks, tmp_path / "ranks", loaded, str(tmp_path / "models"), device="cuda") == [[]] * ranks


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_own_door_on_gpus(ranks: int, tmp_path: Path) -> None:
    needs_gpus(ranks)
    for scheme in ("w8a8-dynamic", "w4a16-g32", "bcq-q2-g32"):
        octofuse.save_pretrained(model_of("llama", scheme), tmp_path / "models" / scheme)
    assert on_ranks(ranks, tmp_path / "ranks", own_door, str(tmp_path / "models"), device="cuda") == [[]] * ranks


def write_models(folder: Path) -> None:
    for family in ("llama", "opt", "gpt2"):
        model = model_of(family, None)
        for scheme in ("w8a8-dynamic", "w4a16-g32"):
            model.save_pretrained(folder / f"{family} {scheme}")
        octofuse.save_pretrained(quantize_(model, "w8a8-dynamic", progress=False), folder / family)


# Keys and values of 128 outputs, which are one block: all ranks have its scale.
ONE_BLOCK = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64,
             "num_key_value_heads": 2}  # fmt: skip


@needs_plans
def test_what_more_than_a_row_decides(tmp_path: Path) -> None:
    small("llama", **ONE_BLOCK).save_pretrained(tmp_path / "models" / "llama fp8-block128")
    model_of("llama", None).save_pretrained(tmp_path / "models" / "llama bcq-q2-g32")
    model_of("llama", None).save_pretrained(tmp_path / "models" / "llama w8a8-dynamic")  # which `loaded` goes on with
    assert on_ranks(2, tmp_path / "ranks", loaded, str(tmp_path / "models")) == [[]] * 2


def spoilt(mesh: DeviceMesh, folder: str) -> str:
    """What a rank says of a model that another one, or itself, could not quantise."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    ranks = {"distributed_config": DistributedConfig(tp_size=mesh.size())}
    with pytest.raises((ValueError, RuntimeError)) as found:
        AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=octofuse.OctofuseConfig("w8a8-dynamic"), **ranks
        )
    return str(found.value)


@needs_plans
def test_a_rank_that_cannot_quantise_its_part(tmp_path: Path) -> None:
    model = model_of("llama", None)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[-1, 3] = float("nan")
    model.save_pretrained(tmp_path / "model")
    first, other = on_ranks(2, tmp_path / "ranks", spoilt, str(tmp_path / "model"))
    assert re.match("rank 0 of 2: rank 1 ended with ValueError: model.layers.1.mlp.up_proj: ", first)
    assert re.match(r"model\.layers\.1\.mlp\.up_proj: ", other)


def own_door(mesh: DeviceMesh, folder: str) -> list[str]:
    """Folders of which from_pretrained(mesh=) gives other bits."""
    wrong = []
    for path in sorted(Path(folder).iterdir()):
        whole = octofuse.from_pretrained(path, mesh.device_type)
        want, got = outputs(whole)[0], outputs(octofuse.from_pretrained(path, mesh=mesh))[0]
        if not torch.allclose(got, want, atol=0 if path.name.startswith("w8a8") else 1e-5, rtol=0):
            wrong.append(path.name)
    return wrong


def test_own_door(tmp_path: Path) -> None:
    """Files of several formats, one in floating point among them."""
    folder = tmp_path / "models"
    for scheme in ("w8a8-dynamic", "w4a16-g32", "bcq-q2-g32"):
        octofuse.save_pretrained(model_of("llama", scheme), folder / scheme)
    source = model_of("llama", None)
    source.save_pretrained(folder / "float")
    gptq = Gptq(source, 4, 32, order=True)
    write_folder(source, folder / "gptq", gptq.tensors, gptq.config)
    assert on_ranks(2, tmp_path / "ranks", own_door, str(folder)) == [[]] * 2


def refused(mesh: DeviceMesh, folder: str) -> list[str]:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    def message(call: Callable[[], Any]) -> str:
        with pytest.raises(ValueError, match="distributed_config: expected") as found:
            call()
        return str(found.value)

    octofuse.enable()
    found = [message(lambda: octofuse.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2)))]
    for config in ({"fsdp_size": 2}, {"tp_size": 2, "tp_plan": {"lm_head": "colwise"}}):
        given = DistributedConfig(**config)
        found.append(
            message(lambda given=given: AutoModelForCausalLM.from_pretrained(folder, distributed_config=given))
        )
    return found


@needs_plans
def test_refusals(tmp_path: Path) -> None:
    octofuse.save_pretrained(model_of("llama", "w8a8-dynamic"), tmp_path / "model")
    patterns = (
        "distributed_config: expected mesh in its place",
        "distributed_config: expected tp_size alone for quantised layers, got dp_size=2",
        "distributed_config: expected no tp_plan for quantised layers, got {'lm_head': 'colwise'}",
    )
    for found in on_ranks(2, tmp_path / "ranks", refused, str(tmp_path / "model")):
        for text, pattern in zip(found, patterns, strict=True):
            assert re.match(pattern, text), text
