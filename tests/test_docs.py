"""Every example of the documentation runs: code blocks of README and docs, and those in public docstrings."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import octofuse
from octofuse.ops import decode, gemm, lowbit, quantize, rows

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NEEDS = {"docs/others.md": ("lm_eval", "peft")}  # of which the tests do not install the first
EXAMPLES = [rows, gemm, lowbit, quantize]


@pytest.mark.parametrize("module", EXAMPLES, ids=lambda module: module.__name__)
def test_docstrings(module: ModuleType) -> None:
    found = doctest.DocTestFinder(exclude_empty=True).find(module, extraglobs={"torch": torch, "octofuse": octofuse})
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in found:
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


def test_public_functions_say_what_they_take() -> None:
    known = {name: getattr(octofuse, name) for name in octofuse.__all__}
    of_ops = [f for f in known.values() if getattr(f, "__module__", "").startswith("octofuse.ops") and callable(f)]
    by_modules = [f for f in of_ops if sys.modules[f.__module__] in EXAMPLES]
    assert len(by_modules) > 20
    for function in by_modules:
        assert ">>>" in function.__doc__, f"{function.__name__} has no example"
    for function in (*of_ops, decode.quantized_linear):
        assert "Raises" in function.__doc__ or "are those of" in function.__doc__ or len(function.__doc__) > 60


RANKED = "# run with: torchrun"  # the first words of such a script


def blocks() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        code = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        if code:
            found.append((page.relative_to(ROOT).as_posix(), "\n".join(code)))
    return found


@pytest.mark.parametrize(("page", "code"), blocks(), ids=[page for page, _ in blocks()])
def test_code_blocks(page: str, code: str, tmp_path: Path) -> None:
    """Those of a page run one after the other, as a reader would type them; each script for several ranks by itself, as a
    process cannot well begin and end its group of ranks twice."""
    for library in NEEDS.get(page, ()):
        pytest.importorskip(library)
    source = os.pathsep.join((str(Path(octofuse.__file__).parents[1]), os.environ.get("PYTHONPATH", "")))
    settings = os.environ | {"PYTHONPATH": source, "PYTHONWARNINGS": "ignore"}
    for script in re.split(f"^(?={RANKED})", code, flags=re.MULTILINE):
        (tmp_path / "page.py").write_text(script)
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if RANKED in script else []
        done = subprocess.run(
            [sys.executable, *ranks, "page.py"], cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr


def test_tables_are_what_the_results_say() -> None:
    words = [sys.executable, str(ROOT / "benchmarks" / "tables.py"), "--check"]
    subprocess.run(words, check=True, timeout=60)


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if not target.startswith(("http", "mailto")):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
