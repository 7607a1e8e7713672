"""The tables of README.md and docs/, written from benchmarks/results between their markers, so that no figure is typed.

    python benchmarks/tables.py          # write them
    python benchmarks/tables.py --check  # exit 1 if one is not what the results say (a test runs this)

A table stands between `<!-- table: name -->` and `<!-- end -->`; its name is a function of this file.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import parallel_tables
import peer_tables
from table_text import lines, us

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def times(value: float) -> str:
    return f"{value:.1f}x"


def thousands(value: float) -> str:
    return f"{value:,.0f}"


def gpt2_of(model: str, engine: str) -> dict[str, Any]:
    rows = result("h200/gpt2")["study"]
    found: dict[str, Any] = next(row for row in rows if (row["model"], row["engine"]) == (model, engine))
    return found


def cpu_of(isa: str, model: str, engine: str) -> dict[str, Any]:
    rows = result(f"cpu/{isa}")["rows"]
    found: dict[str, Any] = next(row for row in rows if (row["model"], row["engine"]) == (model, engine))
    return found


def highlights() -> str:
    """Eight rows: what a user gains."""
    rows = []
    decoding = {(row["model"], row["engine"]): row["tokens/s"] for row in result("h200/decode")["one"]}
    for engine, label in (("w8a8-dynamic", "int8"), ("w4a16-g128", "4-bit weights")):
        rate, before = (decoding["Llama-3.1-8B", name] for name in (f"octofuse {engine}", "transformers compiled"))
        what = "Llama-3.1-8B, one sequence, H200"
        gain = times(rate / before)
        rows.append((what, "transformers compiled, fp16", f"{label}: {thousands(rate)} tokens/s", gain))
    for model in ("124M", "XL"):
        before = gpt2_of(model, "transformers compiled")["tokens/s"]
        rate = decoding[f"GPT-2 {model}", "octofuse w8a8-static"]
        what = f"GPT-2 {model}, one sequence, H200"
        gain = times(rate / before)
        rows.append((what, "transformers compiled, fp16", f"int8: {thousands(rate)} tokens/s", gain))
    lowbit = next(row for row in result("h200/lowbit")["one token"] if row["N = K"] == 8192)
    for name, label in (("w8a8", "int8"), ("w4a16", "4-bit weights")):
        gain = times(lowbit["fp16 F.linear"] / lowbit[name])
        rows.append(("one token, 8192 x 8192 linear, H200", "fp16 `F.linear`", f"{label}: {us(lowbit[name])} us", gain))
    for engine, label in (("w8a8-static", "int8"), ("w4a16-g128", "4-bit weights")):
        row = cpu_of("avx2", "124M", engine)
        gain = times(row["octofuse, over fp32"])
        rate = f"{row['octofuse, tokens/s']:.0f} tokens/s"
        rows.append(("GPT-2 124M, one sequence, 2 CPU cores with AVX2", "the same in fp32", f"{label}: {rate}", gain))
    return lines(("what", "against", "octofuse", "faster"), rows)


def schemes() -> str:
    found = json.loads((ROOT / "python/octofuse/assets/schemes.json").read_text(encoding="utf-8"))["schemes"]
    rows = []
    for name, row in found.items():
        cost = f"{row['cost']:+.1%}" if row["cost"] < 1 else times(1 + row["cost"])
        rows.append((f"`{name}`", f"{row['bits']:.1f}", cost, times(row["gpu"]), times(row["cpu"])))
    heads = ("scheme", "bits a weight", "perplexity", "one token on an H200, over fp16", "decoding on a CPU, over fp32")
    return lines(heads, rows)


def costs() -> str:
    """Perplexity of every scheme that was measured, the cheapest first."""
    found = json.loads((ROOT / "python/octofuse/assets/schemes.json").read_text(encoding="utf-8"))
    cost = {name: row["cost"] for name, row in found["schemes"].items()} | found["more costs"]
    rows = []
    for name in sorted(cost, key=lambda name: cost[name]):
        shown = f"{cost[name]:+.2%}" if cost[name] < 1 else times(1 + cost[name])
        rows.append((f"`{name}`", f"{found['perplexity'] * (1 + cost[name]):.2f}", shown))
    return lines(("scheme", f"perplexity ({found['tokens']:,} held-out tokens)", "cost"), rows)


def gemm() -> str:
    columns = ("fp16 F.linear", "fp8 _scaled_mm", "cublaslt int32 (raw)", "vLLM", "octofuse alone")
    rows = []
    for row in sorted(result("h200/gemm")["rows"], key=lambda row: (row["M"] * row["N"] * row["K"], row["M"])):
        values = [us(row.get(column)) for column in (*columns, "octofuse chained")]
        shape = f"{row['M']}, {row['N']}, {row['K']}"
        rows.append((shape, *values, row["kernel"], times(row["over fp16"])))
    heads = ("M, N, K", "fp16", "fp8", "cuBLASLt int32", "vLLM", "alone", "chained", "kernel", "over fp16")
    return lines(heads, rows)


def float8() -> str:
    """Some of the shapes, and means over all of them."""
    found = result("h200/float8")
    names = ("fast", "exact sums", "blocks", "int8", "torch row, fast", "torch tensor, fast", "vLLM")
    weights, tokens = ((4096, 4096), (28672, 4096), (8192, 28672)), (1, 16, 64, 256, 1000, 4096)
    shown = [row for row in found["rows"] if (row["N"], row["K"]) in weights and row["M"] in tokens]
    rows = [(f"{row['M']}, {row['N']}, {row['K']}", *(us(row.get(name)) for name in names)) for row in shown]
    means = [f"{what}: {value}" for what, value in found.items() if isinstance(value, float)]
    count = len({(row["N"], row["K"]) for row in found["rows"]})
    summary = f"Over all {len(found['rows'])} shapes of {count} weights: {'; '.join(means)}."
    return f"{lines(('M, N, K', *names), rows)}\n\n{summary}"


def lowbit() -> str:
    names = ("w8a16", "w4a16", "w3a16", "w2a16", "w1a16", "bcq-q4", "bcq-q3", "bcq-q2", "bcq-q1", "sparse12")
    rows = []
    for row in result("h200/lowbit")["one token"]:
        pairs = [f"{us(row[name])} / {us(row[f'{name}, chained'])}" for name in names]
        rows.append((row["N = K"], us(row["fp16 F.linear"]), us(row["tinygemm"]), us(row["gemlite"]), *pairs))
    return lines(("N = K", "fp16", "tinygemm", "gemlite", *names), rows)


def prompts() -> str:
    """Times beside fp16's, and fp16's over those of 4 bits by tokens."""
    names = ("w8a16", "w4a16", "w3a16", "bcq-q3", "nf4", "w4a16, dequantised")
    found = result("h200/prompts")["rows"]
    rows = []
    for row in found:
        if row["M"] in (256, 512, 2048):
            rows.append(
                (f"{row['M']}, {row['N']}, {row['K']}", us(row["fp16 F.linear"]), *(us(row[name]) for name in names))
            )
    means = []
    for m in sorted({row["M"] for row in found}):
        gains = [row["fp16 F.linear"] / row["w4a16"] for row in found if row["M"] == m]
        means.append(f"{m} tokens {geometric_mean(gains):.2f} (worst {min(gains):.2f})")
    return f"{lines(('M, N, K', 'fp16', *names), rows)}\n\nfp16 over w4a16, geometric mean: {'; '.join(means)}."


def peer_rows() -> list[dict[str, Any]]:
    """Of each family, number of tokens and layer the newest row."""
    newest: dict[tuple[str, int, int, int], dict[str, Any]] = {}
    for name in ("peers", "peers_long", "peers_older"):
        for row in result(f"h200/{name}")["rows"]:
            newest.setdefault((row["family"], row["M"], row["N"], row["K"]), row)
    return list(newest.values())


def peers() -> str:
    heads = ("the fastest other kernel over octofuse", "layers", *peer_tables.BANDS)
    return lines(heads, peer_tables.summary(peer_rows()))


def peers_between() -> str:
    """Other layers, and numbers of tokens between powers of two."""
    heads = ("the fastest other kernel over octofuse", "layers", *peer_tables.BETWEEN)
    rows = [row for name in ("peers_between", "peers_between_int8") for row in result(f"h200/{name}")["rows"]]
    return lines(heads, peer_tables.summary(rows, peer_tables.BETWEEN))


def peer_times() -> str:
    families = ("w8a8", "w8a16", "w4a16", "w4a8", "w4a8-g128", "w3a16", "w2a16", "w1a16")
    return peer_tables.all_times(peer_rows(), families)


def codebook() -> str:
    names = ("fp16 F.linear", "w4a16-g64", "nf4", "bitsandbytes", "w8a16", "w8a16-fp8")
    tokens = (1, 4, 16, 64, 128, 512)
    rows = []
    for row in result("h200/codebook")["rows"]:
        if row["M"] in tokens:
            chained = f" / {us(row['nf4, chained'])}" if "nf4, chained" in row else ""
            columns = [us(row.get(name)) + (chained if name == "nf4" else "") for name in names]
            rows.append((f"{row['M']}, {row['N']}, {row['K']}", *columns))
    return lines(("M, N, K", *names), rows)


def outliers() -> str:
    names = ("fp16 F.linear", "w8a8-dynamic", "llm-int8", "bitsandbytes")
    rows = [
        (f"{row['M']}, {row['N']}, {row['K']}", *(us(row.get(name)) for name in names))
        for row in result("h200/outliers")["rows"]
    ]
    return lines(("M, N, K", *names), rows)


def gpt2() -> str:
    rows = []
    for row in result("h200/gpt2")["study"]:
        first, between = f"{row['first token ms']:.2f}", f"{row['inter-token ms']:.3f}"
        energy = f"{row['mJ/token']:.0f}"
        rows.append((row["model"], row["engine"], thousands(row["tokens/s"]), first, between, energy))
    return lines(("GPT-2", "engine", "tokens/s", "first token, ms", "inter-token, ms", "mJ a token"), rows)


def batches() -> str:
    engines = ("transformers eager", "transformers compiled", "fp16", "int8 dynamic", "int8 static")
    rows = [
        (f"{row['model']}, batch {row['batch']}", *(thousands(row[engine]) for engine in engines))
        for row in result("h200/gpt2")["batches"]
    ]
    return lines(("tokens/s", *engines), rows)


def decoders(gpu: str = "h200") -> str:
    """One sequence, by model; of transformers there is no floor."""
    rows = []
    for row in result(f"{gpu}/decode")["one"]:
        bound = "" if "of the floor" not in row else f"{thousands(row['floor tokens/s'])} ({row['of the floor']:.0%})"
        first, between = f"{row['first token ms']:.1f}", f"{row['ms a token']:.2f}"
        rows.append((row["model"], row["engine"], thousands(row["tokens/s"]), between, first, bound))
    heads = ("model", "engine", "tokens/s", "ms a token", "first token, ms", "the bytes alone, tokens/s")
    return lines(heads, rows)


def decoder_loads(gpu: str = "h200") -> str:
    """Batches, prompts and contexts of the 8B model, each beside the same engine in fp16."""
    found = result(f"{gpu}/decode")
    rows = []
    parts = (("batch", "tokens/s", "batch 32, 256 new tokens"), ("prefill", "ms", "8 prompts of 2,048 tokens"))
    for part, unit, label in parts:
        of_part = {row["engine"]: row[unit] for row in found[part]}
        for engine, value in of_part.items():
            gain = value / of_part["octofuse fp16"]
            gain = gain if unit == "tokens/s" else 1 / gain
            rows.append((label, engine, f"{thousands(value)} {unit}", f"{gain:.2f}x"))
    plain = {row["engine"]: row["us"] for row in found["context"] if row["cache"] == "float16"}
    for row in found["context"]:
        engine = f"{row['engine']}, cache in {row['cache']}"
        gain = plain[row["engine"]] / row["us"]
        rows.append(("a step of 8 behind 32,768 each", engine, f"{row['us'] / 1e3:.1f} ms", f"{gain:.2f}x"))
    return lines(("Llama-3.1-8B", "engine", "", "over fp16 (of the cache)"), rows)


def beside_vllm() -> str:
    return peer_tables.beside_vllm(peer_rows())


def decoders_h100() -> str:
    return decoders("h100")


def decoder_loads_h100() -> str:
    return decoder_loads("h100")


def cpu(isa: str) -> str:
    rows = []
    for row in result(f"cpu/{isa}")["rows"]:
        values: list[str] = []
        for way in ("octofuse", "transformers"):
            for column, show in (
                (", tokens/s", "{:.0f}"),
                (", over fp32", "{:.2f}x"),
                (", prompt over fp32", "{:.2f}x"),
            ):
                value = row.get(way + column)
                values.append("" if value is None else show.format(value))
        rows.append((row["model"], row["engine"], *values))
    heads = ("GPT-2", "engine", "tokens/s", "decoding", "prompt", "tokens/s, transformers", "decoding", "prompt")
    return lines(heads, rows)


def cpu_avx2() -> str:
    return cpu("avx2")


def cpu_avx512() -> str:
    return cpu("avx512_vnni")


def llama_cpp() -> str:
    rows = result("cpu/llama_cpp_avx2")["rows"]
    best = {row["engine"]: row for row in rows}
    shown = []
    for row in rows:
        peer = best["llama.cpp q4_0" if "4 bits" in row["engine"] else "llama.cpp q8_0"]
        ratios = ("", "")
        if row["engine"] in ("octofuse int8", "octofuse 4 bits"):
            ratios = (times(row["tokens/s"] / peer["tokens/s"]), times(peer["prompt ms"] / row["prompt ms"]))
        shown.append((row["engine"], f"{row['tokens/s']:.0f}", ratios[0], f"{row['prompt ms']:.0f}", ratios[1]))
    return lines(("engine", "tokens/s", "over llama.cpp", "prompt of 128, ms", "over llama.cpp"), shown)


def machines() -> str:
    rows = []
    for name in ("avx2", "avx512_vnni"):
        found = result(f"cpu/{name}")
        busy = found["beside two busy processes"]
        rows.append((name, found["cpu"], found["threads"], times(busy["octofuse"]), times(busy["fp32"])))
    return lines(("instruction set", "CPU", "threads", "octofuse beside two busy processes", "fp32 beside them"), rows)


def tests() -> str:
    found = result("h200/tests")
    ran, tools = found["tests"], found["sanitizers"]
    counts = f"{ran['passed']} passed, {ran['failures']} failed, {ran['skipped']} skipped"
    rows = [("GPU tests", ran["tests"], "; ".join([counts, *([ran["note"]] if "note" in ran else [])]))]
    rows += [(f"compute-sanitizer {name}", tool["cases"], outcome(tool)) for name, tool in tools.items()]
    return lines(("suite on H200", "cases", "outcome"), rows)


def outcome(tool: dict[str, Any]) -> str:
    note = tool.get("note")
    return str(tool["summary"]) if note is None else f"{tool['summary']}; {note}"


def distill() -> str:
    """What the perplexity loses, before training, after all at once and by blocks."""
    found: dict[str, dict[str, list[str]]] = {}
    schemes: list[str] = []
    for row in result("h200/distill")["rows"]:
        if row["scheme"] not in schemes:
            schemes.append(row["scheme"])
        cell = found.setdefault(row["model"], {}).setdefault(row["scheme"], [f"{row['loss before, %']:+.1f} % ->"])
        cell.append(f"{row['loss after, %']:+.1f}" if len(cell) == 1 else f"({row['loss after, %']:+.1f})")
    rows = [(model, *(" ".join(cells[scheme]) for scheme in schemes)) for model, cells in found.items()]
    return lines(("model", *schemes), rows)


def files() -> str:
    """Loading a model: seconds and memory."""
    rows = []
    for row in result("h200/files")["rows"]:
        sizes = (f"{row[name]:.1f}" for name in ("file GB", "model GB", "peak GB"))
        rows.append((row["what"], f"{row['s']:.1f}", *sizes, thousands(row["tokens/s"])))
    return lines(("checkpoint", "seconds", "file, GB", "model, GB", "at most, GB", "tokens/s"), rows)


def versions() -> str:
    found = result("h200/gemm")
    names = ("tests", "peers", "peers_older", "peers_long", "peers_between", "peers_between_int8", "gemm", "float8",
             "decode", "gpt2", "lowbit", "prompts", "codebook", "outliers", "files", "parallel", "distill")  # fmt: skip
    ran = [f"{name} {result(f'h200/{name}')['cpp'][:8]}" for name in names]
    return (
        f"One H200, torch {found['torch']}, driver {found['driver']}, cuBLASLt {found['cublaslt']}. `cpp/` was, for "
        f"each of them: {', '.join(ran)}."
    )


TABLES: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        highlights, schemes, costs, peers, peers_between, peer_times, beside_vllm, gemm, float8, lowbit, prompts, codebook,
        outliers, decoders, decoder_loads, decoders_h100, decoder_loads_h100, gpt2, batches, distill, files, cpu_avx2,
        cpu_avx512, llama_cpp, machines, tests, versions,
    )
}  # fmt: skip


def of_several_gpus(table: Callable[[dict[str, Any]], str], card: str) -> str:
    return table(result(f"{card}/parallel"))


for name, table in (("parallel", parallel_tables.one_sequence), ("parallel_loads", parallel_tables.loads),
                    ("one_against_two", parallel_tables.one_against_two),
                    ("gathers", parallel_tables.exchanges)):  # fmt: skip
    for suffix, card in (("", "h200"), ("_h100", "h100")):
        TABLES[name + suffix] = functools.partial(of_several_gpus, table, card)


def filled(page: str) -> str:
    """The page with its tables as the results have them. KeyError for a table that there is not."""
    marked = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return marked.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[3]}", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    for path in PAGES:
        before = path.read_text(encoding="utf-8")
        after = filled(before)
        if check and before != after:
            raise SystemExit(f"{path.name}: a table is not what the results say; run python benchmarks/tables.py")
        path.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
