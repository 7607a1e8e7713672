"""Loading models and texts for the commands."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from octofuse import _C
from octofuse.assets import CALIBRATION_TEXT, EMBEDDED, EVALUATION_TEXT
from octofuse.generate import generate
from octofuse.models import gpt2, load, perplexity
from octofuse.models.checkpoint import is_checkpoint

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


def _resolve(model: str) -> str:
    return str(EMBEDDED) if model == "embedded" else model


def load_tokenizer(model: str) -> Any:
    quiet_transformers()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(_resolve(model))


def load_float(model: str, device: torch.device) -> tuple[Any, Any]:
    """A floating-point model (fp16 on a GPU, fp32 on the CPU) and its tokenizer. ValueError for a quantised one."""
    quiet_transformers()
    from transformers import AutoModelForCausalLM

    name = _resolve(model)
    if is_checkpoint(name):
        raise ValueError(f"model: expected a floating-point model, got {name}, which octofuse has quantised already")
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    loaded = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval().requires_grad_(False)
    return loaded, load_tokenizer(name)


def load_any(model: str, device: torch.device) -> tuple[Any, Any]:
    """A quantised folder or a floating-point model, with its tokenizer."""
    name = _resolve(model)
    if is_checkpoint(name):
        return load(name, device), load_tokenizer(name)
    return load_float(name, device)


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
    tokens = encode(tokenizer, path.read_text(encoding="utf-8"))
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
    tokens = encode(tokenizer, path.read_text(encoding="utf-8"))
    if tokens.numel() < 2:
        raise ValueError(f"text: expected at least 2 tokens, got {tokens.numel()} in {path}")
    return tokens


def measure_perplexity(model: nn.Module, tokens: Tensor, description: str, stride: int | None = None) -> float:
    with progress(description) as on_window:
        return perplexity(model, tokens, context=window_of(model), stride=stride, on_window=on_window)


def window_of(model: nn.Module) -> int:
    """Tokens that evaluation shows a model at once."""
    return min(context_of(model), 512)


def expect_picture(plot: Path | None) -> None:
    """Before the work whose result it shows: ValueError for another kind of file, ImportError without matplotlib."""
    if plot is None:
        return
    if plot.suffix not in (".png", ".svg"):
        raise ValueError(f"plot: expected a name that ends in .png or .svg, got {plot.name!r}")
    if find_spec("matplotlib") is None:
        raise ImportError("drawing needs matplotlib: pip install 'octofuse[plots]'")


@contextmanager
def picture(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """matplotlib's axes of one figure, which is written at the end; the path is one that expect_picture took."""
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
    """A bar on stderr; what it gives is called with (done, all)."""
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description)
        yield lambda done, everything: bar.update(task, completed=done, total=everything)


@torch.no_grad()
def generate_text(model: Any, tokenizer: Any, prompt: str, new_tokens: int, temperature: float, seed: int) -> str:
    """The prompt and its continuation, at most as long as the model's context."""
    ids = encode(tokenizer, prompt).unsqueeze(0)
    if ids.shape[1] == 0:
        raise ValueError("prompt: expected at least one token, got none")
    room = context_of(model) - ids.shape[1]
    if room < 1:
        raise ValueError(f"prompt: expected fewer than {context_of(model)} tokens, got {ids.shape[1]}")
    end, count = tokenizer.eos_token_id, min(new_tokens, room)
    if gpt2.matches(model):
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
