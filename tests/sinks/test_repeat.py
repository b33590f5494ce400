"""`repeat --read norm` and `--read attention`: against planted truth and against the long way; what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from attack_kit import text_file
from covering import every_nth, slow
from hypothesis import given
from hypothesis import strategies as st
from organisms import Organism, organism
from organisms.decoders import byte_tokenizer, decoder
from organisms.hard import hard
from organisms.planted_places import places
from raw_kit import attention, norms, zeroed
from refusals import refused

from sinkscope.app.cli import main
from sinkscope.hooks.trace.run import trace
from sinkscope.models.text import text_rows
from sinkscope.results.result import Result
from sinkscope.sinks.repetition.attention import TAIL
from sinkscope.sinks.repetition.norm import NormReading
from sinkscope.sinks.repetition.repeat import Repeat, repeat
from sinkscope.sinks.repetition.sweep import Sweep, curve_counts


def norms_of(o: Organism, ids: list[int]) -> torch.Tensor:
    site = f"blocks.{o.truth.sink_layer}.hook_resid_post"
    return trace(o.model, torch.tensor([ids]), [site], "norm")[site][0]


def word_of(o: Organism, group: int, which: int = 0) -> str:
    return str(o.tokenizer.decode([o.tokens_of(group)[which]]))


def measured(o: Organism, **options) -> Repeat:
    return repeat(o.model, tokenizer=o.tokenizer, **options)


def norm_reading(result: Repeat) -> tuple[NormReading, Sweep]:
    return result.reading, result.reading.sweep


@pytest.fixture(scope="module")
def llama():
    """One sink neuron."""
    return organism("llama", 2)


@pytest.fixture(scope="module")
def two():
    """Two sink neurons, which write along different dimensions."""
    seed = next(seed for seed in range(9) if len(organism("qwen3", seed).truth.neurons) > 1)
    return organism("qwen3", seed)


# --- norms ---------------------------------------------------------------------------------------------------------


def test_a_marked_word_becomes_a_sink_where_its_norm_crosses_half_of_the_first_one(llama):
    """As many repetitions alone, and one fewer, stand on both sides of it; a word of no group never gets there."""
    expected = llama.truth.repeats_expected or 0
    result = measured(llama, tokens=[word_of(llama, 0), word_of(llama, -1)], max_repeats=2 * expected)
    norm, sweep = norm_reading(result)
    assert result.sink_layer == llama.truth.sink_layer
    marked = int(norm.repeats[0])
    assert 0.6 * expected <= marked <= 1.5 * expected and np.isnan(norm.repeats[1])
    for count in (marked - 1, marked):
        alone = norms_of(llama, llama.repeated(count, sweep.ids[0][0])[0].tolist())
        assert (alone[-1] >= alone[0] / 2) == (count == marked)
    assert norm.norms[0, 1].max() < 0.1 * norm.first_norms[0, 0]
    assert [row["repeats"] for row in result.rows()] == [marked, None]
    assert f"after {marked} repetitions (median of 1 of 2 tokens)" in result.conclusion()


def test_every_special_token_of_a_text_stands_before_the_repetitions(tmp_path):
    """Each of three special tokens is a sink, so without two of them the first one gets what they share in a text."""
    m = places("all_specials")
    (tmp_path / "text.txt").write_text(m.text(), encoding="utf-8")
    found = repeat(m.model, read="attention", tokenizer=m.tokenizer, text=tmp_path / "text.txt", max_repeats=32)
    sweep = found.reading.sweep
    ids = torch.tensor([[*m.truth.before, *sweep.ids[0] * 32]])
    assert list(sweep.before) == m.tokenizer.convert_ids_to_tokens(list(m.truth.before)) and len(sweep.before) == 3
    tail = text_rows(m.tokenizer, m.text(), 1, 35 + TAIL, m.truth.before[0])[0, -TAIL:]
    plain = attention(m.model, torch.cat([ids, tail[None]], 1))[:, 0, :, -TAIL:, 0].mean((1, 2))
    assert found.reading.received[1, 0] == pytest.approx(plain.detach().numpy(), abs=1e-5)


def test_ablation_takes_the_planted_neurons_and_gives_the_norms_of_ablated_passes(two):
    words, layer = [word_of(two, 0), word_of(two, 1)], two.truth.sink_layer
    count = 2 * (two.truth.repeats_expected or 0)
    result = measured(two, tokens=words, max_repeats=count, ablate=True)
    norm, sweep = norm_reading(result)
    assert layer is not None and norm.conditions == ("intact", "set", "control")
    assert set(norm.zeroed[1]) == set(two.truth.neurons)
    assert len(norm.zeroed[2]) == len(norm.zeroed[1]) and not set(norm.zeroed[2]) & set(two.truth.neurons)
    assert sweep.ids[2] == sweep.ids[0] + sweep.ids[1]
    rows = torch.tensor([[two.tokenizer.bos_token_id, *(ids * count)[:count]] for ids in sweep.ids])
    for condition, sites in enumerate(norm.zeroed):
        with zeroed(two.model, sites):
            expected = norms(two.model, rows)[layer]
        assert norm.first_norms[condition] == pytest.approx(expected[:, 0].numpy(), rel=2e-3)
        assert norm.norms[condition] == pytest.approx(expected[:, sweep.counts].numpy(), rel=2e-3)
    every, control = norm.lost[1:, 0]
    assert every > 0.8 and abs(control) < 0.05
    reached = np.isfinite(norm.repeats)
    lost = np.median(norm.lost[1, reached])
    assert f"zeroing them takes away {lost:.1%} of it" in result.conclusion()
    assert [number.value for number in result.numbers()][1] == pytest.approx(lost)


@given(st.integers(1, 20000))
def test_counts_rise_from_one_to_all(most):
    counts = curve_counts(most).tolist()
    assert counts[0] == 1 and counts[-1] == most and counts == sorted(set(counts))


# --- attention -----------------------------------------------------------------------------------------------------


def test_attention_of_each_class_is_that_of_whole_matrices(llama, tmp_path):
    count, text = 60, text_file(llama, tmp_path, 1, length=900)
    result = measured(llama, read="attention", tokens=[word_of(llama, 0)], max_repeats=count, text=text)
    found = result.reading
    assert found.sequences == ("natural text", *found.sweep.tokens, "one cluster")
    bos = llama.tokenizer.bos_token_id
    natural = text_rows(llama.tokenizer, text.read_text(), 1, count + 1 + TAIL, bos)[0].tolist()
    ids = torch.tensor([natural, [bos, *found.sweep.ids[0] * count, *natural[-TAIL:]]])
    every = attention(llama.model, ids).mean(2)  # layer sequence query key
    visible = torch.ones(ids.shape[1], ids.shape[1]).tril()
    last = range(count + 1, ids.shape[1])
    for sequence, (kind, end) in enumerate([("ordinary", ids.shape[1]), ("repeated", count + 1)]):
        own = found.classes.index(kind)
        pairs = torch.tensor([(query, key) for query in last for key in range(1, min(query + 1, end))])
        seen = every[:, sequence, pairs[:, 0], pairs[:, 1]].mean(1)
        assert found.received[sequence, own] == pytest.approx(seen.numpy(), abs=1e-5)
        fair = (visible / visible.sum(1, keepdim=True))[pairs[:, 0], pairs[:, 1]].mean()
        assert found.uniform[sequence, own] == pytest.approx(float(fair), rel=1e-4)
        first = every[:, sequence, list(last), 0].mean(1)
        assert found.received[sequence, found.classes.index("first")] == pytest.approx(first.numpy(), abs=1e-5)
    assert np.isnan(found.received[0, 1:3]).all() and np.isnan(found.received[1, 2]).all()
    layer = llama.truth.sink_layer + 1
    times = float(every[layer, 0, list(last), 0].mean()) / found.uniform[0, 0]
    assert result.details()[0].startswith(f"The first token receives {times:,.1f} times its share in natural text")


def test_repetitions_that_became_sinks_and_tokens_of_one_cluster_receive_attention_like_the_first_token(llama):
    count = 3 * (llama.truth.repeats_expected or 0)
    found = measured(llama, read="attention", tokens=[word_of(llama, 0), word_of(llama, -1)], max_repeats=count).reading
    first, repeated, cluster, ordinary = map(found.classes.index, ("first", "repeated", "cluster", "ordinary"))
    natural, marked, of_no_group, different = found.times
    assert found.layer == llama.truth.sink_layer + 1
    assert marked[first] < 3 * marked[repeated] and of_no_group[first] > 30 * of_no_group[repeated]
    assert natural[first] > 10 * natural[ordinary] and different[cluster] > different[ordinary]


def test_a_word_of_the_paper_that_had_to_be_replaced_is_named():
    model, tokenizer = decoder("llama"), byte_tokenizer()
    result = repeat(model, tokenizer=tokenizer, read="distance", max_repeats=4)
    replaced = dict(result.reading.sweep.replaced)
    assert tuple(replaced) == ("cat", "dog", "the", "bla") and f"{replaced['bla']!r} for 'bla'" in str(result)
    asked = repeat(model, tokenizer=tokenizer, read="distance", max_repeats=4, tokens=["q"])
    assert asked.reading.sweep.replaced == () and "were replaced" not in str(asked)
    tokenizer.unk_token = "x"  # as if this byte stood for words that the tokenizer does not know
    lacking = repeat(model, tokenizer=tokenizer, read="distance", max_repeats=4, tokens=["q"], prefix="ax")
    assert lacking.reading.sweep.replaced == (("ax", "ax"),) and "were replaced: 'ax' for 'ax'." in str(lacking)


@pytest.mark.parametrize("first", [True, slow(False)])
def test_readings_of_attention_leave_layers_without_it_out(first):
    """Hybrids whose attention layers are 0, 2, ... or 1, 3, ...: the theorem holds for layer 0 only."""
    model, tokenizer = decoder("lfm2"), byte_tokenizer()
    if first:
        model, tokenizer = (hybrid := hard("plain", "lfm2")).model, hybrid.tokenizer
    kinds = model.config.layer_types
    layers = tuple(number for number, kind in enumerate(kinds) if kind == "full_attention")
    distance = repeat(model, tokenizer=tokenizer, read="distance", max_repeats=4).reading
    assert distance.layers == layers and np.isfinite(distance.distance).all()
    assert (distance.outside is None) == first
    attention_ = repeat(model, tokenizer=tokenizer, read="attention", max_repeats=4).reading
    assert tuple(np.flatnonzero(np.isfinite(attention_.received[0, 0]))) == layers


# --- answers, errors, files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": ["poem book"]}, r"'poem book' is 2 tokens \('poem', 'book'\); give a string that is one token"),
        ({"tokens": ["poem"], "prefix": "a poem of"}, r"--prefix 'a poem of' contains the repeated token 'poem'"),
        ({"max_repeats": 2048}, r"--max-repeats 2048 and .* the context of .* is 2048: the largest is \d+$"),
        ({"prefix": "of " * 2048, "tokens": ["poem"]}, r"2\d\d\d tokens around them .*: give a shorter --prefix"),
        ({"tokens": ["all"], "read": "distance"}, "--tokens all is read for its norm only"),
        ({"ablate": True, "read": "attention"}, "--ablate belongs to --read norm"),
        ({"patch": "p.json"}, "--patch belongs to --read probability"),
        ({"sample": 4}, "--sample 4 draws from the vocabulary: give --tokens all"),
    ],
)
def test_bad_input_is_refused_in_one_line(llama, options, message):
    with refused(message):
        measured(llama, **options)


@pytest.mark.parametrize(
    "option", every_nth(["--ablate", "--read=attention", "--read=probability", "--read=distance"], 4)
)
def test_the_command_gives_what_the_function_gives_also_streamed(two, option, tmp_path):
    word, read = word_of(two, 0), option.removeprefix("--read=")
    more, short = {"read": read}, []
    if read == "--ablate":
        more = {"ablate": True}
    elif read == "probability":
        more, short = {**more, "answer_after": [5], "new_tokens": 4}, ["--answer-after", "5", "--new-tokens", "4"]
    live = measured(two, tokens=[word], max_repeats=40, **more)
    folder, out, html = two.save(tmp_path / "model"), tmp_path / "r.json", tmp_path / "r.html"
    words = f"repeat {option} --model {folder} --tokens {word} --max-repeats 40 --json {out} --html {html}".split()
    assert main([*words, *short, *["--all-layers"] * (read == "distance")]) == 0
    loaded = Result.load(out)
    assert isinstance(loaded, Repeat) and loaded.to_dict() == json.loads(out.read_text())
    near = json.loads(json.dumps(live.to_dict()), parse_float=lambda x: pytest.approx(float(x), rel=1e-3, abs=1e-4))
    assert loaded.to_dict()["result"] == near["result"]
    assert 'class="plot"' in html.read_text() and word in html.read_text()
