"""The kernels that vLLM gets, against the interface files of the real vLLM: its base classes, parameters, scalar types and
registry, loaded without the rest of it.

They are read from an installed vLLM, or from a folder OCTOFUSE_VLLM_FILES with its wheel unpacked.
"""

from __future__ import annotations

import ast
import enum
import importlib
import importlib.util
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import octofuse
from octofuse.files.words import pack_words


def files_of_vllm() -> Path | None:
    if named := os.environ.get("OCTOFUSE_VLLM_FILES"):
        return Path(named) / "vllm"
    found = importlib.util.find_spec("vllm")
    return None if found is None or found.origin is None else Path(found.origin).parent


FILES = files_of_vllm()
pytestmark = pytest.mark.skipif(FILES is None, reason="no vLLM here, and OCTOFUSE_VLLM_FILES names no files of one")

KERNELS = "vllm.model_executor.kernels"
QUANTIZATION = "vllm.model_executor.layers.quantization"
# Packages whose files are loaded one by one, so that their __init__ imports nothing.
PACKAGES = ("vllm", "vllm.model_executor", "vllm.model_executor.layers", "vllm.model_executor.layers.fusion", QUANTIZATION,
            KERNELS, f"{KERNELS}.linear", f"{KERNELS}.linear.scaled_mm", f"{KERNELS}.linear.mixed_precision")  # fmt: skip


E4M3 = torch.float8_e4m3fn


class PlatformEnum(enum.Enum):
    CUDA = 1
    CPU = 2


def parts_of(path: Path, names: tuple[str, ...], scope: dict[str, Any]) -> dict[str, Any]:
    """These classes, functions and assignments of a real file, alone, in a scope with what else they need."""

    def name_of(node: Any) -> str:
        return getattr(node, "name", None) or ast.unparse(node.targets[0] if hasattr(node, "targets") else node)

    nodes = [node for node in ast.parse(path.read_text()).body if name_of(node).split(".")[0] in names]
    exec(compile(ast.Module(nodes, []), str(path), "exec"), scope)
    return scope


def registry_of(files: Path) -> dict[str, Any]:
    """vLLM's lists of kernels, with its own `register_linear_kernel`."""
    lists = ("_POSSIBLE_KERNELS", "_POSSIBLE_INT8_KERNELS", "_POSSIBLE_FP8_KERNELS")
    scope: dict[str, Any] = {name: {PlatformEnum.CUDA: ["theirs", "other"]} for name in lists}
    source = files / "model_executor/kernels/linear/__init__.py"
    return parts_of(source, ("register_linear_kernel",), scope | {"PlatformEnum": PlatformEnum})


def keys_of(files: Path) -> dict[str, Any]:
    """vLLM's descriptions of a quantisation."""
    scope = {
        "torch": torch, "NamedTuple": NamedTuple, "ClassVar": ClassVar, "dataclass": dataclass, "ScalarType": object,
        "_dtype_abbr": str, "__name__": __name__,
    }  # fmt: skip
    names = ("_GroupShape", "GroupShape", "ScaleDesc", "QuantKey")
    return parts_of(files / "model_executor/layers/quantization/utils/quant_utils.py", names, scope)


class QuantFP8:
    """In place of vLLM's, which is one of its own kernels."""

    def __init__(self, static: bool, group_shape: Any, num_token_padding: int | None = None) -> None:
        self.by_token = group_shape.is_per_token()

    def __call__(self, x: Tensor, scale: Tensor | None, _: Tensor | None) -> tuple[Tensor, Tensor]:
        if scale is None and self.by_token:
            return octofuse.quantize_per_token(x, E4M3)
        found = x.float().abs().amax() / 448 if scale is None else scale
        return octofuse.quantize_per_tensor(x, found, E4M3), found


