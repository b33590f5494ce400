"""`repeat --read probability` on a model that repeats until its sink sets in, and its numbers found another way."""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache

import numpy as np
import pytest
import torch
from attack_kit import setup_of
from organisms import Organism, organism
from refusals import refused
from torch.testing import assert_close

from sinkscope.hooks.edit import SinkPatch
from sinkscope.hooks.edit.decode import repeat_probabilities
from sinkscope.opening.live import target_of
from sinkscope.results.parts import sites_of
from sinkscope.results.result import Result
from sinkscope.sinks.repetition.probability import ProbabilityReading, stopped_after
from sinkscope.sinks.repetition.repeat import Repeat, repeat
from sinkscope.sinks.repetition.sweep import beside_copies

pytestmark = pytest.mark.few_texts

PREFIX = "cat the"


@lru_cache
def repeater() -> Organism:
    """Says the word it has just read, until the sink drowns it: the unembedding reads the word out of the residual
    stream and, where the sink dimension is large, one other token."""
    o = organism("llama", 2)
    base, head = o.model.model, o.model.lm_head
    with torch.no_grad():
        head.weight = torch.nn.Parameter(base.embed_tokens.weight.clone())  # where it was tied it no longer is
        dim = o.truth.residual_dims[0]
        [(layer, neuron), *_] = o.truth.neurons
        head.weight[:, list(o.truth.residual_dims)] = 0
        sign = float(base.layers[layer].mlp.down_proj.weight[dim, neuron].sign())
        head.weight[10, dim] = 100 * sign
    return o


@lru_cache
def repeated_word() -> int:
    o = repeater()
    return next(t for t in o.tokens_of(0) if t != 10 and o.tokenizer.decode([t]) not in ("cat", "the"))


def measured(**changes) -> Repeat:
    o = repeater()
    options = {
        "read": "probability",
        "tokens": [o.tokenizer.decode([repeated_word()])],
        "prefix": PREFIX,
        "max_repeats": 300,
        "answer_after": [5, 280],
        "new_tokens": 8,
    }
    return repeat(o.model, tokenizer=o.tokenizer, **(options | changes))


@lru_cache
def plain() -> ProbabilityReading:
    """A reading, which no test can alter."""
    return measured().reading


@pytest.mark.slow
def test_it_repeats_until_the_sink_and_for_ever_with_the_patch():
    o, found = repeater(), plain()
    assert set(sites_of(found.neurons)) == set(o.truth.neurons)
    assert found.conditions == ("intact", "patched", "random neurons")
    expected = o.truth.repeats_expected or 0
    intact, patched, random = found.left[:, 0]
    # the other token wins before the norm is half of BOS's, which is what `repeats_expected` counts to
    assert 0.2 * expected < intact < 1.3 * expected and np.isnan(patched) and random == pytest.approx(intact, abs=2)
    patch, copies = found.claims
    assert copies.verdict == "not shown" and copies.value < 0.01
    assert patch.verdict == "sufficient" and patch.value > 0.9
    assert len(found.answers) == 4
    for answer in found.answers:
        breaks = answer.repeats == 280 and not answer.patched
        assert answer.kept < 8 if breaks else answer.kept == 8
        assert (answer.follows == "") == (answer.kept == answer.tokens)


@pytest.mark.parametrize(
    ("likeliest", "expected"),
    [
        ([False, True, False, True, True], None),  # it comes back, so it has not stopped
        ([True, False, True, False, False], 4),
        ([True, True], None),
        ([False, False], None),
    ],
)
def test_repetition_has_stopped_only_where_it_never_comes_back(likeliest, expected):
    after = stopped_after(torch.tensor(likeliest))
    assert (None if after != after else after) == expected


def test_curve_against_a_pass_of_its_own():
    o, word = repeater(), repeated_word()
    head = o.tokenizer(PREFIX)["input_ids"]
    ids = torch.tensor([[*head, *[word] * 300]])  # 256 ids make a chunk
    for edit in (None, SinkPatch(sites=o.truth.neurons)):
        p, likeliest = repeat_probabilities(target_of(o.model, o.tokenizer), head, word, 300, edit)
        with nullcontext() if edit is None else edit.on(o.model), torch.no_grad():
            logits = o.model(ids).logits[0, len(head) :]
        assert_close(p, logits.softmax(-1)[:, word], rtol=1e-3, atol=1e-7)
        assert likeliest.equal(logits.argmax(-1))
        if edit is None:
            setup = setup_of(o)
            beside = beside_copies(setup, ids, len(head))
            last = [float(o.model(rows).logits[0, -1].detach().softmax(-1)[word]) for rows in beside]
            claim = plain().claims[-1]
            assert [claim.value, *[one.value for one in claim.contrasts]] == pytest.approx(last, rel=1e-3)
            assert plain().probability[0, 0] == pytest.approx(p[plain().sweep.counts - 1].numpy(), rel=1e-5)
            left = int(plain().left[0, 0])
            assert (likeliest == word).tolist()[:left] == [True] * (left - 1) + [False]


def test_of_a_flat_distribution_no_token_counts_as_the_likeliest():
    """The word still has the largest logit, by a millionth of what it had."""
    weight = repeater().model.lm_head.weight
    with torch.no_grad():
        weight.mul_(1e-6)
        try:
            result = measured(answer_after=[5], new_tokens=1, max_repeats=20)
        finally:
            weight.mul_(1e6)
    found = result.reading
    assert result.settings["max_repeats"] == 20  # not those of the search for the patch's neurons
    assert found.probability == pytest.approx(found.uniform, rel=1e-3)
    assert np.isnan(found.left).all()


def test_a_model_without_a_sink_is_measured_without_a_patch_and_a_small_context_is_refused_in_one_line():
    o = organism("llama", 0, kind="none")
    o.model.config.max_position_embeddings = 64
    options = {"tokenizer": o.tokenizer, "read": "probability", "prefix": ""}
    with refused(words=("400 repetitions", "--answer-after")):
        repeat(o.model, **options)
    result = repeat(o.model, answer_after=[8], new_tokens=4, **options)
    assert result.reading.conditions == ("intact",)
    assert len(result.figure().data) == len(result.reading.sweep.tokens)


def test_a_patch_that_is_given_is_used(tmp_path):
    SinkPatch(sites=[(1, 5)], calibrated={(1, 5): 0.0}).save(tmp_path / "p.json")
    result = measured(patch=tmp_path / "p.json", answer_after=[5], max_repeats=250, prefix="")
    found = result.reading
    assert sites_of(found.neurons) == ((1, 5),) and (1, 5) not in repeater().truth.neurons
    assert found.left[0] == found.left[1]  # no sink neuron: it diverges all the same
    assert Result.from_dict(result.to_dict()).to_dict() == result.to_dict()
