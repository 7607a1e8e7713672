"""Train the GPT-2 that ships inside octofuse, on text that every machine with Python has: the standard library.

Two steps, so that the first needs no GPU and the second no text:

    python benchmarks/train_embedded.py prepare --out build/embedded
    python benchmarks/train_embedded.py train --data build/embedded --out python/octofuse/assets/gpt2-stdlib

`prepare` reads every .py file of the running Python's standard library (site-packages left out), splits it by file into
training and held-out modules, trains a byte-level BPE tokenizer on the training part and writes both token streams.
`train` fits the model with AdamW and a cosine schedule and writes fp16 safetensors, config, tokenizer and
`training.json` (seed, versions, loss curve, held-out perplexity).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import shutil
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SEED = 20261121
VOCABULARY = 4096
CONTEXT = 512
END_OF_TEXT = "<|endoftext|>"
# One module in twenty, chosen by the hash of its path: the split does not move when files are added.
HELD_OUT_SHARE = 20
CALIBRATION_MODULES = ("argparse.py", "heapq.py", "textwrap.py", "pathlib.py", "statistics.py", "calendar.py")
CALIBRATION_BYTES = 80_000
EVALUATION_BYTES = 160_000


def is_held_out(relative: str) -> bool:
    digest = hashlib.sha256(relative.encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_SHARE == 0


def read_modules(stdlib: Path) -> dict[str, str]:
    """Path relative to the standard library -> text, for files that are prose or code rather than tables of data."""
    modules: dict[str, str] = {}
    for path in sorted(stdlib.rglob("*.py")):
        relative = path.relative_to(stdlib).as_posix()
        if "site-packages/" in relative or "__pycache__" in relative or relative.startswith(("encodings/", "config-")):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # test fixtures in other encodings
        if text.strip():
            modules[relative] = text
    return modules


def tokenizer_of(texts: Iterable[str]) -> Any:
    """A byte-level BPE tokenizer with VOCABULARY tokens; the first ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def prepare(out: Path, stdlib: Path) -> None:
    import numpy as np

    out.mkdir(parents=True, exist_ok=True)
    modules = read_modules(stdlib)
    held_out = {name: text for name, text in modules.items() if is_held_out(name) and "/test" not in f"/{name}"}
    training = {name: text for name, text in modules.items() if not is_held_out(name)}

    tokenizer = tokenizer_of(training.values())
    tokenizer.save(str(out / "tokenizer.json"))
    end = tokenizer.token_to_id(END_OF_TEXT)

    def tokens_of(part: dict[str, str]) -> np.ndarray:
        stream: list[int] = []
        for encoding in tokenizer.encode_batch(list(part.values())):
            stream.extend(encoding.ids)
            stream.append(end)
        return np.array(stream, dtype=np.uint16)

    np.savez_compressed(out / "tokens.npz", training=tokens_of(training), held_out=tokens_of(held_out))
    write_texts(out, training, held_out)
    summary = {
        "python": platform.python_version(),
        "training_modules": len(training),
        "training_bytes": sum(len(t.encode()) for t in training.values()),
        "held_out_modules": sorted(held_out),
        "held_out_bytes": sum(len(t.encode()) for t in held_out.values()),
        "vocabulary": VOCABULARY,
    }
    (out / "corpus.json").write_text(json.dumps(summary, indent=1) + "\n")
    print({key: value for key, value in summary.items() if key != "held_out_modules"})


def write_texts(out: Path, training: dict[str, str], held_out: dict[str, str]) -> None:
    """The texts that ship: calibration from training modules, evaluation from held-out ones."""
    calibration = "".join(training[name] for name in CALIBRATION_MODULES if name in training)
    (out / "calibration.txt").write_text(calibration[:CALIBRATION_BYTES])
    # The same share of every held-out module, so that no single one decides.
    share = EVALUATION_BYTES / sum(len(text) for text in held_out.values())
    excerpts = (text[: max(1, int(len(text) * share))] for text in held_out.values())
    (out / "evaluation.txt").write_text("".join(excerpts))


def held_out_perplexity(model, tokens, device, batch: int = 32) -> tuple[float, int]:
    """exp(mean negative log likelihood) over full windows of CONTEXT tokens, each predicted within its window."""
    import torch

    windows = tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    total = 0.0
    with torch.no_grad():
        for some in windows.split(batch):
            some = some.to(device)
            logits = model(some).logits[:, :-1].float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), some[:, 1:].flatten(), reduction="sum")
            total += loss.item()
    count = windows.numel() - windows.shape[0]
    return math.exp(total / count), count


