"""Rows, positions, budgets and evictions that were not tried are said and are no pass; what was tried is counted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from mistaken_policies import Attended
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

import sinkscope as ss
from sinkscope.conformance.checks import OF_A_BUDGET
from sinkscope.conformance.kit import LONG
from sinkscope.kv import Policy, StreamingLLM

ROWS = "rows_of_a_batch_are_what_they_are_alone"
EASY = "with_room_for_everything_logits_are_those_of_the_plain_model"
TOKENS = "the_budget_holds_at_every_step_in_tokens"


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


def of_row_zero(budget):
    return SlotsOfRowZero(budget=budget)


def needs_much(budget):
    return Attended(budget=budget, first=4, last=16)


def refusing(budget):
    return Refusing(budget=budget)


def always_sixty_four():
    return StreamingLLM(budget=64)


def row_zero_of_sixty_four():
    return SlotsOfRowZero(budget=64)


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
    right = ss.check_cache(needs_much, only=[TOKENS, ROWS])
    assert right.verdict == "passes" and right.least == 24, right.text()


def test_what_was_tried_stands_in_the_record():
    result = ss.check_cache(needs_much, only=[EASY, ROWS], budget=40)
    easy, rows = result.checks
    assert (easy.lengths, easy.rows, easy.evicted) == ((6, LONG), 1, 0)
    assert rows.rows == 3 and rows.lengths[1] >= 3 * 40 and rows.evicted >= 2 * 40
    assert any("padded on the right" in reason for reason in rows.refused)
    assert "Refused beside what was tried" in result.text()
    again = type(result).from_dict(result.to_dict())
    assert again == result and again.checks[1].evicted == rows.evicted


def test_evictions_that_are_all_refused_are_no_pass():
    result = ss.check_cache(refusing, only=[EASY, *OF_A_BUDGET])
    assert result.verdict == "incomplete" and result.exit_code == 1
    assert set(result.untried()) == {"positions", "budget", "eviction"}
    assert "is incomplete: positions, budget, eviction not tried; give a budget that it takes" in result.conclusion()
    assert "it does not evict" in result.text() and len(result.conclusion().split()) <= 30
    assert ss.check_cache(refusing, only=[EASY]).exit_code == 0, "no check of a budget was asked for"


def test_rows_that_are_refused_are_no_pass():
    result = ss.check_cache(single_row, only=[EASY, ROWS])
    assert result.verdict == "incomplete" and "rows not tried" in result.conclusion() and result.exit_code == 1
    assert "one row at a time" in result.text()


def test_a_budget_that_is_fixed_is_found_and_tried():
    """Nobody asks these to keep a part; that they do is seen on a long text."""
    only = ["the_first_tokens_survive", TOKENS, ROWS, EASY]
    result = ss.check_cache(always_sixty_four, only=only)
    assert verdicts(result) == {
        EASY: "passes", "the_first_tokens_survive": "passes", TOKENS: "does not apply", ROWS: "passes"
    }  # fmt: skip
    assert result.verdict == "incomplete" and set(result.untried()) == {"budget"}
    assert "parameter budget" in result.conclusion()
    assert verdicts(ss.check_cache(row_zero_of_sixty_four, only=[ROWS])) == {ROWS: "fails"}


def test_a_cache_that_keeps_everything_passes_and_says_so():
    result = ss.check_cache(lambda config: DynamicCache(config=config), only=[EASY, ROWS, TOKENS])
    assert result.verdict == "passes" and result.conclusion().endswith("(not applicable: 1); it keeps every token.")


def test_the_smallest_order_that_fails_is_printed(capsys):
    result = ss.check_cache(
        "faulty_caches:crop_does_nothing_after_a_reset", only=["any_order_of_calls_gives_what_one_pass_gives"]
    )
    (row,) = result.checks
    assert row.verdict == "fails" and row.reproduction.count("('") == 4, row.reproduction
    exec(row.reproduction, {})
    assert float(capsys.readouterr().out) > 0.01


def test_random_numbers_of_the_caller_stay():
    torch.manual_seed(5)
    right = torch.rand(1)
    torch.manual_seed(5)
    ss.check_cache(needs_much, only=["nothing_is_left_on_the_model"])
    assert torch.equal(torch.rand(1), right)
