"""int8 products in every layout: output types, epilogues, conversions, and chains that stay in COL32.

Each row is one product of one shape: `us` with operands already laid out; `with conversion` from rows and back to rows;
`conversions` of x and of the output alone, and their share of the whole. Weights are laid out once, offline. cuBLASLt's
numbers are those of its best algorithm. What the device cannot run is a row as well, with its reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

import octofuse
from bench_gemm import LARGE, operand_sets
from octofuse import layouts
from octofuse.layouts import COL32, LAYOUTS, ROW, LaidOut, Layout, from_layout, to_layout
from octofuse.ops.measure import Captured, device_time, device_times, overlap

SHAPES = ((2048, 1920, 1920), *(shape for shape in LARGE if shape != (2048, 1920, 1920)))
ALPHA = 1e-4
Set = tuple[Any, ...]  # x, w, x_scale, w_scale, bias
Product = Callable[[Set], Any]


def laid_out(sets: list[Set], x: Layout, w: Layout) -> list[Set]:
    return [(to_layout(s[0], x), to_layout(s[1], w), *s[2:]) for s in sets]


def captured(sets: list[Set], product: Product) -> Captured:
    return Captured([lambda s=s: product(s) for s in sets])


def round_trip(product: Product, x: Layout) -> Product:
    """From rows to rows: the activations are laid out before the product and its output is converted back."""

    def call(s: Set) -> Tensor:
        rows, laid, _ = s
        return from_layout(product((to_layout(rows[0], x), *laid[1:])))

    return call


def conversions_alone(x: Layout) -> Product:
    def call(s: Set) -> Tensor:
        rows, _, y = s
        to_layout(rows[0], x)
        return from_layout(y)

    return call


class Table:
    """The rows of one shape, timed in turns."""

    def __init__(self, shape: tuple[int, int, int], sets: list[Set]) -> None:
        self.shape, self.sets = shape, sets
        self.rows: list[dict[str, Any]] = []
        self.graphs: dict[str, Captured] = {}

    def add(self, output: str, layout: str, engine: str, sets: list[Set], product: Product, x: Layout = ROW) -> None:
        key = str(len(self.rows))
        self.graphs[key] = captured(sets, product)
        if x != ROW:
            whole = [(rows, laid, product(laid)) for rows, laid in zip(self.sets, sets, strict=True)]
            self.graphs[key + " converted"] = captured(whole, round_trip(product, x))
            self.graphs[key + " conversions"] = captured(whole, conversions_alone(x))
        self.rows.append({"output": output, "layout": layout, "engine": engine})

    def refuse(self, output: str, layout: str, engine: str, reason: str) -> None:
        self.rows.append(
            {"output": output, "layout": layout, "engine": engine, "us": f"not supported on this device: {reason}"}
        )

    def timed(self) -> list[dict[str, Any]]:
        m, n, k = self.shape
        with overlap(False):
            times = device_times(self.graphs, repeats=15 if m * n * k < 1e11 else 7)
        for key, row in enumerate(self.rows):
            if "us" in row:
                continue
            us = row["us"] = times[str(key)]
            whole = times.get(f"{key} converted")
            row["TOPS"] = 2 * m * n * k / us / 1e6
            if whole is not None:
                row["with conversion"] = whole
                row["conversions"] = times[f"{key} conversions"]
                row["share of conversions"] = row["conversions"] / whole
        return [{"M": m, "N": n, "K": k, **row} for row in self.rows]


def best_algorithm(s: Set, out: Layout, alpha: float | None, count: int) -> int:
    def time_of(algorithm: int) -> float:
        return device_time(
            [lambda: layouts.matmul(s[0], s[1], alpha=alpha, out_layout=out, engine="cublaslt", algorithm=algorithm)],
            repeats=3,
        )

    return min(range(count), key=time_of)


def add_cublaslt(table: Table, alpha: float | None) -> None:
    output = "int32" if alpha is None else "int8"
    m, n, k = table.shape
    found = layouts.support(m, n, k, int8_output=alpha is not None)
    for names, count in found.items():
        x, w, out = map(layouts.layout_named, names.split(" / "))
        if count <= 0:
            table.refuse(output, names, "cublaslt", f"cuBLASLt declines with status {-count}")
            continue
        sets = laid_out(table.sets, x, w)
        algorithm = best_algorithm(sets[0], out, alpha, count)
        given = {"alpha": alpha, "out_layout": out, "engine": "cublaslt", "algorithm": algorithm}
        table.add(output, names, "cublaslt", sets, lambda s, g=given: layouts.matmul(s[0], s[1], **g), x)


def table_of(shape: tuple[int, int, int]) -> list[dict[str, Any]]:
    sets = operand_sets(*shape)
    table = Table(shape, sets)
    halves = [(s[0].half(), s[1].half(), s[4]) for s in sets[: max(2, len(sets) // 2)]]
    table.add("fp16", "ROW / ROW / ROW", "torch F.linear, fp16", halves, lambda s: linear(*s))
    tiled = laid_out(sets, COL32, COL32)
    rows, col32 = "ROW / ROW / ROW", "COL32 / COL32 / COL32"
    for alpha in (None, ALPHA):
        output = "int32" if alpha is None else "int8"
        table.add(output, rows, "octofuse", sets, raw_product(alpha))
        add_cublaslt(table, alpha)
        table.add(output, col32, "cutlass", tiled, lambda s, a=alpha: layouts.matmul(s[0], s[1], alpha=a), COL32)
    table.add("fp16, fused", rows, "octofuse", sets, lambda s: octofuse.i8f16_linear(*s))
    table.add("fp16, fused", rows, "cutlass_sm80", sets, lambda s: octofuse.i8f16_linear(*s, engine="cutlass_sm80"))
    table.add("fp16, fused", col32, "cutlass", tiled, lambda s: layouts.linear(*s), COL32)
    table.add("fp16, second pass", rows, "cublaslt", sets, lambda s: octofuse.i8f16_linear(*s, engine="cublaslt"))
    return table.timed()


def raw_product(alpha: float | None) -> Product:
    if alpha is None:
        return lambda s: octofuse.i8i32_matmul(s[0], s[1])
    return lambda s: octofuse.i8i8_matmul(s[0], s[1], alpha)


def conversions(rows: int, cols: int) -> list[dict[str, Any]]:
    """Every conversion beside a copy of the same bytes."""
    count = max(2, (256 << 20) // (rows * cols))
    matrices = [torch.randint(-128, 128, (rows, cols), dtype=torch.int8, device="cuda") for _ in range(count)]
    halves = [x.half() for x in matrices[: count // 2]]
    copies = [torch.empty_like(x) for x in matrices]
    copy = device_time([lambda a=a, b=b: b.copy_(a) for a, b in zip(matrices, copies, strict=True)])
    found: dict[str, float] = {}
    for layout in LAYOUTS[1:]:
        laid = [to_layout(x, layout) for x in matrices]
        found[f"ROW -> {layout.name}"] = device_time([lambda x=x, t=layout: to_layout(x, t) for x in matrices])
        found[f"{layout.name} -> ROW"] = device_time([lambda x=x: from_layout(x) for x in laid])
        for name, call in (
            (f"ROW -> {layout.name}, cublasLtMatrixTransform",
             lambda t=layout: to_layout(matrices[0], t, engine="cublaslt")),
            (f"{layout.name} -> ROW, cublasLtMatrixTransform", lambda x=laid[0]: from_layout(x, engine="cublaslt")),
        ):  # fmt: skip
            try:
                call()
            except ValueError as error:
                found[name] = str(error)
            else:
                found[name] = device_time([call])
    q, scales = layouts.quantize(halves[0])
    plain = from_layout(q)
    found["quantise, ROW"] = device_time([lambda x=x: octofuse.quantize_per_token(x) for x in halves])
    found["quantise + convert, COL32"] = device_time([lambda x=x: layouts.quantize(x) for x in halves])
    found["dequantise, ROW"] = device_time([lambda: octofuse.dequantize(plain, scales)] * 4)
    found["dequantise + convert back, COL32"] = device_time([lambda: layouts.dequantize(q, scales)] * 4)
    return [
        {"rows": rows, "cols": cols, "pass": name, "us": us, "of copy's bandwidth": speed(name, us, copy)}
        for name, us in {"copy": copy, **found}.items()
    ]


def speed(name: str, us: Any, copy: float) -> float | None:
    """Bytes a second beside the copy's; a quantising pass moves 3 bytes an element where the copy moves 2."""
    moved = 1.5 if "quantise" in name else 1.0
    return None if isinstance(us, str) else moved * copy / us


