"""The kernels that vLLM gets for int8 and FP8, and how they are registered (`vllm_interface.py`)."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

import octofuse
from vllm_interface import E4M3, FILES, PlatformEnum, keys_of, needs_files

pytestmark = needs_files


NAMES = ("weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj")


def int8_layer(vllm: Any, *, static: bool, channels: bool, widths: list[int], k: int = 96) -> tuple[Any, nn.Module]:
    g = torch.Generator().manual_seed(len(widths))
    layer: Any = nn.Module()
    n = sum(widths)
    layer.logical_widths = widths
    layer.weight = nn.Parameter(torch.randint(-127, 128, (n, k), generator=g, dtype=torch.int8), requires_grad=False)
    scales = (n, 1) if channels else (len(widths),)
    layer.weight_scale = nn.Parameter(torch.rand(scales, generator=g) / 100 + 0.001, requires_grad=False)
    parts = torch.rand(len(widths), generator=g) / 10 + 0.01 if static else None
    layer.input_scale = None if parts is None else nn.Parameter(parts, requires_grad=False)
    layer.input_zero_point = layer.azp_adj = None
    config = vllm.scaled.Int8ScaledMMLinearLayerConfig(static, channels, True, len(widths) > 1)
    assert vllm.own.OctofuseInt8LinearKernel.can_implement(config) == (True, None)
    return vllm.own.OctofuseInt8LinearKernel(config, NAMES), layer


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("widths", [[40], [32, 16, 16]])
def test_int8(vllm: Any, static: bool, channels: bool, widths: list[int]) -> None:
    kernel, layer = int8_layer(vllm, static=static, channels=channels, widths=widths)
    weight = layer.weight.clone().float()
    scale = layer.weight_scale.flatten()
    if not channels:
        scale = scale.repeat_interleave(torch.tensor(widths))
    input_scale = None if not static else layer.input_scale.max()
    kernel.process_weights_after_loading(layer)
    kernel.process_weights_after_loading(layer)  # as vLLM does when weights are loaded again
    x, bias = torch.randn(3, 5, 96), torch.randn(sum(widths))
    step = x.abs().amax(-1, keepdim=True) / 127 if input_scale is None else input_scale
    codes = (x / step).round().clamp(-127, 127)
    want = linear(codes, weight) * step * scale + bias
    got = kernel.apply_weights(layer, x, bias)
    assert got.shape == (3, 5, sum(widths))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
    for rows in (x[1, 2:3], x[2]):
        alone = kernel.apply_weights(layer, rows, bias)
        assert torch.equal(alone, got[1, 2:3] if rows.shape[0] == 1 else got[2]), "no token depends on the others"
    torch._dynamo.reset()
    compiled = torch.compile(lambda y: kernel.apply_weights(layer, y, bias), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), got)


def test_int8_declines_zero_points(vllm: Any) -> None:
    config = vllm.scaled.Int8ScaledMMLinearLayerConfig(False, True, False)
    assert vllm.own.OctofuseInt8LinearKernel.can_implement(config) == (
        False,
        "octofuse quantises activations without a zero point",
    )


@pytest.mark.parametrize("weights", ["PER_TENSOR", "PER_CHANNEL"])
@pytest.mark.parametrize(("activations", "static"), [("PER_TENSOR", True), ("PER_TENSOR", False), ("PER_TOKEN", False)])
def test_fp8(vllm: Any, weights: str, activations: str, static: bool) -> None:
    assert FILES is not None
    keys = keys_of(FILES)
    shapes, n, k = keys["GroupShape"], 48, 96

    def key(still: bool, shape: Any) -> Any:
        return keys["QuantKey"](E4M3, keys["ScaleDesc"](torch.float32, still, shape))

    of_both = [key(True, getattr(shapes, weights)), key(static, getattr(shapes, activations))]
    more = ((n, k), torch.bfloat16, torch.bfloat16)
    config = vllm.scaled.FP8ScaledMMLinearLayerConfig(*of_both, *more)
    own = vllm.own.OctofuseFP8LinearKernel
    assert own.can_implement(config) == (True, None)
    kernel = own(config, ("weight", "weight_scale", "input_scale", "input_scale_ub"))
    layer: Any = nn.Module()
    w = torch.randn(n, k).to(E4M3)
    layer.weight = nn.Parameter(w.t(), requires_grad=False)  # as vLLM's methods leave it
    scale = torch.rand(n, 1) / 50 if weights == "PER_CHANNEL" else torch.tensor(0.02)
    layer.weight_scale = nn.Parameter(scale, requires_grad=False)
    layer.input_scale = nn.Parameter(torch.tensor(0.01), requires_grad=False) if static else None
    kernel.process_weights_after_loading(layer)
    x, bias = torch.randn(2, 3, k).bfloat16(), torch.randn(n).bfloat16()
    got = kernel.apply_weights(layer, x, bias)
    q, step = kernel.quant_fp8(x.view(-1, k), layer.input_scale, None)
    want = linear(q.double() * step.double(), w.double() * layer.weight_scale.double(), bias.double())
    assert got.shape == (2, 3, n)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double().view(-1, n), want, rtol=1e-2, atol=1e-2)
    blocks = vllm.scaled.FP8ScaledMMLinearLayerConfig(of_both[0], key(False, shapes(1, 128)), *more)
    served, reason = own.can_implement(blocks)
    assert not served
    assert reason.startswith("octofuse takes scales of tokens or one, got QuantKey(")


@pytest.mark.parametrize("place", ["last", "first", "off"])
def test_registering(vllm: Any, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTOFUSE_VLLM", place)
    register = importlib.import_module("octofuse.vllm").register
    for _ in range(2):  # vLLM loads plug-ins in each of its processes, some of them twice
        register()
    for found, own in (
        (vllm.registry._POSSIBLE_INT8_KERNELS, vllm.own.OctofuseInt8LinearKernel),
        (vllm.registry._POSSIBLE_FP8_KERNELS, vllm.own.OctofuseFP8LinearKernel),
        (vllm.registry._POSSIBLE_KERNELS, vllm.own.OctofuseMPLinearKernel),
    ):
        theirs = ["theirs", "other"]
        want = {"last": [*theirs, own], "first": [own, *theirs], "off": theirs}[place]
        assert found[PlatformEnum.CUDA] == want
    monkeypatch.setenv("OCTOFUSE_VLLM", "maybe")
    with pytest.raises(ValueError, match="OCTOFUSE_VLLM: expected last, first, off, got 'maybe'"):
        register()


def test_another_interface_is_no_error(
    vllm: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(vllm.registry, "register_linear_kernel")
    monkeypatch.delitem(sys.modules, "octofuse.vllm.kernels")
    importlib.import_module("octofuse.vllm").register()
    assert "octofuse registers no kernels: this vLLM has another interface (ImportError: " in caplog.text


def test_where_it_is_supported(vllm: Any) -> None:
    source = importlib.util.find_spec("octofuse.vllm.kernels")
    assert source is not None
    plain = importlib.util.module_from_spec(source)
    assert source.loader is not None
    source.loader.exec_module(plain)
    built = bool(octofuse._C.build_info()["cuda"])  # type: ignore[attr-defined]
    assert plain.unsupported(75) == (
        "octofuse needs compute capability 80, got 75" if built else "this octofuse was built for the CPU only"
    )
    vllm.platform.is_cuda = lambda: False
    assert plain.OctofuseInt8LinearKernel.is_supported(90) == (False, "octofuse's kernels need CUDA")
