"""`repeat` of norms and of attention: against planted truth and against the long way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attack_kit import setup_of, text_file
from organisms import Organism, organism
from plain_hooks import attention, residuals

from sinkscope.models.text import text_rows
from sinkscope.results.headline import Verdict
from sinkscope.results.mean import Mean
from sinkscope.sinks.repeat import TAIL, below_again, contrasts, half_reached, repeat, stopped_after
from sinkscope.sinks.repeat_result import Repeat
from sinkscope.sinks.repeat_tables import AtLastCopy, Filled, Places
from sinkscope.sinks.spikes.find import spike_of

pytestmark = pytest.mark.few_texts


def word_of(o: Organism, group: int) -> str:
    return str(o.tokenizer.decode([o.tokens_of(group)[0]]))


def test_a_marked_word_gets_the_spike_where_it_crosses_half_of_it():
    """As many repetitions alone, and one fewer, stand on both sides of it; a word of no group never gets there."""
    o = organism(seed=2)
    setup, expected = setup_of(o), o.truth.repeats_expected
    result = repeat.on(setup, tokens=[word_of(o, 0), word_of(o, -1)], max_repeats=4 * expected)
    marked, spike = int(result.repeats[0, 0]), spike_of(setup).spike
    assert 0.6 * expected <= marked <= 1.5 * expected and np.isnan(result.repeats[0, 1])
    for count in (marked - 1, marked):
        alone = spike.along(residuals(o.model, o.repeated(count, result.ids[0]))[spike.peak])[0]
        assert (alone[-1] >= 0.5 * alone[0]) == (count == marked)
    assert result.values[0, 1].max() < 0.1
    first, second = result.by_token()
    assert (first["repeats"].value, second.repeats) == (marked, None)
    assert result.conclusion().startswith(
        f"Within {4 * expected:,} copies, half of the first token's norm spike is reached by 1 of 2 tokens in "
        f"{result.conditions[0]}. The last copy has "
    )


def of_tokens(*curves: list[float]) -> Repeat:
    """A result of tokens whose copies have these shares of the spike."""
    values = torch.tensor([curves])
    return Repeat(
        quantity="norm",
        copies=len(curves[0]),
        effects=(
            AtLastCopy(key=Filled.COPIES, layers=(1, 5), share=Mean(0.6, 0.1)),
            AtLastCopy(key=Filled.ONE_COPY, layers=(1, 5), share=Mean(0.2)),
            AtLastCopy(key=Filled.OTHERS, layers=(1, 5), share=Mean(0.1)),
        ),
        ids=tuple(range(len(curves))),
        conditions=("layers 1-5",),
        tokens=tuple("abcdefgh"[: len(curves)]),
        at=np.arange(1, len(curves[0]) + 1),
        values=values.numpy(),
        repeats=np.array([[half_reached(curve) for curve in values[0]]], dtype=float),
        spikes=((1, 5),),
        below_again=np.array([[below_again(curve) for curve in values[0]]], dtype=float),
    )


def test_a_word_whose_first_copy_has_the_spike_is_counted_apart_and_one_that_falls_again_is_said():
    apart, falls, stays, never = [0.8, 0.2, 0.6, 0.7], [0.1, 0.6, 0.7, 0.4], [0.1, 0.2, 0.6, 0.7], [0.1] * 4
    result = of_tokens(apart, falls, stays, never)
    assert result.conclusion() == (
        "Within 4 copies, half of the first token's norm spike is reached by 2 of 4 tokens in layers 1-5 (1 of them "
        "falls below it again; 1 more has it with the first copy). The last copy has 60% (± 10%) of it on average (as "
        "a control, after other tokens, and one copy at the end: 20%)."
    )
    rows = result.by_token()
    assert [row.apart for row in rows] == ["first copy", None, None, None]
    assert [row.below and row.below.value for row in rows] == [None, 4, None, None]


@pytest.mark.parametrize(("control", "verdict"), [(0.2, Verdict.SHOWN), (0.55, Verdict.NOT_SHOWN)])
def test_a_control_that_has_as_much_is_no_finding(control, verdict):
    result = of_tokens([0.1, 0.6, 0.7, 0.8])
    copies, one_copy, others = result.effects
    result = replace(result, effects=(copies, replace(one_copy, share=Mean(control)), others))
    (headline,) = result.headlines()
    assert (headline.verdict, headline.control) == (verdict, f"{control:.0%} (no copies)")
    wins = verdict is Verdict.NOT_SHOWN
    assert result.conclusion().startswith("Not shown to come of repetition: within 4 copies, half of ") == wins
    attention = replace(result, quantity="attention", repeats=None, shown=2)
    assert attention.conclusion().startswith("Not shown to come of repetition: 4 copies of a token get 60%") == wins


def test_the_last_copy_is_read_in_the_spike_that_most_tokens_reach():
    """Nothing reaches the first spike, so its number beside its control says nothing of the second."""
    result = of_tokens([0.1, 0.6, 0.7, 0.8])
    low = replace(result.effects[0], layers=(0, 0), share=Mean(0.01, 0.02))
    controls = [replace(row, layers=(0, 0), share=Mean(0.0)) for row in result.effects[1:]]
    result = replace(
        result,
        effects=(low, *controls, *result.effects),
        conditions=("layer 0", "layers 1-5"),
        values=np.concatenate([result.values * 0, result.values]),
        repeats=np.concatenate([result.repeats * np.nan, result.repeats]),
        below_again=np.concatenate([result.below_again * np.nan, result.below_again]),
        spikes=((0, 0), (1, 5)),
    )
    assert result.conclusion().endswith(
        "is reached by 0 of 1 tokens in layer 0 and 1 of 1 tokens in layers 1-5. In layers 1-5 the last copy has 60% "
        "(± 10%) of it on average (as a control, after other tokens, and one copy at the end: 20%)."
    )
    assert result.headlines()[0].verdict is Verdict.SHOWN


@pytest.mark.parametrize(
    ("repeats", "words"),
    [
        ([94.0, 92.0], "for 2 of 2 tokens, from 92 to 94 copies on."),
        ([np.nan, 92], "for 1 of 2 tokens, from 92 copies on."),
        ([np.nan, np.nan], "for 0 of 2 tokens within 4 copies."),
    ],
)
def test_a_probability_is_said_with_where_tokens_stop(repeats, words):
    result = replace(of_tokens([0.9] * 4, [0.9] * 4), quantity="probability", spikes=(), repeats=np.array([repeats]))
    result = replace(result, effects=tuple(replace(row, layers=None, share=Mean(0.0)) for row in result.effects))
    assert result.conclusion() == (
        f"The probability that a token comes once more falls below 50% and stays there {words} After 4 copies it is 0% "
        "(as a control, after other tokens, and one copy at the end: 0%)."
    )
    assert result.headlines()[0].verdict is Verdict.NO_CONTROL


def test_a_single_position_that_stands_out_is_not_made_by_repetition():
    shares = torch.tensor([0.1, 0.1, 0.9, 0.1, 0.9, 0.9, 0.9])
    assert [half_reached(shares[:end]) for end in (4, 6, 7)] == [None, 5, 5]


def test_attention_of_each_place_is_that_of_whole_matrices(tmp_path):
    """In natural text, with copies, and with one copy; and what the copies get together."""
    o, count = organism(seed=2), 60
    text = text_file(o, tmp_path, 1, length=900)
    setup = setup_of(o, text=text)
    result = repeat.on(setup, quantity="attention", tokens=[word_of(o, 0)], max_repeats=count)
    natural = text_rows(o.tokenizer, text.read_text(), 1, count + 1 + TAIL, setup.bos)
    copies = o.repeated(count, result.ids[0])
    single, _ = contrasts(setup, copies, count)
    ids = torch.cat([torch.cat([natural[:, :-TAIL], copies, single]), natural[:, -TAIL:].expand(3, -1)], 1)
    every = attention(o.model, ids).mean(2)[..., -TAIL:, :]  # layer sequence query key
    fair = float((1 / torch.arange(count + 2, ids.shape[1] + 1)).mean())
    there = every[..., 1 : count + 1].sum(-1).mean(-1)
    own = torch.stack([every[..., 0].mean(-1), there / count]).permute(2, 0, 1).numpy() / fair
    assert result.values == pytest.approx(own, rel=1e-3, abs=1e-5)
    layer = o.truth.sink_layer + 1
    on_copies = [row.times.value for row in result.given() if row.key.places is Places.COPIES]
    assert on_copies == result.values[:, 1, layer].tolist()
    share = {row.key: row.share.value for row in result.effects}
    values = [share[Filled.OTHERS], share[Filled.COPIES], share[Filled.ONE_COPY]]
    assert values == pytest.approx(there[layer].tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("likely", "expected"),
    [
        ([False, True, False, True, True], None),  # it comes back, so it has not stopped
        ([True, False, True, False, False], 4),
        ([False, False], None),
    ],
)
def test_repetition_has_stopped_only_where_it_never_comes_back(likely, expected):
    assert stopped_after(torch.where(torch.tensor(likely), 0.6, 0.4)) == expected
