"""Caches with one fault each. `FAULTS` names the check that has to catch each of them, and the right cache beside."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from right_caches import (
    FIRST,
    HeadKeeper,
    Keeper,
    cache_of,
    head_keeper,
    keeper,
    stock,
)
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sinkscope.conformance.subject import Factory
from sinkscope.kv import LayerMoment, Policy, StreamingLLM


@dataclass(frozen=True)
class Fault:
    """A faulty cache.

    Attributes:
        factory: Makes it.
        check: The check that names the fault.
        right: The cache without the fault.
    """

    factory: Factory
    check: str
    right: Factory


FAULTS: dict[str, Fault] = {}


def fault(check: str, right: Factory) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a factory; its name says the fault."""

    def register(factory: Factory) -> Factory:
        FAULTS[factory.__name__] = Fault(factory, check, right)
        return factory

    return register


def stock_with(config, layer: type[DynamicLayer]) -> DynamicCache:
    """A stock cache in which another class holds the layers of full attention."""
    cache = DynamicCache(config=config)
    for number, one in enumerate(cache.layers):
        if type(one) is DynamicLayer:
            cache.layers[number] = layer()
    return cache


def streaming(budget):
    return StreamingLLM(budget=budget)


# Positions


@fault("the_cache_knows_its_length", keeper)  # VeloxQuant-MLX#137
def length_is_what_is_held(config, budget):
    class Short(Keeper):
        def get_seq_length(self):
            return self.keys.shape[2] if self.is_initialized else 0

        def get_mask_sizes(self, query_length):
            return self.get_seq_length() + query_length, 0

    return cache_of(config, lambda: Short(budget))


def rotated(keys, places: int, config):
    """Keys rotated by so many more places."""
    half = keys.shape[-1] // 2
    theta = config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
    cos, sin = (theta * places).cos(), (theta * places).sin()
    a, b = keys[..., :half], keys[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@fault("facts_on_both_sides_of_a_hole_are_recalled", keeper)
def evicted_twice_rotated(config, budget):
    class Moved(Keeper):
        def evict(self):
            gone = max(0, self.keys.shape[2] - self.budget)
            super().evict()
            if gone:
                moved = rotated(self.keys[:, :, self.first :].float(), -gone, config).to(self.keys.dtype)
                self.keys = torch.cat([self.keys[:, :, : self.first], moved], 2)

    return cache_of(config, lambda: Moved(budget))


@fault("positions_are_right_after_eviction_inside_the_text", keeper)
def evicts_keys_and_values_one_apart(config, budget):
    class Apart(Keeper):
        def evict(self):
            if self.keys.shape[2] > self.budget:
                self.values = self.values.roll(1, 2)
            super().evict()

    return cache_of(config, lambda: Apart(budget))


# First tokens


@fault("the_first_tokens_survive", keeper)
def only_the_latest_are_kept(config, budget):
    return cache_of(config, lambda: Keeper(budget, first=0))


@fault("the_first_tokens_survive", keeper)  # kvpress, StreamingLLMPress in decoding
def slots_are_taken_for_positions(config, budget):
    class Unordered(Keeper):
        def kept(self, states):
            if states.shape[2] <= self.budget:
                return states
            return super().kept(states).roll(-self.first, 2)  # the latest now stand first

    return cache_of(config, lambda: Unordered(budget))


@fault("the_first_tokens_survive", keeper)  # mlx-lm#1631
def each_chunk_evicts_all_before_it(config, budget):
    class Chunked(Keeper):
        chunks = 0

        def update(self, key_states, value_states, *args, **kwargs):
            self.chunks += key_states.shape[2] > 1
            if self.chunks > 1:
                self.first = 0
            return super().update(key_states, value_states)

    return cache_of(config, lambda: Chunked(budget))


# Learned sink logits, windows, states


@fault("learned_sink_logits_count", stock)  # kekzl/imp#1345
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


def windowed_with(config, layer: type[DynamicSlidingWindowLayer]) -> DynamicCache:
    cache = DynamicCache(config=config)
    for number, one in enumerate(cache.layers):
        if type(one) is DynamicSlidingWindowLayer:
            cache.layers[number] = layer(one.sliding_window)
    return cache


@fault("a_prompt_in_chunks_is_the_whole_prompt", stock)  # vllm#43374
def a_chunk_sees_only_the_last_window(config):
    class Last(DynamicSlidingWindowLayer):
        def update(self, key_states, value_states, *args, **kwargs):
            keys, values = super().update(key_states, value_states)
            missing = keys.shape[2] - self.sliding_window
            if self.cumulative_length > key_states.shape[2] > 1 and missing > 0:
                keys, values = keys.clone(), values.clone()
                keys[:, :, :missing], values[:, :, :missing] = 0, 0
            return keys, values

    return windowed_with(config, Last)


@fault("windows_hide_what_has_left_them_and_nothing_else", stock)
def the_window_is_one_short(config):
    class Short(DynamicSlidingWindowLayer):
        def update(self, key_states, value_states, *args, **kwargs):
            keys, values = super().update(key_states, value_states)
            if self.keys.shape[2] == self.sliding_window - 1:
                self.values = self.values.clone()
                self.keys = self.keys.clone()
                self.keys[:, :, 0] = 0
                self.values[:, :, 0] = 0
            return keys, values

    return windowed_with(config, Short)


@fault("states_of_a_hybrid_are_kept", stock)
def states_are_lost_between_calls(config):
    cache = DynamicCache(config=config)
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionLayer):

            def update(states, *args, own=layer, **kwargs):
                new = type(own).update_conv_state(own, states, *args, **kwargs)
                own.conv_states[0].zero_()
                return new

            layer.update_conv_state = update
    return cache


