"""`repeat --tokens all` against planted groups and against one long pass per token; resuming."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attack_kit import setup_of
from covering import slow
from organisms import Organism, organism
from raw_kit import norms

from sinkscope.errors import SinkscopeError
from sinkscope.measure import Setup
from sinkscope.sinks import repeat as readings
from sinkscope.sinks.repeat import repeat
from sinkscope.sinks.repeat_result import Repeat

pytestmark = pytest.mark.few_texts

LIMIT = 128


def measured(setup: Setup, **options) -> Repeat:
    return repeat.on(setup, tokens=["all"], **{"max_repeats": LIMIT, **options})


def by_hand(o: Organism, first: int, token: int, limit: int) -> float:
    """The whole model on the longest sequence, by plain hooks."""
    norm = norms(o.model, torch.tensor([[first] + [token] * limit]))[o.truth.sink_layer, 0]
    above = (norm[1:] >= norm[0] / 2).nonzero()
    return float(above[0]) + 1 if len(above) else float("nan")


@pytest.mark.parametrize(("family", "seed"), [("qwen2", 1), slow("gpt_oss", 1)])
def test_every_grouped_token_gets_there_and_no_other(family, seed):
    o = organism(family, seed)
    setup = setup_of(o)
    result, expected, bos = measured(setup), o.truth.repeats_expected, o.tokenizer.bos_token_id
    assert expected is not None and list(result.ids) == list(range(o.model.config.vocab_size))
    (repeats,), ids = result.repeats, np.array(result.ids)
    hand = [by_hand(o, bos, token, LIMIT) for token in result.ids[4:10]]
    np.testing.assert_allclose(repeats[4:10], hand, atol=2)  # the whole norm there, and the projection here
    some = measured(setup, sample=6)
    assert len(set(some.ids)) == 6
    np.testing.assert_array_equal(some.repeats[0], repeats[list(some.ids)])
    group = np.array([o.truth.groups[token] for token in result.ids])
    assert (np.isnan(repeats) == (group < 0)).all()
    needed = repeats[(group >= 0) & (ids != bos)]
    assert needed.min() >= 0.6 * expected and needed.max() <= 1.5 * expected
    assert repeats[ids == bos] == 1  # after itself it is its own group from the start
    assert [row["repeats"] is None for row in result.rows()] == (group < 0).tolist()
    assert len(result.figure().data) == 1


def test_a_run_that_was_broken_off_goes_on_with_the_same_table(tmp_path, monkeypatch):
    o = organism("llama", 1)
    options, setup = {"sample": 40, "max_repeats": 16}, setup_of(o)
    monkeypatch.setattr(readings, "TOKENS", 12)
    whole = measured(setup, **options).to_dict()["result"]
    asked, along = [], readings.copies_of

    def breaking(target, spikes, tokens, *rest):
        asked.append(tokens)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return along(target, spikes, tokens, *rest)

    monkeypatch.setattr(readings, "copies_of", breaking)
    with pytest.raises(KeyboardInterrupt):
        measured(setup, resume=tmp_path, **options)
    assert measured(setup, resume=tmp_path, **options).to_dict()["result"] == whole
    del asked[2]  # which is asked again
    assert [token for tokens in asked for token in tokens] == whole["ids"]
    with torch.no_grad():
        o.model.model.layers[-1].mlp.down_proj.weight[0, 0] += 1
    with pytest.raises(SinkscopeError, match=r"other settings .*model"):
        measured(setup_of(o), resume=tmp_path, **options)
