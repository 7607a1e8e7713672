"""The command line as a user types it, right and wrong."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch

from helpers import command
from octofuse.assets import EMBEDDED
from test_models_families import small


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("cli") / "int8")
    code, out, _ = command("quantize", "embedded", "-o", folder, "--device", "cpu")
    assert code == 0
    assert "w8a8-dynamic" in out
    return folder


def test_generate_and_eval(checkpoint: str) -> None:
    code, out, _ = command("generate", checkpoint, "def main(", "--new-tokens", "8", "--device", "cpu")
    assert code == 0
    assert out.startswith("def main(")
    code, out, _ = command("eval", checkpoint, "--max-tokens", "2048", "--device", "cpu")
    assert code == 0
    assert 5 < float(re.search(r"perplexity ([\d.]+)", out)[1]) < 30


def test_static_scheme_reads_a_calibration_text(tmp_path) -> None:
    text = tmp_path / "sample.txt"
    text.write_text("import re\n" * 600)
    code, _, _ = command(
        "quantize", "embedded", "-o", str(tmp_path / "q"), "--scheme", "w8a8-static", "--calibration", str(text),
        "--device", "cpu",
    )  # fmt: skip
    assert code == 0
    assert (tmp_path / "q" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("generate", "no/such/folder", "x"), "no/such/folder"),
        (("quantize", "embedded", "-o", "{tmp}/q", "--scheme", "w2a2"), "scheme: expected a name such as"),
        (
            ("quantize", "embedded", "-o", "{tmp}/q", "--format", "gguf"),
            "format: expected one of auto, compressed-tensors, octofuse",
        ),
        (
            ("quantize", "embedded", "-o", "{tmp}/q", "--format", "compressed-tensors"),
            "transformer.h.0.attn.c_attn: expected nn.Linear, got Conv1D",
        ),
        (
            ("quantize", "embedded", "-o", "{tmp}/q", "--format", "compressed-tensors", "--scheme", "bcq-q3-g128"),
            "scheme: expected a scheme that compressed-tensors knows",
        ),
        (("quantize", "embedded", "-o", "{full}"), "expected a new or empty folder"),
        (("quantize", "{int8}", "-o", "{tmp}/q"), "quantised already"),
        (("generate", "embedded", ""), "prompt: expected at least one token"),
        (("generate", "embedded", "x " * 2000), "prompt: expected fewer than 512 tokens"),
        (("eval", "embedded", "--text", "{tmp}/none.txt"), "none.txt"),
        (("eval", "embedded", "--text", "{empty}"), "expected at least 2 tokens"),
        (("eval", "embedded", "--device", "tpu"), "device: expected"),
        (("eval", "embedded", "--device", "cuda:77"), "device: expected"),
    ],
)
def test_mistakes_end_in_one_line(words, message: str, tmp_path, checkpoint: str) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").write_text("x")
    (tmp_path / "empty.txt").write_text("")
    names = {"tmp": tmp_path, "full": full, "int8": checkpoint, "empty": tmp_path / "empty.txt"}
    words = [word.format(**names) for word in words]
    if "--device" not in words:
        words += ["--device", "cpu"]
    code, _, err = command(*words)
    assert code == 1
    assert err.startswith("octofuse: ")
    assert message in err.replace("\n", "")
    assert "Traceback" not in err
    assert not (tmp_path / "q").exists()


def test_quantise_and_distill(tmp_path) -> None:
    text = tmp_path / "text"
    text.write_text("def f(x):\n    return x + 1\n" * 80)
    few = ("--calibration", str(text), "--distill", "2", "--device", "cpu")
    code, out, err = command("quantize", "embedded", "-o", str(tmp_path / "q"), "--scheme", "w2a16-g128", *few)
    assert code == 0, err
    assert "KL divergence from the float model: " in out
    assert (tmp_path / "q" / "config.json").is_file()
    code, _, err = command("quantize", "embedded", "-o", str(tmp_path / "r"), "--scheme", "w8a8-dynamic", *few)
    assert code == 1
    assert "distill: expected schemes such as w3a16-g128 or bcq-q2-g128, got w8a8-dynamic" in err.replace("\n", " ")
    code, _, err = command("quantize", "embedded", "-o", str(tmp_path / "r"), "--scheme", "w4a16-g128", "--codes")
    assert code == 1
    assert "codes: expected --distill of at least 1, got 0" in err
    code, _, err = command(
        "quantize", "embedded", "-o", str(tmp_path / "r"), "--scheme", "bcq-q5-g128", *few, "--codes"
    )
    assert code == 1
    assert "codes: expected a scheme such as w4a16-g128 (not awq) or bcq-q2-g128" in err
    code, _, err = command("quantize", "embedded", "-o", str(tmp_path / "r"), "--scheme", "w4a16-g128", "--by-blocks")
    assert code == 1
    assert "by-blocks: expected --distill of at least 1, got 0" in err
    assert not (tmp_path / "r").exists()
    code, out, err = command(
        "quantize", "embedded", "-o", str(tmp_path / "r"), "--scheme", "w2a16-g128", *few, "--codes"
    )
    assert code == 0, err
    assert "KL divergence from the float model: " in out
    assert "one after the other" not in out


def test_distill_by_blocks_where_memory_is_short(tmp_path, monkeypatch) -> None:
    from octofuse.cli import quantize

    text = tmp_path / "text"
    text.write_text("def f(x):\n    return x + 1\n" * 80)
    monkeypatch.setattr(quantize, "LEAST_STEPS", 1)
    monkeypatch.setattr(quantize, "_fits", lambda model, codes: not codes)
    words = ("--scheme", "w2a16-g128", "--calibration", str(text), "--distill", "2", "--codes", "--device", "cpu")
    steps = []
    scales = quantize.distill_
    monkeypatch.setattr(quantize, "distill_", lambda *given, **more: steps.append(more) or scales(*given, **more))
    code, out, err = command("quantize", "embedded", "-o", str(tmp_path / "q"), *words)
    assert code == 0, err
    assert "note: too little memory to train all blocks at once: one after the other" in out.replace("\n", " ")
    assert "KL divergence from the float model: " in out
    assert steps == [{"steps": 1}]  # the scales of all, after the blocks
    monkeypatch.setattr(quantize, "_fits", lambda model, codes: False)
    code, out, err = command("quantize", "embedded", "-o", str(tmp_path / "r"), *words, "--by-blocks")
    assert code == 0, err
    assert "note:" not in out
    assert len(steps) == 1


def test_memory_that_is_free(tmp_path, monkeypatch) -> None:
    from octofuse.cli import quantize

    cpu = torch.device("cpu")
    for text, free in (("MemTotal: 9 kB\nMemAvailable:   8 kB\n", 8192), ("MemTotal: 9 kB\n", None), (None, None)):
        file = tmp_path / "memory"
        file.unlink(missing_ok=True)
        if text is not None:
            file.write_text(text)
        monkeypatch.setattr(quantize, "MEMORY", file)
        assert quantize._free_memory(cpu) == free
    model = quantize.quantize_(small("llama"), "w4a16-g32", progress=False)
    need = quantize.training_bytes(model, codes=True)
    for free, fits in ((None, True), (2 * need, True), (need, False)):  # the rest is for activations
        monkeypatch.setattr(quantize, "_free_memory", lambda device, free=free: free)
        assert quantize._fits(model, codes=True) == fits


def test_doctor_json() -> None:
    code, out, _ = command("doctor", "--json")
    report = json.loads(out)
    assert code == 0
    for device in report["devices"]:
        assert device["self_test_cases"] == 64
        assert device["self_test_failures"] == []
    assert report["devices"][0]["engines"]["reference"] == ""


def test_doctor_for_people() -> None:
    code, out, _ = command("doctor")
    assert code == 0
    assert "self-test: 64 cases, all exact" in out


@pytest.mark.slow
def test_demo(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    few = ("--new-tokens", "8", "--evaluation-tokens", "1024", "--device", "cpu")
    names = ("float32", "w8a8-static-tensor", "sparse12-w7")
    code, out, err = command("demo", *few, "--schemes", ", ".join(names[1:]), "--plot", str(tmp_path / "demo.png"))
    assert code == 0
    for name in names:
        row = next(line for line in out.splitlines() if line.startswith(name)).split()
        assert len(row) == 9, row
        assert all(float(value) >= 0 for value in row[1:]), row
    assert out.count("def read_config(path):") == 3
    assert "w8a8-static-tensor makes " in out.replace("\n", " "), "a scheme that costs little is what it concludes with"
    assert (tmp_path / "demo.png").stat().st_size > 5000
    lines = err.splitlines()
    assert [line for line in lines if line[:2] in ("1/", "2/", "3/")] == [f"{i + 1}/3 {n}" for i, n in enumerate(names)]
    assert "" not in lines
    code, out, _ = command("demo", "--quick", *few)
    assert code == 0
    assert "w8a8-dynamic" in out
    assert "def read_config" not in out


@pytest.mark.parametrize("kind", ["llama", "opt", "qwen3"])
def test_a_folder_of_another_family(kind: str, tmp_path) -> None:
    """Quantised, continued, evaluated and demonstrated, with the embedded model's tokenizer and random weights."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(EMBEDDED)
    model = small(kind, vocab_size=len(tokenizer), max_position_embeddings=256)
    folder, quantised = str(tmp_path / "float"), str(tmp_path / "int8")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    device = ("--device", "cpu")
    assert command("quantize", folder, "-o", quantised, *device)[0] == 0
    for source in (folder, quantised):
        code, out, _ = command("generate", source, "def main(", "--new-tokens", "5", *device)
        assert code == 0
        assert out.startswith("def main(")
    code, out, _ = command("eval", quantised, "--against", folder, "--max-tokens", "600", *device)
    assert code == 0
    assert "self_attn.q_proj" in out, "one linear for all three is the engine's alone"
    few = ("--schemes", "w8a8-dynamic,w4a16-g32", "--new-tokens", "5", "--evaluation-tokens", "600", *device)
    code, out, _ = command("demo", folder, *few)
    assert code == 0
    assert out.count("def read_config(path):") == 3


