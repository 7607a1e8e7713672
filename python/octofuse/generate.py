"""Text generation with a static KV cache: on a GPU one CUDA graph for a prompt and one for every token after it.

    generator = octofuse.Generator(model)  # a transformers model that quantize_ has changed, or a floating-point one
    new_tokens = generator([[15496, 11], [464]], 30)  # a list for each prompt

`octofuse.generate(model, prompts, 30)` keeps a Generator for each model.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octofuse.engine import Decoder, Draws, Sampling, check_cache
from octofuse.models.architecture import architecture_of, decodes
from octofuse.ops import cpu, decode
from octofuse.parallel import shard_

KEPT = 4  # sessions of a generator, and prompt lengths of a session, whose graphs are kept
CAPACITY_STEP = 64  # positions of a session's cache are a multiple of this: one serves many lengths
PROMPT_STEP = 16  # captured prompts are padded to a multiple of this many tokens
LONGEST_CAPTURED = 256  # tokens of a prompt: longer ones keep the GPU busy without a graph
LOOK_EVERY = 16  # tokens between looks for stop tokens, where nobody streams
BURST = 8  # greedy steps of one graph: between two of them the GPU would wait for the next one's launch
START = 8  # tokens of the given text before each sequence of own_text
AT_ONCE = 128  # such sequences

OnToken = Callable[[int, list[int]], None]


class Session:
    """Buffers and graphs for one batch size, capacity and way of sampling; `sampling` may be exchanged for one alike."""

    def __init__(self, decoder: Decoder, batch: int, capacity: int, sampling: Sampling) -> None:
        self.decoder, self.sampling = decoder, sampling
        self.cache = decoder.new_cache(batch, capacity)
        device = decoder.device
        self.ids = torch.zeros(batch, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.ids)
        self.counts = torch.zeros_like(self.ids)  # of new tokens
        self.history = torch.zeros(batch, capacity, dtype=torch.int64, device=device)
        shape = (batch, decoder.vocabulary)
        self.noise = torch.ones(shape, device=device) if sampling.temperature > 0 else None
        self.numbers = sampling.numbers().to(device)
        self.prompts: OrderedDict[int, tuple[Tensor, Any]] = OrderedDict()
        self.step = self.captured(self._step)
        self.burst: Callable[[], None] | None = None

    def prepare(self, count: int, sampling: Sampling) -> None:
        """Records what `count` new tokens need; before start(), since recording spoils the state."""
        if sampling != self.sampling:
            self.sampling = sampling
            self.numbers.copy_(sampling.numbers())
        if self.burst is None and count > BURST and self.noise is None and self.decoder.device.type == "cuda":
            self.burst = self.captured(self._steps)

    def advance(self, room: int) -> int:
        """One step, or several if there is room for them; returns their number."""
        if self.burst is not None and room >= BURST:
            self.burst()
            return BURST
        self.step()
        return 1

    def captured(self, run: Callable[[], None]) -> Callable[[], None]:
        """run() as a CUDA graph; on the CPU, itself."""
        device = self.decoder.device
        if device.type != "cuda":
            return run
        with torch.cuda.device(device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # libraries make their handles and workspaces before anything is recorded
                run()
                self.positions.zero_()
                self.counts.zero_()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
        return graph.replay

    def _accept(self, logits: Tensor, advance: bool) -> None:
        """Takes each row's next token; `advance`: the one before stood where `positions` points."""
        if self.noise is None and self.decoder.fused:
            decode.argmax(logits, self.ids, self.history, self.counts, self.positions, advance)
            return
        self.ids.copy_(self.sampling.choose(logits, self.noise, self.numbers))
        self.history.scatter_(1, self.counts.unsqueeze(1), self.ids.unsqueeze(1))
        self.counts.add_(1)
        if advance:
            self.positions.add_(1)

    def _step(self) -> None:
        self._accept(self.decoder.step(self.ids, self.positions, self.cache), advance=True)

    def _steps(self) -> None:
        for _ in range(BURST):
            self._step()

    def start(self, prompts: list[list[int]]) -> None:
        """Runs the prompts and chooses the first new token of each."""
        longest = max(map(len, prompts))
        padded = _rounded_up(longest, PROMPT_STEP)
        captured = self.decoder.device.type == "cuda" and padded <= min(LONGEST_CAPTURED, self.cache.capacity)
        width = min(padded, self.decoder.positions) if captured else longest
        # One copy to the device: each costs the host as much as some kernels take.
        inputs = [token for prompt in prompts for token in prompt + [0] * (width - len(prompt))]
        inputs += map(len, prompts)
        if captured:
            static, run = self._prompt_of(width)
            static.copy_(torch.tensor(inputs))
            run()
        else:
            self._prefill(torch.tensor(inputs, device=self.decoder.device))

    def _prefill(self, inputs: Tensor) -> None:
        """inputs: the ids of all prompts, then their lengths."""
        batch = self.ids.shape[0]
        self.positions.copy_(inputs[-batch:])
        self.counts.zero_()
        ids = inputs[:-batch].view(batch, -1)
        self._accept(self.decoder.prefill(ids, self.positions, self.cache), advance=False)

    def _prompt_of(self, width: int) -> tuple[Tensor, Callable[[], None]]:
        if width not in self.prompts:
            static = torch.ones(self.ids.shape[0] * (width + 1), dtype=torch.int64, device=self.decoder.device)
            self.prompts[width] = static, self.captured(lambda: self._prefill(static))
            if len(self.prompts) > KEPT:
                self.prompts.popitem(last=False)
        self.prompts.move_to_end(width)
        return self.prompts[width]


