"""A layer of the cache against sets, and what a cache has to be for a policy to take it over."""

from __future__ import annotations

import copy
from random import Random

import pytest
import torch
from kv_kit import allocated_slots, append, decode, model_of, prompts
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
            real += [False] * padding + [True] * (new - padding)
            last = sum(real)
            for head in held:
                head |= {*range(last - new + padding, last)}
            keys[row, :, padding:, 0] = 100 * name + torch.arange(last - new + padding, last)
        columns = torch.tensor([real for _, real, _ in self.rows])
        layer.upcoming = TokenPositions.of(torch.where(columns, columns.long().cumsum(1) - 1, -1))
        layer.update(keys, -keys)

    def evict(self, layer: CacheLayer, random: Random) -> None:
        if layer.whole_layer is None:
            keep = (torch.rand(layer.pos.shape) < random.random()) & (layer.pos >= 0)
            for row, (_, _, held) in enumerate(self.rows):
                held[:] = [{*layer.pos[row, head, keep[row, head]].tolist()} for head in range(HEADS)]
            layer.evict(keep)

    def part(self, layer: CacheLayer, random: Random) -> None:
        layer.settle()
        whole, before = layer.copy(), copy.deepcopy(self.rows)
        self.evict(layer, random)
        layer.whole_layer, self.rows = whole, before

    def crop(self, layer: CacheLayer, random: Random) -> None:
        count = random.randint(0, len(self.rows[0][1]))
        layer.crop(-count)
        for _, real, held in self.rows:
            del real[len(real) - count :]
            for head in held:
                head &= {*range(sum(real))}

    def reorder(self, layer: CacheLayer, random: Random) -> None:
        order = random.choices(range(len(self.rows)), k=random.randint(1, 3))
        layer.reorder_cache(torch.tensor(order))
        self.rows = [copy.deepcopy(self.rows[row]) for row in order]

    def repeat(self, layer: CacheLayer, random: Random) -> None:
        layer.batch_repeat_interleave(2)
        self.rows = [copy.deepcopy(row) for row in self.rows for _ in range(2)]

    def reset(self, layer: CacheLayer, random: Random) -> None:
        layer.reset()
        self.__init__(random.randint(1, 3))

    def note(self, layer: CacheLayer, random: Random) -> None:
        layer.extra("n")
        layer.numbers["n"] = layer.keys[..., 0].clone()

    def settle(self, layer: CacheLayer, random: Random) -> None:
        layer.settle()

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
                pos, keys, notes = (part[row, head] for part in (layer.pos, layer.keys[..., 0], layer.extra("n")))
                there = pos >= 0
                assert pos[there].tolist() == sorted(held[head])
                assert torch.equal(keys[there], 100.0 * name + pos[there])
                assert bool((~there | (notes == keys) | (notes == 0)).all())
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
            if name == "fork":
                pairs = [*pairs[:3], (copy.deepcopy(slow), layer.copy())]
            elif layer.is_initialized or name in ("update", "reset", "settle"):
                getattr(slow, name)(layer, random)
            for one, its in pairs:
                one.check(its)


def test_a_layer_of_which_all_is_taken_back_is_empty():
    layer = CacheLayer()
    append(layer, torch.zeros(2, 2, 4, 3), torch.zeros(2, 2, 4, 3))
    layer.evict(torch.tensor([True, False, True, True]).expand(2, 2, 4))
    layer.crop(-4)
    assert not layer.is_initialized and layer.seen == layer.slots == 0


def test_caches_that_cannot_be_taken_over(model):
    ids, mask = prompts([12], 2)
    window = model_of("mistral")
    slid, left = DynamicCache(config=window.config), DynamicCache()
    decode(window, ids, mask, 12, slid)
    with StreamingLLM(budget=6).on(window), refused("this cache was filled outside of the `with`"):
        window(input_ids=ids[:, :1], past_key_values=slid)
    encoder = EncoderDecoderCache(DynamicCache(), DynamicCache())
    with StreamingLLM(budget=6).on(model):
        with refused("EncoderDecoderCache: a cache policy"):
            model(input_ids=ids[:, :1], past_key_values=encoder)
        decode(model, ids, mask, 12, left)
    with refused("outside of the `with`"):
        model(input_ids=ids[:, :1], past_key_values=left)
    with Observe(lambda _: None).on(model):  # somebody who does not own the cache still knows its positions
        model(input_ids=ids[:, :1], past_key_values=left)


def test_usage_is_counted_by_hand(model):
    """Two layers hold the whole prompt in its own call; every third of the steps after it begins with 8 tokens."""
    with StreamingLLM(budget=8, every=3).on(model) as run:
        decode(model, *prompts([20, 13], 4), 20)
    (usage,) = run.usage
    size = 2 * 2 * 8 * 4  # keys and values, kv heads, width, bytes
    assert usage.read_tokens == 24 and usage.mean_held == usage.mean_read == [(9 + 10 + 11 + 9) / 4] * 2
    assert usage.decoding_tokens == [11.0, 11.0] and usage.decoding_bytes == 2 * size * 2 * 11
    assert run.summary().startswith("StreamingLLM(8) held at most 11 of 24 tokens while it generated: 0.00563 MB.")


def test_tokens_are_counted_since_the_number_of_rows_changed(model):
    """By `batch_repeat_interleave`, say: nobody knows which row became which."""
    cache = DynamicCache()
    with torch.no_grad(), Full().on(model) as run:
        model(prompts([9])[0], past_key_values=cache)
        cache.batch_repeat_interleave(2)
        for new in (2, 1, 1):
            model(prompts([new])[0].repeat(2, 1), past_key_values=cache)
    assert (run.usage[0].mean_held, run.usage[0].decoding_tokens) == ([12.5, 12.5], [13.0, 13.0])
