"""Loading models and texts for the commands."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from octofuse import _C
from octofuse.assets import CALIBRATION_TEXT, EVALUATION_TEXT
from octofuse.cli.files import expect_model, expect_tokenizer, folder_of, read_text
from octofuse.files import from_pretrained
from octofuse.files.headers import method_of
from octofuse.generate import generate
from octofuse.models import fallbacks, perplexity
from octofuse.models.architecture import decodes
from octofuse.parallel import shard_

CALIBRATION_BATCHES = 8
CALIBRATION_BATCH = 4


def pick_device(name: str) -> torch.device:
    """auto: the GPU if there is one and this build has kernels, else the CPU. ValueError if a named one is not there."""
    usable = torch.cuda.is_available() and bool(_C.build_info()["cuda"])
    if name == "auto":
        return torch.device("cuda" if usable else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device: expected auto, cpu or cuda[:N], got {name!r}") from error
    if device.type == "cuda" and not usable:
        reason = "no CUDA device" if not torch.cuda.is_available() else "this octofuse is CPU-only"
        raise ValueError(f"device: expected one that octofuse can use, got {name!r} ({reason})")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device: expected one of {torch.cuda.device_count()} CUDA devices, got {name!r}")
    return device


def quiet_transformers() -> None:
    """Its progress bars and advice would tear our tables."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # a line for every retry


def load_tokenizer(model: str) -> Any:
    quiet_transformers()
    from transformers import AutoTokenizer

    name = folder_of(model)
    expect_tokenizer(name)
    return AutoTokenizer.from_pretrained(name)


def load_float(
    model: str, device: torch.device, *, with_tokenizer: bool = True, for_gpu: bool | None = None
) -> tuple[Any, Any]:
    """A floating-point model (fp16 on a GPU, or for one, fp32 on the CPU) and its tokenizer. ValueError for a quantised
    one."""
    quiet_transformers()
    from transformers import AutoModelForCausalLM

    name = expect_model(model)
    if (method := method_of(Path(name))) is not None:
        raise ValueError(f"model: expected a floating-point model, got {name}, which is quantised already ({method})")
    if with_tokenizer:
        expect_tokenizer(name)
    dtype = torch.float16 if for_gpu or device.type == "cuda" else torch.float32
    loaded = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval().requires_grad_(False)
    return loaded, load_tokenizer(name) if with_tokenizer else None


def load_any(model: str, device: torch.device, mesh: Any = None) -> tuple[Any, Any]:
    """A quantised folder, of this library or another, or a floating-point model, with its tokenizer. Says so where an
    engine is slow here. mesh: of ranks, each of which keeps its part of the model."""
    for_gpu = device.type == "cuda"
    if mesh is not None and method_of(Path(model).expanduser()) is None:
        whole, tokenizer = load_float(model, torch.device("cpu"), for_gpu=for_gpu)
        return shard_(whole, mesh).to(device), tokenizer
    loaded, tokenizer = _load_any(model, device, mesh, for_gpu=for_gpu)
    if mesh is None:
        warn_of_fallbacks(loaded)
    return loaded, tokenizer


def _load_any(model: str, device: torch.device, mesh: Any = None, *, for_gpu: bool) -> tuple[Any, Any]:
    if method_of(Path(model).expanduser()) is None:
        return load_float(model, device, for_gpu=for_gpu)
    name = expect_model(model)
    expect_tokenizer(name)
    quiet_transformers()
    loaded = from_pretrained(name, device, dtype="auto" if for_gpu else torch.float32, mesh=mesh)
    return loaded, load_tokenizer(name)


def warn_of_fallbacks(model: nn.Module) -> None:
    for note in fallbacks(model):
        print(f"note: {note}", file=sys.stderr)


def encode(tokenizer: Any, text: str) -> Tensor:
    """Text -> int64 [T]."""
    ids: list[int] = tokenizer(text, return_attention_mask=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.long)