class Generator:
    """Generates with one model; its graphs are made when they are first needed and kept.

    Args:
        model: a transformers causal language model of a family that the documentation lists, in eval mode, in floating
            point or after `quantize_`. Its weights are shared, those of linears that read the same input as views of one
            tensor: make a new Generator after changing them.
        cache: of keys and values: None for the model's dtype, "int8" or "fp8" (e4m3) for half its size, with a scale for
            each token and head, or "fp8-static": with one for each block's keys and one for its values, `k_scale` and
            `v_scale` of the model's file or of `calibrate_cache_`.
        mesh: of ranks that generate together, each with a part of the model: a DeviceMesh of one dimension or a process
            group, for `octofuse.parallel.shard_`, which changes the model in place; None for one device, and for a model
            that was sharded. All ranks call the Generator with the same arguments, and get the same tokens.

    Not for use by several threads at once. Raises ValueError, naming what is not as expected, for other models.
    """

    def __init__(self, model: nn.Module, *, cache: str | None = None, mesh: Any = None) -> None:
        check_cache(cache)
        if mesh is not None:
            shard_(model, mesh)
        self.decoder = Decoder(model, cache)
        self.sessions: OrderedDict[Any, Session] = OrderedDict()

    def __repr__(self) -> str:
        """What it holds."""
        decoder = self.decoder
        kind = decoder.cache_kind or str(decoder.dtype).removeprefix("torch.")
        caches = sum(session.cache.bytes for session in self.sessions.values())
        return (
            f"Generator({decoder.described}: {decoder.bytes_of_weights() / 1e6:,.1f} MB of weights; a cache in {kind} of "
            f"{decoder.bytes_of_token() / 1e3:,.1f} kB a token, {caches / 1e6:,.1f} MB in {len(self.sessions)} sessions)"
        )

    def __call__(
        self,
        prompts: Tensor | Sequence[Sequence[int] | Tensor],
        max_new_tokens: int,
        *,
        attention_mask: Tensor | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop_tokens: Iterable[int] = (),
        seed: int = 0,
        on_token: OnToken | None = None,
    ) -> list[list[int]]:
        """New tokens for each prompt; the first of stop_tokens ends a sequence and is its last.

        Args:
            prompts: token ids, `[B, T]` or a list of sequences of any lengths, each at least 1.
            attention_mask: `[B, T]`, of prompts that a tokenizer has padded on either side: 0 where a token is left out.
            max_new_tokens: at least 1; prompt and new tokens together fit the model's context.
            temperature, top_k, top_p: see Sampling. Sequence i draws from its own generator, seeded with seed + i, so what
                a prompt becomes does not depend on those beside it.
            stop_tokens: ids.
            on_token: on_token(n, tokens) is called for n = 0, 1, ... as soon as each sequence's n-th new token is there;
                sequences that have stopped give -1.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        sampling = Sampling(temperature, top_k, top_p)
        rows = _checked(_unpadded(prompts, attention_mask), max_new_tokens, self.decoder)
        stops = _checked_stops(stop_tokens, self.decoder.vocabulary)
        longest = max(map(len, rows))
        session = self._session(len(rows), longest + max_new_tokens, sampling)
        session.prepare(max_new_tokens, sampling)
        draws = Draws(session.noise, seed)
        draws.refill()
        with cpu.Threads(self.decoder.device) as threads:
            session.start(rows)
            tokens = self._continue(session, draws, threads, max_new_tokens, stops, on_token)
        return [_until(row, stops) for row in tokens]

    @staticmethod
    def _continue(
        session: Session,
        draws: Draws,
        threads: cpu.Threads,
        most: int,
        stops: frozenset[int],
        on_token: OnToken | None,
    ) -> list[list[int]]:
        """Steps until `most` tokens are there or every sequence has stopped; returns those that were looked at."""
        tokens: list[list[int]] = [[] for _ in range(session.ids.shape[0])]
        live = set(range(len(tokens)))
        done, count = 0, 1
        look_every = 1 if on_token is not None else LOOK_EVERY if stops else most
        while True:
            if count == most or count - done >= look_every:
                session.decoder.settle()
                for row, new in zip(tokens, session.history[:, done:count].tolist(), strict=True):
                    row += new
                for at in range(done, count):
                    if on_token is not None and live:
                        on_token(at, [row[at] if i in live else -1 for i, row in enumerate(tokens)])
                    live -= {i for i in live if tokens[i][at] in stops}
                done = count
                if not live or count == most:
                    return tokens
            draws.refill()
            threads.adjust()
            count += session.advance(min(look_every - (count - done), most - count))
            session.decoder.mark()

    def _session(self, batch: int, length: int, sampling: Sampling) -> Session:
        capacity = _rounded_up(length, CAPACITY_STEP)
        key = (batch, capacity, sampling.narrows)
        if key not in self.sessions:
            while len(self.sessions) >= KEPT:
                self.sessions.popitem(last=False)
            self.sessions[key] = Session(self.decoder, batch, capacity, sampling)
        self.sessions.move_to_end(key)
        return self.sessions[key]


# By model: its tensors, the versions in which they were read, and the Generator made of them.
_generators: weakref.WeakKeyDictionary[nn.Module, tuple[list[Tensor], list[int], Generator]]
_generators = weakref.WeakKeyDictionary()


def generate(
    model: nn.Module,
    prompts: Tensor | Sequence[Sequence[int] | Tensor],
    max_new_tokens: int,
    *,
    cache: str | None = None,
    attention_mask: Tensor | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_tokens: Iterable[int] = (),
    seed: int = 0,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """New tokens for each prompt: `Generator(model, cache=cache)` called with the other arguments, described there.

    The Generator is kept as long as the model is, and made anew when a tensor of the model was exchanged or written to.
    """
    tensors, versions = _state_of(model)
    known = _generators.get(model)
    unchanged = known is not None and [*map(id, known[0])] == [*map(id, tensors)] and known[1] == versions
    if known is None or not unchanged or known[2].decoder.cache_kind != cache:
        del tensors, known  # joined layers leave theirs: they must not stay in memory meanwhile
        _generators.pop(model, None)
        generator = Generator(model, cache=cache)
        known = _generators[model] = (*_state_of(model), generator)  # its making exchanges some tensors for views
    return known[2](
        prompts, max_new_tokens, attention_mask=attention_mask, temperature=temperature, top_k=top_k, top_p=top_p,
        stop_tokens=stop_tokens, seed=seed, on_token=on_token,
    )  # fmt: skip


def _state_of(model: nn.Module) -> tuple[list[Tensor], list[int]]:
    tensors = [*model.parameters(), *model.buffers()]
    return tensors, [0 if t.is_inference() else t._version for t in tensors]


def own_text(model: nn.Module, batches: Iterable[Tensor], count: int, *, seed: int = 0) -> list[Tensor]:
    """`count` batches like the first of `batches`, int64 `[B, T]`, that the float model writes itself (temperature 1).

    Each sequence goes on from 8 tokens of the given ones from a random position.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    given = list(batches)
    if count < 1 or not given or given[0].shape[1] <= START:
        shape = list(given[0].shape) if given else "none"
        raise ValueError(f"batches, count: expected [B, T] with T > {START} and at least 1, got {shape} and {count}")
    rows, width = given[0].shape
    source = torch.cat([batch.flatten() for batch in given]).cpu()
    fits = decodes(model) and architecture_of(model).positions >= width
    write = Generator(model) if fits else partial(_sampled, model)
    firsts = torch.randint(0, source.numel() - START, (count * rows,), generator=torch.Generator().manual_seed(seed))
    starts = [source[at : at + START].tolist() for at in firsts.tolist()]
    found: list[list[int]] = []
    for first in range(0, len(starts), AT_ONCE):
        some = starts[first : first + AT_ONCE]
        new = write(some, width - START, temperature=1.0, seed=seed + first)
        found += [start + more for start, more in zip(some, new, strict=True)]
    return list(torch.tensor(found, device=given[0].device).view(count, rows, width))


