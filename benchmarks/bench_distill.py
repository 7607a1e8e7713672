"""What training wins back of what quantisation lost, and how long it takes, on models that are made here, from text that
every machine with PyTorch has.

Three models of different families, widths and depths, each on a text of its own: Python files, C++ headers, and the
docstrings of those Python files. One file in fifty is set aside, and what is said of a model is said of these.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import math
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from octofuse import own_text
from octofuse.models import compare, distill_, distill_blocks_, quantize_
from train_embedded import CONTEXT, VOCABULARY, tokenizer_of

ASIDE = 50  # one file in so many, for evaluation
SCHEMES = ("w4a16-g128-zp-gptq", "w3a16-g128-half-gptq", "w2a16-g128-half-gptq", "bcq-q2-g128")
SITE = Path(sysconfig.get_paths()["purelib"])
HEADERS = (Path(torch.__file__).parent / "include", Path("/usr/local/cuda/include"), Path("/usr/include"))


@dataclass(frozen=True)
class Amounts:
    characters: int = 40_000_000  # of text
    training: int = 2500  # steps that make the model, of 64 windows
    batch: int = 64
    own: int = 1024  # batches that it writes
    steps: int = 2000  # of distill_
    aside: int = 150_000  # tokens
    window: int = CONTEXT


SMOKE = Amounts(characters=400_000, training=2, batch=2, own=1, steps=2, aside=512, window=32)


# ---- text ----


def files_of(kind: str) -> Iterator[str]:
    """In an order that no directory decides."""
    endings, roots = ((".h", ".hpp", ".cuh"), HEADERS) if kind == "headers" else ((".py",), (SITE,))
    found = {path.resolve() for root in roots if root.is_dir() for path in root.rglob("*") if path.suffix in endings}
    for path in sorted(found, key=lambda path: hashlib.sha256(path.name.encode()).digest()):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if kind == "docstrings":
            text = docstrings_of(text)
        if 300 < len(text) < 200_000:
            yield text


def docstrings_of(text: str) -> str:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return ""
    nodes = (n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef))
    return "\n\n".join(found for node in nodes if (found := ast.get_docstring(node)))


def tokens_of(kind: str, amounts: Amounts) -> tuple[Tensor, Tensor]:
    """For training, and set aside: int64 [T] each, by a tokenizer of their own."""
    found_texts: dict[str, None] = {}  # in order, copies of a file once
    length = 0
    for text in files_of(kind):
        length += 0 if text in found_texts else len(text)
        found_texts[text] = None
        if length > amounts.characters:
            break
    texts = list(found_texts)
    aside, training = texts[::ASIDE], [t for i, t in enumerate(texts) if i % ASIDE]
    tokenizer = tokenizer_of(training[::4])
    found = ([token for e in tokenizer.encode_batch(some) for token in [*e.ids, 0]] for some in (training, aside))
    first, second = (torch.tensor(stream) for stream in found)
    return first, second[: amounts.aside]


# ---- models ----


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=384, n_layer=8, n_head=6, **ends)
    )


def llama(width: int, inner: int, layers: int, key_heads: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
            num_attention_heads=width // 64, num_key_value_heads=key_heads, max_position_embeddings=CONTEXT,
            tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


MODELS = {
    "GPT-2, 8 x 384": ("python", gpt2),
    "Llama, 6 x 320": ("headers", lambda: llama(320, 864, 6, 1)),
    "Llama, 4 x 512": ("docstrings", lambda: llama(512, 1408, 4, 4)),
}


def trained(model: nn.Module, tokens: Tensor, amounts: Amounts, device: str) -> nn.Module:
    model = model.to(device).train()
    parameters = [{"params": [p for p in model.parameters() if (p.dim() > 1) == big]} for big in (True, False)]
    parameters[1]["weight_decay"] = 0.0  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(parameters, lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.1)
    tokens = tokens.to(device)
    generator = torch.Generator(device).manual_seed(3)
    offsets = torch.arange(amounts.window, device=device)
    for step in range(amounts.training):
        part = min(1.0, (step + 1) / 200) * (1 + math.cos(math.pi * step / amounts.training)) / 2
        for group in optimizer.param_groups:
            group["lr"] = 1.5e-3 * max(part, 0.03)
        first = torch.randint(len(tokens) - amounts.window, (amounts.batch, 1), generator=generator, device=device)
        ids = tokens[first + offsets]
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(ids, use_cache=False).logits[:, :-1]
        loss = cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval().requires_grad_(False)


# ---- what is measured ----


def rows_of(name: str, amounts: Amounts, device: str, schemes: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    torch.manual_seed(7)
    kind, make = MODELS[name]
    training, aside = tokens_of(kind, amounts)
    teacher = trained(make(), training, amounts, device).to(torch.float16 if device == "cuda" else torch.float32)
    width = amounts.window
    calibration = list(training[: 32 * width].view(-1, 4, width).to(device))
    began = time.perf_counter()
    text = calibration + own_text(teacher, calibration, amounts.own, seed=1)
    wrote = time.perf_counter() - began
    for scheme in schemes:
        start = quantize_(copy.deepcopy(teacher), scheme, calibration, progress=False)
        for how in ("all at once", "by blocks"):
            model = copy.deepcopy(start)
            began = time.perf_counter()
            if how == "all at once":
                distill_(model, teacher, text, steps=amounts.steps, codes=True, progress=False)
            else:
                few = text[:136]
                of_each = max(1, amounts.steps // teacher.config.num_hidden_layers)
                distill_blocks_(model, teacher, few, steps=of_each, codes=True, progress=False)
                distill_(model, teacher, few, steps=max(1, amounts.steps // 4), progress=False)
            took = time.perf_counter() - began
            row: dict[str, Any] = {"model": name, "text": kind, "scheme": scheme, "how": how}
            for when, one in (("before", start), ("after", model)):
                found = compare(one, teacher, aside, context=width, layers=False)
                row |= {"float": round(found.reference_perplexity, 3), f"KL {when}": round(found.kl, 4)}
                row[f"loss {when}, %"] = round(found.cost * 100, 2)
            yield row | {"steps": amounts.steps, "writing, s": round(wrote, 1), "training, s": round(took, 1)}


def run(smoke: bool) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    amounts = SMOKE if smoke else Amounts()
    names, schemes = (list(MODELS)[:1], SCHEMES[2:3]) if smoke else (list(MODELS), SCHEMES)
    return {"rows": [row for name in names for row in rows_of(name, amounts, device, schemes)]}
