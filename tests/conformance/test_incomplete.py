"""Rows, positions, budgets and evictions that were not tried are said and are no pass; what was tried is counted."""

from __future__ import annotations

from dataclasses import dataclass

from mistaken_policies import Attended
from transformers.cache_utils import Cache, DynamicLayer

import sinkscope as ss
from sinkscope.conformance.promises import PROMISES
from sinkscope.kv import Policy

ERRORS, EASY, ROWS, PLACES, TOKENS, FIRST = PROMISES


@dataclass(frozen=True, kw_only=True)
class SlotsOfRowZero(Attended):
    """As it passed 13 checks, with 4 that did not apply, because it always keeps more than those asked for."""

    first: int = 4
    last: int = 16

    def select(self, scores, at, budget):
        return super().select(scores, at, budget)[:1].expand(scores.shape)


@dataclass(frozen=True, kw_only=True)
class Refusing(Policy):
    def scores(self, at):
        raise NotImplementedError("it does not evict")


@dataclass(frozen=True, kw_only=True)
class ScoresOfRowZero(Attended):
    """As it passed, because the least budget that it takes leaves nothing to choose."""

    first: int = 4
    last: int = 8

    def scores(self, at):
        found = super().scores(at)
        return found[:1].expand(found.shape)


def scored_by_row_zero(budget):
    return ScoresOfRowZero(budget=budget)


def of_row_zero(budget):
    return SlotsOfRowZero(budget=budget)


def needs_much(budget):
    return Attended(budget=budget, first=4, last=16)


def refusing(budget):
    return Refusing(budget=budget)


class SingleRow(DynamicLayer):
    def update(self, key_states, value_states, *args, **kwargs):
        if len(key_states) > 1:
            raise NotImplementedError("one row at a time")
        return super().update(key_states, value_states)


def single_row(config):
    if config.model_type != "llama":
        raise NotImplementedError(config.model_type)
    return Cache(layers=[SingleRow() for _ in range(config.num_hidden_layers)])


def verdicts(result):
    return {one.check.replace(" ", "_"): one.verdict for one in result.checks}


def test_a_policy_that_needs_larger_budgets_is_tried_with_them():
    result = ss.check_cache(of_row_zero, only=[TOKENS, ROWS])
    assert verdicts(result) == {TOKENS: "passes", ROWS: "fails"} and result.exit_code == 1
    assert verdicts(ss.check_cache(of_row_zero, only=[ROWS], budget=0.5)) == {ROWS: "fails"}
    assert verdicts(ss.check_cache(scored_by_row_zero, only=[ROWS])) == {ROWS: "fails"}
    right = ss.check_cache(needs_much, only=[TOKENS, ROWS])
    assert right.verdict == "passes" and right.least == 24, right.text()


def test_evictions_that_are_all_refused_are_no_pass():
    result = ss.check_cache(refusing, only=[EASY, PLACES, TOKENS, FIRST])
    assert result.verdict == "incomplete" and result.exit_code == 1
    assert set(result.untried()) == {"positions", "budget", "eviction"}
    assert "is incomplete: positions, budget, eviction not tried; give a budget that it takes" in result.conclusion()
    assert "it does not evict" in result.text() and len(result.conclusion().split()) <= 30
    assert ss.check_cache(refusing, only=[EASY]).exit_code == 0, "no check of a budget was asked for"


def test_rows_that_are_refused_are_no_pass():
    result = ss.check_cache(single_row, only=[EASY, ROWS])
    assert result.verdict == "incomplete" and "rows not tried" in result.conclusion() and result.exit_code == 1
    assert "one row at a time" in result.text()
