"""Every family that the engine runs, beside transformers: random models of two blocks, in floating point and quantised."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import octofuse
from helpers import DEVICES, PROMPTS, by_transformers
from octofuse.engine import Decoder
from octofuse.generate import Generator, generate
from octofuse.models import quantize_
from octofuse.models.blocks import BLOCKS
from octofuse.nn import QUANTISED
from test_models_families import VOCABULARY, small

ROPE = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
LLAMA3 = ROPE | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
KINDS = [kind for kind, block in BLOCKS.items() if block.names is not None]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {kind: (kind, {}) for kind in KINDS} | {
    "llama, one pair": ("llama", {"num_key_value_heads": 1}),
    "llama, two pairs": ("llama", {"num_key_value_heads": 2}),
    "llama, eight a group": ("llama", {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 8}),
    "llama, heads of 80": ("llama", {"head_dim": 80, "num_key_value_heads": 2}),
    "llama, heads of 256": ("llama", {"head_dim": 256, "num_key_value_heads": 2}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn": ("llama", {"rope_parameters": ROPE | {"rope_type": "yarn"}}),
    "mistral, window": ("mistral", {"sliding_window": 7}),
    "qwen2, window in one block": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "gemma2, window": ("gemma2", {"sliding_window": 7, "num_key_value_heads": 2}),
    "phi3, half rotated": ("phi3", {"rope_parameters": HALF}),
    "gpt_neox, one after the other": ("gpt_neox", {"use_parallel_residual": False}),
    "granite, multipliers": (
        "granite",
        {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 3.0},
    ),
}  # fmt: skip
SCHEMES = ("w8a8-dynamic", "w8a8-static-smooth", "w8a16", "w4a16-g32-zp", "bcq-q3-g32", "w8a16-fp8", "w4a8-g32")


def made(kind: str, settings: dict[str, Any]) -> Any:
    model = small(kind, **settings)
    with torch.no_grad():
        for parameter in model.parameters():  # random models are all but linear otherwise
            if parameter.dim() == 2:
                parameter.mul_(4.0)
    return model


def model_of(variant: str) -> Any:
    return made(*VARIANTS[variant])


def on_gpu(model: Any) -> Any:
    """In fp16, with angles as they were: half() would round them as well."""
    moved = copy.deepcopy(model)
    angles = {name: buffer.clone() for name, buffer in moved.named_buffers() if "inv_freq" in name}
    moved = moved.half().cuda()
    for name, buffer in angles.items():
        owner, _, own = name.rpartition(".")
        setattr(moved.get_submodule(owner), own, buffer.cuda())
    return moved


def tokens_of(batch: int, length: int) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def decoded_logits(model: nn.Module, tokens: Tensor, first: int, cache: str | None = None) -> Tensor:
    """A prompt of `first` tokens, the others one by one: what follows each of them, and the prompt."""
    decoder = Decoder(model, cache)
    batch, length = tokens.shape
    room = decoder.new_cache(batch, length)
    logits = [decoder.prefill(tokens[:, :first], torch.full((batch,), first, device=tokens.device), room)]
    for at in range(first, length):
        logits.append(decoder.step(tokens[:, at], torch.full((batch,), at, device=tokens.device), room))
    return torch.stack(logits, 1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_are_those_of_transformers(variant: str) -> None:
    model = model_of(variant)
    tokens = tokens_of(3, 24)
    want = model(tokens).logits[:, 15:]
    assert (decoded_logits(model, tokens, 16) - want).abs().max() < 1e-4
    assert Generator(model)(PROMPTS, 12) == [by_transformers(model, prompt, 12) for prompt in PROMPTS]


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_fp16_on_a_gpu_is_as_exact_as_transformers(variant: str) -> None:
    """Beside fp32: at most twice the error of the worse of transformers' two ways to attend in fp16."""
    model = model_of(variant)
    tokens = tokens_of(3, 24)
    exact = model(tokens).logits[:, 15:]
    half = on_gpu(model)
    errors = []
    for way in ("eager", "sdpa"):
        try:
            half.set_attn_implementation(way)
        except ValueError:  # gemma2 has no sdpa
            continue
        errors.append(float((half(tokens.cuda()).logits[:, 15:].cpu().float() - exact).abs().max()))
    got = decoded_logits(half, tokens.cuda(), 16).cpu().float()
    assert float((got - exact).abs().max()) <= 2 * max(errors)
    for cache in ("int8", "fp8"):
        got = decoded_logits(half, tokens.cuda(), 16, cache).cpu().float()
        assert float((got - exact).norm() / exact.norm()) < (0.02 if cache == "int8" else 0.08)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", ["llama", "opt", "qwen3", "phi3", "gpt_neox", "gemma2"])
