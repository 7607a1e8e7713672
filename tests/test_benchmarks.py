"""The benchmarks that a CPU can run, on their smallest shapes: what they need of the package is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RUN = Path(__file__).parents[1] / "benchmarks" / "run.py"


def smoke(topic: str, folder: Path) -> Any:
    """On one thread: beside other programs OpenMP's would wait for each other."""
    command = [sys.executable, str(RUN), topic, "--smoke", "--out", str(folder)]
    subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    return json.loads((folder / f"{topic}.json").read_text())


@pytest.mark.parametrize(("topic", "rows"), [("gpt2", "study"), ("model", "rows")])
def test_smoke(topic: str, rows: str, tmp_path: Path) -> None:
    record = smoke(topic, tmp_path)
    assert record["command"] == f"python benchmarks/run.py {topic}"
    assert all(row["tokens/s"] > 0 for row in record[rows])
    assert len(record[rows]) > 1


def test_smoke_of_schemes(tmp_path: Path) -> None:
    """Leaves the package's own table as it is."""
    assert all(row["cpu"] > 0 for row in smoke("schemes", tmp_path)["rows"])


def test_smoke_on_a_cpu(tmp_path: Path) -> None:
    found = smoke("cpu", tmp_path)
    assert {row["engine"] for row in found["rows"]} >= {"fp32", "torch.ao dynamic int8", "w8a8-dynamic"}
    assert found["beside two busy processes"]["octofuse"] > 0


def test_smoke_of_distillation(tmp_path: Path) -> None:
    """A model is made from the text of this machine, quantised and trained."""
    found = smoke("distill", tmp_path)["rows"]
    assert [row["how"] for row in found] == ["all at once", "by blocks"]
    assert all(row["KL before"] > 0 and row["KL after"] > 0 for row in found)
