"""Models beside GPT-2: smoothing folds into their norms, batches by name, heads that stay, checkpoints of any class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import octofuse
from octofuse.generate import own_text
from octofuse.models import distill_, frontier, quantize_
from octofuse.models.blocks import BLOCKS, Source, normed, valued
from octofuse.models.quantize import calibrated, smoothed_sources
from octofuse.models.smooth import fold
from octofuse.nn import Int8Linear, WeightOnlyLinear, linear_layers
from octofuse.nn.linear import is_conv1d, weight_of
from octofuse.quant import observe, scheme_named

WIDTH, VOCABULARY = 32, 97
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
SIZES = HEADS | {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2}
GPT = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4}
OWN: dict[str, dict[str, Any]] = {
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gptj": GPT | {"rotary_dim": 8},
    "gpt_neo": {"hidden_size": WIDTH, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": WIDTH},
    "openai-gpt": GPT,
    "bloom": {"hidden_size": WIDTH, "n_layer": 2, "n_head": 4},
    "mixtral": {"num_local_experts": 4},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8},
    "qwen3": {"head_dim": 8},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
}


def small(kind: str, architecture: str = "AutoModelForCausalLM", **settings: Any) -> Any:
    """A random model of two blocks; norms and biases are random too, so that nothing folds by chance."""
    import transformers

    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    every = {"vocab_size": VOCABULARY, "max_position_embeddings": 64} | SIZES | ends | OWN.get(kind, {}) | settings
    config = transformers.AutoConfig.for_model(kind, **every)
    model = getattr(transformers, architecture).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval().requires_grad_(False)


def ids() -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(1))


def scales_of(sources: list[Source]) -> list[torch.Tensor]:
    """Random ones, for every channel."""
    generator = torch.Generator().manual_seed(2)
    return [torch.empty(source.tensors[0].shape[-1]).uniform_(0.5, 2, generator=generator) for source in sources]


def with_outliers(model: Any) -> Any:
    """The same function, with two channels behind each norm 50 times as large, which the linears undo."""
    sources = normed(model)
    fold(model, sources, [torch.ones(WIDTH).index_fill_(0, torch.tensor([3, 17]), 1 / 50) for _ in sources])
    return model


@pytest.mark.parametrize("kind", BLOCKS)
def test_folding_keeps_the_function(kind: str) -> None:
    model = small(kind)
    sources = normed(model) + valued(model)
    read = [name for source in sources for name in source.linears]
    assert len(sources) % 2 == 0, "of two blocks"
    assert len(sources) >= 2
    assert len(set(read)) == len(read)
    layers = {name: model.get_submodule(name) for name in read}
    before = observe(layers, [ids()], model, per_channel=True)
    want = model(ids()).logits
    scales = scales_of(sources)
    fold(model, sources, scales)
    assert torch.allclose(model(ids()).logits, want, rtol=1e-4, atol=1e-5)
    after = observe(layers, [ids()], model, per_channel=True)
    for source, s in zip(sources, scales, strict=True):
        for name in source.linears:
            assert torch.allclose(after[name].result() * s, before[name].result(), rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("kind", [*BLOCKS, "openai-gpt", "olmo2"])
def test_every_scheme_without_smoothing(kind: str, tmp_path) -> None:
    want = small(kind)(ids()).logits
    for scheme in ("w8a8-dynamic", "w4a16-g32-zp-gptq"):
        model = quantize_(small(kind), scheme, [ids()], progress=False)
        got = model(ids()).logits
        if scheme == "w8a8-dynamic":
            assert (got - want).norm() / want.norm() < 0.025
        else:
            check_four_bits(model, small(kind), got)
        octofuse.save_pretrained(model, tmp_path / scheme)
        again = octofuse.from_pretrained(tmp_path / scheme)
        assert type(again) is type(model)
        # Not the same bits: torch's CPU products may depend on where a tensor lies.
        assert torch.allclose(again(ids()).logits, got, atol=1e-5), scheme


def check_four_bits(model: Any, plain: Any, got: torch.Tensor) -> None:
    """Every weight is as close as 4 bits with groups of 32 allow, which no zero point that is off by one would be; and the
    model computes what the float model does with these weights."""
    most = 0.225  # of a weight's norm; GPTQ trades some of it for the outputs' sake
    for name, layer in model.named_modules():
        if not isinstance(layer, WeightOnlyLinear):
            continue
        original = plain.get_submodule(name)
        w = weight_of(original)
        assert (layer.dequantized() - w).norm() / w.norm() < most, name
        layer.zero.add_(1)
        assert (layer.dequantized() - w).norm() / w.norm() > most, "a wrong zero point would be found"
        layer.zero.sub_(1)
        used = layer.dequantized()
        original.weight.data = used.t().contiguous() if is_conv1d(original) else used
    want = plain(ids()).logits
    assert (got - want).norm() <= 1e-5 * want.norm()


def test_falcon_with_a_norm_for_each() -> None:
    model = small("falcon", new_decoder_architecture=True, num_kv_heads=4)
    sources = normed(model)
    assert [source.linears[0].split(".")[-1] for source in sources] == ["query_key_value", "dense_h_to_4h"] * 2
    want = model(ids()).logits
    fold(model, sources, scales_of(sources))
    assert torch.allclose(model(ids()).logits, want, rtol=1e-4, atol=1e-5)


def test_grouped_heads_keep_their_values() -> None:
    """Of two query heads that share one value, each may want another scale."""
    assert len(valued(small("llama"))) == 2
    model = small("llama", num_key_value_heads=2)
    assert valued(model) == []
    with pytest.raises(ValueError, match="scales attention's values, which LlamaForCausalLM cannot take"):
        quantize_(model, "w8a8-static-smooth-values", [ids()], progress=False)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [("olmo2", {}, "known for gpt2, .*llama.*; got Olmo2ForCausalLM"),
     ("falcon", {"parallel_attn": False}, "expects falcon models with parallel_attn=True, got False"),
     ("opt", {"do_layer_norm_before": False}, "expects opt models with do_layer_norm_before=True, got False"),
     ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm=False")],
)  # fmt: skip
def test_models_whose_norms_others_read(kind: str, settings: dict[str, Any], message: str) -> None:
    model = small(kind, **settings)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        quantize_(model, "w4a16-g32-awq", [ids()], progress=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_smoothing_serves_a_llama(tmp_path) -> None:
    costs = {}
    for scheme in ("w8a8-static", "w8a8-static-smooth", "w4a16-g32-mse", "w4a16-g32-awq"):
        model = with_outliers(small("llama"))
        want = model(ids()).logits
        quantize_(model, scheme, [ids()], progress=False)
        got = model(ids()).logits
        costs[scheme] = float((got - want).norm() / want.norm())
        octofuse.save_pretrained(model, tmp_path / scheme)
        assert torch.equal(octofuse.from_pretrained(tmp_path / scheme)(ids()).logits, got)
    assert costs["w8a8-static-smooth"] < 0.5 * costs["w8a8-static"]
    assert costs["w4a16-g32-awq"] < 0.5 * costs["w4a16-g32-mse"]


def test_linears_beside_a_smoothed_one() -> None:
    """One norm feeds q, k and v: where one is smoothed the others' weights, moments and ranges go with it."""
    for other in ("w8a16", "w8a16-gptq", "w8a8-static", None):
        model = with_outliers(small("llama"))
        want = model(ids()).logits
        exceptions = {"q_proj": "w8a8-dynamic-smooth", "k_proj": other}
        quantize_(model, "w8a16", [ids()], exceptions=exceptions, progress=False)
        assert (model(ids()).logits - want).norm() / want.norm() < 0.03, other


