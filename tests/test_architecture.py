"""The house's arrows go one way: cli -> models -> nn -> ops -> _C, layouts -> ops; quant is pure mathematics, for all."""

from __future__ import annotations

import ast
from pathlib import Path

import octofuse

ROOT = Path(octofuse.__file__).parent
ALLOWED = {
    "testing": {"_C"},  # timing.environment records the build
    "quant": {"testing"},
    "ops": {"_C", "quant", "testing"},
    "layouts": {"ops"},
    "nn": {"ops", "quant"},
    "models": {"nn", "ops", "quant"},
    "generate": {"models", "ops"},
    "assets": set(),
    "doctor": {"_C", "ops", "testing"},
    "cli": {"_C", "assets", "doctor", "generate", "layouts", "models", "nn", "ops", "quant"},
}


def test_imports_follow_the_arrows() -> None:
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        layer = parts[0]
        if layer == "__init__":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                names = [f"{node.module}.{a.name}" if node.module == "octofuse" else node.module for a in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                if not name.startswith("octofuse.") or name == "octofuse.__version__":
                    continue
                target = name.split(".")[1]
                assert target == layer or target in ALLOWED[layer], f"{path.name}: {layer} imports {target}"


def test_no_kernel_reads_through_ldg() -> None:
    """The compiler moves such loads above griddepcontrol.wait: a chained kernel would read what is not there yet."""
    sources = Path(__file__).resolve().parents[1] / "cpp" / "src"
    for path in sources.rglob("*.cu*"):
        code = [line.split("//")[0] for line in path.read_text().splitlines()]
        assert not any("__ldg(" in line or "__restrict__" in line for line in code), path.name
