"""Layers and models with weights of 1 to 8 bits: ops against fp64, checkpoints, generation, refusals."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import octofuse
from helpers import DEVICES, PROMPTS, by_transformers, ids, layer_of, small_gpt2
from octofuse import quantize_per_token
from octofuse.generate import Generator
from octofuse.models import compare, quantize_, weight_bytes
from octofuse.nn import BCQLinear, CodebookLinear, PackedLinear, WeightOnlyLinear, quantised_layer
from octofuse.ops.lowbit import bcq_linear, codebook_linear, sparse12_linear, woq_linear
from octofuse.quant import WeightOnly

NAMES = (
    "w8a16",
    "w6a16-g32",
    "w5a16-g32-half",
    "w5a16-g64-zp",
    "w4a16-g32-gptq",
    "w4a16-g32-zp-awq",
    "w3a16-mse",
    "w2a16-g64-zp",
    "w1a16-g32",
    "bcq-q3-g32",
    "sparse12-w7-g64",
    "nf4",
    "fp4-g32",
    "w8a16-fp8",
    "w8a16-fp8-g32",
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("n", "k"), [(48, 128), (33, 100), (1, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_linears_multiply_what_they_hold(device: str, name: str, n: int, k: int, dtype: torch.dtype) -> None:
    """No further than twice the error of torch's own linear from what that gives in fp64: it rounds the weight as well."""
    layer, _ = layer_of(name, n, k, dtype, device)
    x = torch.randn(2, 5, k, device=device).to(dtype)
    w = layer.dequantized()
    want = linear(x.double(), w.double(), layer.bias.double())
    rounding = (x.double().abs() @ w.double().abs().t()).max() * torch.finfo(dtype).eps / 2  # of the weight
    own = (linear(x, w, layer.bias).double() - want).abs().max()
    got = layer(x)
    assert got.shape == (2, 5, n)
    assert got.dtype == dtype
    assert (got.double() - want).abs().max() <= 2 * own + rounding


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["w4a16-g32", "bcq-q2-g64", "sparse12-w7"])
def test_linears_take_what_torchs_take(device: str, name: str) -> None:
    """Any strides, no rows, a single row without a batch, and what autocast leaves of a model in fp32."""
    layer, _ = layer_of(name, 40, 64, torch.float32, device)
    x = torch.randn(64, 6, device=device).t()
    want = layer(x.contiguous())
    batches = [(x, want), (x[0], want[0]), (x[::2], want[::2])]
    batches.append(tuple(t.unflatten(0, (2, 3)).transpose(0, 1) for t in batches[0]))
    for given, expected in batches:
        assert torch.allclose(layer(given), expected, atol=1e-5)
    assert layer(x[:0]).shape == (0, 40)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = layer(linear(x, torch.eye(64, device=device)))
    assert got.dtype == torch.bfloat16
    assert torch.allclose(got.float(), want, atol=0.1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["w4a16-g32", "bcq-q2-g64"])
