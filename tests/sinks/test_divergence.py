"""divergence on a model that repeats until its sink sets in, and its numbers found another way."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from organisms import Organism, organism

from sinkscope.errors import SinkscopeError
from sinkscope.files.result import Result
from sinkscope.interventions import SinkPatch
from sinkscope.interventions.decode import greedy, repeat_probabilities
from sinkscope.models.target import Target
from sinkscope.sinks.repetition.divergence import Divergence, divergence


@lru_cache
def _repeater() -> Organism:
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


def _word(o: Organism) -> int:
    return next(t for t in o.tokens_of(0) if t != 10 and o.tokenizer.decode([t]) not in ("cat", "the"))


def _measure(**changes: Any) -> Divergence:
    o = _repeater()
    options: dict[str, Any] = {
        "tokens": [o.tokenizer.decode([_word(o)])],
        "prefix": "cat the",
        "max_repeats": 300,
        "repeats": [5, 280],
        "new_tokens": 8,
        "controls": 3,
    }
    return divergence(o.model, tokenizer=o.tokenizer, **(options | changes))


@lru_cache
def _plain() -> Divergence:
    """A result, which no test can alter."""
    return _measure()


def test_it_repeats_until_the_sink_and_for_ever_with_the_patch() -> None:
    o = _repeater()
    found = _plain()
    assert (found.sink_layer, set(found.neurons)) == (o.truth.sink_layer, set(o.truth.neurons))
    curves = {(c.prefix, c.patched): c for c in found.curves}
    assert len(curves) == 4
    expected = o.truth.repeats_expected
    assert expected is not None
    for prefix in (False, True):
        intact, patched = curves[prefix, False], curves[prefix, True]
        assert (intact.caught, patched.caught, patched.left) == (1, 1, None)
        assert intact.left is not None
        # the other token wins before the norm is half of BOS's, which is what `repeats_expected` counts to
        assert 0.2 * expected < intact.left < 1.3 * expected
        assert intact.p[-1] < 0.01
        assert patched.p[-1] > 0.9
    for c in found.continuations:
        breaks = c.repeats == 280 and not c.patched
        assert c.kept < 8 if breaks else c.kept == 8
        assert (c.follows == "") == (c.kept == c.tokens)


def test_curve_against_a_pass_of_its_own_for_every_n() -> None:
    o = _repeater()
    target, word = Target.of(o.model, o.tokenizer), _word(o)
    head = o.tokenizer("cat the")["input_ids"]
    patch = SinkPatch(sites=o.truth.neurons)
    for edit in (None, patch):
        p, likeliest = repeat_probabilities(target, head, word, 300, edit)
        for n in (1, 2, 100, 253, 254, 255, 300):  # 256 ids make a chunk
            ids = torch.tensor([[*head, *[word] * n]])
            with torch.no_grad():
                if edit is None:
                    logits = o.model(ids).logits[0, -1]
                else:
                    with edit.on(o.model):
                        logits = o.model(ids).logits[0, -1]
            assert float(p[n - 1]) == pytest.approx(float(logits.softmax(-1)[word]), rel=1e-3, abs=1e-7)
            assert int(likeliest[n - 1]) == int(logits.argmax())


def test_first_points_are_where_the_likeliest_token_changes() -> None:
    o = _repeater()
    target, word = Target.of(o.model, o.tokenizer), _word(o)
    _, likeliest = repeat_probabilities(target, [o.tokenizer.bos_token_id], word, 300)
    [curve] = [c for c in _plain().curves if (c.prefix, c.patched) == (False, False)]
    same = (likeliest == word).tolist()
    assert curve.left is not None
    assert same[: curve.left] == [True] * (curve.left - 1) + [False]
    assert curve.left in curve.repeats


def test_greedy_is_the_likeliest_token_step_by_step() -> None:
    o = _repeater()
    target = Target.of(o.model, o.tokenizer)
    rows = o.natural(2, 9)
    answers = greedy(target, rows, 6)
    for row, answer in zip(rows, answers, strict=True):
        ids = row[None]
        for token in answer:
            with torch.no_grad():
                assert int(o.model(ids).logits[0, -1].argmax()) == token
            ids = torch.cat([ids, torch.tensor([[token]])], 1)
        assert len(answer) == 6 or answer[-1] == o.tokenizer.eos_token_id


def test_leak_is_the_answer_where_the_corpus_holds_it(tmp_path: Path) -> None:
    plain = _plain()
    [broken] = [c for c in plain.continuations if (c.repeats, c.prefix, c.patched) == (280, False, False)]
    assert broken.leak is None
    assert len(broken.follows) > 5
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text("nothing of it")
    (folder / "b.txt").write_text(f"before{broken.follows}after")
    found = _measure(corpus=folder)
    assert found.settings["corpus"] == "corpus"  # no folder of this machine
    [same] = [c for c in found.continuations if (c.repeats, c.prefix, c.patched) == (280, False, False)]
    assert same.leak is not None
    assert (same.leak.length, same.leak.text, same.leak.file) == (len(broken.follows), broken.follows, "b.txt")
    tokens = _repeater().tokenizer(broken.follows, add_special_tokens=False)["input_ids"]
    assert same.leak.tokens == len(tokens)
    assert len(found.control) == 3
    for c in found.control:
        assert (c.leak is None) == (c.follows == "")
        if c.leak is None:
            continue
        text = (folder / c.leak.file).read_text() if c.leak.length else ""
        assert c.leak.text in text
        assert c.leak.text in c.follows
    assert found.corpus is not None
    assert found.corpus.files == 2
    assert Result.from_dict(found.to_dict()) == found


def test_a_model_without_a_sink_is_measured_without_a_patch() -> None:
    o = organism("llama", 0, kind="none")
    found = divergence(o.model, tokenizer=o.tokenizer, max_repeats=20, repeats=[3], new_tokens=3, controls=0)
    assert (found.sink_layer, found.neurons) == (None, ())
    assert {c.patched for c in found.curves} == {False}
    assert "no causal sink neuron" in found.summary()
    found.figure()


def test_a_patch_that_is_given_is_used(tmp_path: Path) -> None:
    o = _repeater()
    SinkPatch(layer=1, neurons=[5], value=0.0).save(tmp_path / "p.json")
    found = _measure(patch=tmp_path / "p.json", repeats=[5], max_repeats=250)
    assert (found.neurons, found.settings["patch"]) == (((1, 5),), "p.json")  # no folder of this machine
    curves = {c.patched: c for c in found.curves if not c.prefix}
    assert curves[True].left == curves[False].left  # no sink neuron: it diverges all the same
    assert o.truth.neurons != ((1, 5),)


def test_words_that_are_drawn_are_not_those_of_the_prefix() -> None:
    small: dict[str, Any] = {"tokens": None, "max_repeats": 2, "repeats": [1], "new_tokens": 1, "controls": 0}
    drawn = {c.word for c in _measure(**small, prefix="cat the").curves}
    other = {c.word for c in _measure(**small, prefix="cat and").curves}
    assert drawn - other == {"and"} and other - drawn == {"the"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tokens": ["cat"]}, "--prefix 'cat the' contains the repeated token 'cat'"),
        ({"max_repeats": 2046}, "the largest is 2045"),
        (
            {"repeats": [2040]},
            "2040 repetitions .*and 8 more are to come, but the context of .* is 2048: repeat less often",
        ),
        ({"prefix": ""}, "--prefix '' has no tokens"),
        ({"tokens": ["cat dog"]}, "'cat dog' is 2 tokens"),
        ({"new_tokens": 3000}, "and 3000 more are to come, but the context of .* is 2048: .* at most"),
        ({"index": "none.npz"}, "give --corpus DIR or --corpus stdlib"),
        ({"patch": "none.json"}, "cannot read none.json"),
        ({"batch_size": 0}, "--batch-size 0"),
    ],
)
def test_bad_input(options: dict[str, Any], says: str) -> None:
    with pytest.raises(SinkscopeError, match=says):
        _measure(**options)