def test_schemes(kind: str, scheme: str, device: str) -> None:
    """The quantised model that transformers runs, and a prompt that does not see its neighbours."""
    model = model_of(kind)
    if scheme == "w8a8-static-smooth" or kind != "gemma2":
        quantize_(model, scheme, [tokens_of(2, 30)], progress=False)
    model = on_gpu(model) if device == "cuda" else model
    tokens = tokens_of(3, 24).to(device)
    want = model(tokens).logits[:, 15:].float()
    error = (decoded_logits(model, tokens, 16).float() - want).norm() / want.norm()
    assert float(error) < 0.03
    generator = Generator(model)
    together = generator(PROMPTS, 9)
    assert together == [generator([prompt], 9)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cache", ["int8", "fp8"])
def test_caches_in_8_bits(cache: str, device: str) -> None:
    model = model_of("llama, two pairs")
    model = on_gpu(model) if device == "cuda" else model
    tokens = tokens_of(3, 40).to(device)
    want = model(tokens).logits[:, 19:].float()
    got = decoded_logits(model, tokens, 20, cache).float()
    error = float((got - want).norm() / want.norm())
    assert 1e-4 < error < (0.01 if cache == "int8" else 0.04)
    generator = Generator(model, cache=cache)
    together = generator(PROMPTS, 9)
    assert together == [generator([prompt], 9)[0] for prompt in PROMPTS]
    assert f"a cache in {cache} of 0.1 kB a token" in repr(generator)
    assert generate(model, PROMPTS, 9, cache=cache) == together
    assert generate(model, PROMPTS, 9) == Generator(model)(PROMPTS, 9)
    with pytest.raises(ValueError, match="cache: expected None, 'int8', 'fp8' or 'fp8-static', got 'int4'"):
        Generator(model, cache="int4")


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches(side: str) -> None:
    model = model_of("llama")
    rows = [torch.tensor(prompt) for prompt in PROMPTS]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0, padding_side=side)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(r) for r in rows], batch_first=True, padding_side=side)
    assert generate(model, ids, 9, attention_mask=mask) == generate(model, PROMPTS, 9)
    with pytest.raises(ValueError, match=r"attention_mask: expected the shape of prompts \[B, T\], got \[1, 8\]"):
        generate(model, ids, 9, attention_mask=mask[:1])
    with pytest.raises(ValueError, match=r"prompts\[1\]: expected at least one token"):
        generate(model, ids, 9, attention_mask=mask * torch.tensor([[1], [0], [1]]))


@pytest.mark.parametrize("device", DEVICES)
def test_long_contexts(device: str) -> None:
    model = small("llama", max_position_embeddings=5000, num_key_value_heads=2)
    model = on_gpu(model) if device == "cuda" else model
    prompt = torch.randint(1, VOCABULARY, (4300,), generator=torch.Generator().manual_seed(2)).tolist()
    (new,) = generate(model, [prompt], 5)
    if device == "cpu":
        assert new == by_transformers(model, prompt, 5)
    assert [new] == generate(model, [prompt, [7]], 5)[:1]
    with pytest.raises(ValueError, match="so that 5 more fit the context of 5000, got 4996"):
        generate(model, [[1] * 4996], 5)


