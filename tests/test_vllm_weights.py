"""vLLM's layers with weights of few bits, by this library's kernel (`vllm_interface.py`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

import octofuse
from octofuse.files.words import pack_words
from vllm_interface import needs_files

pytestmark = needs_files


@pytest.mark.parametrize("input_first", [False, True])
@pytest.mark.parametrize(("bits", "zeros"), [(4, False), (4, True), (8, False), (2, True)])
@pytest.mark.parametrize("group", [-1, 32])
def test_weights_of_few_bits(vllm: Any, bits: int, zeros: bool, group: int, input_first: bool) -> None:
    """In either order of a weight's dimensions: files of compressed-tensors, and of GPTQ."""
    k, n = 128, 48
    g = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (n, k), generator=g)
    groups = 1 if group == -1 else k // group
    scale = torch.rand(groups, n, generator=g).half() / (1 << bits)
    zero = torch.randint(0, 1 << bits, (groups, n), generator=g) if zeros else torch.full((groups, n), 1 << bits - 1)
    kind = getattr(vllm.types, f"uint{bits}" if zeros else f"uint{bits}b{1 << bits - 1}")
    layer: Any = nn.Module()
    dims = {"input_dim": 0, "output_dim": 1} if input_first else {"input_dim": 1, "output_dim": 0}
    loader = {"weight_loader": lambda *_: None}
    words, scales = pack_words(codes, bits), scale.t().contiguous()
    packed_zeros = pack_words(zero, bits)  # [G, N / pack]
    if input_first:
        words, scales = words.t().contiguous(), scale
    else:
        packed_zeros = packed_zeros.t().contiguous()
    make = vllm.parameter
    pack = {"packed_factor": 32 // bits}
    layer.weight_packed = make.PackedvLLMParameter(data=words, packed_dim=dims["input_dim"], **dims, **pack, **loader)
    layer.weight_scale = make.GroupQuantScaleParameter(data=scales, **dims, **loader)
    if zeros:
        layer.weight_zero_point = make.PackedvLLMParameter(
            data=packed_zeros, packed_dim=dims["output_dim"], **dims, **pack, **loader
        )
    config = vllm.mixed.MPLinearLayerConfig((k, n), (k, n), kind, torch.float16, group, zeros)
    assert vllm.own.OctofuseMPLinearKernel.can_implement(config) == (True, None)
    kernel = vllm.own.OctofuseMPLinearKernel(config, "weight_packed", "weight_scale", "weight_zero_point")
    kernel.process_weights_after_loading(layer)
    x, bias = torch.randn(2, 3, k).half(), torch.randn(n).half()
    spread = [t.repeat_interleave(k // groups, 0).t().double() for t in (zero, scale)]
    weight = (codes - spread[0]) * spread[1]
    got = kernel.apply_weights(layer, x, bias)
    want = linear(x.double(), weight, bias.double())
    torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=2e-3)
    torch._dynamo.reset()
    compiled = torch.compile(lambda y: kernel.apply_weights(layer, y, bias), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), got)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group", [None, 32])
def test_w4a8(vllm: Any, group: int | None, dtype: torch.dtype) -> None:
    """CompressedTensorsW4A8Int: signed codes as int8, one parameter under two names; a row's scale is a group of all K."""
    k, n = 160, 48
    g = torch.Generator().manual_seed(k)
    codes = torch.randint(-8, 8, (n, k), generator=g, dtype=torch.int8)
    groups = 1 if group is None else k // group
    scale = (torch.rand(n, groups, generator=g) / 50 + 0.001).to(dtype)
    layer: Any = nn.Module()
    make, loader = vllm.parameter, {"weight_loader": lambda *_: None}
    weight = make.ModelWeightParameter(data=codes.clone(), input_dim=1, output_dim=0, **loader)
    layer.weight = layer.weight_packed = weight
    layer.weight_scale = make.GroupQuantScaleParameter(data=scale.clone(), input_dim=1, output_dim=0, **loader)
    own = vllm.own.OctofuseMPLinearKernel
    config = vllm.mixed.MPLinearLayerConfig((k, n), (k, n), vllm.types.int4, dtype, group or k, False)
    assert own.can_implement(config) == (True, None)
    kernel = own(config, w_q_param_name="weight_packed", w_s_param_name="weight_scale", w_zp_param_name=None)
    kernel.process_weights_after_loading(layer)
    x, bias = torch.randn(2, 3, k).to(dtype), torch.randn(n).to(dtype)
    got = kernel.apply_weights(layer, x, bias)
    assert got.dtype == dtype
    if group is None:
        q, step = octofuse.quantize_per_token(x)
        want = octofuse.linear(q, codes, step, scale.float().view(-1), bias, out_dtype=dtype)
        assert torch.equal(got, want), "the bits of the int8 linear with the codes as its weight"
        assert torch.equal(kernel.apply_weights(layer, x[1, 2:], bias)[0], got[1, 2]), "no token depends on the others"
    else:
        floats = codes.double() * scale.double().repeat_interleave(group, 1)
        torch.testing.assert_close(got.double(), linear(x.double(), floats, bias.double()), rtol=1e-2, atol=1e-2)
    torch._dynamo.reset()
    compiled = torch.compile(lambda y: kernel.apply_weights(layer, y, bias), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), got)


