"""models.QuantizedStaticCache under transformers' own generate."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from octofuse.models import QuantizedStaticCache
from octofuse.ops.cache import decoded, encoded

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 16},
}
LENGTH = 64


def small(kind: str, device: str = "cpu", dtype: torch.dtype = torch.float32, heads: int = 4) -> nn.Module:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": heads,
        "num_key_value_heads": 2, "vocab_size": 200, "max_position_embeddings": 256, "head_dim": 16,
    }  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes | FAMILIES[kind]))
    model.set_attn_implementation("octofuse")
    return model.eval().to(device, dtype)


def padded(device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Three prompts of 12, 7 and 1 tokens, padding in front."""
    ids = torch.randint(1, 200, (3, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    mask[2, :11] = 0
    return (ids * mask).to(device), mask.to(device)


@torch.no_grad()
def logits_of(model: Any, cache: Any, ids: Tensor, mask: Tensor, tokens: Tensor, step: Any = None) -> Tensor:
    """Of the prompts' last tokens, and of `tokens` [B, T] behind them, one by one -> [B, 1 + T, V]."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    out = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
    found, at = [out.logits[:, -1:]], positions[:, -1:]
    for i in range(tokens.shape[1]):
        mask, at = nn.functional.pad(mask, (0, 1), value=1), at + 1
        whole = nn.functional.pad(mask, (0, LENGTH - mask.shape[1]))  # one shape: nothing is compiled again
        given = {"attention_mask": whole, "position_ids": at, "past_key_values": cache, "use_cache": True}
        found.append((step or model)(tokens[:, i : i + 1], **given).logits)
    return torch.cat(found, 1).float()


class ByHand(nn.Module):
    """The model with every key and value behind its prompt rounded as the cache rounds it: what the cache should give."""

    def __init__(self, model: Any, kind: str) -> None:
        super().__init__()
        self.model, self.kind = model, kind

    def logits(self, ids: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
        from transformers import DynamicCache
        from transformers.cache_utils import DynamicLayer

        kind = torch.int8 if self.kind == "int8" else torch.uint8

        class Rounded(DynamicLayer):
            def update(self, key_states: Tensor, value_states: Tensor, *a: Any, **k: Any) -> tuple[Tensor, Tensor]:
                seen = super().update(key_states, value_states, *a, **k)
                fresh = seen[0].shape[2] == key_states.shape[2]
                self.keys, self.values = (decoded(*encoded(t, kind), t.dtype) for t in seen)
                return seen if fresh else (self.keys, self.values)

        cache = DynamicCache()
        cache.layers = [Rounded() for _ in range(self.model.config.num_hidden_layers)]
        cache.layer_class_to_replicate = None
        self.model.set_attn_implementation("eager")
        try:
            return logits_of(self.model, cache, ids, mask, tokens)
        finally:
            self.model.set_attn_implementation("octofuse")


def check(model: Any, kind: str, device: str, most: float) -> None:
    ids, mask = padded(device)
    tokens = torch.randint(1, 200, (3, 9), generator=torch.Generator().manual_seed(2)).to(device)
    got = logits_of(model, QuantizedStaticCache(model.config, LENGTH, kind), ids, mask, tokens)
    want = ByHand(model, kind).logits(ids, mask, tokens)
    assert ((got - want).norm(dim=-1) / want.norm(dim=-1)).max() < most


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_rounded_keys_and_values(family: str, kind: str) -> None:
    """Rounding what is rounded already changes nothing but where a value lies between two: hence the tolerance."""
    check(small(family), kind, "cpu", 2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu(family: str, kind: str) -> None:
    check(small(family, "cuda", torch.float16, heads=8), kind, "cuda", 3e-2)


class Recorded:
    """A model's step as a CUDA graph, made at the first token."""

    def __init__(self, model: Any, cache: Any) -> None:
        self.model, self.cache, self.graph = model, cache, torch.cuda.CUDAGraph()
        self.given: dict[str, Any] = {}

    def __call__(self, token: Tensor, **given: Any) -> Any:
        given["input_ids"] = token
        if not self.given:
            self.given = {name: value.clone() if isinstance(value, Tensor) else value for name, value in given.items()}
            self.record()
        for name in ("input_ids", "attention_mask", "position_ids"):
            self.given[name].copy_(given[name])
        self.graph.replay()
        return SimpleNamespace(logits=self.logits.clone())

    def record(self) -> None:
        state = [(t, t.clone()) for layer in self.cache.layers for t in vars(layer).values() if isinstance(t, Tensor)]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.model(**self.given)  # what is made once is made now
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self.graph):
            self.logits = self.model(**self.given).logits
        for tensor, before in state:
            tensor.copy_(before)


@pytest.mark.gpu
def test_a_recorded_step() -> None:
    """Replayed for every token, the same bits as step by step."""
    model: Any = small("llama", "cuda", torch.float16, heads=8)
    ids, mask = padded("cuda")
    tokens = torch.randint(1, 200, (3, 9), generator=torch.Generator().manual_seed(2)).cuda()
    want = logits_of(model, QuantizedStaticCache(model.config, LENGTH), ids, mask, tokens)
    cache = QuantizedStaticCache(model.config, LENGTH)
    assert torch.equal(logits_of(model, cache, ids, mask, tokens, Recorded(model, cache)), want)


def test_generate_and_reuse() -> None:
    """transformers' generate takes it; after reset() it gives the same tokens again; beams are refilled in place."""
    model: Any = small("llama")
    ids, mask = padded()
    cache = QuantizedStaticCache(model.config, LENGTH)
    assert cache.bytes == 0
    given = {
        "attention_mask": mask,
        "max_new_tokens": 8,
        "do_sample": False,
        "disable_compile": True,
        "pad_token_id": 0,
    }
    given["eos_token_id"] = -1
    first = model.generate(ids, past_key_values=cache, **given)
    assert cache.bytes == 2 * 2 * 3 * 2 * LENGTH * (16 + 4)
    addresses = [layer.keys.data_ptr() for layer in cache.layers]
    cache.reset()
    assert torch.equal(model.generate(ids, past_key_values=cache, **given), first)
    one = QuantizedStaticCache(model.config, LENGTH)
    alone = model.generate(ids[:1], past_key_values=one, **given | {"attention_mask": mask[:1]})
    assert torch.equal(alone, first[:1])
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    assert [layer.keys.data_ptr() for layer in cache.layers] == addresses
    assert torch.equal(cache.layers[0].keys[0], cache.layers[0].keys[1])


def test_a_prompt_in_parts() -> None:
    """A second part sees the first as the cache has it, and itself unrounded."""
    model: Any = small("llama")
    ids = torch.randint(1, 200, (2, 20), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        want = model(ids, use_cache=False).logits[:, -1]
        cache = QuantizedStaticCache(model.config, LENGTH)
        for part in ids.split((9, 11), 1):
            got = model(part, past_key_values=cache, use_cache=True).logits[:, -1]
    assert 0 < (got - want).norm() / want.norm() < 0.02


def test_compiles_as_one_graph() -> None:
    model: Any = small("qwen3")
    ids, mask = padded()
    tokens = torch.randint(1, 200, (3, 5), generator=torch.Generator().manual_seed(2))
    eager = logits_of(model, QuantizedStaticCache(model.config, LENGTH), ids, mask, tokens)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    compiled = logits_of(model, QuantizedStaticCache(model.config, LENGTH), ids, mask, tokens, step)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert (compiled - eager).abs().max() < 1e-5


def test_another_cache_beside_this_attention() -> None:
    """A model may stay with this attention: with transformers' own caches it computes what "sdpa" does."""
    from transformers import StaticCache

    for family in ("llama", "gemma2"):
        model: Any = small(family)
        ids, mask = padded()
        tokens = torch.randint(1, 200, (3, 5), generator=torch.Generator().manual_seed(2))
        found = []
        for name in ("octofuse", "eager"):
            model.set_attn_implementation(name)
            found += [
                logits_of(model, cache, ids, mask, tokens) for cache in (None, StaticCache(model.config, LENGTH))
            ][1:]
        assert (found[0] - found[1]).abs().max() < 1e-4


def test_mistakes_are_refused() -> None:
    model: Any = small("llama")
    for given, message in (
        ({"kind": "int4"}, "kind: expected 'int8' or 'fp8', got 'int4'"),
        ({"max_cache_len": 0}, "max_cache_len: expected an int of at least 1, got 0"),
        ({"config": model}, "config: expected a transformers config, got LlamaForCausalLM"),
    ):
        with pytest.raises(ValueError, match=message):
            QuantizedStaticCache(**{"config": model.config, "max_cache_len": LENGTH} | given)
    config = AutoConfig.for_model("llama")
    config.layer_types = ["linear_attention"]
    with pytest.raises(ValueError, match="config: expected layers of full_attention and sliding_attention, got linear"):
        QuantizedStaticCache(config, LENGTH)
    ids, mask = padded()
    with pytest.raises(ValueError, match="cache: expected no gradients"):
        model(ids, past_key_values=QuantizedStaticCache(model.config, LENGTH))
    with torch.no_grad():
        cache = QuantizedStaticCache(model.config, 13)
        model(ids, attention_mask=mask, past_key_values=cache)
        with pytest.raises(
            ValueError, match="cache: expected 3 sequences with 2 heads, as at its first use, got 1 and 2"
        ):
            model(ids[:1, :1], past_key_values=cache)
        model(ids[:, :1], attention_mask=nn.functional.pad(mask, (0, 1), value=1), past_key_values=cache)
        with pytest.raises(ValueError, match="max_cache_len: expected room for all tokens, got 13"):
            model(ids[:, :1], attention_mask=nn.functional.pad(mask, (0, 2), value=1), past_key_values=cache)
        model.set_attn_implementation("sdpa")
        with pytest.raises(ValueError, match="config: expected attention by 'octofuse'"):
            model(ids, past_key_values=QuantizedStaticCache(model.config, LENGTH))


@torch.no_grad()
def test_gaps_between_what_a_token_sees_are_refused() -> None:
    """Padding behind a prompt leaves one; without this cache it is nobody's mistake."""
    model: Any = small("llama")
    ids, mask = padded()
    right = mask.flip(1)
    want = model(ids, attention_mask=right, use_cache=False).logits
    cache = QuantizedStaticCache(model.config, LENGTH)
    assert torch.equal(model(ids, attention_mask=right, past_key_values=cache).logits, want)
    with pytest.raises(ValueError, match="attention_mask: expected padding in front"):
        model(ids[:, :1], attention_mask=nn.functional.pad(right, (0, 1), value=1), past_key_values=cache)


@torch.no_grad()
def test_a_mask_of_the_callers_own_that_changes() -> None:
    """One tensor for every step, written in place."""
    model: Any = small("llama")
    ids, _ = padded()
    tokens = torch.randint(1, 200, (3, 4), generator=torch.Generator().manual_seed(2))
    caches = [QuantizedStaticCache(model.config, LENGTH) for _ in range(2)]
    for cache in caches:
        model(ids, past_key_values=cache)
    mask = torch.zeros(3, 1, 1, LENGTH, dtype=torch.bool)
    for i in range(4):
        mask[..., : ids.shape[1] + i + 1] = True
        got = model(tokens[:, i : i + 1], attention_mask=mask, past_key_values=caches[0]).logits
        assert torch.equal(got, model(tokens[:, i : i + 1], past_key_values=caches[1]).logits)


@torch.no_grad()
def test_a_model_without_a_cache_of_this_kind() -> None:
    """One token behind others in transformers' own cache, softcap and no padding: no mask at all."""
    model: Any = small("gemma2")
    ids = torch.randint(1, 200, (2, 7), generator=torch.Generator().manual_seed(3))
    found = []
    for name in ("octofuse", "eager"):
        model.set_attn_implementation(name)
        first = model(ids[:, :6], use_cache=True)
        found.append(model(ids[:, 6:], past_key_values=first.past_key_values).logits)
    assert (found[0] - found[1]).abs().max() < 1e-4


def test_attention_that_a_cache_of_codes_has_not() -> None:
    q, k = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 5, 16)
    run = AttentionInterface()["octofuse"]
    with pytest.raises(ValueError, match="s_aux: expected a model without attention sinks"):
        run(nn.Module(), q, k, k, None, s_aux=torch.zeros(4))
    with pytest.raises(ValueError, match="position_bias: expected None"):
        run(nn.Module(), q, k, k, None, softcap=3.0, position_bias=torch.zeros(1))
    with pytest.raises(
        ValueError, match="cache: expected a model that attends to keys and values as the cache gives them"
    ):
        run(nn.Module(), q, k.to(torch.int8), k.to(torch.int8), None)
