"""`repeat --quantity probability` on a model that repeats until its sink sets in, and its numbers found another way."""

from __future__ import annotations

import pytest
import torch
from attack_kit import setup_of
from organisms import Organism, organism

from sinkscope.sinks.repeat import Sweep, repeat, stopped_after

pytestmark = pytest.mark.few_texts

PREFIX = "cat the"


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


def test_it_repeats_until_the_sink():
    o = repeater()
    word = next(t for t in o.tokens_of(0) if t != 10 and o.tokenizer.decode([t]) not in ("cat", "the"))
    setup, tokens = setup_of(o), [o.tokenizer.decode([word])]
    found = repeat.on(setup, quantity="probability", tokens=tokens, prefix=PREFIX, max_repeats=300)
    expected, (intact,) = o.truth.repeats_expected or 0, found.repeats[0]
    # the other token wins before the norm is half of BOS's, which is what `repeats_expected` counts to
    assert 0.2 * expected < intact < 1.3 * expected
    copies, *controls = (row.get("share") for row in found.effects)
    assert copies < 0.01
    head = o.tokenizer(PREFIX)["input_ids"]
    ids = torch.tensor([[*head, *[word] * 300]])
    with torch.no_grad():
        curve = o.model(ids).logits[0, len(head) :].softmax(-1)[:, word]
    assert found.values[0, 0] == pytest.approx(curve[found.at - 1].numpy(), rel=1e-3, abs=1e-7)
    assert (curve >= 0.5).nonzero().max() + 2 == intact
    texts = ids, *Sweep(setup, len(head), ids).contrasts()
    last = [float(o.model(rows).logits[0, -1].detach().softmax(-1)[word]) for rows in texts]
    assert [copies, *controls] == pytest.approx(last, rel=1e-3)


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


def test_a_model_without_a_sink_is_measured():
    o = organism("llama", 0, kind="none")
    result = repeat(o.model, tokenizer=o.tokenizer, quantity="probability", max_repeats=30)
    assert result.conditions == ("intact",) and len(result.figure().data) == len(result.tokens)
