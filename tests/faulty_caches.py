"""Caches with one fault each. `FAULTS` names the check that has to catch each of them, and the right cache beside.

Most are a layer with one method that is wrong; the name of its class says the fault.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from right_caches import HeadKeeper, Keeper, cache_of, head_keeper, keeper, stock
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sinkscope.conformance.subject import Factory


class Fault(NamedTuple):
    """A faulty cache: what makes it, the check that names the fault, and the cache without it."""

    factory: Factory
    check: str
    right: Factory


FAULTS: dict[str, Fault] = {}
CHANGES = "with_room_for_everything_it_changes_nothing"


def planted(factory: Factory, name: str, check: str, right: Factory) -> Factory:
    """Register a factory by a name, or that of a class, which says the fault."""
    factory.__name__ = re.sub("(?!^)([A-Z])", r"_\1", name).lower()
    FAULTS[factory.__name__] = Fault(factory, check, right)
    return factory


def fault(check: str, right: Factory) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a factory; its name says the fault."""
    return lambda factory: planted(factory, factory.__name__, check, right)


def faulty_layer(check: str = CHANGES) -> Callable[[type], type]:
    """Register the cache with these layers: all of an evicting one, or those of a stock cache that this replaces."""

    def register(layer: type) -> type:
        if issubclass(layer, Keeper):
            right = head_keeper if issubclass(layer, HeadKeeper) else keeper
            planted(lambda config, budget: cache_of(config, lambda: layer(budget)), layer.__name__, check, right)
        else:
            planted(partial_stock(layer), layer.__name__, check, stock)
        return layer

    return register


def partial_stock(layer: type) -> Factory:
    """A stock cache in which another class holds the layers of the kind that it is derived from."""
    kind = next(kind for kind in layer.__mro__ if kind.__module__ == DynamicLayer.__module__)

    def make(config):
        cache = DynamicCache(config=config)
        for number, one in enumerate(cache.layers):
            if type(one) is kind:
                cache.layers[number] = layer(*([one.sliding_window] if hasattr(one, "sliding_window") else []))
        return cache

    return make


def lost(states, begin: int, end: int | None = None):
    """Other states, in which some slots are empty."""
    states = states.clone()
    states[:, :, begin:end] = 0
    return states


class Given(DynamicLayer):
    """Spoils the keys and values that it is given."""

    def update(self, key_states, value_states, *args, **kwargs):
        return super().update(self.given(key_states), self.given(value_states))


class Held(DynamicLayer):
    """Spoils what it holds, after so many new tokens."""

    def update(self, key_states, value_states, *args, **kwargs):
        for states in super().update(key_states, value_states):
            self.spoil(states, key_states.shape[2])
        return self.keys, self.values


# Positions


@faulty_layer("it_raises_no_error_and_leaves_nothing_behind")  # VeloxQuant-MLX#137
class LengthIsWhatIsHeld(Keeper):
    def get_seq_length(self):
        return self.keys.shape[2] if self.is_initialized else 0

    def get_mask_sizes(self, query_length):
        return self.get_seq_length() + query_length, 0


@faulty_layer("what_is_kept_stands_at_its_place")
class EvictedTwiceRotated(Keeper):
    def evict(self):
        gone = max(0, self.keys.shape[2] - self.budget)
        super().evict()
        half = self.keys.shape[-1] // 2
        turn = torch.polar(torch.ones(half), -gone * 1e8 ** (-torch.arange(half) / half))
        moved = torch.complex(*self.keys[:, :, self.first :].float().chunk(2, -1)) * turn
        moved = torch.cat([moved.real, moved.imag], -1).to(self.keys.dtype)
        self.keys = torch.cat([self.keys[:, :, : self.first], moved], 2)


@faulty_layer("what_is_kept_stands_at_its_place")
class EvictsKeysAndValuesOneApart(Keeper):
    def evict(self):
        if self.keys.shape[2] > self.budget:
            self.values = self.values.roll(1, 2)
        super().evict()


# First tokens


@faulty_layer("the_first_and_the_latest_tokens_survive")
class OnlyTheLatestAreKept(Keeper):
    first = 0


