"""Commands: `octofuse advise | explain | demo | quantize | generate | eval | compare | frontier | schemes | tune | ...`."""

from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from octofuse import __version__

app = typer.Typer(add_completion=False, no_args_is_help=True)
layouts_app = typer.Typer(no_args_is_help=True, help="The memory layouts of int8 GEMMs.")
app.add_typer(layouts_app, name="layout")
console = Console()

Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto takes the GPU if octofuse can use it")]


def main() -> None:
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"octofuse {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and end")
    ] = False,
) -> None:
    """int8 models that are really faster."""


@app.command()
def demo(
    model: Annotated[
        str, typer.Argument(help="a folder, or a hub name, of a model that octofuse.generate takes")
    ] = "embedded",
    device: Device = "auto",
    new_tokens: Annotated[int, typer.Option(min=2, help="tokens to generate")] = 48,
    evaluation_tokens: Annotated[int, typer.Option(min=512, help="held-out tokens for the perplexity")] = 24576,
    schemes: Annotated[str | None, typer.Option(help="names as for quantize, by commas; default: five of them")] = None,
    plot: Annotated[Path | None, typer.Option(help="draw a picture, .png or .svg")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="two schemes, fewer tokens, no texts")] = False,
) -> None:
    """Quantise a model (one is embedded) some ways and compare it with the original: accuracy, size, speed, text."""
    with _plain_errors():
        from octofuse.cli.demo import run_demo

        run_demo(console, model, device, new_tokens, evaluation_tokens, schemes, plot, quick)


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="a folder, a hub name such as gpt2, or 'embedded'")],
    output: Annotated[Path, typer.Option("-o", "--output", help="a new folder")],
    scheme: Annotated[
        str,
        typer.Option(
            help="such as w8a8-dynamic, w8a16, w4a16-g128-gptq, bcq-q3-g128; `octofuse schemes` says what each is"
        ),
    ] = "w8a8-dynamic",
    exceptions: Annotated[
        list[str] | None,
        typer.Option("--except", help="LAYERS=SCHEME, such as mlp.c_proj=w8a8-dynamic or 'transformer.h.0.*=float'"),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help="text file for static and smoothed schemes, gptq, awq; default: a text that ships"),
    ] = None,
    distill: Annotated[int, typer.Option(min=0, help="steps that train the scales of few bits by the float model")] = 0,
    codes: Annotated[
        bool,
        typer.Option(help="with --distill: codes too, on text that the float model writes as well"),
    ] = False,
    by_blocks: Annotated[
        bool,
        typer.Option(
            "--by-blocks",
            help="with --distill: one block after the other, 100 steps each at least; by itself where memory is short",
        ),
    ] = False,
    cache_scales: Annotated[
        bool, typer.Option("--cache-scales", help="k_scale and v_scale too, of a static FP8 cache")
    ] = False,
    tokenizer: Annotated[bool, typer.Option(help="whether the folder gets the model's tokenizer")] = True,
    form: Annotated[
        str,
        typer.Option(
            "--format", help="compressed-tensors, which transformers reads; octofuse; auto: the first that can say it"
        ),
    ] = "auto",
    device: Device = "auto",
) -> None:
    """Quantise a model and write it, with its tokenizer, to a folder."""
    with _plain_errors():
        from octofuse.cli.quantize import run_quantize

        run_quantize(
            console, model, output, scheme, exceptions or [], calibration, distill, codes, by_blocks, cache_scales,
            tokenizer, form, device,
        )  # fmt: skip


@app.command()
def advise(
    model: Annotated[
        str, typer.Argument(help="a folder, whose config.json is enough, that file, a hub name, or 'embedded'")
    ],
    gpu: Annotated[
        str, typer.Option(help="h200 or h100; auto: this machine's, if it is one of these, else h200")
    ] = "auto",
    budget_gb: Annotated[
        float | None, typer.Option("--budget-gb", help="for weights and cache; default: the GPU's memory")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="sequences at a time")] = 1,
    context: Annotated[
        int | None, typer.Option(min=1, help="tokens of each sequence; default: 2048, or the model's own limit")
    ] = None,
    max_loss: Annotated[float, typer.Option(help="of perplexity that a recommended scheme may lose, 0.03: 3 %")] = 0.03,
    schemes: Annotated[str | None, typer.Option(help="names as for quantize, and float, by commas")] = None,
    text: Annotated[
        Path | None, typer.Option(help="text to measure the loss on; the folder then needs weights")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="of the text")] = 8192,
    measure: Annotated[
        bool, typer.Option("--measure", help="time the model here; the folder then needs weights")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="draw a picture, .png or .svg")] = None,
    device: Device = "auto",
) -> None:
    """Which scheme for a model: size, speed and loss of each, a recommendation, and why."""
    with _plain_errors():
        from octofuse.cli.advise import run_advise

        run_advise(
            console, model, gpu, budget_gb, batch, context, max_loss, schemes, text, max_tokens, measure, plot, device
        )  # fmt: skip