def test_calibration_speaks_of_the_folded_model() -> None:
    """Ranges and second moments are those of inputs that a neighbour's smoothing has divided."""
    model = with_outliers(small("llama"))
    schemes = {"q_proj": "w8a8-static-smooth", "k_proj": "w8a8-static", "v_proj": "w3a16-g32-gptq"}
    layers = {n: m for n, m in linear_layers(model).items() if n.endswith(tuple(schemes))}
    plan = {name: scheme_named(schemes[name.rpartition(".")[2]]) for name in layers}
    sources = smoothed_sources(model, plan)
    found = calibrated(model, layers, sources, plan, [ids()], False)
    fold(model, sources, found.scales)
    after = observe(layers, [ids()], model, moments=list(layers))
    assert len(found.amax) == 4
    assert len(found.moments) == 2
    for name, amax in found.amax.items():
        assert torch.allclose(amax, after[name].result(), rtol=1e-4)
    for name, moments in found.moments.items():
        assert torch.allclose(moments, after[name].moments, rtol=1e-3, atol=1e-5)


def test_batches_by_name() -> None:
    """What a tokenizer returns."""
    from transformers import BatchEncoding

    batch = BatchEncoding({"input_ids": ids(), "attention_mask": torch.ones_like(ids())})
    by_name = quantize_(small("opt"), "w8a8-static", [batch], progress=False)
    plain = quantize_(small("opt"), "w8a8-static", [ids()], progress=False)
    assert torch.equal(by_name(ids()).logits, plain(ids()).logits)


