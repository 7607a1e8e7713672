"""The house's arrows go one way, in Python and in C++, and nothing goes in circles."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import octofuse

ROOT = Path(octofuse.__file__).parent
REPOSITORY = Path(__file__).resolve().parents[1]
CPP = REPOSITORY / "cpp"

# cli -> generate -> engine -> parallel -> models -> files -> nn -> ops -> _C, layouts -> ops; quant: mathematics, for all.
PYTHON = {
    "reference": set(),
    "testing": {"_C"},  # timing.environment records the build
    "quant": {"reference"},
    "ops": {"_C", "quant", "reference"},
    "layouts": {"ops"},
    "nn": {"ops", "quant"},
    "models": {"_C", "files", "nn", "ops", "quant"},  # _C: its file, whose machine code `explain` reads
    "parallel": {"files", "models", "nn", "ops", "quant"},
    "engine": {"files", "models", "nn", "ops", "parallel"},
    "files": {"nn", "quant"},
    "generate": {"engine", "models", "ops", "parallel"},
    "assets": set(),
    "doctor": {"_C", "ops", "reference"},
    "__main__": {"cli"},
    "vllm": {"_C", "files", "ops", "quant"},
    "cli": {
        "_C",
        "assets",
        "doctor",
        "engine",
        "files",
        "generate",
        "layouts",
        "models",
        "nn",
        "ops",
        "parallel",
        "quant",
    },
}

# The rooms of cpp/src. Everything may include cpp/include.
ROOMS = {
    "cpu": set(),  # host code alone: it shares the structs of cpp/include with the kernels
    "device": set(),
    "epilogue": {"device"},
    "rows": {"device", "epilogue"},
    "gemm": {"device", "epilogue", "rows"},
    "lowbit": {"device", "epilogue", "rows"},
    "decode": {"device", "epilogue", "rows"},
    "layout": {"device", "epilogue"},
    "outliers": {"device", "epilogue", "rows"},
    "parallel": {"device", "epilogue", "rows"},
}
# Each says that a kernel is absent from a build; so these two know of all rooms.
STAND_INS = {"gemm/absent_sm90.cpp", "gemm/cpu_only.cpp"}


def test_imports_follow_the_arrows() -> None:
    for path in ROOT.rglob("*.py"):
        layer = path.relative_to(ROOT).with_suffix("").parts[0]
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
                assert target == layer or target in PYTHON[layer], f"{path.name}: {layer} imports {target}"


def sources() -> dict[str, list[str]]:
    """Every file of cpp/src, as rooms have it, and what it includes of cpp/src."""
    found = {}
    for path in (CPP / "src").rglob("*"):
        if path.suffix in (".h", ".cuh", ".cpp", ".cu", ".inc"):
            included = re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE)
            own = [name for name in included if (CPP / "src" / name).exists()]
            strange = [n for n in included if n not in own and not (CPP / "include" / n).exists()]
            assert not strange, f"{path.name} includes {strange}, by a path that is none of cpp/src or cpp/include"
            found[path.relative_to(CPP / "src").as_posix()] = own
    return found


def test_includes_follow_the_arrows() -> None:
    files = sources()
    assert {name.split("/")[0] for name in files} == set(ROOMS)
    for name, included in files.items():
        room = name.split("/")[0]
        for other in included:
            target = other.split("/")[0]
            allowed = target == room or target in ROOMS[room] or name in STAND_INS
            assert allowed, f"{name} includes {other}: {room} must not know {target}"


def circle_in(graph: dict[str, Iterable[str]]) -> list[str]:
    """A circle, or nothing."""
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for other in graph.get(node, ()):
            if found := walk(other, [*path, node]):
                return found
        done.add(node)
        return []

    return next((found for node in graph if (found := walk(node, []))), [])


def test_no_include_goes_in_circles() -> None:
    files = sources()
    assert circle_in({"a": ["b"], "b": ["c"], "c": ["a"]}) == ["a", "b", "c", "a"]
    assert circle_in(files) == []
    # Nor do the folders inside a room, gemm/wgmma and gemm/skinny for one.
    folders: dict[str, set[str]] = {}
    for name, included in files.items():
        if name in STAND_INS:
            continue
        folder = name.rpartition("/")[0]
        folders.setdefault(folder, set()).update(f for o in included if (f := o.rpartition("/")[0]) != folder)
    folders["gemm"] = set()  # its own files stand above its folders: they choose between them and call them
    assert circle_in({folder: sorted(others) for folder, others in folders.items()}) == []
    for name, included in files.items():
        engine = re.match(r"gemm/\w+/", name)
        above = [other for other in included if re.fullmatch(r"gemm/[^/]+", other)]
        assert not (engine and above), f"{name} includes {above}: an engine knows nothing of the choice between engines"


def test_no_import_goes_in_circles() -> None:
    graph: dict[str, set[str]] = {}
    for path in (ROOT / "ops").glob("*.py"):
        if path.stem == "__init__":
            continue
        graph[path.stem] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("octofuse.ops"):
                below = node.module.removeprefix("octofuse.ops").lstrip(".")
                graph[path.stem] |= {below} if below else {alias.name for alias in node.names}
    assert circle_in({name: sorted(others) for name, others in graph.items()}) == []


def test_no_kernel_reads_through_ldg() -> None:
    """The compiler moves such loads above griddepcontrol.wait: a chained kernel would read what is not there yet."""
    for path in (CPP / "src").rglob("*.cu*"):
        code = [line.split("//")[0] for line in path.read_text().splitlines()]
        assert not any("__ldg(" in line or "__restrict__" in line for line in code), path.name


# Words of this library's own that have given way to the field's, which CONTRIBUTING's glossary has.
RETIRED = (
    r"strips?|chunks?|bringer|brings?|summers?|facts|places|held|near|gemv_bits|choose_op|let_later|earlier_kernels"
)


def test_retired_words_stay_away() -> None:
    used = re.compile(rf"(?i)(?<![\w-])(?:k?(?:{RETIRED}))(?![\w-])|\bk(?:Strip|Chunk|Summers|Held|Parts)\w*")
    for folder in ("cpp", "tests", "benchmarks", "python/octofuse"):
        for path in (REPOSITORY / folder).rglob("*"):
            known = path.suffix in (".h", ".cuh", ".cpp", ".cu", ".py", ".pyi", ".inc", ".def")
            if not known or "assets" in path.parts or path.name == Path(__file__).name:
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                found = used.search(line.replace(".strip(", "(").replace(".chunk(", "("))
                assert found is None, f"{path.name}:{number}: {found[0]}" if found else ""
