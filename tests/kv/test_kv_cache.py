"""A layer of the cache against lists, and what a cache has to be for a policy to take it over."""

from __future__ import annotations

import copy
from random import Random
from unittest import mock

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from kv_kit import Drawn, allocated_slots, append, decode, model_of, prompts
from refusals import refused
from transformers import DynamicCache, EncoderDecoderCache

from sinkscope.engine.step import TokenPositions
from sinkscope.kv import Full, Observe, StreamingLLM
from sinkscope.kv import cache as layers_of
from sinkscope.kv.cache import CacheLayer

HEADS = 2
ALWAYS = ("update", "settle", "crop", "reset")
"""Operations that a layer takes in every state; the others need tokens, and what chooses slots a whole layer."""
WITH_TOKENS = ("note", "reorder", "repeat", "rows")


def may(layer: CacheLayer, name: str) -> bool:
    if name in ALWAYS:
        return True
    return layer.is_initialized and (name in WITH_TOKENS or layer.whole_layer is None)


class Slow:
    """held[row][head]: position -> [key, note], in order; real[row]: of each column."""

    def __init__(self, rows: int):
        self.held = [[{} for _ in range(HEADS)] for _ in range(rows)]
        self.real = [[] for _ in range(rows)]

    def update(self, layer: CacheLayer, random: Random):
        """New tokens, with padding at the left of each row; a single one is real."""
        new = 1 if layer.whole_layer else random.randint(1, 4)
        keys = torch.rand(len(self.real), HEADS, new, 1)
        for row, real in enumerate(self.real):
            padding = random.randint(0, new) if new > 1 else 0
            for column in range(new):
                real.append(column >= padding)
                for head in range(HEADS):
                    if real[-1]:
                        self.held[row][head][sum(real) - 1] = [float(keys[row, head, column]), 0]
        columns = torch.tensor(self.real)
        layer.upcoming = TokenPositions.of(torch.where(columns, columns.long().cumsum(1) - 1, -1))
        layer.update(keys, -keys)

    def apply(self, layer: CacheLayer, random: Random, name: str):
        """One operation on both, with a number from 0 to 9 for every slot."""
        rows = len(self.real)
        if name == "update":
            return self.update(layer, random)
        if name == "settle":
            return layer.settle()
        if not layer.is_initialized and name == "crop":
            return layer.crop(-1)
        if name == "reset":
            layer.reset()
            return self.__init__(random.randint(1, 3))
        numbers = torch.randint(0, 10, layer.pos.shape)
        share = random.choice([0, 3, 7, 10])
        crop = min(random.randint(0, len(self.real[0]) + 2), len(self.real[0]))
        index = [random.randrange(rows) for _ in range(random.randint(1, 3))]
        entries = []
        for row, head, slot in (layer.pos >= 0).nonzero().tolist():
            if layer.whole_layer is None:  # else what is noted is lost with the part
                entries.append((self.held[row][head], int(layer.pos[row, head, slot]), int(numbers[row, head, slot])))
        if name == "evict":
            layer.evict(numbers < share)
            for held, pos, number in entries:
                if number >= share:
                    del held[pos]
            counts = [len(head) for row in self.held for head in row]
            assert layer.slots == max(counts) and layer.gapless == (min(counts) == max(counts))
        elif name == "part":
            layer.settle()
            whole = layer.copy()
            layer.evict(numbers < share)
            layer.whole_layer = whole
        elif name == "note":
            layer.numbers["n"] = layer.extra("n") + numbers
            for held, pos, number in entries:
                held[pos][1] += number
        elif name == "crop":
            layer.crop(-crop)
            self.real = [row[: len(row) - crop] for row in self.real]
            for real, heads in zip(self.real, self.held, strict=True):
                for held in heads:
                    for pos in [pos for pos in held if pos >= sum(real)]:
                        del held[pos]
        else:
            if name == "repeat":
                layer.batch_repeat_interleave(2)
                index = sorted([*range(rows), *range(rows)])
            elif name == "reorder":
                layer.reorder_cache(torch.tensor(index))
            else:
                layer.batch_select_indices(torch.tensor(index))
            self.held = [copy.deepcopy(self.held[row]) for row in index]
            self.real = [list(self.real[row]) for row in index]

    def check(self, layer: CacheLayer):
        if layer.whole_layer is not None:
            layer = layer.copy()
            layer.settle()
        assert layer.seen == layer.get_seq_length() == len(self.real[0])
        assert torch.equal(layer.values, -layer.keys)
        assert layer.get_mask_sizes(3) == (layer.slots + 3, layer.seen - layer.slots)
        holes = torch.zeros(len(self.real))
        for row, heads in enumerate(self.held):
            for head, held in enumerate(heads):
                got = {}
                for slot in (layer.pos[row, head] >= 0).nonzero().flatten().tolist():
                    note = float(layer.extra("n")[row, head, slot])
                    got[int(layer.pos[row, head, slot])] = [float(layer.keys[row, head, slot, 0]), note]
                assert list(got.items()) == list(held.items())
                holes[row] += (layer.slots - len(held)) / HEADS
        assert torch.equal(layer.holes(), holes)
        if layer.gapless:
            assert not holes.any()  # what lets a call go without a mask


