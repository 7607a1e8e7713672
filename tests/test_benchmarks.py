"""The benchmarks that a CPU can run, on their smallest shapes: what they need of the package is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[1] / "benchmarks" / "run.py"


@pytest.mark.parametrize(("topic", "rows"), [("gpt2", "study"), ("model", "rows")])
def test_smoke(topic: str, rows: str, tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(RUN), topic, "--smoke", "--out", str(tmp_path)], check=True)
    record = json.loads((tmp_path / f"{topic}.json").read_text())
    assert record["command"] == f"python benchmarks/run.py {topic}"
    assert all(row["tokens/s"] > 0 for row in record[rows])
    assert len(record[rows]) > 1