@pytest.mark.parametrize(("strategy", "symmetric"), [("token", True), ("group", True), ("token", False)])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_int8_tokens_of_packed_files(vllm: Any, bits: int, strategy: str, symmetric: bool) -> None:
    """CompressedTensorsWNA8Int, which says so beside the kernel's interface."""
    k, n = 128, 48
    codes = torch.randint(0, 1 << bits, (n, k), generator=torch.Generator().manual_seed(bits))
    scale = (torch.rand(n, 1) / 50 + 0.001).half()
    zero = torch.full((n, 1), 1 << bits - 1)
    kind = getattr(vllm.types, f"uint{bits}b{1 << bits - 1}" if symmetric else f"uint{bits}")
    layer: Any = nn.Module()
    make, more = vllm.parameter, {"input_dim": 1, "output_dim": 0, "weight_loader": lambda *_: None}
    pack = {"packed_factor": 32 // bits}
    layer.weight_packed = make.PackedvLLMParameter(data=pack_words(codes, bits), packed_dim=1, **pack, **more)
    layer.weight_scale = make.GroupQuantScaleParameter(data=scale.clone(), **more)
    if not symmetric:
        words = pack_words(zero.t(), bits).t().contiguous()
        layer.weight_zero_point = make.PackedvLLMParameter(data=words, packed_dim=0, **pack, **more)
    layer._humming_input_quant_config = {
        "num_bits": 8, "type": "int", "strategy": strategy, "symmetric": True, "dynamic": True, "group_size": 0,
        "quant_method": "compressed-tensors", "format": "int-quantized",
    }  # fmt: skip
    config = vllm.mixed.MPLinearLayerConfig((k, n), (k, n), kind, torch.float16, -1, not symmetric)
    kernel = vllm.own.OctofuseMPLinearKernel(config, "weight_packed", "weight_scale", "weight_zero_point")
    kernel.process_weights_after_loading(layer)
    x = torch.randn(7, k).half()
    got = kernel.apply_weights(layer, x)
    assert kernel.quantises_tokens == (strategy == "token" and symmetric)
    integers = (codes - (1 << bits - 1)).to(torch.int8)
    if kernel.quantises_tokens:
        q, step = octofuse.quantize_per_token(x)
        assert torch.equal(got, octofuse.linear(q, integers, step, scale.float().view(-1)))
    else:
        want = linear(x.double(), integers.double() * scale.double())
        torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=2e-3)


CODES = "octofuse takes unsigned codes of 2, 4, 8 bits and signed ones of 4"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"weight_type": "uint3b4"}, f"{CODES}, got uint3b4"),
        ({"weight_type": "float8_e4m3fn"}, f"{CODES}, got float8_e4m3fn"),
        (
            {"weight_type": "int4", "zero_points": True},
            "octofuse takes zero points or one zero for all, got int4 with zero_points=True",
        ),
        ({"zero_points": True}, "octofuse takes zero points or one zero for all, got uint4b8 with zero_points=True"),
        ({"act_type": torch.float32}, "octofuse takes activations in float16 or bfloat16, got torch.float32"),
        ({"group_size": 48}, "octofuse takes groups of 32, 64, 128, 256 or a row, got 48"),
    ],
)
def test_what_is_declined(vllm: Any, change: dict[str, Any], reason: str) -> None:
    given = {"weight_type": "uint4b8", "act_type": torch.float16, "group_size": 128, "zero_points": False} | change
    kind = getattr(vllm.types, given.pop("weight_type"))
    config = vllm.mixed.MPLinearLayerConfig((256, 64), (256, 64), kind, **given)
    assert vllm.own.OctofuseMPLinearKernel.can_implement(config) == (False, reason)
