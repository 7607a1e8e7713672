"""Run benchmarks and write what was measured: `python benchmarks/run.py gemm quantize model --out benchmarks/results/h200`.

Each topic is a file bench_<topic>.py with `run(smoke) -> dict`; `--smoke` runs two shapes of each, to see that it works.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from octofuse.testing.timing import environment

TOPICS = ("gemm", "float8", "layouts", "lowbit", "prompts", "codebook", "outliers", "quantize", "model", "gpt2",
          "decode", "parallel", "files", "cpu", "schemes", "llama_cpp", "distill")  # fmt: skip


def show(console: Console, topic: str, rows: list[dict]) -> None:
    table = Table(title=topic)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    for column in columns:
        table.add_column(str(column))
    for row in rows:
        values = (row.get(column, "") for column in columns)
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in values))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topics", nargs="+", choices=TOPICS)
    parser.add_argument("--out", type=Path, help="folder for <topic>.json")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    console = Console(width=220)
    for topic in args.topics:
        result = importlib.import_module(f"bench_{topic}").run(args.smoke)
        record = {**environment(f"python benchmarks/run.py {topic}"), **result}
        tables = {key: value for key, value in result.items() if isinstance(value, list)}
        for key, rows in tables.items():
            show(console, f"{topic}: {key}", rows)
        others = {key: value for key, value in result.items() if key not in tables}
        if others:
            console.print(others)
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / f"{topic}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
