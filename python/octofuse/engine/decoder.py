"""A decoder of any family that `models.blocks` describes: its weights, and a prompt or a token through its blocks.

A block of an int8 model runs: norm + quantise + qkv | attention (+ quantise) | (quantise +) projection + residual | norm +
quantise + up + activation (+ quantise) | (quantise +) down + residual; a gated one: norm + quantise + gates and values |
activation * values + quantise | down + residual. Queries and keys are normalised and rotated, and the cache is appended
to, where attention is computed. For one token of a narrow model on compute capability 9.0 the first are five kernels
(`ops.quantized_linear` says when); else norms and per-token scales are kernels of their own. Layers of few bits run the
same, for up to 4 tokens, without quantising anything, and their gates and values are multiplied where they are made: five
kernels too. A floating-point model takes the same way through torch's linears.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from octofuse.engine.attention import Given, KernelAttention, TorchAttention, rotary_table
from octofuse.engine.cache import Cache, Pairs
from octofuse.files import cache_scales
from octofuse.models.architecture import architecture_of, rotary_of
from octofuse.models.parts import Attend, Parts, Stream, attended, fed_forward, parts_of, split_heads
from octofuse.nn import QUANTISED, FloatingLinear, Norm, inner_of, verb_of
from octofuse.nn.gathered import GatheredFused
from octofuse.nn.norm import in_floating_point
from octofuse.nn.parted import Parted
from octofuse.ops import decode
from octofuse.ops.cache import CACHE_KINDS, FIXED, new_codes
from octofuse.parallel import share_of

HEAD_ROWS = 64  # of the output head at a time: its kernel, and so its bits, then do not depend on the batch


class Decoder:
    """What generation needs of a transformers model, quantised by `quantize_` or in floating point.

    The model's tensors are shared: linears that read the same input are put behind each other, and the model's own weights
    become views of that (`nn.joined`). Copies are floating-point Conv1D weights, which are transposed once, and scales and
    biases of joined layers. cache: None for the model's dtype, "int8", "fp8", or "fp8-static": with the k_scale and v_scale
    that the model has.

    Raises ValueError for other families, for variants of these that compute something else, and for "fp8-static" of a model
    without these scales.
    """

    def __init__(self, model: nn.Module, cache: str | None = None) -> None:
        check_cache(cache)
        self.architecture = architecture_of(model)
        self.cache_kind = cache
        names = self.architecture.names
        share = share_of(model)
        self.group = None if share is None else share.group
        self.heads = self.architecture.heads if share is None else share.heads
        self.positions, self.vocabulary = self.architecture.positions, self.architecture.vocabulary
        embeddings: Any = model.get_submodule(names.token_embeddings)
        self.token_embeddings: Tensor = embeddings.weight.detach()
        self.position_embeddings = _position_embeddings(model, names.position_embeddings, self.positions)
        self.width = self.token_embeddings.shape[1]
        self.dtype, self.device = self.token_embeddings.dtype, self.token_embeddings.device
        self.multiplier = self.architecture.embedding_multiplier
        if self.architecture.block.scales_embeddings:  # transformers rounds this factor to the embeddings' dtype
            self.multiplier = float(torch.tensor(self.multiplier, dtype=self.dtype))
        self.rotary = rotary_of(model, self.architecture)
        head = verb_of(model.get_submodule(names.head), transposes=True)
        self.head = inner_of(head)
        self.logits_joint = head.around.gather_output if isinstance(head, GatheredFused) else None
        self.norm = self.architecture.norm(model.get_submodule(names.last_norm))
        blocks: Any = model.get_submodule(names.blocks)
        self.blocks = [parts_of(block, self.architecture, joins=True) for block in blocks]
        self.fixed_scales = self._fixed_scales(blocks) if cache == FIXED else None
        self.fused = decode.serves(self.device, self.dtype, self.heads[0].size, self.width, cache is not None)
        self.streams_head = decode.takes_logits(self.device, self.dtype, self.width)
        self.described, self._tensors = _described(model), [*model.parameters(), *model.buffers()]

    def attention_of(self, block: nn.Module) -> nn.Module:
        """The module that has the linears of queries, keys and values."""
        return block.get_submodule(self.architecture.names.qkv[0].rpartition(".")[0])

    def _fixed_scales(self, blocks: Any) -> list[tuple[float, float]]:
        found = []
        for index, block in enumerate(blocks):
            scales = cache_scales.of(self.attention_of(block))
            if scales is None:
                raise ValueError(
                    f"cache: expected a model whose attention has k_scale and v_scale, from its file or from "
                    f"octofuse.calibrate_cache_, for {FIXED!r}, got none in block {index}"
                )
            found.append(scales)
        return found

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """Room for `capacity` positions of `batch` sequences, all zero."""
        heads = self.heads[0]
        shape = (len(self.blocks), 2, batch, heads.pairs, capacity, heads.size)
        codes, scales = new_codes(shape, self.cache_kind, self.token_embeddings)
        rotary = None if self.rotary is None else rotary_table(*self.rotary, capacity, self.device)
        scratch = None
        if self.fused:
            scratch = decode.attend_scratch(batch, heads.queries, heads.pairs, heads.size, capacity, self.device)
        pads = self.device.type == "cuda" and not self.streams_head
        rows = self.token_embeddings.new_zeros(HEAD_ROWS, self.width) if pads else None
        return Cache(codes, scales, self.fixed_scales, rotary, scratch, rows)

    def mark(self) -> None:
        """Of ranks, that a step was given to the device (`settle`)."""
        if self.group is not None:
            self.group.mark(self.device)

    def settle(self) -> None:
        """Waits for what ranks exchange, no longer than their time limit: RuntimeError where one has ended."""
        if self.group is not None:
            self.group.settle(self.device)

    def bytes_of_weights(self) -> int:
        """The model's tensors, and what was copied of them, each byte once however many share it."""
        norms = [norm for parts in self.blocks for norm in parts if isinstance(norm, Norm)]
        linears = [layer for parts in self.blocks for layer in parts.linears]
        copies = [tensor for norm in norms for tensor in (norm.weight, norm.bias) if tensor is not None]
        copies += [t for layer in (*linears, self.head) for t in vars(layer).values() if isinstance(t, Tensor)]
        copies += [t for layer in linears if isinstance(layer, nn.Module) for t in layer.state_dict().values()]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*self._tensors, *copies)}
        return sum(storages.values())

    def bytes_of_token(self) -> int:
        """What a position of one sequence takes in the cache."""
        heads = self.heads[0]
        of_head = heads.size * self.dtype.itemsize if self.cache_kind is None else heads.size + 4
        return len(self.blocks) * 2 * heads.pairs * of_head

    @torch.no_grad()
    def prefill(self, ids: Tensor, lengths: Tensor, cache: Cache) -> Tensor:
        """ids int64 [B, T], padded behind each sequence's length [B] -> the logits [B, V] that follow the last token.

        Keys and values of positions 0 to T - 1 go into the cache.
        """
        batch, length = ids.shape
        run = self._attention(cache)
        positions = torch.arange(length, device=ids.device).expand(batch, -1).reshape(-1)
        x = self._embed(ids.reshape(-1), positions)
        stream = self._through_blocks(x, lambda given: run.prefill(given, batch), cache)
        last = torch.arange(batch, device=ids.device) * length + (lengths - 1)
        return self._logits(stream.at(last) if isinstance(stream, Parted) else stream[last], cache)

    @torch.no_grad()
    def step(self, ids: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """The next token of each sequence, int64 [B], and its position, int64 [B] -> logits [B, V].

        Its keys and values go into the cache. Nothing waits for the host: a CUDA graph can record it.
        """
        run = self._attention(cache)
        x = self._embed(ids, positions)
        return self._logits(self._through_blocks(x, lambda given: run.step(given, positions), cache), cache)

    def _attention(self, cache: Cache) -> TorchAttention | KernelAttention:
        if cache.scratch is None:
            return TorchAttention(cache.rotary)
        return KernelAttention(cache.rotary, cache.scratch)

    def _through_blocks(self, x: Stream, run: Any, cache: Cache) -> Stream:
        architecture = self.architecture
        for index, parts in enumerate(self.blocks):
            attend = self._attend(run, index, parts, cache.of_block(index))
            y = attended(parts, x, attend, architecture.residual_multiplier)
            x = fed_forward(parts, y, x if architecture.parallel else y, architecture)
        return x

    def _attend(self, run: Any, index: int, parts: Parts, pairs: Pairs) -> Attend:
        heads, interleaved = self.heads[index], self.architecture.names.interleaved

        def attend(outputs: tuple[Tensor, ...], scale: Tensor | None) -> Tensor:
            q, k, v = split_heads(outputs, heads, interleaved)
            result: Tensor = run(Given(q, k, v, pairs, heads, parts, scale))
            return result

        return attend

    def _embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """ids, positions [M] -> [M, width]."""
        if self.fused:
            tables = (self.token_embeddings, self.position_embeddings)
            return decode.embed(ids.contiguous(), positions, *tables, self.multiplier)
        x: Tensor = self.token_embeddings[ids] * self.multiplier
        return x if self.position_embeddings is None else x + self.position_embeddings[positions]

    def _logits(self, x: Stream, cache: Cache) -> Tensor:
        found = self._product(x, cache)
        if self.logits_joint is not None:
            found = self.logits_joint(found)
        if self.architecture.logits_multiplier != 1.0:
            found = found * self.architecture.logits_multiplier
        if (cap := self.architecture.logits_softcap) is not None:
            found = torch.tanh(found / cap) * cap
        return found

    def _product(self, x: Stream, cache: Cache) -> Tensor:
        if not isinstance(self.head, FloatingLinear):
            return self.head.fused(x, norm=self.norm)
        x = in_floating_point(x, self.norm, None)
        if self.head.bias is not None:
            return self.head.fused(x)
        if self.streams_head:
            return decode.logits(x, self.head.weight)
        if cache.head_rows is None:
            return linear(x, self.head.weight)
        # As many rows whatever the batch: the kernel, and so the bits, do not depend on it. And products of multiples of 8
        # columns: for an odd vocabulary cuBLAS would take a kernel of a quarter of the speed.
        vocabulary = self.head.weight.shape[0]
        even = vocabulary // 8 * 8
        found = []
        for rows in x.split(HEAD_ROWS):
            cache.head_rows[: rows.shape[0]].copy_(rows)
            out = x.new_empty(HEAD_ROWS, even + 8)
            for columns in (slice(0, even), slice(even, vocabulary)):
                torch.mm(cache.head_rows, self.head.weight[columns].t(), out=out[:, columns])
            found.append(out[: rows.shape[0], :vocabulary])
        return found[0] if len(found) == 1 else torch.cat(found)


def check_cache(cache: str | None) -> None:
    """ValueError for a kind that there is not."""
    kinds = (*CACHE_KINDS, FIXED)
    if cache is not None and cache not in kinds:
        raise ValueError(f"cache: expected None, {', '.join(map(repr, kinds[:-1]))} or {kinds[-1]!r}, got {cache!r}")


def _position_embeddings(model: Any, name: str | None, positions: int) -> Tensor | None:
    if name is None:
        return None
    weight: Tensor = model.get_submodule(name).weight.detach()
    return weight[weight.shape[0] - positions :]  # OPT's first two rows belong to no position


def _described(model: nn.Module) -> str:
    schemes = sorted({module.scheme.name for module in model.modules() if isinstance(module, QUANTISED)})
    return f"{type(model).__name__}, {', '.join(schemes) or 'floating point'}"
