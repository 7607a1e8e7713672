"""distill_blocks_: each block towards the float model's, of any family, and models that stay as they were."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import octofuse
from helpers import ids, small_gpt2
from octofuse.models import blockwise, distill_, distill_blocks_, quantize_, weight_bytes
from octofuse.models.blockwise import check_blocks
from octofuse.models.distill import Training
from octofuse.nn import PackedLinear
from test_models_distill import other_gpt2
from test_models_families import ids as of_families
from test_models_families import small


def packed(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: module.packed.clone() for name, module in model.named_modules() if isinstance(module, PackedLinear)}


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3", "gemma3_text", "opt", "bloom", "falcon"])
def test_divergence_falls_in_every_family(kind: str, codes: bool) -> None:
    teacher = small(kind)
    model = quantize_(copy.deepcopy(teacher), "w2a16-g32", progress=False)
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    size, old = weight_bytes(model), packed(model)
    before, after = distill_blocks_(model, teacher, [of_families()], steps=40, lr=4e-3, codes=codes, progress=False)
    assert 0 < after < before
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    assert weight_bytes(model) == size
    assert codes == any(not torch.equal(codes_now, old[name]) for name, codes_now in packed(model).items())


def test_what_was_learnt_is_saved(tmp_path) -> None:
    teacher = small_gpt2().eval()
    model = quantize_(copy.deepcopy(teacher), "bcq-q2-g32", progress=False)
    before, after = distill_blocks_(model, teacher, [ids(4, 32), ids(3, 20)], steps=60, progress=False)
    assert 0 < after < 0.8 * before
    octofuse.save_pretrained(model, tmp_path / "q")
    assert torch.equal(octofuse.from_pretrained(tmp_path / "q")(ids()).logits, model(ids()).logits)


def test_each_block_reads_what_the_quantised_ones_before_it_make(monkeypatch) -> None:
    """And learns what the float ones make of theirs, from batches that do not judge it."""
    teacher = small_gpt2().eval()
    model = quantize_(copy.deepcopy(teacher), "w2a16-g32", progress=False)
    batches = [ids(4, 9 + i) for i in range(9)]
    samples, judged = [], []
    descend, mean_loss = blockwise.descend, blockwise._mean_loss
    monkeypatch.setattr(
        blockwise, "descend", lambda built, some, *a, **k: samples.append(some) or descend(built, some, *a, **k)
    )
    monkeypatch.setattr(blockwise, "_mean_loss", lambda block, some: judged.append(some) or mean_loss(block, some))
    distill_blocks_(model, teacher, batches, steps=5, lr=1e-2, progress=False)
    assert [[sample.x.shape[1] for sample in some] for some in samples] == [[10, 11, 12, 13, 14, 15, 16, 17]] * 2
    assert [[sample.x.shape[1] for sample in some] for some in judged] == [[9]] * 4
    wanted, made = states_behind(teacher, batches[1]), states_behind(model, batches[1])
    for block in range(2):
        assert torch.allclose(samples[block][0].x, made[block], atol=1e-6)  # as it is after the first one was trained
        assert torch.allclose(samples[block][0].wanted, wanted[block + 1], atol=1e-6)
    assert not torch.allclose(made[1], wanted[1], atol=1e-4)


def states_behind(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    """In front of the first block, and behind each."""
    found: list[torch.Tensor] = []
    first = model.transformer.h[0].register_forward_pre_hook(lambda _, given: found.append(given[0]))
    others = [block.register_forward_hook(lambda _, __, y: found.append(states_of(y))) for block in model.transformer.h]
    model(batch)
    for handle in (first, *others):
        handle.remove()
    return found


def states_of(made: object) -> torch.Tensor:
    return made if isinstance(made, torch.Tensor) else made[0]


def test_a_block_that_is_not_better_stays(monkeypatch) -> None:
    """The other one does not."""
    teacher = small_gpt2().eval()
    model = quantize_(copy.deepcopy(teacher), "w2a16-g32", progress=False)
    descend = blockwise.descend
    rates = iter((30.0, 4e-3))  # with the first one scales leap
    monkeypatch.setattr(blockwise, "descend", lambda *given, lr, **more: descend(*given, lr=next(rates), **more))
    old = copy.deepcopy(model)
    before, after = distill_blocks_(model, teacher, [ids(4, 32)], steps=30, progress=False)
    assert after < before
    for block, stays in enumerate((True, False)):
        one, other = (m.transformer.h[block].mlp.c_fc.scale for m in (model, old))
        assert torch.equal(one, other) == stays


def test_a_model_that_is_not_better_stays(monkeypatch) -> None:
    """Though each of its blocks is."""
    teacher = small_gpt2().eval()
    model = quantize_(copy.deepcopy(teacher), "w2a16-g32", progress=False)
    want, old = model(ids()).logits, packed(model)
    said = iter((1.0, 1.5))
    monkeypatch.setattr(Training, "divergence", lambda training: next(said))
    assert distill_blocks_(model, teacher, [ids(4, 32)], steps=20, codes=True, progress=False) == (1.0, 1.0)
    assert torch.equal(model(ids()).logits, want)
    assert all(torch.equal(now, old[name]) for name, now in packed(model).items())


def test_masks_of_each_model_are_its_own() -> None:
    """Eager attention needs one where another kind has none."""
    found = []
    for kind in ("eager", "sdpa"):
        teacher = small("llama", attn_implementation="sdpa")
        model = quantize_(small("llama", attn_implementation=kind), "w2a16-g32", progress=False)
        found.append(distill_blocks_(model, teacher, [of_families()], steps=20, progress=False))
    assert found[0] == pytest.approx(found[1], rel=1e-3)


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_an_interrupt_leaves_the_model_as_it_was(at: int, monkeypatch) -> None:
    teacher = small_gpt2().eval()
    model = quantize_(copy.deepcopy(teacher), "w2a16-g32", progress=False)
    want = model(ids()).logits
    calls = []
    loss_of = blockwise._mean_loss

    def interrupted(*given):
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt
        return loss_of(*given)

    monkeypatch.setattr(blockwise, "_mean_loss", interrupted)
    with pytest.raises(KeyboardInterrupt):
        distill_blocks_(model, teacher, [ids(4, 32)], steps=20, progress=False)
    assert len(calls) == at
    assert torch.equal(model(ids()).logits, want)


def test_layers_outside_blocks_stay() -> None:
    teacher = small("llama", tie_word_embeddings=False)
    model = quantize_(copy.deepcopy(teacher), "w2a16-g32", exceptions={"lm_head": "w4a16-g32"}, progress=False)
    head = model.lm_head.packed.clone()
    before, after = distill_blocks_(model, teacher, [of_families()], steps=20, progress=False)
    assert after < before
    assert torch.equal(model.lm_head.packed, head)


def test_modes_come_back() -> None:
    """Dropout is off meanwhile, and on again where it was."""
    teacher = small_gpt2().train()
    model = quantize_(small_gpt2().train(), "w2a16-g32", progress=False)
    model.transformer.h[1].eval()
    modes = [module.training for module in model.modules()]
    rest = copy.deepcopy(model).eval()
    found = distill_blocks_(model, teacher, [ids(4, 32)], steps=20, progress=False)
    assert [module.training for module in model.modules()] == modes
    assert teacher.training
    assert found == distill_blocks_(rest, teacher.eval(), [ids(4, 32)], steps=20, progress=False)


class Twice(nn.Module):
    """A language model whose one block runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(32, 32), nn.Tanh())])

    def forward(self, tokens: torch.Tensor, use_cache: bool = True) -> object:
        x = self.embedding(tokens)
        for _ in range(2):
            x = self.blocks[0](x)
        return SimpleNamespace(logits=self.head(x))


