"""Run the GPU tests and the sanitizers and write tests.json.

    python benchmarks/gpu_suite.py --out benchmarks/results/h200

compute-sanitizer's four tools watch every kernel of this library (their mangled names hold `octofuse`) over
tests/sanitizer_cases.py. With --seconds it ends by then, keeps what has finished and says what has not.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from octofuse.testing.timing import environment

ROOT = Path(__file__).resolve().parents[1]
# cuBLASLt's own kernels are left out where the tool cannot take them: racecheck stops in them with an internal error, and
# initcheck does not see their TMA stores.
ENGINES = ["skinny", "wgmma", "wgmma_float8", "wgmma_float8_fast", "wgmma_e5m2", "cutlass_sm90", "cutlass_sm80",
           "naive"]  # fmt: skip
TOOLS = {
    "memcheck": ["--engines", "all"],
    "racecheck": ["--engines", *ENGINES],
    "initcheck": ["--engines", *ENGINES],
    "synccheck": ["--engines", "all"],
}
# initcheck: clusters that share tiles look for a mark in memory in which nobody need have written before; outputs that
# llm_int8_linear() makes and TMA writes are nobody's to it.
LEFT_OUT = {"initcheck": ("shared_tiles", "outlier_tiles")}
# Of each process: with one for every core the processes took four times as long on 64 cores.
THREADS = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
TESTS = "tests"
PYTEST = ["-m", "pytest", "tests", "-m", "gpu", "-p", "no:cacheprovider", "-p", "no:benchmark"]


def run(command: list[str], env: dict[str, str], end: float, **options: Any) -> tuple[int | None, str]:
    """Exit status, None where it had to be ended, and what it printed, if that is asked for."""
    with subprocess.Popen(command, cwd=ROOT, env=env, text=True, start_new_session=True, **options) as process:
        try:
            left = None if math.isinf(end) else max(0.0, end - time.monotonic())
            printed, _ = process.communicate(timeout=left)
        except subprocess.TimeoutExpired:
            return None, ended(process)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, printed or ""


def ended(process: subprocess.Popen[str]) -> str:
    """What it printed up to its end, which comes now: with PYTHONFAULTHANDLER set, where it was, too."""
    printed = ""
    for how in (signal.SIGABRT, signal.SIGKILL):  # of its workers as well
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            printed = process.communicate(timeout=10)[0] or printed
    return printed


def outcomes_in(lines: str) -> dict[str, str]:
    """By test: tests/conftest.py's lines, of which a test that fails in its teardown has two."""
    found: dict[str, str] = {}
    for line in lines.splitlines():
        outcome, _, test = line.partition(" ")
        found[test] = outcome if found.get(test) in (None, "passed") else found[test]
    return found


def run_tests(workers: int, gpus: int, end: float) -> dict[str, Any]:
    command = [*PYTEST, *(["-n", str(workers)] if workers else [])]
    began = time.time()
    with tempfile.NamedTemporaryFile("r") as lines:
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")} | THREADS
        env["OCTOFUSE_TEST_OUTCOMES"] = lines.name
        if gpus > 1:
            env["OCTOFUSE_TEST_GPUS"] = str(gpus)
        status, _ = run([sys.executable, *command], env, end)
        found = outcomes_in(lines.read())
    of = Counter(found.values())
    record = {
        "command": f"python {' '.join(command)}",
        "passed": of["passed"],
        "tests": len(found),
        "failures": of["failed"],
        "errors": of["error"],
        "skipped": of["skipped"],
        "failed": sorted(test for test, outcome in found.items() if outcome in ("failed", "error")),
        "seconds": round(time.time() - began, 1),
    }
    if status is None:
        return record | {"note": "time ended before the other cases"}
    says = 0 if found and not record["failed"] else 1 if record["failed"] else None  # what was counted
    return record if status == says else record | {"note": f"pytest ended with status {status}"}


def reports_of(output: str) -> dict[str, int]:
    """What compute-sanitizer reported and in which functions, and how often."""
    lines = re.findall(r"^=========(?: |     at )(\w.*?)(?:\+0x[0-9a-f]+.*)?$", output, re.MULTILINE)
    return dict(Counter(line for line in lines if "SANITIZER" not in line and "SUMMARY" not in line).most_common(12))


def parts_of_cases() -> tuple[str, ...]:
    sys.path.insert(0, str(ROOT / "tests"))
    return tuple(importlib.import_module("sanitizer_cases").PARTS)


def parts_of(tool: str, chosen: Sequence[str]) -> list[str]:
    return [part for part in chosen if part not in LEFT_OUT.get(tool, ())]


