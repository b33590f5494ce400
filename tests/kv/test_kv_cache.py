"""A layer of the cache against sets, and what a cache has to be for a policy to take it over."""

from __future__ import annotations

import copy
from random import Random

import pytest
import torch
from kv_kit import Drawn, allocated_slots, append, decode, model_of, prompts
from refusals import refused
from transformers import DynamicCache, EncoderDecoderCache

from sinkscope.engine.step import TokenPositions
from sinkscope.kv import Full, Observe, StreamingLLM
from sinkscope.kv import cache as layers_of
from sinkscope.kv.cache import CacheLayer

HEADS = 2


class Slow:
    """What a layer should hold: of each row its name, which columns are real, and the positions that each head holds.

    A key says its row and position, and so does what is noted of a slot.
    """

    def __init__(self, rows: int):
        self.rows = [(row + 1, list[bool](), [set[int]() for _ in range(HEADS)]) for row in range(rows)]

    def update(self, layer: CacheLayer, random: Random) -> None:
        """New tokens, with padding at the left of each row; a single one is real."""
        new = 1 if layer.whole_layer else random.randint(1, 4)
        keys = torch.zeros(len(self.rows), HEADS, new, 1)
        for row, (name, real, held) in enumerate(self.rows):
            padding = random.randint(0, new) if new > 1 else 0
            for column in range(new):
                real.append(column >= padding)
                if real[-1]:
                    keys[row, :, column] = 100 * name + sum(real) - 1
                    for head in held:
                        head.add(sum(real) - 1)
        columns = torch.tensor([real for _, real, _ in self.rows])
        layer.upcoming = TokenPositions.of(torch.where(columns, columns.long().cumsum(1) - 1, -1))
        layer.update(keys, -keys)

    def evict(self, layer: CacheLayer) -> None:
        keep = (torch.rand(layer.pos.shape) < torch.rand(1)) & (layer.pos >= 0)
        for row, (_, _, held) in enumerate(self.rows):
            for head in range(HEADS):
                held[head] = {*layer.pos[row, head, keep[row, head]].tolist()}
        layer.evict(keep)

    def crop(self, layer: CacheLayer, count: int) -> None:
        layer.crop(-count)
        for _, real, held in self.rows:
            del real[len(real) - count :]
            for head in held:
                head -= {pos for pos in head if pos >= sum(real)}

    def select(self, order: list[int]) -> None:
        self.rows = [copy.deepcopy(self.rows[row]) for row in order]

    def apply(self, layer: CacheLayer, random: Random, name: str) -> None:
        """One operation on both."""
        count = len(self.rows)
        order = [random.randrange(count) for _ in range(random.randint(1, 3))]
        if name == "update":
            self.update(layer, random)
        elif name == "reset":
            layer.reset()
            self.__init__(random.randint(1, 3))
        elif not layer.is_initialized:
            layer.settle()
        elif name == "note":
            layer.extra("n")
            layer.numbers["n"] = layer.keys[..., 0].clone()
        elif name == "settle":
            layer.settle()
        elif name == "evict" and layer.whole_layer is None:
            self.evict(layer)
        elif name == "part":
            layer.settle()
            whole, before = layer.copy(), copy.deepcopy(self.rows)
            self.evict(layer)
            layer.whole_layer, self.rows = whole, before
        elif name == "crop":
            self.crop(layer, random.randint(0, len(self.rows[0][1])))
        elif name == "repeat":
            layer.batch_repeat_interleave(2)
            self.select(sorted([*range(count), *range(count)]))
        elif name == "reorder":
            layer.reorder_cache(torch.tensor(order))
            self.select(order)

    def check(self, layer: CacheLayer) -> None:
        if layer.whole_layer is not None:
            layer = layer.copy()
            layer.settle()
        if not layer.is_initialized:
            assert (layer.seen, layer.slots, layer.edited, layer.gapless) == (0, 0, False, False)
            return
        assert layer.seen == layer.get_seq_length() == len(self.rows[0][1]) and layer.slots <= allocated_slots(layer)
        assert torch.equal(layer.values, -layer.keys)
        assert layer.get_mask_sizes(3) == (layer.slots + 3, layer.seen - layer.slots)
        for row, (name, _, held) in enumerate(self.rows):
            for head in range(HEADS):
                there = layer.pos[row, head] >= 0
                pos, keys, notes = (
                    part[row, head, there] for part in (layer.pos, layer.keys[..., 0], layer.extra("n"))
                )
                assert pos.tolist() == sorted(held[head]) and torch.equal(keys, 100.0 * name + pos)
                assert bool(((notes == keys) | (notes == 0)).all())
            assert layer.holes()[row] == sum(layer.slots - len(head) for head in held) / HEADS
        assert not layer.gapless or not layer.holes().any()  # what lets a call go without a mask


OPERATIONS = ("settle", "crop", "reset", "note", "reorder", "repeat", "evict", "part", "update", "update", "fork")


@pytest.mark.parametrize("seed", range(40))
def test_layers_and_copies_that_share_their_memory(seed, monkeypatch):
    """With buffers so short that they are full now and then."""
    monkeypatch.setattr(layers_of, "COPY_LIMIT", 4)
    monkeypatch.setattr(layers_of, "SPARE", 3)
    torch.manual_seed(seed)
    random = Random(seed)
    pairs = [(Slow(random.randint(1, 3)), CacheLayer())]
    with torch.no_grad():
        pairs[0][0].update(pairs[0][1], random)
        for name in random.choices(OPERATIONS, k=40):
            slow, layer = random.choice(pairs)
            if name == "fork" and len(pairs) < 4:
                pairs.append((copy.deepcopy(slow), layer.copy()))
            slow.apply(layer, random, name)
            for each in pairs:
                each[0].check(each[1])


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
