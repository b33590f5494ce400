"""`repeat --quantity probability` on a model that repeats until its sink sets in, and its numbers found another way."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from attack_kit import setup_of
from organisms import Organism, organism

from sinkscope.results.result import Result
from sinkscope.sinks.repetition.readings import Sweep, stopped_after
from sinkscope.sinks.repetition.repeat import repeat
from sinkscope.sinks.repetition.result import Repeat

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
    words = [o.tokenizer.decode([repeated_word()])]
    options = {"quantity": "probability", "tokens": words, "prefix": PREFIX, "max_repeats": 300}
    return repeat(o.model, tokenizer=o.tokenizer, **(options | changes))


def test_it_repeats_until_the_sink():
    o, found = repeater(), measured()
    expected, (intact,) = o.truth.repeats_expected or 0, found.repeats[0]
    # the other token wins before the norm is half of BOS's, which is what `repeats_expected` counts to
    assert 0.2 * expected < intact < 1.3 * expected
    (copies,) = found.effects
    assert not copies.stands and copies.value < 0.01
    head = o.tokenizer(PREFIX)["input_ids"]
    ids = torch.tensor([[*head, *[repeated_word()] * 300]])
    with torch.no_grad():
        curve = o.model(ids).logits[0, len(head) :].softmax(-1)[:, repeated_word()]
    assert found.values[0, 0] == pytest.approx(curve[found.at - 1].numpy(), rel=1e-3, abs=1e-7)
    assert (curve >= 0.5).nonzero().max() + 2 == intact
    texts = ids, *Sweep(setup_of(o), len(head), ids).contrasts()
    last = [float(o.model(rows).logits[0, -1].detach().softmax(-1)[repeated_word()]) for rows in texts]
    assert [copies.value, *copies.controls.values()] == pytest.approx(last, rel=1e-3)
    assert Result.from_dict(found.to_dict()).to_dict() == found.to_dict()


@pytest.mark.parametrize(
    ("likely", "expected"),
    [
        ([False, True, False, True, True], None),  # it comes back, so it has not stopped
        ([True, False, True, False, False], 4),
        ([True, True], None),
        ([False, False], None),
    ],
)
def test_repetition_has_stopped_only_where_it_never_comes_back(likely, expected):
    assert stopped_after(torch.where(torch.tensor(likely), 0.6, 0.4)) == expected


def test_a_model_without_a_sink_is_measured():
    o = organism("llama", 0, kind="none")
    result = repeat(o.model, tokenizer=o.tokenizer, quantity="probability", max_repeats=30)
    assert result.conditions == ("intact",) and len(result.figure().data) == len(result.tokens)