@torch.no_grad()
def _sampled(model: Any, starts: list[list[int]], count: int, *, temperature: float, seed: int) -> list[list[int]]:
    """`count` tokens more for starts of one length, by transformers' own loop: for models that Generator does not take."""
    ids = torch.tensor(starts, device=model.device)
    cuda = [ids.device] if ids.is_cuda else []
    with torch.random.fork_rng(cuda):
        torch.manual_seed(seed)
        lengths = {"min_new_tokens": count, "max_new_tokens": count}
        how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
        found = model.generate(ids, attention_mask=torch.ones_like(ids), **lengths, **how)
    new: list[list[int]] = found[:, ids.shape[1] :].tolist()
    return new


def _rounded_up(count: int, step: int) -> int:
    return -(-count // step) * step


def _until(tokens: list[int], stops: frozenset[int]) -> list[int]:
    for index, token in enumerate(tokens):
        if token in stops:
            return tokens[: index + 1]
    return tokens


def _unpadded(prompts: Any, attention_mask: Tensor | None) -> Any:
    """The rows of prompts [B, T] without what a tokenizer has padded them with."""
    if attention_mask is None:
        return prompts
    if not isinstance(prompts, Tensor) or attention_mask.shape != prompts.shape:
        got = list(prompts.shape) if isinstance(prompts, Tensor) else type(prompts).__name__
        raise ValueError(
            f"attention_mask: expected the shape of prompts [B, T], got {list(attention_mask.shape)} beside {got}"
        )
    return [row[kept] for row, kept in zip(prompts, attention_mask.to(prompts.device).bool(), strict=True)]


def _checked(
    prompts: Tensor | Sequence[Sequence[int] | Tensor], max_new_tokens: int, decoder: Decoder
) -> list[list[int]]:
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: expected an int of at least 1, got {max_new_tokens!r}")
    if max_new_tokens >= decoder.positions:
        raise ValueError(
            f"max_new_tokens: expected at most {decoder.positions - 1}, so that a prompt fits the context too, "
            f"got {max_new_tokens}"
        )
    if isinstance(prompts, Tensor) and (prompts.dim() != 2 or prompts.is_floating_point()):
        raise ValueError(f"prompts: expected token ids [B, T], got {prompts.dtype} of shape {list(prompts.shape)}")
    rows = [row.tolist() if isinstance(row, Tensor) else list(row) for row in prompts]
    if not rows:
        raise ValueError("prompts: expected at least one, got none")
    for index, row in enumerate(rows):
        if not row:
            raise ValueError(f"prompts[{index}]: expected at least one token, got none")
        for token in row:
            if not isinstance(token, int) or not 0 <= token < decoder.vocabulary:
                raise ValueError(f"prompts[{index}]: expected tokens from 0 to {decoder.vocabulary - 1}, got {token!r}")
        if len(row) + max_new_tokens > decoder.positions:
            raise ValueError(
                f"prompts[{index}]: expected at most {decoder.positions - max_new_tokens} tokens, so that "
                f"{max_new_tokens} more fit the context of {decoder.positions}, got {len(row)}"
            )
    return rows


def _checked_stops(stop_tokens: Iterable[int], vocabulary: int) -> frozenset[int]:
    stops = frozenset(stop_tokens)
    for token in stops:
        if not isinstance(token, int) or not 0 <= token < vocabulary:
            raise ValueError(f"stop_tokens: expected tokens from 0 to {vocabulary - 1}, got {token!r}")
    return stops
