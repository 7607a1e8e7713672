"""Fixed scales of an FP8 cache: measured, written, read from files of others, and what a generator makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import octofuse
from checkpoints import write_folder
from helpers import DEVICES, PROMPTS, command
from octofuse.engine import Decoder
from octofuse.files import cache_scales
from octofuse.files.cache_scales import NAMES
from octofuse.models import quantize_
from octofuse.nn import EightBitLinear
from octofuse.ops.cache import decoded, encoded
from test_engine_families import decoded_logits, made, on_gpu
from test_files import model_of

TOKENS = torch.randint(1, 97, (2, 11), generator=torch.Generator().manual_seed(1))


def attention(model: Any, block: int = 0) -> Any:
    return model.model.layers[block].self_attn


def calibrated(kind: str = "llama") -> Any:
    model = model_of(kind)
    octofuse.calibrate_cache_(model, [TOKENS])
    return model


def test_codes_of_a_fixed_scale() -> None:
    x = torch.tensor([[0.0, 1.0, -0.25, 448.0], [500.0, -1e9, 3.0, torch.nan]])
    codes, scales = encoded(x, torch.uint8, 0.5)
    assert torch.equal(scales, torch.tensor([0.5, 0.5]))
    want = torch.tensor([[0.0, 1.0, -0.25, 224.0], [224.0, -224.0, 3.0, torch.nan]])
    assert torch.equal(decoded(codes, scales, torch.float32).nan_to_num(-1), want.nan_to_num(-1))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "gpt_neox"])
def test_scales_are_the_largest_keys_and_values(kind: str) -> None:
    """As the cache of a model in floating point has them, over all batches; and written where the attention is."""
    model = model_of(kind)
    first, second = TOKENS[:1], TOKENS[1:, :7]
    found = octofuse.calibrate_cache_(model, iter([first, second]))
    decoder = Decoder(model)
    most = []
    for ids in (first, second):
        cache = decoder.new_cache(1, ids.shape[1])
        decoder.prefill(ids, torch.tensor([ids.shape[1]]), cache)
        most.append(cache.codes.abs().flatten(2).amax(-1))
    assert torch.equal(torch.tensor(found), torch.maximum(*most) / 448)
    names = sorted(name for name in model.state_dict() if name.endswith(("k_scale", "v_scale")))
    assert len(names) == 2 * len(found)
    assert "attn" in names[0] or "attention" in names[0]


@pytest.mark.parametrize("device", DEVICES)
def test_generation_with_fixed_scales(device: str) -> None:
    model = made("llama", {"num_key_value_heads": 2})
    octofuse.calibrate_cache_(model, [TOKENS, torch.arange(1, 31).view(1, -1)])
    model = on_gpu(model) if device == "cuda" else model
    tokens = TOKENS.to(device)
    want = model(tokens).logits[:, 5:].float()
    got = decoded_logits(model, tokens, 6, "fp8-static").float()
    assert 1e-4 < float((got - want).norm() / want.norm()) < 0.06
    generator = octofuse.Generator(model, cache="fp8-static")
    together = generator(PROMPTS, 9)
    assert together == [generator([prompt], 9)[0] for prompt in PROMPTS]
    for block in model.model.layers:  # far too small: everything is cut off
        cache_scales.keep(block.self_attn, 1e-6, 1e-6)
    cut = decoded_logits(model, tokens, 6, "fp8-static").float()
    assert float((cut - want).norm()) > 2 * float((got - want).norm())


@pytest.mark.gpu
def test_kernels_and_torch_give_the_same_codes() -> None:
    model = on_gpu(calibrated())
    caches = []
    for fused in (True, False):
        decoder = Decoder(model, "fp8-static")
        decoder.fused = decoder.fused and fused
        cache = decoder.new_cache(2, 64)
        decoder.prefill(TOKENS.cuda()[:, :-1], torch.tensor([10, 10], device="cuda"), cache)
        decoder.step(TOKENS.cuda()[:, -1], torch.tensor([10, 10], device="cuda"), cache)
        caches.append(cache)
    kernels, steps = caches
    assert kernels.scratch is not None
    assert steps.scratch is None
    written = (slice(None), slice(None), slice(None), slice(None), slice(0, 11))
    assert torch.equal(kernels.scales[written], steps.scales[written])
    # Rotation by a kernel and by torch may differ by an ulp, which may lie on a code's edge: one code further at most.
    pair = [c.codes[written].view(torch.float8_e4m3fn).float() for c in caches]
    assert ((pair[0] - pair[1]).abs() <= pair[1].abs() / 8 + 2**-9).all()
    assert (pair[0] == pair[1]).float().mean() > 0.99


@pytest.mark.parametrize("scheme", ["fp8-dynamic", "w4a16-g32", "w8a8-dynamic"])
@pytest.mark.parametrize("form", ["compressed-tensors", "octofuse"])
def test_written_and_read_again(form: str, scheme: str, tmp_path: Path) -> None:
    model = quantize_(calibrated(), scheme, progress=False)
    octofuse.save_pretrained(model, tmp_path / "a", format=form)
    config = json.loads((tmp_path / "a/config.json").read_text())["quantization_config"]
    if form == "compressed-tensors":
        known = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
        assert config["kv_cache_scheme"] == known
    for dtype in (torch.float32, torch.bfloat16):
        again = octofuse.from_pretrained(tmp_path / "a", dtype=dtype)
        for block in range(2):
            assert cache_scales.of(attention(again, block)) == cache_scales.of(attention(model, block))
    octofuse.Generator(again, cache="fp8-static")(PROMPTS, 3)
    octofuse.save_pretrained(again, tmp_path / "b", format=form)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    name = "model.layers.1.self_attn.k_scale"
    assert first[name].shape == (1,)
    assert torch.equal(first[name], second[name])


def fp8_file(more: dict[str, Tensor], folder: Path, method: str = "modelopt") -> Path:
    """Of one scale a weight, with further tensors."""
    model = model_of("llama")
    ours: Any = quantize_(model_of("llama"), "fp8-static-tensor", [TOKENS], progress=False)
    tensors: dict[str, Tensor] = {}
    for name, layer in ours.named_modules():
        if isinstance(layer, EightBitLinear):
            tensors |= {f"{name}.weight": layer.weight.detach(), f"{name}.weight_scale": layer.weight_scale.view(()),
                        f"{name}.input_scale": layer.input_scale}  # fmt: skip
    config = {"quant_method": method, "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    write_folder(model, folder, tensors, config)
    from safetensors.torch import save_file

    whole = load_file(folder / "model.safetensors")
    save_file(whole | more, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "names",
    [("k_proj.k_scale", "v_proj.v_scale"), ("k_scale", "v_scale"), ("k_proj.output_scale", "v_proj.output_scale")],
)
def test_files_of_others(names: tuple[str, str], tmp_path: Path) -> None:
    """ModelOpt's names, compressed-tensors' and older ones."""
    more = {f"model.layers.{i}.self_attn.{name}": torch.tensor([0.25 * (i + 1), 0.5][j]).view(1)
            for i in range(2) for j, name in enumerate(names)}  # fmt: skip
    read = octofuse.from_pretrained(fp8_file(more, tmp_path))
    assert [cache_scales.of(attention(read, i)) for i in range(2)] == [(0.25, 0.5), (0.5, 0.5)]
    octofuse.Generator(read, cache="fp8-static")(PROMPTS, 2)


def test_scales_that_no_cache_here_has(tmp_path: Path) -> None:
    """Left out: of each head, one of the two alone, of another type; what is asked for without them says so."""
    at = "model.layers.1.self_attn"
    ones = {f"{at}.k_scale": torch.ones(1), f"{at}.v_scale": torch.ones(1)}
    others = [ones | {f"{at}.k_scale": torch.ones(2)}, ones | {f"{at}.v_scale": torch.ones(1).int()}]
    others += [{f"{at}.k_scale": torch.ones(1)}, {f"{at}.attn.k_scale": torch.ones(1)}]
    for i, other in enumerate(others):
        read = octofuse.from_pretrained(fp8_file(other, tmp_path / str(i)))
        assert cache_scales.of(attention(read, 1)) is None
    read = octofuse.from_pretrained(fp8_file(ones, tmp_path / "one block"))
    assert cache_scales.of(attention(read, 1)) == (1.0, 1.0)
    assert cache_scales.scheme_of(read) is None, "not all blocks"
    with pytest.raises(ValueError, match=r"has k_scale and v_scale, .* for 'fp8-static', got none in block 0"):
        octofuse.Generator(read, cache="fp8-static")
    zero = {name: torch.zeros(1) for name in ones}
    read = octofuse.from_pretrained(
        fp8_file(zero | {n.replace("1.", "0.", 1): t for n, t in ones.items()}, tmp_path / "z")
    )
    octofuse.save_pretrained(read, tmp_path / "written")
    with pytest.raises(ValueError, match=r"k_scale: expected a finite number above 0, got 0\.0"):
        octofuse.Generator(read, cache="fp8-static")


def test_a_float_model_keeps_none(tmp_path: Path) -> None:
    calibrated().save_pretrained(tmp_path)
    assert cache_scales.of(attention(octofuse.from_pretrained(tmp_path))) is None


def test_what_calibration_refuses() -> None:
    model = model_of("llama")
    for batches, message in (
        ([], "batches: expected at least one, got none"),
        ([TOKENS, TOKENS.float()], r"batches\[1\]: expected token ids, int64 \[B, T\], got torch\.float32 \[2, 11\]"),
        ([TOKENS[0]], r"batches\[0\]: expected token ids, int64 \[B, T\], got torch\.int64 \[11\]"),
        ([TOKENS[:, :0]], r"got torch\.int64 \[2, 0\]"),
        ([torch.ones(1, 4096, dtype=torch.int64)], r"batches: expected at most the model's \d+ tokens, got 4096"),
    ):
        with pytest.raises(ValueError, match=message):
            octofuse.calibrate_cache_(model, batches)
    assert cache_scales.of(attention(model)) is None
    attention(model).k_proj.weight.data[0, 0] = torch.inf
    with pytest.raises(ValueError, match="batches: expected finite keys and values"):
        octofuse.calibrate_cache_(model, [TOKENS])


def test_the_command(tmp_path: Path) -> None:
    assert (
        command("quantize", "embedded", "-o", str(tmp_path / "a"), "--scheme", "w8a8-dynamic", "--cache-scales")[0] == 0
    )
    read = octofuse.from_pretrained(tmp_path / "a")
    octofuse.Generator(read, cache="fp8-static")([[1, 2, 3]], 3)
    smoothed = ("--scheme", "w8a8-dynamic-smooth-values", "--format", "octofuse", "--cache-scales")
    assert command("quantize", "embedded", "-o", str(tmp_path / "c"), *smoothed)[0] == 0
    other = octofuse.from_pretrained(tmp_path / "c")
    smooth, plain = (one.transformer.h[0].attn for one in (other, read))
    keys, values = (getattr(smooth, name) / getattr(plain, name) for name in NAMES)
    assert abs(float(keys) - 1) < 0.05 < abs(float(values) - 1), "measured behind smoothing"
    code, _, error = command("quantize", "embedded", "-o", str(tmp_path / "b"), "--cache-scales", "--no-tokenizer")
    assert code == 1
    assert "--cache-scales" in error