@faulty_layer("the_first_and_the_latest_tokens_survive")  # kvpress, StreamingLLMPress in decoding
class SlotsAreTakenForPositions(Keeper):
    def kept(self, states):
        gone = states.shape[2] > self.budget
        return super().kept(states).roll(-self.first * gone, 2)  # the latest now stand first


@faulty_layer("the_first_and_the_latest_tokens_survive")  # mlx-lm#1631
class EachChunkEvictsAllBeforeIt(Keeper):
    chunks = 0

    def update(self, key_states, value_states, *args, **kwargs):
        self.chunks += key_states.shape[2] > 1
        if self.chunks > 1:
            self.first = 0
        return super().update(key_states, value_states)


# Learned sink logits, windows, states


@fault(CHANGES, stock)  # kekzl/imp#1345
@contextmanager
def learned_sinks_are_dropped(model):
    def attend(module, query, key, value, mask, **kwargs):
        kwargs.pop("s_aux", None)
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    AttentionInterface.register("without-sinks", attend)
    AttentionMaskInterface.register("without-sinks", sdpa_mask)
    before = model.config._attn_implementation
    model.config._attn_implementation = "without-sinks"
    yield
    model.config._attn_implementation = before


@faulty_layer()  # vllm#43374
class AChunkSeesOnlyTheLastWindow(DynamicSlidingWindowLayer):
    def update(self, key_states, value_states, *args, **kwargs):
        keys, values = super().update(key_states, value_states)
        missing = keys.shape[2] - self.sliding_window
        if self.cumulative_length > key_states.shape[2] > 1 and missing > 0:
            return lost(keys, 0, missing), lost(values, 0, missing)
        return keys, values


@faulty_layer()
class TheWindowIsOneShort(DynamicSlidingWindowLayer):
    def update(self, key_states, value_states, *args, **kwargs):
        read = super().update(key_states, value_states)
        if self.keys.shape[2] == self.sliding_window - 1:
            self.keys, self.values = lost(self.keys, 0, 1), lost(self.values, 0, 1)
        return read


@faulty_layer()
class StatesAreLostBetweenCalls(LinearAttentionLayer):
    def update_conv_state(self, *args, **kwargs):
        new = super().update_conv_state(*args, **kwargs)
        self.conv_states[0].zero_()
        return new


# Budgets


@faulty_layer("the_budget_holds_in_tokens_and_bytes")
class EvictsEveryFourthStep(Keeper):
    def evict(self):
        if self.seen % 4 == 0:
            super().evict()


@faulty_layer("the_budget_holds_in_tokens_and_bytes")
class EvictsWithTheThirdTokenOfAnAnswer(Keeper):
    def evict(self):
        if self.seen >= 99:
            super().evict()


@faulty_layer("the_budget_holds_in_tokens_and_bytes")
class AViewKeepsEverythingAlive(Keeper):
    def evict(self):
        if self.seen <= 96:
            self.last_of_prompt = self.keys[:, :, -1:]  # a view of all keys
        super().evict()


# Prompts, rows and turns


@faulty_layer()
class ANewPromptForgetsTheAnswer(DynamicLayer):
    answered = 0

    def update(self, key_states, value_states, *args, **kwargs):
        if key_states.shape[2] == 1:
            self.answered += 1
        elif self.answered > 1:
            self.values = lost(self.values, -self.answered)
            self.answered = 0
        return super().update(key_states, value_states)


@faulty_layer()
class TheFirstRowIsReadByAll(Held):
    def spoil(self, states, new):
        states[1:, :, : states.shape[2] - new] = states[:1, :, : states.shape[2] - new]


for name, kind, method in (
    ("ResetDoesNothing", DynamicLayer, "reset"),
    ("CropDoesNothing", DynamicLayer, "crop"),
    ("StatesStayWhereTheyAre", LinearAttentionLayer, "reorder_cache"),
):
    faulty_layer()(type(name, (kind,), {method: lambda self, *_: None}))
crop_does_nothing = FAULTS["crop_does_nothing"].factory


@faulty_layer()
class CropCrashes(DynamicLayer):
    def crop(self, tokens_to_remove):
        raise RuntimeError("The size of tensor a (3) must match the size of tensor b (2)")


