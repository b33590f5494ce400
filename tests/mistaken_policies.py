"""A right policy, and the same with one mistake each, as an author makes it, among the other `FAULTS`.

Checks were named before they were written: each is the one that ought to fail first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from faulty_caches import fault, planted
from right_caches import FIRST

from sinkscope.conformance.subject import Factory
from sinkscope.engine.run import Run
from sinkscope.kv import LayerMoment, Policy, StreamingLLM, keep_queries
from sinkscope.models.layers import in_groups

WATCHED = 4


@dataclass(frozen=True, kw_only=True)
class Attended(Policy):
    """Keeps two first tokens, the four latest, and those that the four latest queries attend to most."""

    first: int = 2
    last: int = WATCHED

    def watch(self, run):
        keep_queries(run, WATCHED, decoding=True)

    def scores(self, at: LayerMoment):
        return in_groups(at.window_rows(WATCHED).sum(2), at.kv.pos.shape[1]).mean(2)


def attended(budget):
    return Attended(budget=budget)


def mistake(check: str, right: Factory = attended) -> Callable[[type[Policy]], type[Policy]]:
    """Register a policy; the name of its class says the mistake."""

    def register(policy: type[Policy]) -> type[Policy]:
        policy = dataclass(frozen=True, kw_only=True)(policy)
        planted(lambda budget: policy(budget=budget), policy.__name__, check, right)
        return policy

    return register


def slots_of(at: LayerMoment):
    """The number of each slot, as its positions stand."""
    return torch.arange(at.kv.slots).expand(at.kv.pos.shape)


def top_slots(ranked, at: LayerMoment, budget: int):
    """A mask of the slots of the highest ranks."""
    kept = ranked.topk(min(budget, at.kv.slots), -1).indices
    return torch.zeros_like(ranked, dtype=torch.bool).scatter_(-1, kept, True)


# What a slot is


class Moved(Attended):
    """Changes what is kept after each eviction."""

    def changed(self, keys: Any, values: Any, pos: Any) -> tuple[Any, Any, Any]:
        raise NotImplementedError

    def act(self, step):
        super().act(step)
        for kv in step.layers:
            if kv.edited:
                kv.hold(*self.changed(kv.keys, kv.values, kv.pos))


@mistake("what_is_kept_stands_at_its_place")
class PositionsAreOneTooHigh(Moved):
    def changed(self, keys, values, pos):
        return keys, values, pos + (pos >= 0).long()


@mistake("what_is_kept_stands_at_its_place")
class PositionsAreCountedAnew(Moved):
    def changed(self, keys, values, pos):
        return keys, values, torch.arange(pos.shape[-1]).expand(pos.shape)


@mistake("what_is_kept_stands_at_its_place")
class MorePositionsThanSlots(Moved):
    def changed(self, keys, values, pos):
        return keys, values, torch.cat([pos, pos[..., -1:]], -1)


@mistake("rows_are_what_they_are_alone")
class ValuesAreOneApart(Moved):
    def changed(self, keys, values, pos):
        return keys, values.roll(1, 2), pos


@mistake("rows_are_what_they_are_alone")
class KeysAreRounded(Moved):
    def changed(self, keys, values, pos):
        return keys.bfloat16().to(keys.dtype), values, pos


# Budgets


@mistake("the_budget_holds_in_tokens_and_bytes")
class EvictsAtThePromptAlone(Attended):
    def act(self, step):
        if step.prefill_ended:
            super().act(step)


@mistake("the_budget_holds_in_tokens_and_bytes")
class TheWindowComesOnTop(Attended):
    def layer_budget(self, at):
        return at.rows.one_budget + WATCHED


@mistake("the_budget_holds_in_tokens_and_bytes")
class OneLayerKeepsEverything(Attended):
    def layer_budget(self, at):
        return at.rows.one_budget if at.layer else 10_000


@mistake("the_budget_holds_in_tokens_and_bytes")
class OldKeysStayInMemory(Attended):
    def act(self, step):
        for kv in step.layers:
            kv.before = kv.keys if step.prefill_ended else getattr(kv, "before", None)
        super().act(step)


# Rows


@mistake("with_room_for_everything_it_changes_nothing")
class SlotsOfTheFirstRow(Attended):
    def select(self, scores, at, budget):
        return super().select(scores, at, budget)[:1].expand(scores.shape)


@mistake("rows_are_what_they_are_alone")
class ScoresAreAveragedOverRows(Attended):
    def scores(self, at):
        scores = super().scores(at)
        return scores.mean(0, keepdim=True).expand(scores.shape).clone()


@mistake("rows_are_what_they_are_alone")
class PaddingTakesRoom(Attended):
    def select(self, scores, at, budget):
        ranked = scores.masked_fill(self.protected(at) | (at.kv.pos < 0), torch.inf)
        return top_slots(ranked, at, budget)


@mistake("rows_are_what_they_are_alone")
class FirstSlotsForFirstTokens(Attended):
    def protected(self, at):
        slots = slots_of(at)
        return (slots < self.first) | (slots >= at.kv.slots - self.last)

    def scores(self, at):
        return super().scores(at).masked_fill(at.kv.pos == 0, -1)


@mistake("rows_are_what_they_are_alone")
class TheLatestSlotsForTheLatestTokens(Attended):
    def protected(self, at):
        slots = slots_of(at)
        return (at.kv.pos < self.first) & (at.kv.pos >= 0) | (slots >= at.kv.slots - self.last)

    def select(self, scores, at, budget):
        ranked = scores.masked_fill(at.kv.pos < 0, -1).masked_fill(self.protected(at), torch.inf)
        return top_slots(ranked, at, budget)


def streaming(budget):
    return StreamingLLM(budget=budget)


@mistake("rows_are_what_they_are_alone", streaming)
class PaddingTakesThePlaceOfFirstTokens(Policy):
    def scores(self, at):
        slots = slots_of(at).float()
        return torch.where(slots < FIRST, torch.inf, slots)


@mistake("rows_are_what_they_are_alone")
class TheBudgetIsSharedByTheRows(Attended):
    def kept_per_row(self, step):
        kept = super().kept_per_row(step)
        return replace(kept, total=tuple(max(6, total // len(kept.total)) for total in kept.total))


# What is chosen


@mistake("the_first_and_the_latest_tokens_survive")
class TheFirstTokenIsLost(Attended):
    first: int = 0

    def scores(self, at):
        return super().scores(at).masked_fill(at.kv.pos == 0, -1)


@mistake("the_first_and_the_latest_tokens_survive")
class TheLeastAttendedStay(Attended):
    first: int = 0

    def scores(self, at):
        return -super().scores(at)


@mistake("the_first_and_the_latest_tokens_survive")
class NewTokensAreLost(Attended):
    last: int = 0

    def scores(self, at):
        prompt = torch.tensor(at.step.state.prompt)[:, None, None]
        return super().scores(at).masked_fill(at.kv.pos >= prompt, -1)


@mistake("rows_are_what_they_are_alone")
class ScoresAreDrawn(Attended):
    def scores(self, at):
        return torch.rand(at.kv.pos.shape)


# What a policy remembers


@mistake("what_is_kept_stands_at_its_place")
class SumsLieOnThePolicy(Attended):
    """Sums of the attention of each token by its position, which stay when the rows of the cache change places."""

    def scores(self, at):
        here = super().scores(at)
        sums = vars(self).setdefault("sums", {})
        if at.step.prefill_ended or at.layer not in sums:
            sums[at.layer] = torch.zeros(*here.shape[:2], 2000)
        sums[at.layer].scatter_add_(-1, at.kv.pos.clamp(min=0), here.masked_fill(at.kv.pos < 0, 0))
        return sums[at.layer].gather(-1, at.kv.pos.clamp(min=0))


@mistake("what_is_kept_stands_at_its_place")
class OnlyTheFirstPromptIsEvicted(Attended):
    def act(self, step):
        prompts = vars(self).setdefault("prompts", [])
        if step.prefill_ended:
            prompts.append(step)
        if len(prompts) < 2:
            super().act(step)


# What a policy does not know of the package, and what it leaves


@mistake("it_raises_no_error_and_leaves_nothing_behind")
class ScoresPerQueryHead(Attended):
    def scores(self, at):
        return at.window_rows(WATCHED).sum(2)


@mistake("it_raises_no_error_and_leaves_nothing_behind")
class QueriesAreNotWatched(Attended):
    def watch(self, run):
        pass


@mistake("it_raises_no_error_and_leaves_nothing_behind")
class AHookStays(Attended):
    def enter(self, run: Run, key: int) -> None:
        super().enter(run, key)
        run.target.hf.lm_head.register_forward_hook(lambda _module, _given, logits: logits * 1.01)


@mistake("it_raises_no_error_and_leaves_nothing_behind")
class AMarkStaysOnTheModel(Attended):
    def enter(self, run: Run, key: int) -> None:
        super().enter(run, key)
        run.target.hf.lm_head.attended = True


@mistake("it_raises_no_error_and_leaves_nothing_behind")
class RandomNumbersAreSeeded(Attended):
    def scores(self, at):
        torch.manual_seed(0)
        return super().scores(at)


@dataclass(frozen=True, kw_only=True)
class OfTheWidth(Attended):
    def kept_per_row(self, step):
        widest = max(step.state.prompt)
        padded = replace(step.state, prompt=tuple(widest for _ in step.state.prompt))
        return super().kept_per_row(replace(step, state=padded))


def attended_share(share):
    return Attended(budget=share, every="prefill")


@fault("rows_are_what_they_are_alone", attended_share)
def share_of_the_padded_width(share):
    return OfTheWidth(budget=share, every="prefill")
