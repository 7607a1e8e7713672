"""Attention over a cache and what goes into it, beside torch in double precision: groups of heads, rotary embeddings, norms
of heads, windows, caps, caches in 8 bits, long sequences, and the same bits whatever stands beside a sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import octofuse
from helpers import attend_call
from octofuse import _C
from octofuse.engine.attention import rotary_table, rotated
from octofuse.ops import decode
from octofuse.ops.cache import decoded, encoded, new_codes

# Queries, pairs, head size.
HEADS = (
    (12, 12, 64),
    (3, 3, 8),
    (4, 2, 40),
    (4, 4, 80),
    (5, 5, 128),
    (8, 2, 128),
    (8, 1, 96),
    (7, 1, 64),
    (20, 2, 256),
)
POSITIONS = (0, 5, 63, 127, 128, 129, 255, 256, 257, 511, 512, 599)
CAPACITY = 600
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"rotary": True},
    {"rotary": True, "norms": True, "scaling": 0.3},
    {"window": 100, "softcap": 2.0},
)
# Every way with every cache; the types take turns.
WAYS = [
    pytest.param(heads, options, kind, (torch.float16, torch.bfloat16)[(i + j + k) % 2], id=f"{heads}-{name}-{kind}")
    for i, heads in enumerate(HEADS)
    for j, (name, options) in enumerate(zip(("plain", "rotary", "norms", "window"), OPTIONS, strict=True))
    for k, kind in enumerate((None, "int8", "fp8"))
    if kind is None or heads[2] % 16 == 0  # with 8 bits a head has a multiple of 16 channels
]


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> bool:
    return bool(
        (got.double() - want.double()).abs().max() <= (3e-3 if dtype == torch.float16 else 2e-2) * want.abs().max()
    )


def attended(q: Tensor, keys: Tensor, values: Tensor, position: int, given: dict[str, Any]) -> Tensor:
    """One sequence in double precision: q [H, D]; keys and values [P, C, D] hold the new token already -> [H, D]."""
    groups = q.shape[0] // keys.shape[0]
    first = max(0, position + 1 - given["window"]) if given.get("window") else 0
    keys, values = (t[:, first : position + 1].double().repeat_interleave(groups, 0) for t in (keys, values))
    scores = (q.double().unsqueeze(1) @ keys.transpose(1, 2)) * given.get("scaling", q.shape[1] ** -0.5)
    if cap := given.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    return (scores.softmax(-1) @ values).squeeze(1)


class Case:
    """Random tokens and a random cache, on both devices."""

    def __init__(
        self, heads: tuple[int, int, int], dtype: torch.dtype, kind: str | None, options: dict[str, Any]
    ) -> None:
        self.queries, self.pairs, self.size = heads
        self.dtype, self.kind, self.options = dtype, kind, dict(options)
        g = torch.Generator().manual_seed(sum(heads))
        batch = len(POSITIONS)
        self.positions = torch.tensor(POSITIONS)
        self.qkv = (torch.randn(batch, (self.queries + 2 * self.pairs) * self.size, generator=g) * 1.5).to(dtype)
        values = torch.randn(2, batch, self.pairs, CAPACITY, self.size, generator=g).to(dtype)
        self.codes, self.scales = (values, None) if kind is None else encoded(values, _stored(kind))
        table, self.table = None, None
        if self.options.pop("rotary", False):
            angles = self.size // 4 if self.size == 80 else self.size // 2  # of one size not all channels are rotated
            self.table = rotary_table(10000.0 ** (-torch.arange(angles) / angles), 1.0, CAPACITY, torch.device("cpu"))
            table = self.table.cuda()
        norm = torch.rand(self.size, generator=g) + 0.5 if self.options.pop("norms", False) else None
        self.norm = norm
        weights = {} if norm is None else {"query_norm": norm.cuda(), "key_norm": norm.cuda()}
        self.given = self.options | weights | {"rotary": table}

    def cache(self) -> tuple[Tensor, ...]:
        """A copy on the GPU, as attend_call takes it."""
        codes = self.codes.cuda()
        return (*codes, *(() if self.scales is None else self.scales.cuda()))

    def prepared(self, x: Tensor, heads: int, positions: Tensor) -> Tensor:
        """Queries or keys [M, heads * size], normalised and rotated on the CPU -> [M, heads, size]."""
        x = x.unflatten(1, (heads, self.size))
        if self.norm is not None:
            x = octofuse.rms_norm(x.contiguous(), self.norm, 1e-6)
        return x if self.table is None else rotated(x, self.table[positions])

    def split(self, qkv: Tensor) -> tuple[Tensor, ...]:
        widths = [self.queries * self.size, self.pairs * self.size, self.pairs * self.size]
        return qkv.split(widths, 1)


def _stored(kind: str) -> torch.dtype:
    return torch.int8 if kind == "int8" else torch.uint8


def check_cache(case: Case, cache: tuple[Tensor, ...], new: tuple[Tensor, Tensor], at: tuple[Any, ...]) -> None:
    """What was stored at `at` stands for `new` [M, P, D], bit for bit where no sum of squares comes before."""
    for i, want in enumerate(new):
        got, scale = cache[i].cpu()[at], None if case.kind is None else cache[2 + i].cpu()[at]
        if case.norm is not None:
            got = got if scale is None else decoded(got, scale, case.dtype)
            most = 2**-3 if case.kind == "fp8" else 2**-6  # an ulp beside a midpoint
            assert (got.double() - want.double()).abs().max() <= most * want.double().abs().max()
        elif case.kind is None:
            assert torch.equal(got, want)
        else:
            codes, scales = encoded(want, _stored(case.kind))
            assert torch.equal(scale, scales)
            assert torch.equal(got, codes)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "options", "kind", "dtype"), WAYS)
def test_a_token(heads: tuple[int, int, int], options: dict[str, Any], kind: str | None, dtype: torch.dtype) -> None:
    """Any position: the first, the ends of splits, the last of the cache; in a batch, alone, and in a larger cache."""
    case = Case(heads, dtype, kind, options)
    batch, rows = len(POSITIONS), torch.arange(len(POSITIONS))
    cache, positions = case.cache(), case.positions.cuda()
    before = [t.clone() for t in cache]
    scratch = decode.attend_scratch(batch, *heads, CAPACITY, positions.device)
    call = attend_call(case.qkv.cuda(), case.queries, cache, positions, scratch, **case.given)
    got = decode.attend(call)
    assert not scratch[1].any(), "ready for the next call"
    q, k, v = case.split(case.qkv)
    q, k = case.prepared(q, case.queries, case.positions), case.prepared(k, case.pairs, case.positions)
    check_cache(case, cache, (k, v.unflatten(1, (-1, case.size))), (rows, slice(None), case.positions))
    for new, old in zip(cache, before, strict=True):
        old[rows.cuda(), :, positions] = new[rows.cuda(), :, positions]
        assert torch.equal(new, old), "nothing else was written"
    keys, values = (decoded(cache[i], None if kind is None else cache[2 + i], torch.float64) for i in range(2))
    for i, position in enumerate(POSITIONS):
        want = attended(q[i].cuda(), keys[i], values[i], position, case.options)
        assert close(got[i].view(want.shape), want, dtype), position
    scale = torch.tensor(0.02, device="cuda")
    assert torch.equal(decode.attend(call._replace(out_scale=scale)), octofuse.quantize_per_tensor(got, scale))
    for i in range(batch):  # alone, and in a cache of another capacity: the same bits
        larger = [pad(t[i : i + 1], (0, 0) * (t.dim() == 4) + (0, 424)) for t in before]
        table = case.given["rotary"]
        alone = attend_call(
            case.qkv[i : i + 1].cuda(), case.queries, tuple(larger), positions[i : i + 1],
            decode.attend_scratch(1, *heads, 1024, positions.device),
            **case.given | {"rotary": None if table is None else pad(table, (0, 0, 0, 424))},
        )  # fmt: skip
        assert torch.equal(decode.attend(alone)[0], got[i]), POSITIONS[i]


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "options", "kind", "dtype"), [way for way in WAYS if "window" not in str(way.id)])
def test_prompts(heads: tuple[int, int, int], options: dict[str, Any], kind: str | None, dtype: torch.dtype) -> None:
    """Tokens of prompts: prepared in place, and in the cache what the same tokens leave there one by one."""
    case = Case(heads, dtype, kind, options)
    batch, length = 3, len(POSITIONS) // 3
    codes, scales = new_codes((2, batch, case.pairs, 16, case.size), kind, torch.zeros(1, dtype=dtype, device="cuda"))
    cache = (*codes, *(() if scales is None else scales))
    one_by_one = tuple(t.clone() for t in cache)
    scratch = decode.attend_scratch(batch, *heads, 16, codes.device)
    table = case.given["rotary"]
    given = case.given | {"rotary": None if table is None else table[:16].contiguous()}
    qkv = case.qkv.cuda()
    decode.append(attend_call(qkv, case.queries, cache, None, scratch, **given))
    q, k, v = case.split(case.qkv)
    positions = torch.arange(length).repeat(batch)
    q, k = case.prepared(q, case.queries, positions), case.prepared(k, case.pairs, positions)
    got = case.split(qkv.cpu())
    for mine, want in ((got[0], q), (got[1], k)):
        assert close(mine.view(want.shape), want, dtype)
        assert case.norm is not None or torch.equal(mine.view(want.shape), want)
    assert torch.equal(got[2], v)
    rows = torch.arange(batch).repeat_interleave(length)
    check_cache(case, cache, (k, v.unflatten(1, (-1, case.size))), (rows, slice(None), positions))
    by_token = case.qkv.cuda().unflatten(0, (batch, length))
    for t in range(length):
        at = torch.full((batch,), t, device="cuda")
        decode.attend(attend_call(by_token[:, t].contiguous(), case.queries, one_by_one, at, scratch, **given))
    assert all(torch.equal(a, b) for a, b in zip(cache, one_by_one, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [None, "int8", "fp8"])
@pytest.mark.parametrize(
    ("capacity", "position"), [(9000, 8191), (9000, 8192), (20000, 16384), (40000, 39999), (131072, 131071)]
)
def test_long_sequences(capacity: int, position: int, kind: str | None) -> None:
    queries, pairs, size = 8, 2, 128
    g = torch.Generator("cuda").manual_seed(position)
    codes, scales = new_codes((2, 2, pairs, capacity, size), kind, torch.zeros(1, dtype=torch.float16, device="cuda"))
    values = torch.randn(codes.shape, generator=g, device="cuda").half()
    if scales is None:
        codes = values
    else:
        codes, scales = encoded(values, codes.dtype)
    cache = (*codes, *(() if scales is None else scales))
    qkv = (torch.randn(2, (queries + 2 * pairs) * size, generator=g, device="cuda") * 4).half()
    positions = torch.tensor([position, position // 3], device="cuda")
    scratch = decode.attend_scratch(2, queries, pairs, size, capacity, codes.device)
    call = attend_call(qkv, queries, cache, positions, scratch)
    got = decode.attend(call)
    assert torch.equal(decode.attend(call), got)
    keys, values = (decoded(cache[i], None if kind is None else cache[2 + i], torch.float16) for i in range(2))
    for i, at in enumerate(positions.tolist()):
        want = attended(qkv[i, : queries * size].view(queries, size), keys[i], values[i], at, {})
        assert close(got[i].view(queries, size), want, torch.bfloat16 if kind else torch.float16)


@pytest.mark.gpu
def test_positions_outside_of_the_cache() -> None:
    """A position that the cache does not have writes nothing, and the next call finds everything as it should be."""
    heads, size, capacity = 3, 64, 192
    cache = tuple(torch.randn(2, 4, heads, capacity, size, device="cuda").half())
    before, qkv = [t.clone() for t in cache], torch.randn(4, 3 * heads * size, device="cuda").half()
    scratch = decode.attend_scratch(4, heads, heads, size, capacity, qkv.device)
    outside = torch.tensor([192, 255, -1, 1 << 40], device="cuda")
    decode.attend(attend_call(qkv, heads, cache, outside, scratch))
    assert all(torch.equal(a, b) for a, b in zip(cache, before, strict=True))
    assert not scratch[1].any()
    inside = torch.tensor([191, 0, 130, 5], device="cuda")
    got = decode.attend(attend_call(qkv, heads, cache, inside, scratch))
    fresh = decode.attend_scratch(4, heads, heads, size, capacity, qkv.device)
    assert torch.equal(got, decode.attend(attend_call(qkv, heads, cache, inside, fresh)))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [None, "int8", "fp8"])
def test_a_token_that_the_cache_has_already(kind: str | None) -> None:
    """Without k and v the same bits as with them; with `starts` those of a window that begins there."""
    case = Case((8, 2, 128), torch.float16, kind, {})
    batch, positions, cache = len(POSITIONS), case.positions.cuda(), case.cache()
    scratch = decode.attend_scratch(batch, 8, 2, 128, CAPACITY, positions.device)
    call = attend_call(case.qkv.cuda(), 8, cache, positions, scratch)
    want = decode.attend(call)
    before = [t.clone() for t in cache]
    given = call._replace(k=None, v=None)
    assert torch.equal(decode.attend(given), want)
    assert all(torch.equal(a, b) for a, b in zip(cache, before, strict=True))
    for window in (1, 100, 300):
        starts = (positions + 1 - window).clamp(min=0)
        assert torch.equal(decode.attend(given._replace(starts=starts)), decode.attend(given._replace(window=window)))
    assert torch.equal(decode.attend(given._replace(starts=positions + 9)), decode.attend(given._replace(window=1)))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [None, "int8", "fp8"])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_devices_with_less_shared_memory(size: int, kind: str | None) -> None:
    """Shorter rings give the same bits: those of compute capability 8.6 and 8.0, whose blocks have 99 and 163 KB."""
    case = Case((8, 2, size), torch.float16, kind, {"rotary": True})
    batch, positions = len(POSITIONS), case.positions.cuda()
    found = []
    for room in (None, 163 << 10, 99 << 10):
        cache = case.cache()
        scratch = decode.attend_scratch(batch, 8, 2, size, CAPACITY, positions.device)
        call = attend_call(case.qkv.cuda(), 8, cache, positions, scratch, **case.given)
        before = None if room is None else _C.limit_shared_memory(positions.device.index, room)
        try:
            found.append((decode.attend(call), *cache))
        finally:
            if before is not None:
                _C.limit_shared_memory(positions.device.index, before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [None, "int8", "fp8"])
def test_prompts_behind_others(kind: str | None) -> None:
    """In two calls what one leaves; what would stand outside of the cache goes nowhere."""
    like, pairs, size = torch.zeros(1, dtype=torch.float16, device="cuda"), 2, 64
    qkv = torch.randn(2, 10, 4 * pairs * size, device="cuda").half()
    caches = []
    for parts in ((10,), (4, 6)):
        codes, scales = new_codes((2, 2, pairs, 10, size), kind, like)
        caches.append((*codes, *(() if scales is None else scales)))
        at = 0
        for tokens in qkv.split(parts, 1):
            first = torch.full((2,), at, device="cuda")
            call = attend_call(tokens.flatten(0, 1), 2 * pairs, caches[-1], None, (like, like))
            decode.append(call._replace(positions=first))
            at += tokens.shape[1]
    assert all(torch.equal(a, b) for a, b in zip(*caches, strict=True))
    before = [t.clone() for t in caches[0]]
    outside = torch.tensor([10, -2], device="cuda")
    decode.append(
        attend_call(qkv[:, :2].flatten(0, 1), 2 * pairs, caches[0], None, (like, like))._replace(positions=outside)
    )
    assert all(torch.equal(a, b) for a, b in zip(caches[0], before, strict=True))


@pytest.mark.gpu
def test_a_token_without_a_number_stays_alone() -> None:
    heads, size = 4, 64
    for kind in (None, "int8", "fp8"):
        like = torch.zeros(1, dtype=torch.float16, device="cuda")
        codes, scales = new_codes((2, 2, 2, 200, size), kind, like)
        cache = (*codes, *(() if scales is None else scales))
        scratch = decode.attend_scratch(2, heads, 2, size, 200, codes.device)
        qkv = torch.randn(2, 8 * size, device="cuda").half()
        qkv[0, heads * size + 3] = float("nan")  # in the first head's key of the first sequence
        positions = torch.tensor([0, 0], device="cuda")
        got = decode.attend(attend_call(qkv, heads, cache, positions, scratch)).view(2, heads, size)
        assert got[0, :2].isnan().all()
        assert not got[0, 2:].isnan().any()
        assert not got[1].isnan().any()


def eight_bits(size: int) -> dict[str, Tensor]:
    codes = torch.zeros(2, 3, 40, size, dtype=torch.int8, device="cuda")
    return {"keys": codes, "values": codes.clone()}


@pytest.mark.gpu
def test_wrong_tensors_are_refused_before_a_launch() -> None:
    cache = tuple(torch.zeros(2, 2, 3, 40, 16, dtype=torch.float16, device="cuda"))
    qkv = torch.zeros(2, 144, dtype=torch.float16, device="cuda")
    positions = torch.zeros(2, dtype=torch.int64, device="cuda")
    scratch = decode.attend_scratch(2, 3, 3, 16, 40, qkv.device)
    call = attend_call(qkv, 3, cache, positions, scratch)
    for given, error, message in (
        ({"q": call.q.float()}, TypeError, "q: expected dtype"),
        ({"q": call.q.cpu()}, ValueError, "q: expected a tensor on cuda"),
        ({"k": call.k[:, :2]}, ValueError, r"k: expected shape \[2, 3, 16\], dense in the last dimension"),
        ({"v": call.v.cpu()}, ValueError, "v: expected"),
        ({"values": cache[1].cpu()}, ValueError, "values: expected"),
        ({"values": cache[1][:1]}, ValueError, "values: expected a contiguous tensor"),
        ({"values": cache[1].to(torch.int8)}, TypeError, "values: expected dtype float16 like keys"),
        (
            {"key_scales": torch.zeros(2, 3, 40).cuda()},
            ValueError,
            "key_scales: expected None beside a cache in floating",
        ),
        ({"keys": cache[0].to(torch.int8), "values": cache[1].to(torch.int8)}, ValueError, "key_scales: expected fp32"),
        (eight_bits(8), ValueError, r"keys: expected a head size that is a multiple of 16, with 8 bits"),
        ({"rotary": torch.zeros(39, 16).cuda()}, ValueError, r"rotary: expected \[at least capacity"),
        ({"query_norm": torch.zeros(15).cuda()}, ValueError, "query_norm: expected a contiguous tensor"),
        ({"positions": positions.int()}, TypeError, "positions: expected dtype int64"),
        ({"positions": positions[:1]}, ValueError, r"positions: expected a contiguous tensor of shape \[2\]"),
        ({"partials": scratch[0][1:]}, ValueError, "partials: expected a contiguous tensor"),
        ({"window": -1}, ValueError, "window: expected at least 0, got -1"),
        ({"v": None}, ValueError, "v: expected None like k, or both"),
        ({"starts": positions.int()}, TypeError, "starts: expected dtype int64"),
    ):
        with pytest.raises(error, match=message):
            decode.attend(call._replace(**given))
    with pytest.raises(ValueError, match="q: expected a multiple of the cache's 3 heads"):
        decode.attend(call._replace(q=qkv.view(2, -1, 16)[:, :4]))
    with pytest.raises(ValueError, match="k: expected keys to append, got None"):
        decode.append(call._replace(k=None, v=None))
    with pytest.raises(ValueError, match="q: expected as many tokens"):
        decode.append(attend_call(qkv.repeat(41, 1), 3, cache, None, scratch))
