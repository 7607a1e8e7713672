"""Shared fixtures. Tests that need a CUDA device and the CUDA build carry the marker `gpu`;
without one they are left out."""

from __future__ import annotations

import os

import pytest

# On a machine of several GPUs benchmarks/gpu_suite.py gives each worker one, before CUDA looks for them.
if (gpus := os.environ.get("OCTOFUSE_TEST_GPUS")) and (worker := os.environ.get("PYTEST_XDIST_WORKER")):
    os.environ["CUDA_VISIBLE_DEVICES"] = str(int(worker.removeprefix("gw")) % int(gpus))

import torch

from octofuse import _C
from vllm_interface import vllm

__all__ = ["vllm"]  # a fixture

HAS_GPU = torch.cuda.is_available() and bool(_C.build_info()["cuda"])
LEFT_OUT = pytest.StashKey[int]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    without = [item for item in items if "gpu" in item.keywords]
    config.stash[LEFT_OUT] = len(without)
    config.hook.pytest_deselected(items=without)
    items[:] = [item for item in items if "gpu" not in item.keywords]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Lines for benchmarks/gpu_suite.py, which may have to end before the tests do."""
    path = os.environ.get("OCTOFUSE_TEST_OUTCOMES")
    if not path or "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.passed):
        return
    outcome = "error" if report.failed and report.when != "call" else report.outcome
    with open(path, "a", encoding="utf-8") as lines:
        lines.write(f"{outcome} {report.nodeid}\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if count := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(f"no CUDA device with a CUDA build of octofuse: {count} tests left out")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20261121)
