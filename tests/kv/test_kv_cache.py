"""A layer of the cache against lists, and what a cache has to be for a policy to take it over."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_kit import Drawn, Everywhere, close, decode, model_of, prompts
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.kv import Full, Observe, StreamingLLM
from sinkscope.kv.cache import COLUMNS, CacheLayer
from sinkscope.kv.usage import Meter

HEADS = 2


@dataclass
class Slow:
    """held[row][head]: what is there, in order, as [position, key, number, hidden]; real[row]: of each column."""

    held: list[list[list[list[Any]]]]
    real: list[list[bool]]
    select: bool = False
    made: int = 0

    def columns(self) -> Tensor:
        real = torch.tensor(self.real)
        return torch.where(real, real.long().cumsum(1) - 1, -1)

    def update(self, layer: CacheLayer, pads: list[list[bool]]) -> None:
        new = len(pads[0])
        keys = torch.arange(self.made, self.made + len(pads) * HEADS * new).view(len(pads), HEADS, new, 1).float()
        self.made += keys.numel()
        for row, pad in enumerate(pads):
            for i, padding in enumerate(pad):
                if not padding:
                    for head in range(HEADS):
                        self.held[row][head].append([sum(self.real[row]), float(keys[row, head, i]), 0.0, False])
                self.real[row].append(not padding)
        token = COLUMNS.set(self.columns())
        layer.update(keys, -keys)
        COLUMNS.reset(token)

    def apply(self, layer: CacheLayer, draw: Any) -> None:
        """One random operation on both."""
        rows = len(self.held)
        mask = torch.rand(layer.pos.shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 999))))
        name = draw(st.sampled_from(["update", "evict", "select", "show", "crop", "reorder", "repeat", "rows", "note"]))
        chosen = {(b, h, int(p)): float(mask[b, h, i]) for (b, h, i), p in _entries(layer.pos)}
        if name == "update":
            self.update(layer, draw(_pads(rows)))
        elif name == "evict":
            share = draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
            layer.evict(mask < share)
            self._keep(lambda b, h, one: chosen[b, h, one[0]] < share)
            most = max(len(head) for row in self.held for head in row)
            assert layer.slots == most and layer.ragged == any(len(h) < most for row in self.held for h in row)
        elif name in ("select", "show"):
            layer.select(None if name == "show" else mask < 0.5)
            for b, row in enumerate(self.held):
                for h, head in enumerate(row):
                    for one in head:
                        one[3] = name == "select" and chosen[b, h, one[0]] >= 0.5
        elif name == "crop":
            lose = draw(st.integers(0, len(self.real[0]) - 1))
            layer.crop(-lose)
            self.real = [row[: len(row) - lose] for row in self.real]
            self._keep(lambda b, _h, one: one[0] < sum(self.real[b]))
        elif name == "note":
            layer.set_extra("n", layer.extra("n") + mask)
            for b, row in enumerate(self.held):
                for h, head in enumerate(row):
                    for one in head:
                        one[2] += chosen[b, h, one[0]]
        else:
            index = draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=3))
            if name == "reorder":
                layer.reorder_cache(torch.tensor(index))
            elif name == "rows":
                layer.batch_select_indices(torch.tensor(index))
            else:
                layer.batch_repeat_interleave(2 if rows < 3 else 1)
                index = [b for b in range(rows) for _ in range(2 if rows < 3 else 1)]
            self.held = [copy.deepcopy(self.held[b]) for b in index]
            self.real = [list(self.real[b]) for b in index]

    def _keep(self, wanted: Any) -> None:
        self.held = [
            [[one for one in head if wanted(b, h, one)] for h, head in enumerate(row)]
            for b, row in enumerate(self.held)
        ]

    def check(self, layer: CacheLayer) -> None:
        assert layer.seen == layer.get_seq_length() == len(self.real[0])
        assert layer.keys is not None and layer.values is not None
        assert layer.get_mask_sizes(3) == (layer.slots + 3, layer.seen - layer.slots)
        assert layer.pos.shape == layer.keys.shape[:3]
        lost = []
        for b, row in enumerate(self.held):
            for h, head in enumerate(row):
                there = layer.pos[b, h] >= 0
                hidden = layer.hidden[b, h] if layer.hidden is not None else torch.zeros_like(there)
                got = [
                    [int(p), float(k), round(float(x), 4), bool(s)]
                    for p, k, x, s in zip(
                        layer.pos[b, h][there],
                        layer.keys[b, h, there, 0],
                        layer.extra("n")[b, h][there],
                        hidden[there],
                        strict=True,
                    )
                ]
                assert got == [[p, k, round(x, 4), s] for p, k, x, s in head]
                assert torch.equal(layer.values[b, h, there, 0], -layer.keys[b, h, there, 0])
                lost.append(layer.slots - len(head))
        holes = torch.tensor(lost).view(-1, HEADS).float().mean(1)
        assert torch.equal(layer.holes(), holes)
        if layer.edited and not layer.ragged and layer.hidden is None:
            assert not any(lost)  # what lets a call go without a mask


def _entries(pos: Tensor) -> list[tuple[tuple[int, int, int], int]]:
    return [
        ((b, h, i), int(p))
        for b, row in enumerate(pos)
        for h, head in enumerate(row)
        for i, p in enumerate(head)
        if p >= 0
    ]


def _pads(rows: int) -> Any:
    """Padding at the left of each row's new tokens; a single new token is real."""
    new = st.integers(1, 4)
    return new.flatmap(
        lambda n: st.lists(
            st.integers(0, n if n > 1 else 0).map(lambda k: [i < k for i in range(n)]), min_size=rows, max_size=rows
        )
    )