def chain_operands(m: int, width: int) -> Set:
    """x fp16, four int8 weights, their scale and a bias, of values that stay in range from one linear to the next."""
    x = torch.randn(m, width, device="cuda").half()
    weights = [torch.randint(-128, 128, (width, width), dtype=torch.int8, device="cuda") for _ in range(4)]
    scale = torch.rand(width, device="cuda") / (74 * width**0.5)
    return x, weights, scale, torch.randn(width, device="cuda").half()


def chain(m: int, width: int) -> dict[str, Any]:
    """Four linears, gelu_tanh, int8 from one to the next: fp16 in, fp16 out."""
    count = max(2, min(16, (128 << 20) // (4 * width * width)))
    rows = [chain_operands(m, width) for _ in range(count)]
    tiled = [(x, [to_layout(w, COL32) for w in ws], scale, bias) for x, ws, scale, bias in rows]
    floats = [(x, [w.half() for w in ws], scale, bias) for x, ws, scale, bias in rows]

    def in_fp16(s: Set) -> Tensor:
        x, ws, _, bias = s
        for w in ws:
            x = torch.nn.functional.gelu(linear(x, w, bias), approximate="tanh")
        return x

    def in_rows(s: Set) -> Tensor:
        x, ws, scale, bias = s
        q = octofuse.quantize_per_tensor(x, 0.05)
        for w in ws[:-1]:
            q = octofuse.i8i8_linear(q, w, 0.05, scale, bias, activation="gelu_tanh", out_scale=0.05)
        return octofuse.i8f16_linear(q, ws[-1], 0.05, scale, bias, activation="gelu_tanh")

    def step(q: LaidOut, w: LaidOut, scale: Tensor, bias: Tensor) -> LaidOut:
        return layouts.linear(q, w, 0.05, scale, bias, activation="gelu_tanh", out_scale=0.05)

    def in_col32(s: Set) -> LaidOut:
        x, ws, scale, bias = s
        q, _ = layouts.quantize(x, scale=0.05)
        for w in ws[:-1]:
            q = step(q, w, scale, bias)
        return layouts.linear(q, ws[-1], 0.05, scale, bias, activation="gelu_tanh", out_layout=ROW)

    def converted_each_time(s: Set) -> LaidOut:
        x, ws, scale, bias = s
        q = octofuse.quantize_per_tensor(x, 0.05)
        for w in ws[:-1]:
            q = from_layout(step(to_layout(q, COL32), w, scale, bias))
        last = to_layout(q, COL32)
        return layouts.linear(last, ws[-1], 0.05, scale, bias, activation="gelu_tanh", out_layout=ROW)

    with overlap(False):
        graphs = {
            "fp16, torch": captured(floats, in_fp16),
            "int8 in rows": captured(rows, in_rows),
            "int8 in COL32 throughout": captured(tiled, in_col32),
            "int8 in COL32, converted at every linear": captured(tiled, converted_each_time),
        }
        return {"M": m, "width": width, **device_times(graphs, repeats=9)}


def run(smoke: bool) -> dict[str, Any]:
    shapes = SHAPES[:1] if smoke else SHAPES
    widths = ((2048, 1920),) if smoke else ((2048, 1920), (1024, 768), (2048, 4096), (8192, 4096))
    return {
        "unit": "us",
        "rows": [row for shape in shapes for row in table_of(shape)],
        "conversions": conversions(4096, 4096) + ([] if smoke else conversions(2048, 1920)),
        "chains": [chain(m, width) for m, width in widths],
    }