def module(name: str, **contents: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(contents)
    return made


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`octofuse.vllm.kernels` over the real interface."""
    assert FILES is not None
    for name in [name for name in sys.modules if name == "vllm" or name.startswith(("vllm.", "octofuse.vllm"))]:
        monkeypatch.delitem(sys.modules, name)
    for name in PACKAGES:
        package = module(name, __path__=[str(FILES.joinpath(*name.split(".")[1:]))])
        monkeypatch.setitem(sys.modules, name, package)
    platform = SimpleNamespace(
        is_cuda=lambda: True,
        get_device_capability=lambda: (9, 0),
        is_device_capability=lambda it: it == 90,
        use_sync_weight_loader=lambda: False,
        fp8_dtype=lambda: E4M3,
    )
    stubs = (
        module("vllm.logger", init_logger=logging.getLogger),
        module("vllm.platforms", PlatformEnum=PlatformEnum, current_platform=platform),
        module("vllm.distributed", get_tensor_model_parallel_rank=int, get_tensor_model_parallel_world_size=lambda: 1),
        module("vllm.model_executor.utils", replace_parameter=replaced),
        module(
            "vllm.model_executor.layers.fusion.quant_activation",
            QuantizedActivation=object,
            as_quantized_activation=lambda x, key: None,
        ),
        module(f"{QUANTIZATION}.input_quant_fp8", QuantFP8=QuantFP8),
        module(f"{QUANTIZATION}.utils.quant_utils", QuantKey=object),
    )
    importlib.invalidate_caches()
    for stub in stubs:
        monkeypatch.setitem(sys.modules, stub.__name__, stub)
    registry = sys.modules[f"{KERNELS}.linear"]
    scaled = importlib.import_module(f"{KERNELS}.linear.scaled_mm.ScaledMMLinearKernel")
    mixed = importlib.import_module(f"{KERNELS}.linear.mixed_precision.MPLinearKernel")
    vars(registry).update(
        registry_of(FILES), Int8ScaledMMLinearKernel=scaled.Int8ScaledMMLinearKernel, MPLinearKernel=mixed.MPLinearKernel,
        FP8ScaledMMLinearKernel=scaled.FP8ScaledMMLinearKernel,
        MPLinearLayerConfig=mixed.MPLinearLayerConfig,
    )  # fmt: skip
    found = importlib.import_module("octofuse.vllm.kernels")
    monkeypatch.setattr(found, "unsupported", lambda *_: None)
    yield SimpleNamespace(
        own=found, registry=registry, scaled=scaled, mixed=mixed,
        types=importlib.import_module("vllm.scalar_type").scalar_types,
        parameter=importlib.import_module("vllm.model_executor.parameter"), platform=platform,
    )  # fmt: skip
    for name in [name for name in sys.modules if name.startswith(("vllm.", "octofuse.vllm"))]:
        del sys.modules[name]


def replaced(layer: nn.Module, name: str, new: Tensor) -> None:
    setattr(layer, name, new)


NAMES = ("weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj")


def int8_layer(kernels: Any, *, static: bool, channels: bool, widths: list[int], k: int = 96) -> tuple[Any, nn.Module]:
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
    config = kernels.scaled.Int8ScaledMMLinearLayerConfig(static, channels, True, len(widths) > 1)
    assert kernels.own.OctofuseInt8LinearKernel.can_implement(config) == (True, None)
    return kernels.own.OctofuseInt8LinearKernel(config, NAMES), layer


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("widths", [[40], [32, 16, 16]])
def test_int8(kernels: Any, static: bool, channels: bool, widths: list[int]) -> None:
    kernel, layer = int8_layer(kernels, static=static, channels=channels, widths=widths)
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


def test_int8_declines_zero_points(kernels: Any) -> None:
    config = kernels.scaled.Int8ScaledMMLinearLayerConfig(False, True, False)
    assert kernels.own.OctofuseInt8LinearKernel.can_implement(config) == (
        False,
        "octofuse quantises activations without a zero point",
    )


@pytest.mark.parametrize("weights", ["PER_TENSOR", "PER_CHANNEL"])
@pytest.mark.parametrize(("activations", "static"), [("PER_TENSOR", True), ("PER_TENSOR", False), ("PER_TOKEN", False)])
def test_fp8(kernels: Any, weights: str, activations: str, static: bool) -> None:
    assert FILES is not None
    keys = keys_of(FILES)
    shapes, n, k = keys["GroupShape"], 48, 96

    def key(still: bool, shape: Any) -> Any:
        return keys["QuantKey"](E4M3, keys["ScaleDesc"](torch.float32, still, shape))

    of_both = [key(True, getattr(shapes, weights)), key(static, getattr(shapes, activations))]
    more = ((n, k), torch.bfloat16, torch.bfloat16)
    config = kernels.scaled.FP8ScaledMMLinearLayerConfig(*of_both, *more)
    own = kernels.own.OctofuseFP8LinearKernel
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
    blocks = kernels.scaled.FP8ScaledMMLinearLayerConfig(of_both[0], key(False, shapes(1, 128)), *more)
    served, reason = own.can_implement(blocks)
    assert not served
    assert reason.startswith("octofuse takes scales of tokens or one, got QuantKey(")


@pytest.mark.parametrize("input_first", [False, True])
@pytest.mark.parametrize(("bits", "zeros"), [(4, False), (4, True), (8, False), (2, True)])
@pytest.mark.parametrize("group", [-1, 32])
def test_weights_of_few_bits(kernels: Any, bits: int, zeros: bool, group: int, input_first: bool) -> None:
    """In either order of a weight's dimensions: files of compressed-tensors, and of GPTQ."""
    k, n = 128, 48
    g = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (n, k), generator=g)
    groups = 1 if group == -1 else k // group
    scale = torch.rand(groups, n, generator=g).half() / (1 << bits)
    zero = torch.randint(0, 1 << bits, (groups, n), generator=g) if zeros else torch.full((groups, n), 1 << bits - 1)
    kind = getattr(kernels.types, f"uint{bits}" if zeros else f"uint{bits}b{1 << bits - 1}")
    layer: Any = nn.Module()
    dims = {"input_dim": 0, "output_dim": 1} if input_first else {"input_dim": 1, "output_dim": 0}
    loader = {"weight_loader": lambda *_: None}
    words, scales = pack_words(codes, bits), scale.t().contiguous()
    packed_zeros = pack_words(zero, bits)  # [G, N / pack]
    if input_first:
        words, scales = words.t().contiguous(), scale
    else:
        packed_zeros = packed_zeros.t().contiguous()
    make = kernels.parameter
    pack = {"packed_factor": 32 // bits}
    layer.weight_packed = make.PackedvLLMParameter(data=words, packed_dim=dims["input_dim"], **dims, **pack, **loader)
    layer.weight_scale = make.GroupQuantScaleParameter(data=scales, **dims, **loader)
    if zeros:
        layer.weight_zero_point = make.PackedvLLMParameter(
            data=packed_zeros, packed_dim=dims["output_dim"], **dims, **pack, **loader
        )
    config = kernels.mixed.MPLinearLayerConfig((k, n), (k, n), kind, torch.float16, group, zeros)
    assert kernels.own.OctofuseMPLinearKernel.can_implement(config) == (True, None)
    kernel = kernels.own.OctofuseMPLinearKernel(config, "weight_packed", "weight_scale", "weight_zero_point")
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
def test_w4a8(kernels: Any, group: int | None, dtype: torch.dtype) -> None:
    """CompressedTensorsW4A8Int: signed codes as int8, one parameter under two names; a row's scale is a group of all K."""
    k, n = 160, 48
    g = torch.Generator().manual_seed(k)
    codes = torch.randint(-8, 8, (n, k), generator=g, dtype=torch.int8)
    groups = 1 if group is None else k // group
    scale = (torch.rand(n, groups, generator=g) / 50 + 0.001).to(dtype)
    layer: Any = nn.Module()
    make, loader = kernels.parameter, {"weight_loader": lambda *_: None}
    weight = make.ModelWeightParameter(data=codes.clone(), input_dim=1, output_dim=0, **loader)
    layer.weight = layer.weight_packed = weight
    layer.weight_scale = make.GroupQuantScaleParameter(data=scale.clone(), input_dim=1, output_dim=0, **loader)
    own = kernels.own.OctofuseMPLinearKernel
    config = kernels.mixed.MPLinearLayerConfig((k, n), (k, n), kernels.types.int4, dtype, group or k, False)
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
def test_int8_tokens_of_packed_files(kernels: Any, bits: int, strategy: str, symmetric: bool) -> None:
    """CompressedTensorsWNA8Int, which says so beside the kernel's interface."""
    k, n = 128, 48
    codes = torch.randint(0, 1 << bits, (n, k), generator=torch.Generator().manual_seed(bits))
    scale = (torch.rand(n, 1) / 50 + 0.001).half()
    zero = torch.full((n, 1), 1 << bits - 1)
    kind = getattr(kernels.types, f"uint{bits}b{1 << bits - 1}" if symmetric else f"uint{bits}")
    layer: Any = nn.Module()
    make, more = kernels.parameter, {"input_dim": 1, "output_dim": 0, "weight_loader": lambda *_: None}
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
    config = kernels.mixed.MPLinearLayerConfig((k, n), (k, n), kind, torch.float16, -1, not symmetric)
    kernel = kernels.own.OctofuseMPLinearKernel(config, "weight_packed", "weight_scale", "weight_zero_point")
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
def test_what_is_declined(kernels: Any, change: dict[str, Any], reason: str) -> None:
    given = {"weight_type": "uint4b8", "act_type": torch.float16, "group_size": 128, "zero_points": False} | change
    kind = getattr(kernels.types, given.pop("weight_type"))
    config = kernels.mixed.MPLinearLayerConfig((256, 64), (256, 64), kind, **given)
    assert kernels.own.OctofuseMPLinearKernel.can_implement(config) == (False, reason)


@pytest.mark.parametrize("place", ["last", "first", "off"])
def test_registering(kernels: Any, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTOFUSE_VLLM", place)
    register = importlib.import_module("octofuse.vllm").register
    for _ in range(2):  # vLLM loads plug-ins in each of its processes, some of them twice
        register()
    for found, own in (
        (kernels.registry._POSSIBLE_INT8_KERNELS, kernels.own.OctofuseInt8LinearKernel),
        (kernels.registry._POSSIBLE_FP8_KERNELS, kernels.own.OctofuseFP8LinearKernel),
        (kernels.registry._POSSIBLE_KERNELS, kernels.own.OctofuseMPLinearKernel),
    ):
        theirs = ["theirs", "other"]
        want = {"last": [*theirs, own], "first": [own, *theirs], "off": theirs}[place]
        assert found[PlatformEnum.CUDA] == want
    monkeypatch.setenv("OCTOFUSE_VLLM", "maybe")
    with pytest.raises(ValueError, match="OCTOFUSE_VLLM: expected last, first, off, got 'maybe'"):
        register()


def test_another_interface_is_no_error(
    kernels: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(kernels.registry, "register_linear_kernel")
    monkeypatch.delitem(sys.modules, "octofuse.vllm.kernels")
    importlib.import_module("octofuse.vllm").register()
    assert "octofuse registers no kernels: this vLLM has another interface (ImportError: " in caplog.text


def test_where_it_is_supported(kernels: Any) -> None:
    source = importlib.util.find_spec("octofuse.vllm.kernels")
    assert source is not None
    plain = importlib.util.module_from_spec(source)
    assert source.loader is not None
    source.loader.exec_module(plain)
    built = bool(octofuse._C.build_info()["cuda"])  # type: ignore[attr-defined]
    assert plain.unsupported(75) == (
        "octofuse needs compute capability 80, got 75" if built else "this octofuse was built for the CPU only"
    )
    kernels.platform.is_cuda = lambda: False
    assert plain.OctofuseInt8LinearKernel.is_supported(90) == (False, "octofuse's kernels need CUDA")
