"""What the commands say of files and names that are wrong: one line, before anything is loaded, with the name in it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import octofuse
from helpers import command
from octofuse.assets import EMBEDDED
from octofuse.cli.schemes import WHAT, measured


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole model that a test may spoil."""
    return shutil.copytree(EMBEDDED, tmp_path / "model")


def refusal(*words: str) -> str:
    code, _, err = command(*words, "--device", "cpu")
    assert code == 1, err
    last = err.rstrip("\n").split("\n")[-1]
    assert last.startswith("octofuse: ")
    assert "Traceback" not in err
    return last


COMMANDS = (
    ("quantize", "{model}", "-o", "{new}"),
    ("generate", "{model}", "x"),
    ("eval", "{model}"),
    ("eval", "embedded", "--against", "{model}"),
    ("frontier", "{model}"),
)


def filled(words: tuple[str, ...], folder: Path) -> list[str]:
    return [word.format(model=folder, new=folder.parent / "new") for word in words]


@pytest.mark.parametrize("words", COMMANDS)
def test_broken_models(words: tuple[str, ...], folder: Path) -> None:
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for broken in (whole[:1000], whole[:-4096], b"garbage" * 100, b""):
        weights.write_bytes(broken)
        assert f"{weights}: not a whole safetensors file" in refusal(*filled(words, folder))
    weights.write_bytes(whole)
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        text = (folder / name).read_text()
        (folder / name).write_text(text[: len(text) // 2])
        assert f"{folder / name}: not valid JSON" in refusal(*filled(words, folder))
        (folder / name).write_text(text)
    (folder / "config.json").unlink()
    assert "config.json: not found" in refusal(*filled(words, folder))
    assert not (folder.parent / "new").exists()


def test_broken_checkpoints(folder: Path) -> None:
    quantised = folder.parent / "quantised"
    assert command("quantize", str(folder), "-o", str(quantised), "--device", "cpu")[0] == 0
    weights = quantised / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert f"{weights}: not a whole safetensors file" in refusal("generate", str(quantised), "x")
    (quantised / "config.json").write_text("[1, 2]")
    assert "config.json: expected a JSON object, got list" in refusal("generate", str(quantised), "x")


def test_a_folder_without_a_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    new = folder.parent / "new"
    assert "no tokenizer files" in refusal("quantize", str(folder), "-o", str(new))
    wants_text = ("quantize", str(folder), "-o", str(new), "--no-tokenizer", "--scheme", "w8a8-static")
    assert "no-tokenizer: expected a scheme that needs no calibration text" in refusal(*wants_text)
    assert not new.exists()
    assert command("quantize", str(folder), "-o", str(new), "--no-tokenizer", "--device", "cpu")[0] == 0
    assert "no tokenizer files" in refusal("generate", str(new), "x")


def test_what_can_only_be_a_path_is_not_asked_of_the_hub() -> None:
    for name in ("./nodir", "/no/dir", "no/such/dir", "nodir/", "~/no-such-dir"):
        assert f"{name}: no such folder" in refusal("quantize", name, "-o", "/tmp/never")
    assert "got the file" in refusal("quantize", str(EMBEDDED / "config.json"), "-o", "/tmp/never")


def test_targets_are_looked_at_first(tmp_path: Path) -> None:
    """Of a model that is not there either, nothing is said."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "latin").write_bytes("é".encode("latin-1"))
    (tmp_path / "folder.png").mkdir()
    for words, message in (
        (("quantize", "/no/dir", "-o", str(tmp_path / "file" / "new")), "output: "),
        (("quantize", "/no/dir", "-o", str(tmp_path / "q"), "--calibration", "/no/text"), "calibration: /no/text"),
        (("eval", "/no/dir", "--text", str(tmp_path / "latin")), "expected UTF-8 text"),
        (("eval", "/no/dir", "--against", "x", "--plot", str(tmp_path / "folder.png")), "got the folder"),
        (("frontier", "/no/dir", "--text", str(tmp_path)), "text: "),
    ):
        assert message in refusal(*words)


def test_more_tokens_than_the_context() -> None:
    words = ("generate", "embedded", "import re", "--new-tokens", "10000")
    assert "new-tokens: expected at most 510, what 2 tokens of prompt leave of" in refusal(*words)


@pytest.mark.parametrize("turned", ["raise", "raise ImportError('Could not import module') from"])
def test_interrupted(turned: str, tmp_path: Path) -> None:
    """Also where a library turns the interrupt into an error of its own."""
    code = f"""
import os, signal, time
import octofuse.cli.quantize as quantize
from octofuse.cli import main
def interrupt(*_, **__):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    except BaseException as error:
        {turned} error
quantize.save_pretrained = interrupt
main()
"""
    words = ["quantize", "embedded", "-o", str(tmp_path / "q"), "--device", "cpu"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 130
    assert done.stderr == "octofuse: interrupted; nothing written\n"
    assert not (tmp_path / "q").exists()


def test_version() -> None:
    code, out, _ = command("--version")
    assert (code, out) == (0, f"octofuse {octofuse.__version__}\n")


def test_schemes() -> None:
    code, out, _ = command("schemes")
    assert code == 0
    found = measured()["schemes"]
    assert set(found) == set(WHAT)
    for name in WHAT:
        assert any(line.startswith(name) for line in out.splitlines()), name
    assert found["w8a8-dynamic"]["cost"] < 0.01 < found["w4a16-g128"]["cost"] < 1 < found["bcq-q2-g128"]["cost"]
    assert all(2 < row["bits"] < 9 and row["cpu"] > 1 for row in found.values())
    message = refusal("quantize", "embedded", "-o", "/tmp/never", "--scheme", "w4a16-gtpq")
    assert len(message) < 200
    assert "did you mean 'w4a16-g128-gptq'?" in message
    assert len(command("quantize", "--help")[1]) > 0


def test_the_written_folder_says_how_to_load_it(tmp_path: Path) -> None:
    new = tmp_path / "q"
    assert command("quantize", "embedded", "-o", str(new), "--device", "cpu")[0] == 0
    assert len({path.stat().st_mode for path in new.iterdir()}) == 1
    settings = json.loads((new / "config.json").read_text())["quantization_config"]
    assert "octofuse.from_pretrained" in settings["how_to_load"]
