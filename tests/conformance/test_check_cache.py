"""The command, its table and exit status, and the reproduction that it prints."""

from __future__ import annotations

from functools import partial

import torch
from faulty_caches import crop_does_nothing
from refusals import refused
from right_caches import stock
from transformers import DynamicCache

import sinkscope as ss
from sinkscope.conformance.checked import Unit
from sinkscope.conformance.recorder import held_bytes

FAULTY = "faulty_caches:crop_does_nothing"
CHANGES = "with_room_for_everything_it_changes_nothing"


class Offloaded(DynamicCache):
    """As one that copies layers to and from a GPU."""

    def update(self, *_, **__):
        raise AssertionError("Torch not compiled with CUDA enabled")


def offloaded(config):
    return Offloaded(config=config)


def test_the_reproduction_shows_the_failure(capsys):
    result = ss.check_cache(FAULTY, only=(CHANGES,))
    assert result.exit_code == 1 and "1 of 1 check" in result.conclusion()
    (row,) = result.checks
    assert row.verdict == "fails" and row.reproduction in result.text(width=None).replace("\n    ", "\n")
    assert len(row.reproduction.splitlines()) <= 5
    (named,) = ss.check_cache(crop_does_nothing, only=(CHANGES,)).checks
    for one in (row, named):
        exec(one.reproduction, {})  # as its reader would
        assert float(capsys.readouterr().out) > 0.01
    assert ss.check_cache(stock, only=(CHANGES,)).exit_code == 0


BUDGETS = ("the_budget_holds_in_tokens_and_bytes", "the_first_and_the_latest_tokens_survive")


def test_a_budget_is_what_every_use_that_evicts_asks_for():
    result = ss.check_cache("streaming", only=BUDGETS, budget=40)
    assert [one.verdict for one in result.checks] == ["passes"] * 2
    assert result.checks[0].unit is Unit.BYTES
    assert 0 < result.checks[0]["worst"].value <= result.checks[0]["limit"].value
    assert result.checks[0].longest >= 3 * 40
    quarter = ss.check_cache("streaming", only=BUDGETS[:1], budget=0.25)
    assert quarter.checks[0].verdict == "passes" and quarter.checks[0]["evicted"].value > 0
    with refused("--budget 301: expected up to 300 tokens"):
        ss.check_cache("streaming", budget=301)
    with refused("has no parameter budget or share"):
        ss.check_cache(stock, budget=8)


def test_facts_are_asked_of_texts_of_any_length():
    """Words that filled a question were not in the vocabulary of the recall model."""
    (row,) = ss.check_cache("snapkv", only=["what_is_kept_stands_at_its_place"], budget=40).checks
    assert row.verdict == "passes" and row.longest > 96


def test_exit_status_and_bad_input(typed):
    typed(["check-cache", FAULTY, "--only", CHANGES], 1)
    said = typed("check-cache snapkv --only it_raises_no_error_and_leaves_nothing_behind")
    assert "Conclusion: SnapKV passes 1 check." in said.out
    with refused("check 'speed': expected one of it_raises_no_error"):
        ss.check_cache("transformers:DynamicCache", only=("speed",))
    with refused("has no name: expected"):
        ss.check_cache(partial(DynamicCache))


def test_a_cache_that_needs_a_gpu_where_there_is_none_is_not_checked(monkeypatch):
    """It neither fails nor passes anything."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = ss.check_cache(offloaded, only=("it_raises_no_error_and_leaves_nothing_behind", CHANGES))
    assert {one.verdict for one in result.checks} == {"does not apply"} and result.exit_code == 1
    assert result.conclusion().startswith("No check applies to offloaded: it needs a GPU, and there is none here")


def test_bytes_that_two_views_keep_alive_count_once():
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 10, 4), torch.zeros(1, 2, 10, 4), 0)
    cache.layers[0].values = cache.layers[0].keys[:, :, 5:]
    assert held_bytes(cache) == 2 * 10 * 4 * 4
