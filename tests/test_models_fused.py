"""Fused blocks inside a transformers model: the bits of their parts, and everything that generate() can do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import octofuse
from helpers import DEVICES, ids, small_gpt2
from octofuse.models import fuse_, quantize_, unfuse_
from octofuse.nn import Int8Linear
from test_engine_families import VARIANTS, model_of, on_gpu, tokens_of

SCHEMES = ("w8a8-dynamic", "w8a8-static", "w8a8-static-smooth")


def models_of(scheme: str, device: str) -> tuple[nn.Module, nn.Module]:
    """Quantised, as transformers runs it, and the same fused."""
    plain = quantize_(small_gpt2(), scheme, [ids()], progress=False)
    plain = plain.to(device, torch.float16 if device == "cuda" else torch.float32).requires_grad_(False)
    return plain, fuse_(copy.deepcopy(plain))


def exact_logits(model: nn.Module, tokens: Tensor, **given: Tensor) -> Tensor:
    """Of the same weights and scales in fp32 on the CPU."""
    exact = copy.deepcopy(model).float().cpu()
    for name, buffer in model.named_buffers():
        if "inv_freq" in name:  # float() rounds nothing, but what was fp32 must not have been fp16 in between
            assert buffer.dtype == torch.float32, name
    return exact(tokens.cpu(), **{name: one.cpu() for name, one in given.items()}).logits.to(tokens.device)


def assert_as_exact(got: Tensor, want: Tensor, exact: Tensor) -> None:
    """fp16 moves values across a step of an int8 scale, by fused and by other kernels alike: got is no farther from fp32
    than 1.5 times as far as want is, or within 1e-3.

    Where want is fp32 itself, on a CPU, tokens are within 1e-5, but for one in ten: by the last bit of a sum, which
    depends on the CPU, a value may lie on the other side of a step; and all together are within 1e-2.
    """
    own, error, size = (float(t.float().norm()) for t in (want - exact, got - exact, exact))
    if own > 0:
        assert error <= max(1.5 * own, 1e-3 * size), f"{error / size:.4f} of the logits, {own / size:.4f} unfused"
        return
    apart = (got - exact).norm(dim=-1) > 1e-5 * exact.norm(dim=-1)
    assert int(apart.sum()) <= max(1, apart.numel() // 10), f"{int(apart.sum())} of {apart.numel()} tokens"
    assert error <= 1e-2 * size, f"{error / size:.4f} of the logits"


def norm_of(x: Tensor, norm: torch.nn.LayerNorm) -> Tensor:
    return octofuse.layer_norm(x, norm.weight, norm.bias, norm.eps)


def by_parts(layer: Int8Linear, x: Tensor, **more) -> Tensor:
    scale = layer.input_scale
    q, scale = octofuse.quantize_per_token(x) if scale is None else (octofuse.quantize_per_tensor(x, scale), scale)
    given = (q, layer.weight, scale, layer.weight_scale, layer.bias)
    return octofuse.i8f16_linear(*given, out_dtype=x.dtype, **more)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("length", [1, 7])
def test_a_fused_block_keeps_the_bits_of_its_parts(device: str, scheme: str, length: int) -> None:
    _, fused = models_of(scheme, device)
    block = fused.transformer.h[1]
    width = fused.config.n_embd
    x = torch.randn(2, length, width, generator=torch.Generator().manual_seed(2)).to(device, fused.dtype)
    got = block(x)
    normed = norm_of(x, block.ln_1)
    q, k, v = by_parts(block.attn.c_attn, normed).view(2, length, 3, fused.config.n_head, -1).permute(2, 0, 3, 1, 4)
    attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
    h = by_parts(block.attn.c_proj, attended.transpose(1, 2).reshape(x.shape), residual=x)
    normed = norm_of(h, block.ln_2)
    out = block.mlp.c_proj
    if out.input_scale is None:
        hidden = by_parts(block.mlp.c_fc, normed, activation="gelu_tanh")
        want = by_parts(out, hidden, residual=h)
    else:
        fc = block.mlp.c_fc
        q = octofuse.quantize_per_tensor(normed, fc.input_scale)
        given = (q, fc.weight, fc.input_scale, fc.weight_scale, fc.bias)
        hidden = octofuse.i8i8_linear(*given, activation="gelu_tanh", out_scale=out.input_scale)
        given = (hidden, out.weight, out.input_scale, out.weight_scale, out.bias)
        want = octofuse.i8f16_linear(*given, residual=h, out_dtype=x.dtype)
    assert torch.equal(got, want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_model_gives_what_it_gave(device: str, scheme: str) -> None:
    """Norms are summed in another order than torch's, so logits agree within rounding; names and state stay."""
    plain, fused = models_of(scheme, device)
    tokens = ids(3, 12).to(device)
    want = plain(tokens).logits
    got = fused(tokens, output_hidden_states=True)
    assert float((got.logits - want).float().abs().max()) < 0.02 * float(want.float().std())
    assert len(got.hidden_states) == plain.config.n_layer + 1
    assert list(fused.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in fused.named_modules()] == [name for name, _ in plain.named_modules()]
    assert torch.equal(unfuse_(fused)(tokens).logits, want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheme", SCHEMES[:2])
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": False, "cache_implementation": "static", "disable_compile": True},
        {"num_beams": 3, "do_sample": False},
        {"do_sample": False, "use_cache": False},
    ],
    ids=["dynamic cache", "static cache", "beams", "no cache"],
)
def test_generate_with_left_padding(device: str, scheme: str, options: dict) -> None:
    _, fused = models_of(scheme, device)
    prompts = [[3, 1, 4, 1, 5], [92, 6], [65, 35, 89, 79, 32, 38, 46]]
    longest = max(map(len, prompts))
    batch = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    more = {"max_new_tokens": 8, "min_new_tokens": 8, "pad_token_id": 0, **options}
    together = fused.generate(batch, attention_mask=mask, **more)[:, longest:]
    for row, prompt in zip(together, prompts, strict=True):
        alone = fused.generate(
            torch.tensor([prompt], device=device), attention_mask=torch.ones(1, len(prompt), device=device), **more
        )
        if device == "cpu":  # on a GPU masks choose other attention kernels, which round elsewhere
            assert torch.equal(row, alone[0, len(prompt) :])
        assert alone.shape[1] == len(prompt) + 8


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheme", SCHEMES[:2])
def test_past_key_values_continue(device: str, scheme: str) -> None:
    _, fused = models_of(scheme, device)
    tokens = ids(2, 10).to(device)
    first = fused(tokens[:, :6], use_cache=True)
    second = fused(tokens[:, 6:], past_key_values=first.past_key_values, use_cache=True)
    whole = fused(tokens).logits
    assert float((second.logits - whole[:, 6:]).float().abs().max()) < 0.01 * float(whole.float().std())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("scheme", "variant"), [(SCHEMES[0], None), (SCHEMES[1], None), (SCHEMES[0], "qwen3")])
