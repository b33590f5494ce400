"""Controls that win: on planted models where the other neurons, the other token or the other tokens do as much."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from organisms import organism
from repository import FIGURES

import sinkscope as ss
from sinkscope.results.headline import Verdict
from sinkscope.results.mean import Mean
from sinkscope.results.result import Result
from sinkscope.sinks.spikes.why_tables import ONE_OTHER

pytestmark = pytest.mark.few_texts
NOT_SHOWN = "Not shown to matter"


@pytest.mark.parametrize(("seed", "wins"), [(1, False), (2, True)])
def test_hiding_the_first_token_is_shown_to_matter_where_it_costs_more_than_hiding_another(seed, wins):
    """The second model was planted with an output at random, which the spike makes worse."""
    planted = organism("llama", seed)
    found = ss.why_sink(planted.model, tokenizer=planted.tokenizer)
    hidden = found.spikes[0].hidden
    (control,) = (row for row in found.spikes[0].purpose if row.is_control)
    assert (hidden["loss"].value <= control["loss"].value) == wins
    assert (f"{NOT_SHOWN}: hiding the first token" in found.conclusion()) == wins


def test_zeroing_sink_neurons_is_not_shown_to_matter_where_others_that_write_as_much_cost_as_much():
    planted = organism("llama", 2)
    found = ss.find_sinks(planted.model, tokenizer=planted.tokenizer)
    assert f"{NOT_SHOWN} more than others: as a control, " in found.conclusion()


def test_tokens_of_one_cluster_are_not_shown_to_matter_where_all_that_were_tried_are_of_it():
    """Then sequences of any tokens are sequences of the cluster."""
    planted = organism("llama", 1)
    every = ss.attack(planted.model, tokenizer=planted.tokenizer, n_tokens=64, sequences=16)
    assert NOT_SHOWN not in every.conclusion()
    ((head, _),) = Counter(every.head[np.isfinite(every.head)].tolist()).most_common(1)
    words = [planted.tokenizer.decode([token]) for token in every.ids[every.head == head].tolist()]
    cluster = ss.attack(planted.model, tokenizer=planted.tokenizer, tokens=words, sequences=16, length=4)
    assert cluster.conclusion().startswith(f"{NOT_SHOWN} which tokens stand there: ")


@pytest.mark.parametrize(("share", "wins"), [(0.3, False), (0.99, True)])
def test_a_cause_is_shown_where_a_token_that_sees_one_more_has_less_of_the_spike(share, wins):
    found = Result.load(FIGURES / "circuit.json")
    spike = found.spikes[0]
    rows = [replace(row, left=Mean(share)) if row.key == ONE_OTHER else row for row in spike.conditions]
    changed = replace(found, spikes=(replace(spike, conditions=tuple(rows)), *found.spikes[1:]))
    assert changed.conclusion().startswith("Not shown: an ordinary token") == wins
    verdicts = {line.subject: line.verdict for line in changed.headlines()}
    assert (verdicts["spike if a token sees only itself"] is Verdict.NOT_SHOWN) == wins, verdicts