# Budgets


@fault("the_budget_holds_at_every_step_in_tokens", keeper)
def evicts_every_fourth_step(config, budget):
    class Rare(Keeper):
        def evict(self):
            if self.seen % 4 == 0:
                super().evict()

    return cache_of(config, lambda: Rare(budget))


@fault("the_budget_holds_at_every_step_in_bytes", keeper)
def a_view_keeps_everything_alive(config, budget):
    class View(Keeper):
        def evict(self):
            if self.seen <= 96:
                self.last_of_prompt = self.keys[:, :, -1:], self.values[:, :, -1:]  # views of all keys and values
            super().evict()

    return cache_of(config, lambda: View(budget))


# Prompts, rows and turns


@fault("a_second_turn_continues_the_first", stock)
def a_new_prompt_forgets_the_answer(config):
    class Forgetful(DynamicLayer):
        answered = 0

        def update(self, key_states, value_states, *args, **kwargs):
            if key_states.shape[2] == 1:
                self.answered += 1
            elif self.answered > 1:
                self.values = self.values.clone()
                self.values[:, :, -self.answered :] = 0
                self.answered = 0
            return super().update(key_states, value_states)

    return stock_with(config, Forgetful)


@fault("rows_of_a_batch_are_what_they_are_alone", streaming)
def padding_takes_the_place_of_first_tokens(budget):
    class Slots(Policy):
        def scores(self, at: LayerMoment):
            slots = torch.arange(at.kv.slots).expand(at.kv.pos.shape).float()
            return torch.where(slots < FIRST, torch.inf, slots)

    return Slots(budget=budget)


@fault("rows_of_a_batch_are_what_they_are_alone", stock)
def the_values_of_the_first_row_are_read_by_all(config):
    class Broadcast(DynamicLayer):
        def update(self, key_states, value_states, *args, **kwargs):
            keys, values = super().update(key_states, value_states)
            old = values.shape[2] - value_states.shape[2]
            return keys, torch.cat([values[:1, :, :old].expand(len(values), -1, -1, -1), value_states], 2)

    return stock_with(config, Broadcast)


@fault("after_a_reset_nothing_is_left", stock)
def reset_does_nothing(config):
    class Stuck(DynamicLayer):
        def reset(self):
            pass

    return stock_with(config, Stuck)


@fault("a_cropped_draft_leaves_no_trace", stock)
def crop_does_nothing(config):
    class Uncropped(DynamicLayer):
        def crop(self, tokens_to_remove):
            pass

    return stock_with(config, Uncropped)


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


def recording(config):
    """A stock cache whose states go back."""
    cache = DynamicCache(config=config)
    for number, one in enumerate(cache.layers):
        if isinstance(one, LinearAttentionLayer):
            cache.layers[number] = Recording()
    return cache


@fault("a_cropped_draft_leaves_no_trace_in_states", recording)  # huggingface/transformers#49036
def crop_leaves_the_recurrent_state(config):
    cache = DynamicCache(config=config)
    cache.activate_past_recording()
    return cache


# Heads


@fault("positions_are_right_after_eviction_inside_the_text", head_keeper)
def values_are_chosen_by_the_first_head(config, budget):
    class Split(HeadKeeper):
        def chosen(self, states, slots):
            if states is self.values:
                slots = slots[:, :1].expand_as(slots)
            return super().chosen(states, slots)

    return cache_of(config, lambda: Split(budget))


# Numbers


def kept_in(config, dtype, when=None):
    """A stock cache that keeps another data type than it is given."""

    class Other(DynamicLayer):
        def update(self, key_states, value_states, *args, **kwargs):
            if when is None or key_states.dtype is when:
                own = key_states.dtype
                key_states, value_states = key_states.to(dtype).to(own), value_states.to(dtype).to(own)
            return super().update(key_states, value_states)

    return stock_with(config, Other)


@fault("with_room_for_everything_logits_are_the_plain_models", stock)
def everything_is_kept_in_bfloat16(config):
    return kept_in(config, torch.bfloat16)


@fault("half_precision_is_as_exact_as_the_plain_model", stock)
def float16_is_kept_in_bfloat16(config):
    return kept_in(config, torch.bfloat16, torch.float16)


@fault("with_room_for_everything_logits_are_the_plain_models", stock)
def slots_beyond_512_overwrite_the_first(config):
    class Ring(DynamicLayer):
        def update(self, key_states, value_states, *args, **kwargs):
            keys, values = super().update(key_states, value_states)
            more = max(0, keys.shape[2] - 512)
            if more:
                self.keys, self.values = keys.clone(), values.clone()
                self.keys[:, :, :more], self.values[:, :, :more] = keys[:, :, -more:], values[:, :, -more:]
            return self.keys, self.values

    return stock_with(config, Ring)