def test_epilogues(device: str, name: str) -> None:
    layer, _ = layer_of(name, 40, 96, torch.float32, device)
    x, residual = torch.randn(7, 96, device=device), torch.randn(7, 40, device=device)

    def run(activation: str | None, residual: Tensor | None) -> Tensor:
        more = {"group": layer.scheme.group, "activation": activation, "residual": residual}
        if isinstance(layer, BCQLinear):
            return bcq_linear(x, layer.packed, layer.alpha, None, layer.bias, **more)
        assert isinstance(layer, WeightOnlyLinear)
        return woq_linear(x, layer.packed, layer.scale, layer.zeros, layer.bias, bits=layer.scheme.bits, **more)

    plain = layer(x)
    assert torch.equal(run("relu", residual), plain.relu() + residual)
    want = torch.nn.functional.gelu(plain, approximate="tanh")
    torch.testing.assert_close(run("gelu_tanh", None), want, rtol=2e-6, atol=1e-6)  # torch's own is in fp32
    with pytest.raises(ValueError, match="activation: expected None, 'relu', 'gelu', 'gelu_tanh', 'silu', got 'tanh'"):
        run("tanh", None)
    with pytest.raises(ValueError, match=r"residual: expected shape \[7, 40\], got \[6, 40\]"):
        run(None, residual[1:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["w4a16-g32-zp", "w3a16", "bcq-q2-g64", "sparse12-w7", "nf4", "w8a16-fp8"])
def test_int8_activations(device: str, name: str) -> None:
    """As the same numbers in floating point would be multiplied."""
    layer, _ = layer_of(name, 40, 96, torch.float32, device)
    q, scale = quantize_per_token(torch.randn(2, 3, 96, device=device))
    more = {"group": layer.scheme.group, "x_scale": scale, "activation": "relu"}
    if isinstance(layer, BCQLinear):
        got = bcq_linear(q, layer.packed, layer.alpha, None, layer.bias, **more)
    elif isinstance(layer, WeightOnlyLinear):
        got = woq_linear(q, layer.packed, layer.scale, layer.zeros, layer.bias, bits=layer.scheme.bits, **more)
    elif isinstance(layer, CodebookLinear):
        got = codebook_linear(q, layer.packed, layer.scale, layer.scheme.code, layer.bias, **more)
    else:
        got = sparse12_linear(q, layer.packed, layer.scale, layer.bias, **more)
    x = (q.flatten(0, 1).double() * scale.double()).view(2, 3, 96)
    want = linear(x, layer.dequantized().double(), layer.bias.double()).relu()
    assert got.shape == (2, 3, 40)
    assert got.dtype == torch.float32
    assert torch.allclose(got.double(), want, rtol=1e-4, atol=1e-4)


def test_int8_activations_compile_and_meet_an_offset() -> None:
    layer, _ = layer_of("bcq-q2-g64", 40, 96, torch.float32, "cpu")
    assert isinstance(layer, BCQLinear)
    q, scale = quantize_per_token(torch.randn(6, 96))
    offset = torch.randn(2, 40)

    def run(x_scale: Tensor | float) -> Tensor:
        return bcq_linear(q, layer.packed, layer.alpha, offset, group=64, x_scale=x_scale)

    spread = offset.repeat_interleave(64, 0)[:96].t()
    assert torch.allclose(run(scale), linear(q * scale, layer.dequantized() + spread), rtol=1e-4, atol=1e-4)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for given in (scale, 0.02):
        assert torch.equal(compiled(given), run(given))
    with pytest.raises(ValueError, match=r"x_scale: expected one element or 6 elements .*, got shape \[5, 1\]"):
        run(scale[1:])


def test_wrong_operands_are_refused_by_name() -> None:
    layer, _ = layer_of("w4a16-g32-zp", 40, 96, torch.float32, "cpu")
    assert isinstance(layer, WeightOnlyLinear)
    x, packed, scale, zero = torch.randn(2, 96), layer.packed, layer.scale, layer.zeros
    cases = (
        (TypeError, "x: expected dtype float16 or bfloat16 or float32 or int8, got int32", {"x": x.int()}),
        (
            ValueError,
            r"scale: expected a contiguous tensor of shape \[2, 40\], got \[3, 40\]",
            {"x": x[:, :64].clone()},
        ),
        (
            ValueError,
            r"packed: expected a contiguous tensor of shape \[48, 16\], got \[48, 15\]",
            {"packed": packed[:, 1:]},
        ),
        (TypeError, "packed: expected dtype int32, got float32", {"packed": packed.float()}),
        (TypeError, "zero: expected dtype uint8, got float32", {"zero": zero.float()}),
        (ValueError, r"zero: expected a contiguous tensor of shape \[3, 40\], got \[2, 40\]", {"zero": zero[1:]}),
        (
            ValueError,
            r"scale: expected a contiguous tensor of shape \[3, 40\], got \[3, 40\] with strides \[80, 2\]",
            {"scale": scale.repeat_interleave(2, 1)[:, ::2]},
        ),
        (ValueError, r"bias: expected shape \[40\], got \[39\]", {"bias": torch.zeros(39)}),
        (ValueError, "x_scale: expected one for int8 x and None for others, got None for torch.int8", {"x": x.char()}),
        (ValueError, "x_scale: expected one .*, got one for torch.float32", {"x_scale": torch.ones(2)}),
        (
            ValueError,
            r"x_scale: expected one element or 2 elements \(\[2\] or \[2, 1\]\), got shape \[3\]",
            {"x": x.char(), "x_scale": torch.ones(3)},
        ),
        (
            TypeError,
            "x_scale: expected dtype float32, got float16",
            {"x": x.char(), "x_scale": torch.ones(2).half()},
        ),
    )
    for error, message, wrong in cases:
        given = {"x": x, "packed": packed, "scale": scale, "zero": zero} | wrong
        with pytest.raises(error, match=message):
            woq_linear(**given, bits=4, group=32)
    for name, wrong in (("bits", {"bits": 4.0}), ("group", {"group": "32"})):
        with pytest.raises(TypeError, match=f"{name}: expected int.*, got {type(wrong[name]).__name__}"):
            woq_linear(x, packed, scale, zero, **({"bits": 4, "group": 32} | wrong))
    with pytest.raises(ValueError, match=r"alpha: expected \[G, q, N\], got shape \[3, 40\]"):
        bcq_linear(x, packed, scale)
    with pytest.raises(ValueError, match="moments: expected calibrated second moments for gptq, got None"):
        quantised_layer(nn.Linear(32, 8), WeightOnly(4, 32, method="gptq"))


def test_awq_scales_fold_into_the_norms() -> None:
    """In floating point the folded model is the same one; and large channels lose less."""
    tokens, plain = ids(), small_gpt2().eval()
    with torch.no_grad():
        for block in plain.transformer.h:  # some channels are large, and what reads them makes up for it
            for norm, linear_ in ((block.ln_1, block.attn.c_attn), (block.ln_2, block.mlp.c_fc)):
                norm.weight[::16] *= 40
                norm.bias[::16] *= 40
                linear_.weight[::16] /= 40
    want = plain(tokens).logits
    costs = {}
    for name in ("w3a16-g32-mse", "w3a16-g32-awq"):
        model = quantize_(copy.deepcopy(plain), name, [tokens], exceptions={"c_proj": None}, progress=False)
        costs[name] = float((model(tokens).logits - want).square().mean())
    assert costs["w3a16-g32-awq"] < 0.7 * costs["w3a16-g32-mse"]


@pytest.mark.parametrize("name", NAMES)
def test_models_quantise_save_load_and_generate(name: str, tmp_path) -> None:
    model = quantize_(small_gpt2(), name, [ids()], progress=False)
    layers = [m for m in model.modules() if isinstance(m, PackedLinear)]
    assert len(layers) == 8
    assert {layer.scheme.name for layer in layers} == {name}
    octofuse.save_pretrained(model, tmp_path / "q")
    loaded = octofuse.from_pretrained(tmp_path / "q")
    tokens = ids()
    assert torch.equal(loaded(tokens).logits, model.eval()(tokens).logits)
    assert weight_bytes(loaded) == weight_bytes(model) < weight_bytes(small_gpt2())
    generator = Generator(loaded.requires_grad_(False))
    assert generator(PROMPTS, 8) == [by_transformers(loaded, prompt, 8) for prompt in PROMPTS]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["w4a16-g64", "w3a16-g32-zp", "bcq-q3-g32", "sparse12-w7", "nf4", "w8a16-fp8"])