class Recording(LinearAttentionLayer):
    """A layer with a state that can go back by the tokens of the last call."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.activate_past_recording()
        self.before = None

    def update_recurrent_state(self, recurrent_states, state_idx=0, **kwargs):
        if self.is_recurrent_states_initialized[state_idx]:
            self.before = self.recurrent_states[state_idx].clone()
        return super().update_recurrent_state(recurrent_states, state_idx, **kwargs)

    def crop(self, tokens_to_remove):
        super().crop(tokens_to_remove)
        if self.before is not None:
            self.recurrent_states[0].copy_(self.before)


@fault(CHANGES, partial_stock(Recording))  # huggingface/transformers#49036
def crop_leaves_the_recurrent_state(config):
    cache = DynamicCache(config=config)
    cache.activate_past_recording()
    return cache


@fault("it_raises_no_error_and_leaves_nothing_behind", stock)
@contextmanager
def a_hook_is_left(model):
    for layer in model.model.layers:
        layer.register_forward_hook(lambda *_: None)
    yield


# Lengths


@faulty_layer()
class ABlockIsLostAtSomeLengths(Given):
    def given(self, states):
        return lost(states, 32, 48) if states.shape[2] > 64 and states.shape[2] % 64 == 37 else states


@faulty_layer()
class AFullBlockLosesItsFirstToken(Held):
    def spoil(self, states, new):
        if new == 1 and states.shape[2] % 16 == 0:
            states[:, :, -16] = 0


@faulty_layer()
class AnOddPageIsForgotten(Given):
    def given(self, states):
        return lost(states, -1) if states.shape[2] == 3 * 52 + 1 else states


# Rows that move


@faulty_layer()
class OnlyKeysAreReordered(DynamicLayer):
    def reorder_cache(self, beam_idx):
        self.keys = self.keys.index_select(0, beam_idx)


@faulty_layer()
class OnlyKeysAreSelected(DynamicLayer):
    def batch_select_indices(self, indices):
        self.keys = self.keys[indices]


@faulty_layer()
class RowsAreRepeatedAsAWhole(DynamicLayer):
    def batch_repeat_interleave(self, repeats):
        self.keys, self.values = self.keys.repeat(repeats, 1, 1, 1), self.values.repeat(repeats, 1, 1, 1)


@faulty_layer()
class ACopyIsTheSameObject(DynamicLayer):
    def __deepcopy__(self, _memo):
        return self


@faulty_layer()
class BytesHaveNoValues(DynamicLayer):
    def __getstate__(self):
        return vars(self) | {"values": torch.zeros_like(self.values)}


@faulty_layer()
class CropDoesNothingAfterAReset(DynamicLayer):
    was_reset = False

    def reset(self):
        super().reset()
        self.was_reset = True

    def crop(self, tokens_to_remove):
        if not self.was_reset:
            super().crop(tokens_to_remove)


# Heads


@faulty_layer("what_is_kept_stands_at_its_place")
class ValuesAreChosenByTheFirstHead(HeadKeeper):
    def chosen(self, states, slots):
        if states is self.values:
            slots = slots[:, :1].expand_as(slots)
        return super().chosen(states, slots)


# Numbers


@faulty_layer()
class EverythingIsKeptInBfloat16(Given):
    def given(self, states):
        return states.bfloat16().to(states.dtype)


@faulty_layer()
class Float16IsKeptInBfloat16(Given):
    def given(self, states):
        return states.bfloat16().half() if states.dtype is torch.float16 else states


@faulty_layer("it_raises_no_error_and_leaves_nothing_behind")
class TheLengthIsThatOfKeysThatAreNotZero(DynamicLayer):
    """As static caches count: padding without an embedding has no key in the first layer."""

    def get_seq_length(self):
        if not self.is_initialized or self.keys.numel() == 0:
            return 0
        return int((self.keys[0, 0].abs().sum(-1) > 0).sum())


@faulty_layer()
class SlotsBeyond512OverwriteTheFirst(Held):
    def spoil(self, states, new):
        more = max(0, states.shape[2] - 512)
        states[:, :, :more] = states[:, :, states.shape[2] - more :].clone()