def train(data: Path, out: Path, minutes: float, batch: int, peak_rate: float, dropout: float, steps: int) -> None:
    import numpy as np
    import torch
    import transformers
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arrays = np.load(data / "tokens.npz")
    training = torch.from_numpy(arrays["training"].astype(np.int64)).to(device)
    held_out = torch.from_numpy(arrays["held_out"].astype(np.int64))
    end = 0  # the tokenizer's first special token
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=224, n_layer=5, n_head=7, bos_token_id=end, eos_token_id=end,
        embd_pdrop=dropout, attn_pdrop=0.0, resid_pdrop=dropout,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak_rate, betas=(0.9, 0.95), fused=device == "cuda")
    step_model = torch.compile(model) if device == "cuda" else model
    generator = torch.Generator(device=device).manual_seed(SEED)
    offsets = torch.arange(CONTEXT, device=device)

    curve: list[dict[str, float]] = []
    began = time.time()
    smoothed = None
    for step in range(steps):
        warm = min(1.0, (step + 1) / 300)
        rate = peak_rate * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(len(training) - CONTEXT, (batch, 1), generator=generator, device=device)
        window = training[starts + offsets]
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = step_model(window, labels=window).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0 or step == steps - 1:
            value = loss.item()
            smoothed = value if smoothed is None else 0.7 * smoothed + 0.3 * value
            elapsed = time.time() - began
            curve.append({"step": step, "loss": round(value, 4), "seconds": round(elapsed, 1)})
            if step % 1000 == 0:
                print(f"step {step} loss {smoothed:.4f} rate {rate:.2e} {elapsed:.0f} s", flush=True)
            if elapsed > minutes * 60:
                raise SystemExit(f"stopped: step {step} of {steps} after {elapsed:.0f} s; lower --steps")

    model.eval()
    out.mkdir(parents=True, exist_ok=True)
    half = round_weights(model.half())
    perplexity, count = held_out_perplexity(half.float(), held_out, device)
    model.half().save_pretrained(out)
    for name in ("tokenizer.json", "calibration.txt", "evaluation.txt"):
        shutil.copy(data / name, out / name)
    (out / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT,
                    "unk_token": END_OF_TEXT, "model_max_length": CONTEXT}, indent=1) + "\n"
    )  # fmt: skip
    record = {
        "seed": SEED, "parameters": parameters, "steps": steps, "batch": batch, "context": CONTEXT,
        "tokens_seen": steps * batch * CONTEXT, "training_tokens": len(training), "peak_rate": peak_rate,
        "dropout": dropout, "seconds": round(time.time() - began, 1), "held_out_perplexity": round(perplexity, 4),
        "significant_bits": 8, "held_out_tokens": count, "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "corpus": json.loads((data / "corpus.json").read_text()), "curve": curve,
    }  # fmt: skip
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    print({key: value for key, value in record.items() if key not in ("curve", "corpus")})


def round_weights(model: Any) -> Any:
    """To 8 significant bits, which fp16 and bf16 both hold: a sixth less to download."""
    import torch

    with torch.no_grad():
        for weight in model.parameters():
            mantissa, exponent = torch.frexp(weight.float())
            weight.copy_(torch.ldexp(torch.round(mantissa * 256) / 256, exponent))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("prepare")
    first.add_argument("--out", type=Path, required=True)
    first.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    second = commands.add_parser("train")
    second.add_argument("--data", type=Path, required=True)
    second.add_argument("--out", type=Path, required=True)
    second.add_argument("--minutes", type=float, default=30.0, help="stop with an error after this long")
    second.add_argument("--steps", type=int, default=12_000)
    second.add_argument("--batch", type=int, default=64)
    second.add_argument("--peak-rate", type=float, default=2e-3)
    second.add_argument("--dropout", type=float, default=0.1)
    args = parser.parse_args()
    if args.command == "prepare":
        prepare(args.out, args.stdlib)
    else:
        train(args.data, args.out, args.minutes, args.batch, args.peak_rate, args.dropout, args.steps)


if __name__ == "__main__":
    main()