def test_generation_on_the_gpu(name: str) -> None:
    """Prefill and captured steps by the kernels: what the CPU computes in fp32, and what a prompt gives alone."""
    model = quantize_(small_gpt2(), name, progress=False).eval().requires_grad_(False)
    want = model(ids()).logits
    model.to("cuda", torch.float16)
    got = model(ids().cuda()).logits.float().cpu()
    assert (got - want).abs().max() <= 0.02 * want.abs().max()
    prompts = [[5, 1, 9, 2, 7], [3, 8, 8, 1, 2, 6, 4], [11, 4, 7, 7, 1, 3]]
    generator = Generator(model)
    together = generator(prompts, 8)
    assert generator(prompts, 8) == together
    assert [generator([prompt], 8)[0] for prompt in prompts] == together


def test_fewer_bits_cost_more() -> None:
    tokens = ids(2, 64).flatten()
    found = {}
    for name in ("w8a16", "w4a16-g32", "w2a16-g32-mse"):
        model = quantize_(small_gpt2(), name, progress=False)
        found[name] = compare(model.eval(), small_gpt2().eval(), tokens, context=16, stride=8)
        assert len(found[name].sqnr) == 8
    assert found["w8a16"].kl < found["w4a16-g32"].kl < found["w2a16-g32-mse"].kl
    worst = {name: min(one.sqnr.values()) for name, one in found.items()}
    assert worst["w8a16"] > worst["w4a16-g32"] > worst["w2a16-g32-mse"]


def test_layers_of_all_kinds_beside_each_other(tmp_path) -> None:
    exceptions = {"mlp.c_fc": "w8a8-dynamic", "attn.c_proj": None, "mlp.c_proj": "bcq-q4"}
    model = quantize_(small_gpt2(), "w4a16-g32", exceptions=exceptions, progress=False)
    octofuse.save_pretrained(model, tmp_path / "q")
    loaded = octofuse.from_pretrained(tmp_path / "q").requires_grad_(False)
    assert torch.equal(loaded(ids()).logits, model.eval()(ids()).logits)
    assert Generator(loaded)(PROMPTS, 8) == [by_transformers(loaded, prompt, 8) for prompt in PROMPTS]
    with pytest.raises(ValueError, match="model: expected a floating-point model"):
        quantize_(model, "w4a16-g32", progress=False)


def test_gptq_wants_calibration_and_leaves_the_model_whole() -> None:
    model = small_gpt2()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(ValueError, match="calibration: expected batches for the scheme w4a16-g32-gptq, got None"):
        quantize_(model, "w4a16-g32-gptq", progress=False)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
