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


def test_smoke_on_a_cpu(tmp_path: Path) -> None:
    """bench_cpu and bench_schemes, which leaves the package's own table as it is."""
    subprocess.run([sys.executable, str(RUN), "cpu", "schemes", "--smoke", "--out", str(tmp_path)], check=True)
    found = json.loads((tmp_path / "cpu.json").read_text())
    assert {row["engine"] for row in found["rows"]} >= {"fp32", "torch.ao dynamic int8", "w8a8-dynamic"}
    assert found["beside two busy processes"]["octofuse"] > 0
    assert all(row["cpu"] > 0 for row in json.loads((tmp_path / "schemes.json").read_text())["rows"])
