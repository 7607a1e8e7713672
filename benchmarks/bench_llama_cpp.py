"""A GPT-2 of 124M parameters beside llama.cpp's q8_0 and q4_0 of the same weights, on this machine's CPU.

Needs `llama_cpp` (llama-cpp-python, built for the instruction set that is compared) and `gguf`. Both quantise the output
head too, so octofuse's models here do as well. Models take turns; medians.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import octofuse
from bench_cpu import LONG, NEW, PROMPT, ROUNDS, gpt2, turns
from octofuse import _C
from octofuse.models import quantize_
from octofuse.ops import cpu

SCHEMES = {"octofuse int8": "w8a8-dynamic", "octofuse 4 bits": "w4a16-g32"}


def write_gguf(model: Any, path: Path, kind: Any) -> None:
    """kind: gguf.GGMLQuantizationType of every matrix; vectors stay in fp32."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_feed_forward_length(4 * config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")

    def add(name: str, tensor: torch.Tensor) -> None:
        values = tensor.detach().float().contiguous().numpy()
        if values.ndim == 2 and name != "position_embd.weight":
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values.astype(np.float32))

    body = model.transformer
    add("token_embd.weight", body.wte.weight)
    add("position_embd.weight", body.wpe.weight)
    add("output.weight", model.lm_head.weight)
    for end in ("weight", "bias"):
        add(f"output_norm.{end}", getattr(body.ln_f, end))
    for i, block in enumerate(body.h):
        parts = {
            "attn_norm": block.ln_1, "attn_qkv": block.attn.c_attn, "attn_output": block.attn.c_proj,
            "ffn_norm": block.ln_2, "ffn_up": block.mlp.c_fc, "ffn_down": block.mlp.c_proj,
        }  # fmt: skip
        for name, part in parts.items():
            weight = part.weight.t() if part.weight.dim() == 2 else part.weight
            add(f"blk.{i}.{name}.weight", weight)
            add(f"blk.{i}.{name}.bias", part.bias)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_calls(path: Path, short: list[int], long: list[int]) -> dict[str, Callable[[], Any]]:
    from llama_cpp import Llama, llama_get_logits_ith

    threads = torch.get_num_threads()
    model = Llama(str(path), n_ctx=256, n_batch=256, n_threads=threads, n_threads_batch=threads, verbose=False)

    def run(prompt: list[int], count: int) -> None:
        model.reset()
        tokens = prompt
        for _ in range(count):
            model.eval(tokens)  # logits of the last token alone
            logits = np.ctypeslib.as_array(llama_get_logits_ith(model.ctx, -1), shape=(model.n_vocab(),))
            tokens = [int(logits.argmax())]

    return {"new tokens": lambda: run(short, NEW), "prompt": lambda: run(long, 1)}


def octofuse_calls(model: Any, short: list[int], long: list[int]) -> dict[str, Callable[[], Any]]:
    generator = octofuse.Generator(model)
    return {"new tokens": lambda: generator([short], NEW), "prompt": lambda: generator([long], 1)}


@torch.no_grad()
def run(smoke: bool) -> dict[str, Any]:
    import gguf

    model = gpt2("124M")
    g = torch.Generator().manual_seed(1)
    short, long = (torch.randint(0, 50257, (n,), generator=g).tolist() for n in (PROMPT, LONG))
    engines = {"octofuse fp32": octofuse_calls(model, short, long)}
    for name, scheme in SCHEMES.items():
        quantised = quantize_(copy.deepcopy(model), scheme, exceptions={"lm_head": scheme}, progress=False)
        engines[name] = octofuse_calls(quantised, short, long)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("Q8_0", "Q4_0"):
            path = Path(folder) / f"{name}.gguf"
            write_gguf(model, path, gguf.GGMLQuantizationType[name])
            engines[f"llama.cpp {name.lower()}"] = llama_calls(path, short, long)
        found = turns(engines, 2 if smoke else ROUNDS)
    rows = [
        {"engine": name, "tokens/s": NEW / times["new tokens"], "prompt ms": times["prompt"] * 1e3}
        for name, times in found.items()
    ]
    return {"cpu": cpu.name(), "isa": _C.cpu_info()["isa"], "threads": torch.get_num_threads(), "rows": rows}
