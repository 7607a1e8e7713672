"""Loading a Llama-3.1-8B of random weights from every format, and quantising it as it is loaded: seconds and memory.

Files are written to a temporary folder, 26 GB at a time, and read from the page cache. Memory
is what torch has allocated on the device: while loading at most, and afterwards. The rate is that of one sequence.
"""

from __future__ import annotations

import gc
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import octofuse
from bench_decode import NEW_TOKENS, PROMPT, timed_row
from models import build
from octofuse.generate import Generator
from octofuse.nn import linear_layers

WRITTEN = ("w8a8-dynamic", "w8a16", "w4a16-g128", "w4a16-g128-zp", "w4a16-g128-half")
ON_LOAD = ("w8a8-dynamic", "w4a16-g128")
GROUP = 128
GPTQ: dict[str, Any] = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": GROUP,
    "sym": True,
    "checkpoint_format": "gptq",
}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}


def random_words(layer: Any, form: dict[str, Any]) -> dict[str, Tensor]:
    """Any words are codes of some weight: those of GPTQ, with or without activation order, or of AWQ."""
    n, k = layer.weight.shape
    groups = k // GROUP
    words = lambda *shape: torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=layer.weight.device)  # noqa: E731
    found = {
        "scales": torch.full((groups, n), 0.05 * k**-0.5, dtype=layer.weight.dtype),
        "qzeros": torch.full((groups, n // 8), 0x77777777, dtype=torch.int32),  # 8, stored less one
    }
    if form["quant_method"] == "awq":
        return found | {"qweight": words(k, n // 8)}
    of_columns = torch.arange(k, dtype=torch.int32) // GROUP
    # One order for all linears of that width: those that read the same input have the same.
    order = torch.randperm(k, generator=torch.Generator().manual_seed(k)) if form["desc_act"] else torch.arange(k)
    return found | {"qweight": words(k // 8, n), "g_idx": of_columns[order]}


def write_words(model: Any, form: dict[str, Any], folder: Path) -> None:
    """One file: speed does not depend on their number."""
    linears = linear_layers(model)
    tensors = {name: t.cpu() for name, t in model.state_dict().items() if name.rpartition(".")[0] not in linears}
    for name, layer in linears.items():
        tensors |= {f"{name}.{own}": t.cpu().contiguous() for own, t in random_words(layer, form).items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {"quantization_config": form, "architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(config, default=str))


def peak(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else 0.0


def loaded_row(what: str, file: Path, load: Callable[[], nn.Module], device: torch.device) -> dict[str, Any]:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    began = time.perf_counter()
    model = load()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - began
    inside = sum(tensor.nbytes for tensor in {t.data_ptr(): t for t in model.state_dict().values()}.values())
    row = {
        "what": what, "s": seconds, "file GB": sum(path.stat().st_size for path in file.glob("*.safetensors")) / 1e9,
        "model GB": inside / 1e9, "peak GB": peak(device) - before / 1e9,
    }  # fmt: skip
    generator = Generator(model)
    return row | {"tokens/s": timed_row("", "", lambda count: generator([PROMPT], count), device)["tokens/s"]}


def run(smoke: bool) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = "tiny" if smoke else "Llama-3.1-8B"
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "float"
        source: Any = build(name, None, None, device).bfloat16()
        source.save_pretrained(plain)
        if not smoke:
            for what, form in (
                ("GPTQ, 4 bits", GPTQ | {"desc_act": False}),
                ("GPTQ, activation order", GPTQ | {"desc_act": True}),
                ("AWQ", AWQ),
            ):
                path = Path(folder) / form["quant_method"] / str(form.get("desc_act"))
                path.parent.mkdir(exist_ok=True)
                write_words(source, form, path)
                rows.append(loaded_row(what, path, lambda path=path: octofuse.from_pretrained(path, device), device))
                print(rows[-1], flush=True)
                shutil.rmtree(path)
        del source
        for scheme in WRITTEN[:2] if smoke else WRITTEN:
            config = octofuse.OctofuseConfig(scheme)
            on_load = lambda config=config: AutoModelForCausalLM.from_pretrained(  # noqa: E731
                plain, dtype=torch.bfloat16, quantization_config=config, device_map=str(device)
            )
            if scheme in ON_LOAD:
                rows.append(loaded_row(f"{scheme}, quantised on load", plain, on_load, device))
                print(rows[-1], flush=True)
            path = Path(folder) / scheme
            octofuse.save_pretrained(on_load(), path)
            gc.collect()
            rows.append(loaded_row(scheme, path, lambda path=path: octofuse.from_pretrained(path, device), device))
            print(rows[-1], flush=True)
            shutil.rmtree(path)
    return {"rows": rows, "new tokens": NEW_TOKENS}