@app.command(name="explain")
def explain_model(
    model: Annotated[
        str, typer.Argument(help="a folder, of any format that transformers reads, a hub name or 'embedded'")
    ],
    tokens: Annotated[
        int | None, typer.Option(min=1, help="of the prompt, at random; default: 512, or the model's own limit")
    ] = None,
    stock: Annotated[
        bool, typer.Option("--stock", help="load it with transformers' own quantisers and layers, not octofuse's")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON for machines, every layer")] = False,
    plot: Annotated[Path | None, typer.Option(help="draw a picture, .png or .svg")] = None,
    device: Device = "auto",
) -> None:
    """What a model's layers really do: instruction, bytes, share of the roofline, what is widened or copied."""
    with _plain_errors():
        from octofuse.cli.explain import run_explain

        run_explain(console, model, tokens, stock, as_json, plot, device)


@app.command()
def schemes() -> None:
    """The schemes that quantize knows: what each is, its size, what it costs and gains, and whether it calibrates."""
    from octofuse.cli.schemes import print_schemes

    print_schemes(console)


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="a folder written by quantize, a float model, or 'embedded'")],
    prompt: Annotated[str, typer.Argument(help="text to continue")],
    new_tokens: Annotated[int, typer.Option(min=1, help="tokens to generate")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy")] = 0.0,
    seed: Annotated[int, typer.Option(help="for temperature > 0")] = 0,
    fast_sums: Annotated[bool, typer.Option("--fast-sums", help="ranks split sums: faster, other bits")] = False,
    device: Device = "auto",
) -> None:
    """Continue a prompt; started by torchrun, on all of its ranks together."""
    with _plain_errors():
        from octofuse.cli.common import generate_text, load_any
        from octofuse.cli.ranks import is_first, ranked

        with ranked(device, fast_sums=fast_sums) as (own_device, mesh):
            loaded, tokenizer = load_any(model, own_device, mesh)
            text = generate_text(loaded, tokenizer, prompt, new_tokens, temperature, seed)
        if is_first():
            console.print(text, markup=False, highlight=False)


@app.command(name="eval")
def evaluate(
    model: Annotated[str, typer.Argument(help="a folder written by quantize, a float model, or 'embedded'")],
    against: Annotated[
        str | None, typer.Option(help="the float model it was made of: adds agreement, KL and every layer's SQNR")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="text file; default: the held-out text that ships")] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="read at most this many tokens")] = 65536,
    stride: Annotated[int | None, typer.Option(min=1, help="tokens between windows; default: half a window")] = None,
    plot: Annotated[Path | None, typer.Option(help="draw the layers' SQNR (.png or .svg); with --against")] = None,
    device: Device = "auto",
) -> None:
    """Perplexity on a text, and what quantisation costs beside the model that it was made of."""
    with _plain_errors():
        from octofuse.cli.evaluate import run_evaluate

        run_evaluate(console, model, against, text, max_tokens, stride, plot, device)


@app.command(name="compare")
def compare_models(
    first: Annotated[str, typer.Argument(help="a folder, of any format that is read here, a hub name or 'embedded'")],
    second: Annotated[str, typer.Argument(help="another, with the same tokenizer")],
    text: Annotated[Path | None, typer.Option(help="text file; default: the held-out text that ships")] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="read at most this many tokens")] = 16384,
    stride: Annotated[int | None, typer.Option(min=1, help="tokens between windows; default: half a window")] = None,
    new_tokens: Annotated[int, typer.Option(min=2, help="tokens that the speed is measured over")] = 64,
    device: Device = "auto",
) -> None:
    """Two models side by side: perplexity, agreement, KL divergence, size and speed."""
    with _plain_errors():
        from octofuse.cli.compare import run_compare

        run_compare(console, first, second, text, max_tokens, stride, new_tokens, device)