def test_compiles_as_one_graph(device: str, scheme: str, variant: str | None) -> None:
    if variant is None:
        _, fused = models_of(scheme, device)
    else:
        model = model_of(variant)
        fused = fuse_(quantize_((on_gpu(model) if device == "cuda" else model), scheme, progress=False))
    tokens = ids(2, 6).to(device)
    want = fused(tokens, use_cache=False).logits
    torch.compiler.reset()
    got = torch.compile(fused, fullgraph=True)(tokens, use_cache=False).logits
    assert_as_exact(got, want, exact_logits(unfuse_(fused), tokens))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family(variant: str, device: str) -> None:
    """Beside the same model unfused: logits, also with padding, what a cache continues, attention's weights."""
    model = model_of(variant)
    model = (on_gpu(model) if device == "cuda" else model).requires_grad_(False)
    tokens = tokens_of(3, 24).to(device)
    for scheme in ("w8a8-dynamic", "w8a8-static", "w4a16-g32-zp"):
        plain = quantize_(copy.deepcopy(model), scheme, [tokens], progress=False)
        mask = torch.ones_like(tokens)
        mask[0, :5] = 0
        for given, seen in (({}, torch.ones_like(mask).bool()), ({"attention_mask": mask}, mask.bool())):
            want = plain(tokens, **given).logits.float()
            got = fuse_(plain)(tokens, **given).logits.float()
            assert torch.equal(unfuse_(plain)(tokens, **given).logits.float(), want)
            exact = exact_logits(plain, tokens, **given)
            assert_as_exact(got[seen], want[seen], exact[seen])
        fused = fuse_(plain)
        assert any(type(module).__name__.startswith("Fused") for module in fused.modules())
        first = fused(tokens[:, :20], use_cache=True)
        rest = fused(tokens[:, 20:], past_key_values=first.past_key_values).logits.float()
        assert_as_exact(*(t[1:, -4:] for t in (rest, want, exact)))
        fused.set_attn_implementation("eager")
        kept = fused(tokens, output_attentions=True).attentions
        assert len(kept) == model.config.num_hidden_layers
        assert torch.allclose(kept[1].float().sum(-1), torch.ones(()).to(device), atol=1e-2)


def test_attention_weights_are_kept_where_they_are_asked_for() -> None:
    plain, fused = models_of("w8a8-static", "cpu")
    for model in (plain, fused):
        model.set_attn_implementation("eager")
    want, got = (model(ids(2, 5), output_attentions=True).attentions for model in (plain, fused))
    assert len(got) == len(want) == plain.config.n_layer
    assert float((got[1] - want[1]).abs().max()) < 0.02


def test_refusals() -> None:
    with pytest.raises(ValueError, match="model: expected a model that quantize_ has changed"):
        fuse_(small_gpt2())
    with pytest.raises(ValueError, match=r"model: expected a causal language model of a family .*, got Linear"):
        fuse_(nn.Linear(2, 2))
    _, fused = models_of("w8a8-dynamic", "cpu")
    with pytest.raises(ValueError, match="model: expected eval mode, got training"):
        fused.train()(ids(1, 4))
    assert fuse_(fused.eval()) is fused, "fusing twice is fusing once"
    with pytest.raises(ValueError, match="encoder_hidden_states: expected None"):
        fused.transformer.h[0](torch.zeros(1, 2, 32), encoder_hidden_states=torch.zeros(1, 2, 32))
    partly = quantize_(small_gpt2(), "w8a8-static", [ids()], exceptions={"mlp.c_fc": None}, progress=False)
    want = partly(ids(1, 5)).logits
    assert float((fuse_(partly)(ids(1, 5)).logits - want).abs().max()) < 0.02 * float(want.std())