class Layers(RuleBasedStateMachine):
    """Layers and copies that share their memory, with buffers so short that they are full now and then."""

    def __init__(self):
        super().__init__()
        self.patches = [mock.patch.multiple(layers_of, COPY_LIMIT=4, SPARE=3), torch.no_grad()]
        for patch in self.patches:
            patch.__enter__()

    def teardown(self):
        try:
            self.all_hold_what_they_should()
        finally:
            for patch in self.patches:
                patch.__exit__(None, None, None)

    @initialize(random=st.randoms(use_true_random=False))
    def begin(self, random: Random):
        torch.manual_seed(random.randint(0, 9999))
        self.pairs = [(Slow(random.randint(1, 3)), CacheLayer())]
        self.operate(random, "update")

    @rule(
        random=st.randoms(use_true_random=False),
        name=st.sampled_from([*ALWAYS, *WITH_TOKENS, "evict", "part", "update", "update", "fork"]),
    )
    def operate(self, random: Random, name: str):
        slow, layer = random.choice(self.pairs)
        if name == "fork" and len(self.pairs) < 4:
            self.pairs.append((copy.deepcopy(slow), layer.copy()))
        elif name != "fork" and may(layer, name):
            slow.apply(layer, random, name)
        self.all_hold_what_they_should()

    def all_hold_what_they_should(self):
        for slow, layer in self.pairs:
            holds_what_it_should(slow, layer)


def holds_what_it_should(slow: Slow, layer: CacheLayer):
    if layer.is_initialized:
        slow.check(layer)
        assert layer.slots <= allocated_slots(layer)
    else:
        assert (layer.seen, layer.slots, layer.edited, layer.gapless) == (0, 0, False, False)


TestLayers = Layers.TestCase
TestLayers.settings = settings(max_examples=60, stateful_step_count=20)


@pytest.mark.parametrize(
    ("seed", "names"),
    [
        (1, ["note", "part", "update", "note", "update", "note", "crop", "evict"]),
        (2, ["part", *["update"] * 4, "fork", *["update"] * 4]),  # both append in the room that they share
        (3, [*["evict", "update", "crop"] * 4]),
    ],
)
def test_fixed_orders_of_cache_operations(seed: int, names: list[str]):
    layers, random = Layers(), Random(seed)
    layers.begin(random)
    for name in names:
        layers.operate(random, name)
    layers.teardown()


def test_a_layer_of_which_all_is_taken_back_is_empty():
    layer = CacheLayer()
    append(layer, torch.zeros(2, 2, 4, 3), torch.zeros(2, 2, 4, 3))
    layer.evict(torch.tensor([True, False, True, True]).expand(2, 2, 4))
    layer.crop(-4)
    assert not layer.is_initialized and layer.seen == layer.slots == 0


def test_caches_that_cannot_be_taken_over():
    model, window = model_of("llama"), model_of("mistral")
    ids, mask = prompts([20])
    policy = StreamingLLM(budget=6)
    slid = DynamicCache(config=window.config)
    decode(window, ids, mask, 20, slid)
    for cache, inside, said in (
        (slid, window, "this cache was filled outside of the `with`"),
        (EncoderDecoderCache(DynamicCache(), DynamicCache()), model, "EncoderDecoderCache: a cache policy"),
    ):
        with policy.on(inside), refused(said):
            inside(input_ids=ids[:, :1], past_key_values=cache)


def test_a_cache_is_refused_outside(model):
    ids, mask = prompts([12], 2)
    cache = DynamicCache()
    with StreamingLLM(budget=6).on(model):
        decode(model, ids, mask, 12, cache)
    with refused("outside of the `with`"):
        model(input_ids=ids[:, :1], past_key_values=cache)
    with Observe(lambda _: None).on(model):  # somebody who does not own the cache still knows its positions
        model(input_ids=ids[:, :1], past_key_values=cache)


def test_usage_is_counted_by_hand(model):
    """Two layers hold the whole prompt in its own call, and 8 tokens and the new one in each of the six after it."""
    ids, mask = prompts([20, 13], 6)
    with Drawn(budget=8).on(model) as run:
        decode(model, ids, mask, 20)
    (usage,) = run.usage
    size = 2 * 2 * 8 * 4  # keys and values, kv heads, width, bytes
    assert usage.read_tokens == 26 and usage.mean_held == usage.mean_read == [9.0, 9.0]
    assert usage.decoding_tokens == [9.0, 9.0] and usage.decoding_bytes == 2 * size * 2 * 9
    assert run.summary() == "Drawn(8) held at most 9 of 26 tokens while it generated: 0.00461 MB."


def test_the_most_that_was_held_is_not_what_is_held_last(model):
    with StreamingLLM(budget=8, every=3).on(model) as run:
        decode(model, *prompts([20], 4), 20)
    assert (run.usage[0].decoding_tokens, run.usage[0].mean_held) == ([11.0], [(9 + 10 + 11 + 9) / 4])


def test_tokens_are_counted_since_the_number_of_rows_changed(model):
    """By `batch_repeat_interleave`, say: nobody knows which row became which."""
    cache = DynamicCache()
    with torch.no_grad(), Full().on(model) as run:
        model(prompts([9])[0], past_key_values=cache)
        cache.batch_repeat_interleave(2)
        for new in (2, 1, 1):
            model(prompts([new])[0].repeat(2, 1), past_key_values=cache)
    assert (run.usage[0].mean_held, run.usage[0].decoding_tokens) == ([12.5, 12.5], [13.0, 13.0])