@app.command(name="frontier")
def mixtures(
    model: Annotated[str, typer.Argument(help="a floating-point model: a folder, a hub name or 'embedded'")],
    schemes: Annotated[
        str,
        typer.Option(help="what attention and feed-forward may each have, 'float' included; all pairs are evaluated"),
    ] = "w8a16,w4a16-g128-mse,bcq-q4-g128,bcq-q3-g128,bcq-q2-g128",
    text: Annotated[Path | None, typer.Option(help="text file; default: the held-out text that ships")] = None,
    calibration: Annotated[Path | None, typer.Option(help="text file for schemes that need one")] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="read at most this many tokens")] = 16384,
    stride: Annotated[int | None, typer.Option(min=1, help="tokens between windows; default: half a window")] = None,
    plot: Annotated[Path | None, typer.Option(help="draw perplexity against size (.png or .svg)")] = None,
    device: Device = "auto",
) -> None:
    """Mixed precision: perplexity and size of every pair of schemes for attention and feed-forward."""
    with _plain_errors():
        from octofuse.cli.frontier import run_frontier

        run_frontier(console, model, schemes, text, calibration, max_tokens, stride, plot, device)


@app.command()
def tune(
    model: Annotated[str | None, typer.Argument(help="a folder, a hub name or 'embedded': tunes its layers")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="N,K of a weight instead of a model; repeatable")] = None,
    tokens: Annotated[str, typer.Option(help="values of M")] = "1,2,4,8,16,32,64,128,256,512,1024,2048,4096",
    out: Annotated[
        str,
        typer.Option(help="output: float16, bfloat16, float32, int8 (float8 of float8 operands) or int32"),
    ] = "float16",
    dtype: Annotated[
        str, typer.Option(help="operands of --shape, and of layers in floating point: int8, float8")
    ] = "int8",
    device: Device = "auto",
) -> None:
    """Measure the kernels on this GPU and remember the fastest for each shape."""
    with _plain_errors():
        from octofuse.cli.tune import run_tune

        run_tune(console, model, shape or [], tokens, out, dtype, device)


@layouts_app.command(name="show")
def show_layout(
    name: Annotated[str, typer.Argument(help="ROW, COL, COL32, COL4_4R2_8C, COL32_2R_4R4 or 'interleaved<k>'")],
    rows: Annotated[int, typer.Option(help="1 to 64")] = 32,
    cols: Annotated[int, typer.Option(help="1 to 64")] = 64,
    out: Annotated[Path | None, typer.Option(help="write a picture (.png or .svg) instead of a table")] = None,
) -> None:
    """Where each element of a small matrix lies in memory."""
    with _plain_errors():
        from octofuse.layouts import layout_named
        from octofuse.layouts.picture import draw, terminal_table

        layout = layout_named(name)
        if out is None:
            piped = Console(width=6 * (cols + 1))  # a file has no edge to wrap at
            where = console if console.is_terminal else piped
            where.print(terminal_table(layout, rows, cols, console.width if console.is_terminal else None))
            console.print(f"{layout.used_for} ({layout.source})", highlight=False, markup=False)
        else:
            draw(layout, rows, cols, out)
            console.print(f"{out}: {layout.name}, {rows} x {cols}", highlight=False, markup=False, soft_wrap=True)


@layouts_app.command(name="support")
def layout_support(
    shape: Annotated[str, typer.Option(help="M,N,K")] = "2048,1920,1920",
    device: Annotated[str, typer.Option(help="cuda, cuda:1, ...")] = "cuda",
) -> None:
    """Which combinations of layouts cuBLASLt multiplies on a device, asked of the library itself."""
    with _plain_errors():
        from octofuse.cli.layouts import print_support

        print_support(console, shape, device)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="print JSON for machines")] = False,
) -> None:
    """Versions, loaded libraries, engines that can run here or why not, and an exactness self-test."""
    from octofuse.doctor import report

    result = report()
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        from octofuse.cli.demo import print_report

        print_report(console, result)
    if any(device["self_test_failures"] for device in result["devices"]):
        raise typer.Exit(1)


class _plain_errors:
    """A user's mistake or Ctrl-C ends in one line on stderr, not in a traceback.

    Libraries turn a KeyboardInterrupt into errors of their own, so the signal is remembered.
    """

    def __enter__(self) -> None:
        self.interrupted = False
        self.before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, number: int, frame: object) -> None:
        self.interrupted = True
        raise KeyboardInterrupt

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self.before)
        if kind is KeyboardInterrupt or (kind is not None and self.interrupted):
            print("octofuse: interrupted; nothing written", file=sys.stderr)
            raise typer.Exit(130) from None
        if kind is not None and issubclass(kind, (ValueError, TypeError, OSError, ImportError)):
            print(f"octofuse: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
