"""Generation with a static cache: the model's own tokens, whatever stands beside a prompt, and refusals by name."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import octofuse
from helpers import DEVICES, PROMPTS, by_transformers, ids, small_gpt2
from octofuse.engine import Decoder, Sampling
from octofuse.generate import Generator, generate
from octofuse.models import quantize_
from octofuse.ops import decode

SCHEMES = (None, "w8a8-dynamic", "w8a8-static", "w8a8-static-smooth")


def model_of(scheme: str | None, device: str) -> nn.Module:
    model = small_gpt2()
    if scheme is not None:
        quantize_(model, scheme, [ids()], progress=False)
    return model.to(device, torch.float16 if device == "cuda" else torch.float32).requires_grad_(False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_logits_are_those_of_the_model(device: str, scheme: str | None) -> None:
    """Prefill and every step, beside the module that transformers runs; norms are summed in another order there."""
    model = model_of(scheme, device)
    decoder = Decoder(model)
    tokens = ids(3, 12).to(device)
    cache = decoder.new_cache(3, 16)
    logits = [decoder.prefill(tokens[:, :5], torch.tensor([5, 5, 5], device=device), cache)]
    for position in range(5, 12):
        logits.append(decoder.step(tokens[:, position], torch.full((3,), position, device=device), cache))
    want = model(tokens).logits[:, 4:]
    got = torch.stack(logits, 1)
    spread = float(want.float().std())
    assert float((got - want).float().abs().max()) < (0.02 if scheme or device == "cuda" else 1e-4) * spread


@pytest.mark.parametrize("scheme", SCHEMES)
def test_greedy_tokens_are_those_of_the_model(scheme: str | None) -> None:
    model = model_of(scheme, "cpu")
    assert Generator(model)(PROMPTS, 12) == [by_transformers(model, prompt, 12) for prompt in PROMPTS]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheme", SCHEMES[1:])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_prompt_does_not_see_its_neighbours(device: str, scheme: str, temperature: float) -> None:
    generator = Generator(model_of(scheme, device))
    together = generator(PROMPTS, 9, temperature=temperature, seed=5)
    alone = [generator([p], 9, temperature=temperature, seed=5 + i)[0] for i, p in enumerate(PROMPTS)]
    assert together == alone
    assert generator(PROMPTS, 9, temperature=temperature, seed=5) == together, "and runs alike again"


@pytest.mark.parametrize("device", DEVICES)
def test_a_static_block_keeps_int8_from_c_fc_to_c_proj(device: str) -> None:
    """What a fused block gives is bit for bit what its parts give one after the other."""
    model = model_of("w8a8-static", device)
    parts = Decoder(model).blocks[0]
    (fc,), out = parts.up, parts.down
    x = torch.randn(7, fc.weight.shape[1], generator=torch.Generator().manual_seed(3)).to(device, model.dtype)
    norm = parts.feed_forward_norm
    q = octofuse.quantize_per_tensor(octofuse.layer_norm(x, norm.weight, norm.bias, norm.eps), fc.input_scale)
    hidden = octofuse.i8i8_linear(
        q, fc.weight, fc.input_scale, fc.weight_scale, fc.bias, activation="gelu_tanh", out_scale=out.input_scale
    )
    want = octofuse.i8f16_linear(
        hidden, out.weight, out.input_scale, out.weight_scale, out.bias, residual=x, out_dtype=x.dtype
    )
    for rows in (7, 4, 2, 1):
        fused = fc.fused(x[:rows], norm=norm, activation="gelu_tanh", out_scale=out.input_scale)
        assert fused.dtype == torch.int8
        assert torch.equal(fused, hidden[:rows])
        assert torch.equal(out.fused(fused, residual=x[:rows]), want[:rows])


@pytest.mark.parametrize("device", DEVICES)
def test_stop_tokens_and_streaming(device: str) -> None:
    generator = Generator(model_of("w8a8-dynamic", device))
    free = generator(PROMPTS, 20)
    stop = free[0][3]
    want = [row[: row.index(stop) + 1] if stop in row else row for row in free]
    assert generator(PROMPTS, 20, stop_tokens=[stop]) == want
    seen: list[list[int]] = []
    streamed = generator(PROMPTS, 20, stop_tokens=[stop], on_token=lambda n, tokens: seen.append([n, *tokens]))
    assert streamed == want
    assert [row[0] for row in seen] == list(range(max(map(len, want))))
    for i, row in enumerate(want):
        column = [tokens[i + 1] for tokens in seen]
        assert column[: len(row)] == row
        assert set(column[len(row) :]) <= {-1}


def test_sampling_narrows_what_it_draws_from() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0, -1.0]]).expand(4000, -1)
    noise = torch.empty(logits.shape).exponential_(generator=torch.Generator().manual_seed(0))
    assert set(Sampling().choose(logits, None).tolist()) == {1}
    shares = Sampling(1.0).choose(logits, noise).bincount(minlength=5) / 4000
    assert torch.allclose(shares, logits[0].softmax(-1), atol=0.03)
    assert set(Sampling(1.0, top_k=2).choose(logits, noise).tolist()) == {1, 2}
    assert set(Sampling(1.0, top_p=0.85).choose(logits, noise).tolist()) == {1, 2}
    assert set(Sampling(5.0, top_p=1e-6).choose(logits, noise).tolist()) == {1}
    other = Sampling(1.0, top_p=0.5)  # narrows alike: a graph made for it serves these numbers
    assert torch.equal(other.choose(logits, noise, Sampling(0.7, top_p=0.85).numbers()),
                       Sampling(0.7, top_p=0.85).choose(logits, noise))  # fmt: skip
    cold = Sampling(0.1).choose(logits, noise)
    assert float((cold == 1).float().mean()) > 0.99


def test_generate_keeps_a_generator_until_the_model_changes() -> None:
    model = small_gpt2().requires_grad_(False)
    before = generate(model, PROMPTS, 8)
    assert before == octofuse.generate(model, PROMPTS, 8)
    quantize_(model, "w8a8-static-tensor", [ids()], progress=False)
    after = generate(model, PROMPTS, 8)
    assert after == Generator(model)(PROMPTS, 8)
    with torch.no_grad():
        model.transformer.wte.weight.copy_(-model.transformer.wte.weight)
    assert generate(model, PROMPTS, 8) == Generator(model)(PROMPTS, 8)


def test_generate_sees_an_exchanged_weight_and_takes_inference_tensors() -> None:
    model = small_gpt2().requires_grad_(False)
    for seed in range(5):  # a new tensor may lie where the old one lay
        weight = torch.randn(97, 32, generator=torch.Generator().manual_seed(seed)) * 0.3
        model.transformer.wte.weight = model.lm_head.weight = nn.Parameter(weight, requires_grad=False)
        assert generate(model, PROMPTS, 6) == Generator(model)(PROMPTS, 6)
    with torch.inference_mode():
        inferred = small_gpt2()
    assert generate(inferred, PROMPTS, 6) == Generator(small_gpt2())(PROMPTS, 6)


def test_layers_of_different_kinds_follow_each_other() -> None:
    for exceptions in ({"mlp.c_fc": None}, {"mlp.c_proj": "w8a8-dynamic"}, {"attn.c_proj": None, "mlp.c_proj": None}):
        model = quantize_(small_gpt2(), "w8a8-static", [ids()], exceptions=exceptions, progress=False)
        assert Generator(model)(PROMPTS, 12) == [by_transformers(model, prompt, 12) for prompt in PROMPTS]


@pytest.mark.parametrize("device", DEVICES)
def test_an_int8_head_and_long_prompts_in_one_batch(device: str) -> None:
    """The head's logits come from int8 too; and a long prompt's attention does not see how busy the GPU is."""
    model = small_gpt2(n_positions=400).to(device)
    quantize_(model, "w8a8-static", [ids()], exceptions={"lm_head": "w8a8-dynamic"}, progress=False)
    assert model.config.tie_word_embeddings is False
    assert model.lm_head.weight.dtype == torch.int8
    model = model.to(torch.float16 if device == "cuda" else torch.float32).requires_grad_(False)
    room = model.config.n_positions - 20
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(0, 97, (n,), generator=generator).tolist() for n in (room, 3, 129, room - 1)]
    run = Generator(model)
    together = run(prompts, 18)  # more than one burst of steps
    assert together == [run([prompt], 18)[0] for prompt in prompts]
    if device == "cpu":
        assert together[1] == by_transformers(model, prompts[1], 18)


@pytest.mark.gpu
def test_a_head_without_its_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below compute capability 9.0 the head's logits come from cuBLAS: the same for a prompt, whatever stands beside it."""
    monkeypatch.setattr(decode, "takes_logits", lambda *_: False)
    generator = Generator(model_of("w8a8-static", "cuda"))
    assert generator.decoder.streams_head is False
    together = generator(PROMPTS, 12)
    assert together == [generator([prompt], 12)[0] for prompt in PROMPTS]
    monkeypatch.undo()
    assert [row[:3] for row in Generator(model_of("w8a8-static", "cuda"))(PROMPTS, 12)] == [row[:3] for row in together]