def test_blocks_that_run_otherwise_are_refused() -> None:
    """Before anything is trained; distill_ takes them."""
    teacher = Twice().eval()
    model = quantize_(copy.deepcopy(teacher), "w2a16-g32", progress=False)
    message = "model: expected blocks that run once each, .* got Twice with a Sequential that does not"
    with pytest.raises(ValueError, match=message):
        check_blocks(model, ids() % 64)
    with pytest.raises(ValueError, match=message):
        distill_blocks_(model, teacher, [ids() % 64], steps=2, progress=False)
    before, after = distill_(model, teacher, [ids() % 64], steps=30, progress=False)
    assert after < before


class Named(Twice):
    """One that calls its blocks by the argument's name, and gets tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([NamedBlock(), NamedBlock()])

    def forward(self, tokens: torch.Tensor, use_cache: bool = True) -> object:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(hidden_states=x, scale=0.5)[0]
        return SimpleNamespace(logits=self.head(x))


class NamedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, hidden_states: torch.Tensor, scale: float) -> tuple[torch.Tensor, None]:
        return hidden_states + scale * self.linear(hidden_states), None


def test_hidden_states_may_be_named() -> None:
    teacher = Named().eval()
    model = quantize_(copy.deepcopy(teacher), "w2a16-g32", exceptions={"head": None}, progress=False)
    before, after = distill_blocks_(model, teacher, [ids() % 64], steps=30, progress=False)
    assert after < before


def test_blocks_are_counted() -> None:
    model = quantize_(small_gpt2().train(), "w2a16-g32", progress=False)
    assert check_blocks(model, ids()) == 2
    assert model.training


def test_refusals() -> None:
    plain = quantize_(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), "w4a16-g32", progress=False)
    with pytest.raises(ValueError, match="model: expected packed layers in a list of blocks, got none in Sequential"):
        check_blocks(plain, ids())
    teacher = small_gpt2().eval()
    model = quantize_(copy.deepcopy(teacher), "w4a16-g32", progress=False)
    with pytest.raises(ValueError, match="batches: expected at least one, got none"):
        distill_blocks_(model, teacher, [], progress=False)
    with pytest.raises(ValueError, match="steps: expected at least 1, got 0"):
        distill_blocks_(model, teacher, [ids()], steps=0, progress=False)
    for layers, message in ((1, "h.1.attn.c_attn with a weight of .* got none"), (3, "as many blocks .* 2, got 3")):
        with pytest.raises(ValueError, match=f"teacher: expected .*{message}"):
            distill_blocks_(model, other_gpt2(n_layer=layers), [ids()], steps=2, progress=False)
