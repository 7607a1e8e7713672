"""What a type checker sees of the public API in a user's script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")

RIGHT = """
import torch
from transformers import GPT2LMHeadModel

import octofuse
from octofuse.models import quantize_


class Small(torch.nn.Module):
    pass


small: Small = quantize_(Small(), "w8a8-dynamic")
x = torch.zeros(1, 16, dtype=torch.int8)
y: torch.Tensor = octofuse.i8f16_linear(x, x, 1.0, 1.0, activation="gelu")
tokens: list[list[int]] = octofuse.generate(small, [[1, 2]], 5, temperature=0.5, stop_tokens=[3])
"""
# As for an installed package: only the user's own files are reported.
SETTINGS = """[mypy]
strict = True
[mypy-octofuse.*]
ignore_errors = True
[mypy-transformers.*]
follow_imports = skip
ignore_missing_imports = True
"""
WRONG = {
    'octofuse.i8f16_linear(x, x, 1.0, 1.0, activation="swish")': "activation",
    "octofuse.generate(small, [[1]], 5, temprature=0.5)": "temprature",
    "other: torch.nn.Linear = quantize_(Small())": "Incompatible types in assignment",
}


def test_strict_mypy_on_a_users_script(tmp_path: Path) -> None:
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(RIGHT + "\n".join(WRONG) + "\n")
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    source = Path(__file__).resolve().parents[1] / "python"
    words = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "right.py", "wrong.py"]
    done = subprocess.run(
        words, cwd=tmp_path, env={"MYPYPATH": str(source), "PATH": ""}, capture_output=True, text=True, timeout=300
    )
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert len(errors) == len(WRONG), done.stdout + done.stderr
    for error, expected in zip(errors, WRONG.values(), strict=True):
        assert error.startswith("wrong.py")
        assert expected in error