@settings(max_examples=30)
@given(st.data())
def test_any_order_of_operations(data: Any) -> None:
    rows = data.draw(st.integers(1, 3))
    slow = Slow([[[] for _ in range(HEADS)] for _ in range(rows)], [[] for _ in range(rows)])
    layer = CacheLayer()
    slow.update(layer, data.draw(_pads(rows)))
    for _ in range(data.draw(st.integers(1, 8))):
        slow.apply(layer, data.draw)
        slow.check(layer)
    layer.reset()
    assert (layer.seen, layer.slots, layer.edited, layer.ragged, layer.hidden) == (0, 0, False, False, None)
    fresh = Slow([[[] for _ in range(HEADS)]], [[]])
    fresh.update(layer, [[False, False]])
    fresh.check(layer)


def test_crop_takes_minus_a_number() -> None:
    layer = CacheLayer()
    layer.update(torch.zeros(1, 2, 4, 3), torch.zeros(1, 2, 4, 3))
    with pytest.raises(SinkscopeError, match="minus the number"):
        layer.crop(2)


def test_crop_where_heads_keep_other_tokens() -> None:
    """As many in every head before, not so after: there are holes now, and masks are needed again."""
    layer = CacheLayer()
    layer.update(torch.zeros(1, 2, 4, 3), torch.zeros(1, 2, 4, 3))
    layer.evict(torch.tensor([[[True, False, False, True], [True, True, False, False]]]))
    assert not layer.ragged
    layer.crop(-2)
    assert layer.ragged and layer.pos.tolist() == [[[0, -1], [0, 1]]]


def test_a_cache_that_was_filled_before() -> None:
    model = model_of("llama")
    ids, mask = prompts([15, 9], 6)
    policy = Drawn(budget=7)
    with policy.on(model):
        want = decode(model, ids, mask, 15)
    cache = DynamicCache()
    stock = decode(model, ids[:, :15], mask[:, :15], 15, cache)
    copied = copy.deepcopy(cache)
    for one, chunks in ((cache, []), (copied, [])):  # no piece of the prompt is read inside
        with policy.on(model):
            close(torch.cat([stock, decode(model, ids, mask, 15, one, chunks)], 1), want)


def test_a_copy_goes_its_own_way() -> None:
    model = model_of("llama")
    ids, mask = prompts([15, 9], 6)
    policy = Drawn(budget=7)
    with policy.on(model):
        want = decode(model, ids, mask, 15)
        cache = DynamicCache()
        first = decode(model, ids[:, :15], mask[:, :15], 15, cache)
        twin = copy.deepcopy(cache)
        other = decode(model, ids.flip(0)[:, :1].expand(2, 21), torch.ones_like(mask), 15, cache, [])
        got = decode(model, ids, mask, 15, twin, [])
    close(torch.cat([first, got], 1), want)
    assert other.shape[1] == 6


def test_one_cache_over_two_turns_of_generate() -> None:
    model = model_of("llama")
    ids, _ = prompts([12, 12])
    cache = DynamicCache()
    more, _ = prompts([4, 4], seed=1)
    with Full().on(model) as run:
        one = model.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False)
        two = model.generate(torch.cat([one, more], 1), past_key_values=cache, max_new_tokens=5, do_sample=False)
    assert torch.equal(two, model.generate(torch.cat([one, more], 1), max_new_tokens=5, do_sample=False))
    assert len(run.usage) == 1 and cache.get_seq_length() == 12 + 5 + 4 + 4
    # Emptied, it is a new cache; nothing is left of the first sequence.
    with Drawn(budget=6).on(model) as run:
        cache.reset()
        model.generate(ids[:, :9], past_key_values=cache, max_new_tokens=3, do_sample=False)
        cache.reset()
        three = model.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False)
        assert torch.equal(three, model.generate(ids, max_new_tokens=5, do_sample=False))
    assert [usage.calls for usage in run.usage] == [3, 5, 5]


def test_new_positions_need_the_same_tokens_everywhere() -> None:
    """Another policy has left other tokens in every layer."""
    model = model_of("llama")
    ids, mask = prompts([14], 6)
    cache = DynamicCache()
    with Drawn(budget=8, every="prefill").on(model):
        decode(model, ids[:, :18], mask[:, :18], 14, cache)
    rebased = Everywhere(budget=4, positions="rebased")
    with pytest.raises(UnsupportedError, match="other positions in every layer"), rebased.on(model):
        decode(model, ids, mask, 18, cache, [])