def run_part(tool: str, part: str, gpu: int | None, end: float = float("inf")) -> dict[str, Any] | None:
    """None where time ended before it."""
    selection = ["--parts", part, *TOOLS[tool]]
    command = ["compute-sanitizer", "--tool", tool, "--kernel-name", "kns=octofuse", "--error-exitcode", "3",
               sys.executable, "tests/sanitizer_cases.py", *selection]  # fmt: skip
    env = {**os.environ, **THREADS, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONFAULTHANDLER": "1"}
    if gpu is not None:
        env["CUDA_VISIBLE_DEVICES"] = str(gpu)
    began = time.time()
    status, printed = run(command, env, end, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if status is None:
        print(tool, part, "not finished:", printed[-1500:], flush=True)
        return None
    cases = re.search(r"sanitizer cases: (\d+)", printed)
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", printed)
    outcome = {
        "exit": status,
        "cases": int(cases[1]) if cases else 0,
        "summary": summary[-1] if summary else printed[-1500:],
        "seconds": round(time.time() - began, 1),
    }
    if status != 0:
        outcome["reports"] = reports_of(printed)
    print(tool, part, outcome, flush=True)
    return outcome


def tool_record(tool: str, parts: dict[str, dict[str, Any]], every: Sequence[str]) -> dict[str, Any]:
    record = {
        "selection": " ".join(TOOLS[tool]),
        "exit": next((part["exit"] for part in parts.values() if part["exit"] != 0), 0),  # a signal's is negative
        "cases": sum(part["cases"] for part in parts.values()),
        "summary": "; ".join(sorted({part["summary"] for part in parts.values()})),
        "parts": parts,
    }
    missing = [part for part in every if part not in parts]
    return record | {"note": f"without {' and '.join(missing)}"} if missing else record


def run_sanitizers(
    pool: ThreadPoolExecutor, tools: list[str], gpus: int, chosen: Sequence[str], before: dict[str, Any], end: float
) -> dict[str, Any]:
    """Every chosen part of the cases in a process of its own, on one GPU or on each of several in turn; of the others what
    was found before."""
    turn = itertools.count()
    running = {
        tool: {
            part: pool.submit(run_part, tool, part, next(turn) % gpus if gpus > 1 else None, end)
            for part in parts_of(tool, chosen)
        }
        for tool in tools
    }
    found = {}
    for tool, parts in running.items():
        finished = {part: result for part, run in parts.items() if (result := run.result()) is not None}
        every = parts_of(tool, parts_of_cases())
        found[tool] = tool_record(tool, before.get(tool, {}).get("parts", {}) | finished, every)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=0, help="pytest-xdist workers; 0: one process")
    parser.add_argument(
        "--gpus", type=int, default=1, help="share cases between so many; tests of several are left out"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="ends what has not finished by then")
    parser.add_argument("--tools", nargs="*", choices=TOOLS, default=list(TOOLS), help="sanitizers; none: tests alone")
    parser.add_argument(
        "--again", nargs="+", choices=(TESTS, *TOOLS), help="these alone, into a tests.json of the same cpp/"
    )
    every = parts_of_cases()
    parser.add_argument("--parts", nargs="+", choices=every, help="with --again, of the tools' cases")
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # of what ended() ends
    if args.parts and not set(args.again or []) & set(TOOLS):
        parser.error("--parts: expected --again with a sanitizer as well")
    path = args.out / "tests.json"
    end = time.monotonic() + args.seconds
    record = environment("python benchmarks/gpu_suite.py")
    if args.again:
        before = json.loads(path.read_text())
        for key in ("cpp", "device"):
            if before.get(key) != record.get(key):
                raise SystemExit(f"{path}: expected {key} {record.get(key)}, got {before.get(key)}")
        record = before
    # Side by side: each process waits for the GPU, or it for the process.
    with ThreadPoolExecutor(1 + len(TOOLS) * len(every)) as pool:
        tools = [tool for tool in args.again if tool != TESTS] if args.again else args.tools
        tests = pool.submit(run_tests, args.workers, args.gpus, end) if TESTS in (args.again or [TESTS]) else None
        found = record.get("sanitizers", {})
        record["sanitizers"] = found | run_sanitizers(pool, tools, args.gpus, args.parts or every, found, end)
        if tests is not None:
            record["tests"] = tests.result()
    args.out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    ran, watched = record["tests"], record["sanitizers"].values()
    wrong = ran["failures"] or ran["errors"] or any(tool["exit"] for tool in watched)
    unfinished = "note" in ran or any("note" in tool for tool in watched)
    print(json.dumps(ran, indent=1))
    sys.exit(1 if wrong or unfinished else 0)


if __name__ == "__main__":
    main()
