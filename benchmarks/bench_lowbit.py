"""Linears with weights of 1 to 8 bits beside fp16 F.linear and torch's own 4-bit kernel: device time and memory.

Square shapes, those of a GPT-3 175B layer and of other models, fp16 activations, groups of 128 unless said, every
kernel behind the one before it (but for the columns that say chained), over rotating weights larger than L2. w4a8 and
w8a8: int8 activations. Look-up tables: `lut_gemv`, where there is an nvcc.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

import lut_gemv
from octofuse.ops.lowbit import bcq_linear, codebook_linear, sparse12_linear, woq_linear
from octofuse.ops.measure import Captured, device_times, overlap
from octofuse.ops.quantize import quantize_per_token
from octofuse.quant.packing import packed_rows, packed_words
from octofuse.testing.timing import energy

SIZES = (4096, 7168, 8192, 12288)
MODELS = ((1024, 4096), (5120, 5120), (6144, 4096), (11008, 4096), (4096, 11008), (13824, 5120), (28672, 8192))
LAYERS = {"QKV": (36864, 12288), "output": (12288, 12288), "FFN1": (49152, 12288), "FFN2": (12288, 49152)}
KINDS = (*((f"w{b}a16", "uniform", b) for b in (8, 6, 5, 4, 3, 2, 1)), *((f"bcq-q{q}", "planes", q) for q in (4, 3, 2, 1)),
         ("sparse12", "sparse12", 7))  # fmt: skip
LEVELS = {"codebook": "nf4", "float8": "e4m3"}
PEER_TOKENS = (1, 16, 64)  # gemlite tunes itself for every shape, for 6 to 13 s
TOKENS = (1, 2, 4, 5, 8, 16, 32, 64, 65, 128, 256, 512)
GROUPS = (None, 256, 128, 64, 32)
L2_BYTES = 128 << 20

Call = Callable[[], Tensor]


def copies(weight_bytes: int) -> int:
    """So many weights exceed L2."""
    return max(2, min(48, L2_BYTES // weight_bytes))


def lowbit_calls(
    kind: str,
    bits: int,
    m: int,
    n: int,
    k: int,
    group: int | None = 128,
    int8: bool = False,
    engine: str = "auto",
) -> tuple[list[Call], int]:
    """Calls over as many weights as exceed L2, and the bytes of one weight. Codes are random: they cost what others do."""
    shape = (packed_rows(n), packed_words(4 if kind == "sparse12" else bits, k))
    groups = 1 if group is None else -(-k // group)
    scales = (groups, bits, n) if kind == "planes" else (groups, n)
    count = copies(shape[0] * shape[1] * 4)
    calls: list[Call] = []
    for _ in range(count):
        x = torch.randn(m, k, device="cuda").half()
        packed = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device="cuda")
        scale = torch.rand(scales, device="cuda").half()
        more: dict[str, Any] = {"group": group, "constant_weight": True, "engine": engine}
        if int8:
            x, more["x_scale"] = quantize_per_token(x)
        if kind == "planes":
            calls.append(lambda x=x, p=packed, s=scale, more=more: bcq_linear(x, p, s, **more))
        elif kind in LEVELS:
            calls.append(lambda x=x, p=packed, s=scale, more=more: codebook_linear(x, p, s, LEVELS[kind], **more))
        elif kind == "sparse12":
            calls.append(lambda x=x, p=packed, s=scale, more=more: sparse12_linear(x, p, s, **more))
        else:
            calls.append(lambda x=x, p=packed, s=scale, more=more: woq_linear(x, p, s, bits=bits, **more))
    return calls, packed.numel() * 4 + scale.numel() * 2


def float_calls(m: int, n: int, k: int) -> list[Call]:
    count = copies(n * k * 2)
    pairs = [(torch.randn(m, k, device="cuda").half(), torch.randn(n, k, device="cuda").half()) for _ in range(count)]
    return [lambda x=x, w=w: linear(x, w) for x, w in pairs]


def tinygemm_calls(m: int, n: int, k: int) -> list[Call]:
    """torch's 4-bit kernel, bf16, group 128."""
    count = copies(n * k // 2)
    calls: list[Call] = []
    for _ in range(count):
        x = torch.randn(m, k, device="cuda").bfloat16()
        codes = torch.randint(0, 255, (n, k // 2), dtype=torch.uint8, device="cuda")
        packed = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
        scales = torch.rand(k // 128, n, 2, device="cuda").bfloat16()
        calls.append(lambda x=x, p=packed, s=scales: torch.ops.aten._weight_int4pack_mm(x, p, 128, s))
    return calls


def gemlite_calls(m: int, n: int, k: int) -> list[Call] | None:
    """gemlite's (0.6), where it is installed: 4 bits, group 128, with zero points, which it always reads."""
    if m not in PEER_TOKENS:
        return None
    try:
        from gemlite.helper import A16Wn
    except ImportError:
        return None
    calls: list[Call] = []
    for _ in range(copies(n * k // 2)):
        x = torch.randn(m, k, device="cuda").half()
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
        scales, zeros = (torch.rand(n * k // 128, 1, device="cuda").half() for _ in range(2))
        layer = A16Wn(device="cuda").from_weights(codes, scales, zeros, 4, 128)
        calls.append(lambda x=x, f=layer: f(x))
    try:
        calls[0]()
    except Exception as error:  # a peer that cannot run this shape is no reason to stop
        print(f"gemlite: {type(error).__name__}: {error}")
        return None
    return calls


def lut_calls(planes: int, n: int, k: int) -> list[Call] | None:
    """One token by look-up tables (`lut_gemv`), group 128; None without nvcc."""
    if lut_gemv.library() is None:
        return None
    calls: list[Call] = []
    for _ in range(copies(n * k * planes // 8)):
        x = torch.randn(1, k, device="cuda").half()
        signs = torch.randint(-(2**31), 2**31 - 1, (planes, k // 32, n), dtype=torch.int32, device="cuda")
        alpha = torch.rand(k // lut_gemv.GROUP, planes, n, device="cuda").half()
        calls.append(lambda x=x, s=signs, a=alpha: lut_gemv.lut_linear(x, s, a))
    return calls


CHAINED = ", chained"  # each kernel may start while the one before it runs, as it does in octofuse.generate
INT8 = {"w8a8": 8, "w4a8": 4}


def times_of(columns: dict[str, list[Call] | None], repeats: int = 15) -> dict[str, float]:
    graphs = {}
    for name, calls in columns.items():
        if calls is None:
            continue
        with overlap(name.endswith(CHAINED)):
            graphs[name] = Captured(calls)
    return {name: round(value, 2) for name, value in device_times(graphs, repeats=repeats).items()}


def one_token(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    rows = []
    for n in sizes:
        columns: dict[str, list[Call] | None] = {"fp16 F.linear": float_calls(1, n, n), "tinygemm": tinygemm_calls(1, n, n),
                                                 "gemlite": gemlite_calls(1, n, n)}  # fmt: skip
        megabytes = {}
        for name, kind, bits in KINDS:
            columns[name], size = lowbit_calls(kind, bits, 1, n, n)
            columns[name + CHAINED] = columns[name]
            megabytes[name] = round(size / 1e6, 2)
        for name, bits in INT8.items():
            columns[name] = lowbit_calls("uniform", bits, 1, n, n, int8=True)[0]
        for planes in (4, 3, 2, 1):
            columns[f"look-up tables, q = {planes}"] = lut_calls(planes, n, n)
        rows.append({"N = K": n, **times_of(columns), "MB": {"fp16": round(n * n * 2 / 1e6, 2), **megabytes}})
        del columns
        torch.cuda.empty_cache()
    return rows


def several_tokens(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    rows = []
    for n in sizes:
        for m in TOKENS:
            columns: dict[str, list[Call] | None] = {
                "fp16 F.linear": float_calls(m, n, n),
                "tinygemm": tinygemm_calls(m, n, n),
                "gemlite": gemlite_calls(m, n, n),
            }
            for name, kind, bits in (KINDS[0], KINDS[3], KINDS[8]):
                columns[name] = lowbit_calls(kind, bits, m, n, n)[0]
            columns["w4a16" + CHAINED] = columns["w4a16"]
            columns["w4a8"] = lowbit_calls("uniform", 4, m, n, n, int8=True)[0]
            rows.append({"M": m, "N = K": n, **times_of(columns, 9)})
            del columns
            torch.cuda.empty_cache()
    return rows


def layers_of_models() -> list[dict[str, Any]]:
    """Shapes that fill the GPU's SMs less evenly than squares of powers of two."""
    rows = []
    for n, k in MODELS:
        for m in (1, 16, 64, 128):
            columns: dict[str, list[Call] | None] = {"fp16 F.linear": float_calls(m, n, k)}
            for name, kind, bits in (KINDS[0], KINDS[3], KINDS[8]):
                columns[name] = lowbit_calls(kind, bits, m, n, k)[0]
            rows.append({"M": m, "N": n, "K": k, **times_of(columns, 9)})
            del columns
            torch.cuda.empty_cache()
    return rows


def groups(n: int) -> list[dict[str, Any]]:
    return [
        {
            "group": "row" if group is None else group,
            **times_of(
                {
                    name: lowbit_calls(kind, bits, 1, n, n, group)[0]
                    for name, kind, bits in (KINDS[3], KINDS[8], KINDS[10])
                }
            ),
        }
        for group in GROUPS
    ]


def layers() -> list[dict[str, Any]]:
    """Time and energy of one token through each matrix of a GPT-3 175B layer."""
    rows = []
    for name, (n, k) in LAYERS.items():
        row: dict[str, Any] = {"layer": name, "N": n, "K": k}
        for column, kind, bits in (("fp16 F.linear", "", 16), KINDS[3], KINDS[8], KINDS[9]):
            calls = float_calls(1, n, k) if kind == "" else lowbit_calls(kind, bits, 1, n, k)[0]
            with overlap(False):
                graph = Captured(calls)
            row[column] = round(device_times({"": graph}, repeats=9)[""], 2)
            joules, _ = energy(graph.replay, torch.device("cuda"), seconds=0.4)
            row[f"{column}, mJ"] = None if joules is None else round(joules / graph.count * 1e3, 2)
            del graph, calls
            torch.cuda.empty_cache()
        rows.append(row)
    return rows


def warm_up(smoke: bool) -> None:
    """Work until the GPU has the clocks of a busy one; of a smoke run one product."""
    warm = torch.randn(8192, 8192, device="cuda").half()
    for _ in range(1 if smoke else 100):
        warm @ warm


def run(smoke: bool) -> dict[str, Any]:
    warm_up(smoke)
    if lut_gemv.library() is not None:
        lut_gemv.check()
    return {
        "unit": "us",
        "one token": one_token(SIZES[:1] if smoke else SIZES),
        "several tokens": several_tokens((4096,) if smoke else (4096, 8192)),
        "layers of models": [] if smoke else layers_of_models(),
        "groups": groups(4096 if smoke else 8192),
        "GPT-3 175B": [] if smoke else layers(),
    }