@pytest.mark.parametrize("scheme", [None, "w8a8-dynamic", "w4a16-g32"])
def test_weights_lie_in_memory_once(scheme: str | None, tmp_path: Any) -> None:
    """Linears that read the same input become views of one tensor; the model computes and is saved as before."""
    model = model_of("qwen2")
    if scheme is not None:
        quantize_(model, scheme, progress=False)
    tokens = tokens_of(2, 9)
    want = model(tokens).logits
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = Generator(model)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.allclose(model(tokens).logits, want, atol=1e-6)
    attention = model.model.layers[0].self_attn
    large = "packed" if scheme == "w4a16-g32" else "weight"
    qkv = [getattr(getattr(attention, f"{name}_proj"), large) for name in "qkv"]
    assert len({tensor.untyped_storage().data_ptr() for tensor in qkv}) == 1
    kept = generator.decoder.bytes_of_weights()
    plain = sum(tensor.nbytes for tensor in state.values())
    assert kept <= plain * (1.1 if scheme is None else 1.35), "scales and biases of joined layers are copied"
    again = Generator(model)
    assert again.decoder.bytes_of_weights() <= kept + plain // 20, "nothing large was copied again"
    assert again(PROMPTS, 7) == generator(PROMPTS, 7)
    if scheme is not None:
        assert any(isinstance(module, QUANTISED) for module in model.modules())
        octofuse.save_pretrained(model, tmp_path / "saved")
        assert generate(octofuse.from_pretrained(tmp_path / "saved"), PROMPTS, 7) == generator(PROMPTS, 7)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("mixtral", {}, "got MixtralForCausalLM, a mixture of experts"),
        ("qwen3_moe", {}, "got Qwen3MoeForCausalLM, a mixture of experts"),
        ("bloom", {}, "family that is known .gpt2, .*llama.*, got BloomForCausalLM"),
        ("opt", {"do_layer_norm_before": False}, "model: expected do_layer_norm_before=True, got False"),
        ("opt", {"word_embed_proj_dim": 16}, "model: expected embeddings of the model's width"),
        ("opt", {"_remove_final_layer_norm": True}, "model: expected _remove_final_layer_norm=False, got True"),
        ("gemma", {"use_bidirectional_attention": True}, "model: expected use_bidirectional_attention=False"),
        ("llama", {"hidden_act": "relu2"}, "model: expected an activation of .*, got relu2"),
        ("llama", {"rope_parameters": ROPE | {"rope_type": "dynamic"}}, "rotary embeddings of kind .*, got dynamic"),
    ],
)
def test_other_models_are_refused_by_name(kind: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Generator(small(kind, **settings))
    headless = small("llama", "AutoModel")
    with pytest.raises(ValueError, match="got LlamaModel, which has no lm_head"):
        Generator(headless)


STRAYS = {
    "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"], "final_logit_softcapping": 0.1,
    "attn_logit_softcapping": 0.1, "query_pre_attn_scalar": 3.0, "no_rope_layers": [0, 1], "logits_scaling": 7.0,
    "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.4, "use_parallel_residual": True,
    "hidden_activation": "relu", "use_bidirectional_attention": True,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_settings_of_other_families_change_nothing(kind: str) -> None:
    """Configs keep what a conversion has left in them; a family reads its own settings alone, as transformers does."""
    model = model_of(kind)
    tokens = tokens_of(2, 20)
    want = model(tokens).logits[:, 9:]
    for name, value in STRAYS.items():
        if name not in BLOCKS[kind].settings:
            setattr(model.config, name, value)
    assert (decoded_logits(model, tokens, 10) - want).abs().max() < 1e-4


def test_a_model_that_generates_can_still_be_trained() -> None:
    """Its parameters stay the ones that an optimizer knows, inference mode or not, and old ones leave the memory."""
    model = model_of("llama").requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = model.model.layers[0].self_attn.q_proj.weight
    before = weight.detach().clone()
    with torch.inference_mode():
        generate(model, PROMPTS, 3)
    assert model.model.layers[0].self_attn.q_proj.weight is weight
    model(tokens_of(1, 5)).logits.sum().backward()
    optimizer.step()
    assert not torch.equal(weight, before)
    assert generate(model, PROMPTS, 3) == Generator(model)(PROMPTS, 3)
    joined = weight.untyped_storage().nbytes()
    quantize_(model, "w8a8-dynamic", exceptions={"*.q_proj": None}, progress=False)
    alone = model.model.layers[0].self_attn.q_proj.weight
    assert alone.untyped_storage().nbytes() == alone.nbytes < joined


def test_joined_layers_leave_their_old_memory_at_once() -> None:
    model = quantize_(model_of("llama"), "w8a8-dynamic", progress=False)
    old = StorageWeakRef(model.model.layers[0].self_attn.q_proj.weight.untyped_storage())
    seen: list[bool] = []
    generate(model, PROMPTS, 2, on_token=lambda *_: seen.append(old.expired()))
    assert seen == [True, True]


def test_wrapped_and_scattered_layers_are_refused_by_name() -> None:
    class Adapter(nn.Linear):
        pass

    model = model_of("llama")
    model.model.layers[1].self_attn.v_proj.__class__ = Adapter
    with pytest.raises(ValueError, match=r"expected model\.layers\.1\.self_attn\.v_proj to be .*, got Adapter"):
        Generator(model)
    model = model_of("llama")
    model.model.layers[1].to("meta")
    with pytest.raises(ValueError, match="expected all tensors on one device, got them on cpu, meta"):
        Generator(model)


def test_yarn_reaches_as_far_as_it_says() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    model = small("qwen2", rope_parameters=rope)
    prompt = tokens_of(1, 150)[0].tolist()
    assert generate(model, [prompt], 3) == [by_transformers(model, prompt, 3)]