def test_wrong_input_is_refused_by_name() -> None:
    model = small_gpt2().requires_grad_(False)
    generator = Generator(model)
    room = model.config.n_positions
    for prompts, count, message in (
        ([[]], 4, r"prompts\[0\]: expected at least one token"),
        ([], 4, "prompts: expected at least one, got none"),
        ([[1], [1, 97]], 4, r"prompts\[1\]: expected tokens from 0 to 96, got 97"),
        ([[1, -1]], 4, r"prompts\[0\]: expected tokens from 0 to 96, got -1"),
        ([[1] * (room - 3)], 4, rf"prompts\[0\]: expected at most {room - 4} tokens, so that 4 more fit"),
        ([[1]], 0, "max_new_tokens: expected an int of at least 1, got 0"),
        ([[1]], room, f"max_new_tokens: expected at most {room - 1}, so that a prompt fits"),
        (torch.zeros(3, dtype=torch.int64), 4, r"prompts: expected token ids \[B, T\]"),
        (torch.zeros(2, 3), 4, r"prompts: expected token ids \[B, T\], got torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            generator(prompts, count)
    assert len(generator([[1] * (room - 4)], 4)[0]) == 4
    for options, message in (
        ({"temperature": -1.0}, "temperature: expected a finite number"),
        ({"top_k": 0}, "top_k: expected at least 1"),
        ({"top_p": 0.0}, "top_p: expected a number above 0"),
        ({"stop_tokens": [97]}, "stop_tokens: expected tokens from 0 to 96, got 97"),
    ):
        with pytest.raises(ValueError, match=message):
            generator([[1]], 4, **options)
    with pytest.raises(ValueError, match="model: expected a model in eval mode"):
        Generator(copy.deepcopy(model).train())
    with pytest.raises(ValueError, match=r"model: expected a causal language model of a family .*, got Linear"):
        Generator(nn.Linear(2, 2))
    odd = copy.deepcopy(model)
    odd.config.scale_attn_by_inverse_layer_idx = True
    with pytest.raises(ValueError, match="model: expected scale_attn_by_inverse_layer_idx=False, got True"):
        Generator(odd)
