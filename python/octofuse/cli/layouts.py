"""`octofuse layout support`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from octofuse.cli.common import pick_device
from octofuse.layouts import support


def print_support(console: Console, shape: str, device: str) -> None:
    """A row for each combination of layouts: how many algorithms cuBLASLt has, or that it declines."""
    try:
        m, n, k = (int(part) for part in shape.split(","))
    except ValueError:
        raise ValueError(f"shape: expected M,N,K, got {shape!r}") from None
    where = pick_device(device)
    table = Table("x / w / output", "int32 output", "int8 output", title=f"cuBLASLt, M, N, K = {m}, {n}, {k}", box=None)
    found = [support(m, n, k, int8_output=int8_output, device=where) for int8_output in (False, True)]
    for names in found[0]:
        table.add_row(names, *(_words(column[names]) for column in found))
    console.print(table)
    console.print("COL32 / COL32 / COL32 or ROW: CUTLASS's kernels, on compute capability 8.0 and later", markup=False)


def _words(algorithms: int) -> str:
    return f"{algorithms} algorithms" if algorithms > 0 else f"declines (status {-algorithms})"