def context_of(model: nn.Module) -> int:
    """Tokens; 1024 where the model names no limit."""
    return int(getattr(model.config, "max_position_embeddings", None) or 1024)  # type: ignore[arg-type]


def calibration_batches(tokenizer: Any, model: Any, text: Path | None = None) -> list[Tensor]:
    """Up to 8 batches of 4 windows on the model's device. ValueError if the text is too short for one window."""
    path = text or CALIBRATION_TEXT
    tokens = encode(tokenizer, read_text("calibration", path))
    window = min(context_of(model), 512)
    windows = tokens[: tokens.numel() // window * window].view(-1, window)
    if windows.shape[0] == 0:
        raise ValueError(f"calibration: expected at least {window} tokens, got {tokens.numel()} in {path}")
    device = next(model.parameters()).device
    return [batch.to(device) for batch in windows.split(CALIBRATION_BATCH)[:CALIBRATION_BATCHES]]


def exceptions_of(words: list[str]) -> dict[str, str | None]:
    """["mlp.c_proj=w8a8-dynamic", "h.0.*=float"] -> what quantize_ takes. ValueError for other words."""
    found: dict[str, str | None] = {}
    for word in words:
        layers, equals, scheme = word.partition("=")
        if not (layers and equals and scheme):
            raise ValueError(f"except: expected LAYERS=SCHEME, got {word!r}")
        found[layers] = None if scheme == "float" else scheme
    return found


def evaluation_tokens(tokenizer: Any, text: Path | None = None) -> Tensor:
    path = text or EVALUATION_TEXT
    tokens = encode(tokenizer, read_text("text", path))
    if tokens.numel() < 2:
        raise ValueError(f"text: expected at least 2 tokens, got {tokens.numel()} in {path}")
    return tokens


def measure_perplexity(model: nn.Module, tokens: Tensor, description: str, stride: int | None = None) -> float:
    with progress(description) as on_window:
        return perplexity(model, tokens, context=window_of(model), stride=stride, on_window=on_window)


def window_of(model: nn.Module) -> int:
    """Tokens that evaluation shows a model at once."""
    return min(context_of(model), 512)


@contextmanager
def picture(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """matplotlib's axes of one figure, which is written at the end; the path is one that files.expect_picture took."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=size)
    yield axes
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


@contextmanager
def progress(description: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, if that is a terminal; what it gives is called with (done, all)."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, everything: None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(description)
        yield lambda done, everything: bar.update(task, completed=done, total=everything)


@torch.no_grad()
def generate_text(model: Any, tokenizer: Any, prompt: str, new_tokens: int, temperature: float, seed: int) -> str:
    """The prompt and its continuation. ValueError where both do not fit the model's context."""
    ids = encode(tokenizer, prompt).unsqueeze(0)
    if ids.shape[1] == 0:
        raise ValueError("prompt: expected at least one token, got none")
    context, length = context_of(model), ids.shape[1]
    if length >= context:
        raise ValueError(f"prompt: expected fewer than {context} tokens, the model's context, got {length}")
    if new_tokens > context - length:
        raise ValueError(
            f"new-tokens: expected at most {context - length}, what {length} tokens of prompt leave of the model's "
            f"context of {context}, got {new_tokens}"
        )
    end, count = tokenizer.eos_token_id, new_tokens
    if decodes(model):
        stops = [] if end is None else [end]
        new = generate(model, ids, count, temperature=temperature, seed=seed, stop_tokens=stops)[0]
    else:
        torch.manual_seed(seed)
        sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
        ids = ids.to(next(model.parameters()).device)
        mask = torch.ones_like(ids)
        output = model.generate(ids, attention_mask=mask, max_new_tokens=count, pad_token_id=end, **sampling)
        new = output[0, ids.shape[1] :].tolist()
    text: str = tokenizer.decode([*ids[0].tolist(), *new], skip_special_tokens=True)
    return text