def test_caches_that_cannot_be_taken_over() -> None:
    model, window = model_of("llama"), model_of("mistral")
    ids, mask = prompts([20])
    policy = StreamingLLM(budget=6)
    static = StaticCache(config=model.config, max_cache_len=40)
    shallow = DynamicCache()
    decode(model_of("llama", num_hidden_layers=2), ids, mask, 20, shallow)
    narrow = DynamicCache()
    decode(model_of("llama", num_key_value_heads=1), ids, mask, 20, narrow)
    slid = DynamicCache(config=window.config)
    decode(window, ids, mask, 20, slid)
    offloading = DynamicCache(offloading=True) if torch.cuda.is_available() else None
    for cache, inside, said in (
        (static, model, "StaticCache"),
        (shallow, model, "another model"),
        (narrow, model, "another model"),
        (slid, window, "DynamicSlidingWindowLayer"),
        (offloading, model, "offloading"),
        ([1], model, "list"),
        (EncoderDecoderCache(DynamicCache(), DynamicCache()), model, "EncoderDecoderCache: a cache policy"),
    ):
        if cache is None:
            continue
        with policy.on(inside), pytest.raises(SinkscopeError, match=said) as raised:
            model_of_base(inside)(input_ids=ids[:, :1], past_key_values=cache)
        assert "\n" not in str(raised.value)


def model_of_base(model: Any) -> Any:
    return model.get_decoder() if hasattr(model, "get_decoder") else model


def test_an_edited_cache_is_refused_outside() -> None:
    model = model_of("llama")
    ids, mask = prompts([12], 2)
    for mode in ("evict", "select"):
        cache = DynamicCache()
        with StreamingLLM(budget=6, mode=mode).on(model):
            decode(model, ids, mask, 12, cache)
        with pytest.raises(UnsupportedError, match="outside of the `with`"):
            model(input_ids=ids[:, :1], past_key_values=cache)
        with Observe(lambda _: None).on(model):  # somebody who does not own the cache still knows its positions
            model(input_ids=ids[:, :1], past_key_values=cache)


def test_an_untouched_cache_goes_on_outside() -> None:
    model = model_of("mistral")
    ids, mask = prompts([20, 13], 4)
    want = decode(model, ids, mask, 20)
    cache = DynamicCache(config=model.config)
    with Full().on(model):
        first = decode(model, ids[:, :22], mask[:, :22], 20, cache)
    close(torch.cat([first, decode(model, ids, mask, 22, cache, [])], 1), want)


def test_usage_is_counted_by_hand() -> None:
    model = model_of("llama")
    ids, mask = prompts([20, 13], 6)
    cache = DynamicCache()
    tokens, slots = [], []
    from sinkscope.kv import Policy

    class Counting(Drawn):
        def enter(self, run: Any, key: int) -> None:
            super().enter(run, key)
            run.session.after_call(
                lambda moment: (
                    tokens.append(torch.stack([(kv.pos >= 0).sum(-1).float().mean(1) for kv in moment.layers]).mean(0)),
                    slots.append(sum(kv.keys.shape[2] for kv in moment.layers)),
                )
            )

        select = Policy.select

    for policy in (Counting(budget=8), Counting(budget=0.5), Counting(budget=8, mode="select")):
        tokens.clear()
        slots.clear()
        with policy.on(model) as run:
            decode(model, ids, mask, 20, cache := DynamicCache())
        (usage,) = run.usage
        held = torch.stack(tokens)
        size = 2 * 2 * 8 * 4  # keys and values, kv heads, width, bytes
        assert usage.calls == 7 == len(held)
        torch.testing.assert_close(torch.tensor(usage.mean_tokens), held.mean(0))
        torch.testing.assert_close(torch.tensor(usage.peak_tokens), held.amax(0))
        assert usage.logical_bytes == round(float(held.sum(1).max()) * 3 * size)
        assert usage.physical_bytes == max(slots) * 2 * size
        held_now = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        assert held_now <= usage.physical_bytes


def test_usage_of_a_batch_that_grows() -> None:
    layers = [CacheLayer() for _ in range(2)]
    meter = Meter()
    for _ in range(2):
        for layer in layers:
            layer.update(torch.zeros(1, 2, 4, 3), torch.zeros(1, 2, 4, 3))
        meter.note(layers)
    for layer in layers:
        layer.batch_repeat_interleave(2)
        layer.update(torch.zeros(2, 2, 1, 3), torch.zeros(2, 2, 1, 3))
    meter.note(layers)
    usage = meter.usage()
    assert usage.peak_tokens == [9.0, 9.0]
    assert usage.physical_bytes == usage.logical_bytes == 2 * 2 * 2 * 9 * 3 * 4 * 2
    torch.testing.assert_close(torch.tensor(usage.mean_tokens), torch.full((2,), (4 + 8 + 9) / 3))