@pytest.mark.parametrize("tied", [True, False])
def test_an_output_head_stays_unless_it_is_named(tied: bool, tmp_path) -> None:
    model = quantize_(small("llama", tie_word_embeddings=tied), "w4a16-g32", progress=False)
    assert type(model.lm_head) is nn.Linear
    assert "lm_head" not in linear_layers(model)
    model = small("llama", tie_word_embeddings=tied)
    quantize_(model, "w4a16-g32", exceptions={"lm_head": "w8a16"}, progress=False)
    assert isinstance(model.lm_head, WeightOnlyLinear)
    octofuse.save_pretrained(model, tmp_path / "q")
    assert torch.equal(octofuse.from_pretrained(tmp_path / "q")(ids()).logits, model(ids()).logits)


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [("bert", "AutoModelForMaskedLM"), ("gpt2", "AutoModelForSequenceClassification"), ("llama", "AutoModel")],
)
@pytest.mark.parametrize("scheme", ["w8a8-dynamic", "w4a16-g32"])
def test_a_checkpoint_comes_back_as_its_class(kind: str, architecture: str, scheme: str, tmp_path) -> None:
    model = quantize_(small(kind, architecture), scheme, progress=False)
    octofuse.save_pretrained(model, tmp_path / "q")
    again = octofuse.from_pretrained(tmp_path / "q")
    assert type(again) is type(model)
    assert torch.equal(again(ids())[0], model(ids())[0])


@pytest.mark.parametrize("scheme", ["w8a8-dynamic", "w6a16-g32"])
def test_an_encoder_and_decoder(scheme: str) -> None:
    """T5 asks its linears' weights for their dtype."""
    sizes = {"d_model": WIDTH, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8, "decoder_start_token_id": 0}
    model = small("t5", "AutoModelForSeq2SeqLM", **sizes)
    want = model(input_ids=ids(), labels=ids()).logits
    quantize_(model, scheme, progress=False)
    kinds = {type(m) for m in model.modules()}
    assert kinds & {Int8Linear, WeightOnlyLinear}
    got = model(input_ids=ids(), labels=ids()).logits
    assert (got - want).norm() / want.norm() < 0.1


def test_codes_train_on_text_that_the_model_writes() -> None:
    teacher, model = small("llama"), small("llama")
    text = own_text(teacher, [ids()], 3, seed=4)
    assert [list(batch.shape) for batch in text] == [[2, 11]] * 3
    assert all(torch.equal(one, two) for one, two in zip(text, own_text(teacher, [ids()], 3, seed=4), strict=True))
    assert not torch.equal(text[0], own_text(teacher, [ids()], 3, seed=5)[0])
    quantize_(model, "w2a16-g32", progress=False)
    before, after = distill_(model, teacher, text, steps=12, codes=True, progress=False)
    assert after < before


def test_attention_and_feed_forward_of_other_models() -> None:
    for kind in ("llama", "opt", "gpt_neox"):
        found = frontier(small(kind), ids()[0], ["w8a16", "float"], context=8)
        assert len(found) == 4
        assert len({one.bytes for one in found}) == 4


def test_linears_whose_weights_others_read_stay() -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "nhead": 4, "dim_feedforward": 48, "batch_first": True}
    decoder = nn.TransformerDecoderLayer(**sizes).eval().requires_grad_(False)
    x = torch.randn(2, 5, 32)
    want = decoder(x, x)
    assert set(linear_layers(decoder)) == {"linear1", "linear2"}
    got = quantize_(decoder, progress=False)(x, x)
    assert (got - want).norm() / want.norm() < 0.02
    with pytest.raises(ValueError, match="expected linear layers to quantise, got none in TransformerEncoderLayer"):
        quantize_(nn.TransformerEncoderLayer(**sizes), progress=False)


def test_state_space_mixers() -> None:
    model = small("mamba", state_size=4)
    want = model(ids()).logits
    assert {name.rpartition(".")[2] for name in linear_layers(model)} == {"in_proj", "x_proj", "out_proj"}
    got = quantize_(model, "w8a16", progress=False)(ids()).logits
    assert (got - want).norm() / want.norm() < 0.05
