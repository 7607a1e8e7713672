"""benchmarks/gpu_suite.py: what it counts, and what it keeps when time ends before the cases do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import gpu_suite

CASES = """
import time, pytest
def test_passes(): pass
def test_fails(): assert False
@pytest.mark.skip
def test_is_skipped(): pass
@pytest.fixture
def broken():
    yield
    raise ValueError
def test_breaks_afterwards(broken): pass
"""


def run_of(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, seconds: float) -> dict:
    (tmp_path / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    (tmp_path / "vllm_interface.py").write_text("vllm = None\n")
    (tmp_path / "test_some.py").write_text(text)
    monkeypatch.setattr(gpu_suite, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_suite, "PYTEST", ["-m", "pytest", "test_some.py", "-q", "-p", "no:cacheprovider"])
    return gpu_suite.run_tests(workers, 1, time.monotonic() + seconds)


@pytest.mark.parametrize("workers", [0, 2])
def test_counts(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if workers:
        pytest.importorskip("xdist")
    found = run_of(CASES, tmp_path, monkeypatch, workers, 120)
    assert (found["tests"], found["passed"], found["failures"], found["errors"], found["skipped"]) == (4, 1, 1, 1, 1)
    assert found["failed"] == ["test_some.py::test_breaks_afterwards", "test_some.py::test_fails"]
    assert "note" not in found


@pytest.mark.parametrize("workers", [0, 2])
def test_what_was_counted_when_time_ends(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of its workers end too: one of them would write into the folder later."""
    if workers:
        pytest.importorskip("xdist")
    began = time.monotonic()
    late = tmp_path / "late"
    waits = f"def test_waits():\n    time.sleep({began} + 40 - time.monotonic())\n    open({str(late)!r}, 'w')\n"
    found = run_of(CASES + waits, tmp_path, monkeypatch, workers, 30)
    assert time.monotonic() - began < 39
    assert (found["tests"], found["passed"], found["failures"]) == (4, 1, 1)
    time.sleep(began + 43 - time.monotonic())
    assert not late.exists()
    assert "time ended" in found["note"]


@pytest.mark.parametrize("handler", ["signal.SIG_DFL", "signal.SIG_IGN"])
def test_what_is_known_of_a_process_that_had_to_be_ended(handler: str) -> None:
    code = f"import signal, time\nif {handler}: signal.signal(signal.SIGABRT, {handler})\n"
    code += "print('begun', flush=True)\ntime.sleep(100)"
    began = time.monotonic()
    env = os.environ | {"PYTHONFAULTHANDLER": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    status, printed = gpu_suite.run([sys.executable, "-c", code], env, began + 3, **streams)
    assert status is None
    assert printed.startswith("begun")
    assert ('File "<string>", line 4 in <module>' in printed) == (handler == "signal.SIG_DFL")
    assert time.monotonic() - began < 60


def test_a_status_that_nothing_explains_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_suite, "outcomes_in", lambda lines: {})
    assert "status 1" in run_of("def test_fails(): assert False\n", tmp_path, monkeypatch, 0, 120)["note"]


def test_a_run_that_collects_nothing_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "status" in run_of("import nothing_of_that_name\n", tmp_path, monkeypatch, 0, 120)["note"]


def test_parts_that_did_not_finish_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = {"exit": 0, "cases": 3, "summary": "0 errors", "seconds": 1.0}
    monkeypatch.setattr(gpu_suite, "run_part", lambda tool, name, gpu, end: None if name == "lowbit" else part)
    monkeypatch.setattr(gpu_suite, "run_tests", lambda *_: {"failures": 0, "errors": 0})
    monkeypatch.setattr(sys, "argv", ["gpu_suite.py", "--out", str(tmp_path), "--seconds", "9"])
    with pytest.raises(SystemExit) as ended:
        gpu_suite.main()
    assert ended.value.code == 1, "unfinished is no success"
    found = json.loads((tmp_path / "tests.json").read_text())["sanitizers"]
    assert set(found) == set(gpu_suite.TOOLS)
    assert all(tool["note"] == "without lowbit" for tool in found.values())
    assert found["memcheck"]["cases"] == 3 * (len(gpu_suite.parts_of_cases()) - 1)
    monkeypatch.setattr(gpu_suite, "run_part", lambda *_: part)
    monkeypatch.setattr(
        sys, "argv", ["gpu_suite.py", "--out", str(tmp_path), "--again", *gpu_suite.TOOLS, "--parts", "lowbit"]
    )
    with pytest.raises(SystemExit) as ended:
        gpu_suite.main()
    assert ended.value.code == 0
    found = json.loads((tmp_path / "tests.json").read_text())["sanitizers"]
    assert all("note" not in tool for tool in found.values())