def test_demo_refuses(tmp_path) -> None:
    for words, message in (
        ([str(tmp_path / "none")], "no such folder"),
        (["--schemes", "w9a16"], "scheme: "),
        (["--plot", str(tmp_path / "x.gif")], "ends in .png or .svg"),
    ):
        code, _, err = command("demo", *words)
        assert code == 1
        assert message in err


def test_layout_show(tmp_path) -> None:
    code, out, _ = command("layout", "show", "COL4_4R2_8C", "--rows", "8", "--cols", "16")
    assert code == 0
    assert [int(word) for word in out.splitlines()[2].split()] == [0, *(16 * b + c for b in range(4) for c in range(4))]
    assert "Turing" in out
    for words, message in (
        (["COL33"], "layout: expected one of ROW"),
        (["interleaved<12>"], "k: expected a power of two"),
        (["COL", "--rows", "65"], "rows, cols: expected 1 to 64 each"),
        (["COL", "--out", str(tmp_path / "x.gif")], "ends in .png or .svg"),
    ):
        code, _, err = command("layout", "show", *words)
        assert code == 1
        assert message in err


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_layout_pictures(tmp_path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    for cols in (16, 64):  # with a number in each cell, and without
        out = tmp_path / f"picture_{cols}{suffix}"
        code, text, err = command("layout", "show", "COL32", "--rows", "4", "--cols", str(cols), "--out", str(out))
        assert code == 0, err
        assert text == f"{out}: COL32, 4 x {cols}\n"
        assert out.stat().st_size > 2000


def test_eval_against_the_float_model(checkpoint: str, tmp_path) -> None:
    picture = tmp_path / "sqnr.png"
    words = ("eval", checkpoint, "--against", "embedded", "--max-tokens", "1024", "--stride", "128", "--device", "cpu")
    code, out, _ = command(*words, "--plot", str(picture))
    assert code == 0
    assert re.search(r"perplexity [\d.]+ against [\d.]+ \([+-][\d.]+%\) over 1024 tokens \(stride 128\)", out)
    assert "transformer.h.0.attn.c_attn" in out
    assert picture.stat().st_size > 1000
    for more, message in (
        (("eval", checkpoint, "--plot", "x.png"), "plot: expected --against"),
        (("eval", checkpoint, "--against", "embedded", "--plot", "x.pdf"), "plot: expected a name that ends in .png"),
        (("eval", checkpoint, "--against", checkpoint), "model: expected a floating-point model"),
        (
            ("eval", "embedded", "--against", "embedded", "--max-tokens", "64"),
            "expected a model that quantize_ has changed",
        ),
        (("eval", "embedded", "--stride", "100000"), "stride: expected 1 to the context"),
    ):
        code, _, err = command(*more, "--device", "cpu")
        assert code == 1
        assert message in err


def test_compare(checkpoint: str, tmp_path) -> None:
    words = ("compare", "embedded", checkpoint, "--max-tokens", "1024", "--new-tokens", "8", "--device", "cpu")
    code, out, err = command(*words)
    assert code == 0, err
    rows = {line.split("  ")[0].strip(): [float(n) for n in re.findall(r"[\d.]+", line)] for line in out.splitlines()}
    assert rows["weights, MB"][0] == pytest.approx(16.23, abs=0.01)
    assert rows["weights, MB"][1] < 0.5 * rows["weights, MB"][0]
    first, second, ratio = rows["perplexity"]
    assert ratio == pytest.approx(second / first, abs=2e-3)
    assert rows["tokens/s, one sequence, cpu"][0] > 0
    assert re.search(r"over 1024 tokens \(stride 256\): same top token 9\d\.\d+%; KL", out)
    same = command("compare", checkpoint, checkpoint, "--max-tokens", "256", "--new-tokens", "2", "--device", "cpu")[1]
    assert "same top token 100.00%" in same
    other = tmp_path / "other"
    shutil.copytree(EMBEDDED, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = []
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    for more, message in (
        (("embedded", str(other)), "second: expected the tokenizer of embedded, got another"),
        (("embedded", "embedded", "--new-tokens", "10000"), "new-tokens: expected at most 504"),
        (("embedded", "/no/dir"), "/no/dir: no such folder"),
    ):
        code, _, err = command("compare", *more, "--device", "cpu")
        assert code == 1
        assert message in err


def test_frontier_of_mixtures(checkpoint: str, tmp_path) -> None:
    picture = tmp_path / "frontier.svg"
    words = ("frontier", "embedded", "--max-tokens", "1024", "--device", "cpu")
    code, out, err = command(*words, "--schemes", "w8a16, bcq-q2-g128", "--plot", str(picture))
    assert code == 0, err
    rows = [line for line in out.splitlines() if "w8a16" in line or "bcq" in line]
    assert len(rows) == 4
    assert "frontier" in rows[0]
    assert "frontier" in rows[-1]
    assert picture.stat().st_size > 1000
    for more, message in (
        (("--schemes", "w8a16,w8a16"), "schemes: expected different names"),
        (("--schemes", "w10a16"), "scheme: expected a name such as"),
        (("--schemes", "w8a16", "--plot", "x.pdf"), "plot: expected a name that ends in .png"),
    ):
        code, _, err = command(*words, *more)
        assert code == 1
        assert message in err
    code, _, err = command("frontier", checkpoint, "--device", "cpu")
    assert (code, "model: expected a floating-point model" in err) == (1, True)


def test_layout_support_without_a_gpu() -> None:
    code, _, err = command("layout", "support", "--shape", "12")
    assert (code, err.strip()) == (1, "octofuse: shape: expected M,N,K, got '12'")
    if not torch.cuda.is_available():
        code, _, err = command("layout", "support")
        assert code == 1
        assert "device: expected one that octofuse can use, got 'cuda'" in err
    code, _, err = command("layout", "support", "--device", "cpu")
    assert (code, err.strip()) == (1, "octofuse: device: expected a CUDA device, got cpu")


@pytest.mark.gpu
def test_layout_support() -> None:
    code, out, _ = command("layout", "support", "--shape", "64,64,64")
    assert code == 0
    assert "COL32 / COL32_2R_4R4 / COL32" in out
    assert "algorithms" in out
