"""The command, its table and exit status, and the reproduction that it prints."""

from __future__ import annotations

from functools import partial

import torch
from faulty_caches import crop_does_nothing
from refusals import refused
from transformers import DynamicCache

import sinkscope as ss
from sinkscope.conformance.recorder import held_bytes
from sinkscope.kv import StreamingLLM

FAULTY = "faulty_caches:crop_does_nothing"
CROP = "a_cropped_draft_leaves_no_trace"


def dynamic(config):
    return DynamicCache(config=config)


class Offloaded(DynamicCache):
    """As one that copies layers to and from a GPU."""

    def update(self, *_, **__):
        raise AssertionError("Torch not compiled with CUDA enabled")


def offloaded(config):
    return Offloaded(config=config)


def test_the_reproduction_shows_the_failure(capsys):
    result = ss.check_cache(FAULTY, only=(CROP,))
    assert result.exit_code == 1 and "1 of 1 check" in result.conclusion()
    (row,) = result.checks
    assert row.verdict == "fails" and row.reproduction in result.text(width=None).replace("\n    ", "\n")
    assert len(row.reproduction.splitlines()) <= 5
    (named,) = ss.check_cache(crop_does_nothing, only=(CROP,)).checks
    for one in (row, named):
        exec(one.reproduction, {})  # as its reader would
        assert float(capsys.readouterr().out) > 0.01
    assert ss.check_cache(dynamic, only=(CROP,)).exit_code == 0


def maker(budget_of):
    def make(config, budget):
        return StreamingLLM(budget=budget_of(budget))

    return make


good = maker(int)
needs_much = maker(lambda budget: budget if budget >= 20 else 0)
BUDGETS = ("the_first_tokens_survive", "the_budget_holds_at_every_step_in_tokens")


def test_the_name_that_was_given_stands_in_the_printed_lines(capsys):
    """A function that another one made was called `make`, which nothing can import."""
    late = maker(lambda budget: budget + 99)
    for factory, name in (("test_check_cache:good", "test_check_cache:good"), (good, f"{__name__}:good")):
        result = ss.check_cache(factory, only=BUDGETS[:1])
        assert result.cache == name and result.conclusion().startswith("good passes 1 check")
    globals()["late"] = late
    try:
        (_, row) = ss.check_cache(late, only=BUDGETS).checks
        assert row.verdict == "fails" and row.reproduction.startswith(f"from {__name__} import late\n")
        exec(row.reproduction, {})
    finally:
        del globals()["late"]
    assert "tensor(" in capsys.readouterr().out


def test_a_budget_is_what_every_check_asks_for():
    assert ss.check_cache(needs_much, only=BUDGETS).least == 24
    result = ss.check_cache(needs_much, only=BUDGETS, budget=40)
    assert [one.verdict for one in result.checks] == ["passes"] * 2 and result.checks[1].seen == "at most 41 tokens"
    assert result.checks[1].lengths == (120, 144) and result.checks[1].evicted == 109
    quarter = ss.check_cache(good, only=BUDGETS[1:], budget=0.25)
    assert quarter.checks[0].seen == "at most 13 tokens", "a quarter of 48, and the step's own"
    chunks = ss.check_cache(good, budget=40, only=["a_prompt_in_chunks_is_the_whole_prompt"])
    assert chunks.exit_code == 0 and chunks.checks[0].evicted > 0
    with refused("--budget 301: expected up to 300 tokens"):
        ss.check_cache(good, budget=301)
    with refused("has no parameter budget or share"):
        ss.check_cache(dynamic, budget=8)


def test_exit_status_and_bad_input(typed):
    typed(["check-cache", FAULTY, "--only", CROP], 1)
    typed(["check-cache", "transformers:DynamicCache", "--only", CROP])
    said = typed("check-cache snapkv:0.25 --only the_cache_knows_its_length")
    assert "0.25 is not used" in said.err
    assert "Conclusion: SnapKV passes 1 check (not applicable: 0)." in said.out
    with refused("check 'speed': expected one of no_call_raises"):
        ss.check_cache("transformers:DynamicCache", only=("speed",))
    with refused("has no name: expected"):
        ss.check_cache(partial(DynamicCache))


def test_a_cache_that_needs_a_gpu_where_there_is_none_is_not_checked(monkeypatch):
    """It neither fails 11 of 11 checks nor passes any."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = ss.check_cache(offloaded, only=("the_cache_knows_its_length", CROP))
    assert {one.verdict for one in result.checks} == {"does not apply"} and result.exit_code == 1
    assert result.conclusion().startswith("No check applies to offloaded: it needs a GPU, and there is none here")


def test_a_crop_that_refuses_in_words_does_not_apply():
    (row,) = ss.check_cache(dynamic, only=(f"{CROP}_in_states",)).checks
    assert row.verdict == "passes" and any("does not track past states" in reason for reason in row.refused)


def test_bytes_count_what_a_view_keeps_alive():
    cache = DynamicCache()
    for _ in range(2):
        cache.update(torch.zeros(1, 2, 10, 4), torch.zeros(1, 2, 10, 4), 0)
    assert held_bytes(cache) == 2 * 2 * 20 * 4 * 4
    cache.crop(-15)
    assert held_bytes(cache) == 2 * 2 * 20 * 4 * 4
    cache.layers[0].keys = cache.layers[0].keys.clone()
    assert held_bytes(cache) == 2 * 4 * 4 * (5 + 20)
