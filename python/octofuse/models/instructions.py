"""Which instruction multiplies in a CUDA kernel: read in its machine code where that is found, else guessed by its name.

Machine code comes from `cuobjdump` of the CUDA toolkit, for kernels of this library and of Triton, whose files are small
enough to search. Kernels of cuBLAS lie in libraries of hundreds of megabytes; their names say what they are.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from octofuse import _C

# What an instruction multiplies. A kernel's is the one that its code has most often, shape and all.
OPERANDS = {
    "IGMMA": "int8", "IMMA": "int8", "QGMMA": "float8", "QMMA": "float8", "BGMMA": "1 bit", "BMMA": "1 bit",
    "HGMMA": "16 bits", "HMMA": "16 bits", "DMMA": "float64",
}  # fmt: skip
_OPCODE = re.compile(r"\b(" + "|".join(OPERANDS) + r")((?:\.[A-Z0-9x_]+)*)")
# By name, the first that matches: what CUTLASS, cuBLAS and others call their kernels.
_NAMES = (
    (re.compile(r"nvjet_(?:sm\d+_)?q|e4m3|e5m2|fp8|f8f6f4|qgmma"), "QGMMA"),
    (re.compile(r"nvjet_(?:sm\d+_)?[ht]|gmma.*(?:f16|bf16)|(?:f16|bf16).*gmma"), "HGMMA"),
    (re.compile(r"_s8|i8i8|igemm|imma|int8.*gemm|i16832|i8816"), "IMMA"),
    (re.compile(r"[hs]16816|[hs]1688|hmma|tensorop|wmma|_f16|bf16gemm|fp16gemm|fmha|flash"), "HMMA"),
)
_LONGEST = 120  # seconds that reading machine code may take


@dataclass(frozen=True)
class Instruction:
    """name: such as "IGMMA.64x128x32", or "" where no tensor core multiplies; source: "SASS" or "name"."""

    name: str
    source: str

    @property
    def operands(self) -> str:
        """ "int8", "float8", "16 bits", "1 bit", "float64", or "" without tensor cores."""
        return OPERANDS.get(self.name.partition(".")[0], "")


def instructions_of(kernels: Iterable[str]) -> dict[str, Instruction]:
    """Of each kernel, by the name that a profiler gives it."""
    wanted = set(kernels)
    found = {name: Instruction(code, "SASS") for name, code in _in_machine_code(wanted).items()}
    return {name: found.get(name) or _by_name(name) for name in wanted}


def of_listing(listing: str) -> str:
    """The instruction of a kernel's disassembly, with its shape; "" without one."""
    codes = Counter(match[0] for match in _OPCODE.finditer(listing))
    return codes.most_common(1)[0][0] if codes else ""


def _by_name(kernel: str) -> Instruction:
    lower = kernel.lower()
    return Instruction(next((code for pattern, code in _NAMES if pattern.search(lower)), ""), "name")


def _in_machine_code(kernels: set[str]) -> dict[str, str]:
    tool = _tool()
    if tool is None or not kernels:
        return {}
    found: dict[str, str] = {}
    ours = {name for name in kernels if "octofuse::" in name}
    if ours:
        mangled = _functions(tool, _C.__file__)
        for name in ours:
            if (symbol := mangled.get(_plain(name))) is not None:
                found[name] = of_listing(_run(tool, "-sass", "-fun", symbol, _C.__file__))
    for name in kernels - ours:
        if re.fullmatch(r"\w+", name) and (binary := _triton_binary(name)) is not None:
            found[name] = of_listing(_run(tool, "-sass", str(binary)))
    return found


@lru_cache(maxsize=1)
def _tool() -> str | None:
    for folder in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if folder and (path := Path(folder) / "bin" / "cuobjdump").exists():
            return str(path)
    return shutil.which("cuobjdump")


@lru_cache(maxsize=4)
def _functions(tool: str, library: str) -> dict[str, str]:
    """Kernels of a library: as a profiler calls them -> their symbols."""
    names = re.findall(r"Function (\S+):", _run(tool, "-res-usage", library))
    return {_plain(_demangled(name)): name for name in names}


def _run(tool: str, *arguments: str) -> str:
    try:
        done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=_LONGEST, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def _demangled(symbol: str) -> str:
    try:
        library = ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return symbol
    demangle = library.__cxa_demangle
    demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    pointer = demangle(symbol.encode(), None, None, ctypes.byref(status))
    if not pointer or status.value != 0:
        return symbol
    text = ctypes.string_at(pointer).decode()
    ctypes.CDLL(None).free(ctypes.c_void_p(pointer))
    return text


def _plain(name: str) -> str:
    """Without what demanglers spell differently: spaces, return types, casts of template arguments."""
    text = re.sub(r"\((?:[\w:]+|\(anonymous namespace\))\)(?=-?\d)", "", name).removeprefix("void ")
    text = text.replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
    return re.sub(r"\s+|(?<=\d)[ul]+\b", "", text)


def _triton_binary(kernel: str) -> Path | None:
    folder = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
    found = sorted(folder.rglob(f"{kernel}.cubin"), key=lambda path: path.stat().st_mtime) if folder.exists() else []
    return found[-1] if found else None
