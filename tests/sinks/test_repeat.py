"""`repeat --read norm` and `--read attention`: against planted truth and against the long way; what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attack_kit import setup_of, text_file
from covering import slow
from organisms import Organism, hard, organism
from organisms.decoders import byte_tokenizer, decoder
from raw_kit import attention, norms, zeroed
from refusals import refused

from sinkscope.models.text import text_rows
from sinkscope.results.parts import sites_of
from sinkscope.sinks.find.repetitions import repeats_until_half
from sinkscope.sinks.repetition.attention import TAIL
from sinkscope.sinks.repetition.repeat import Repeat, repeat
from sinkscope.sinks.repetition.sweep import beside_copies

pytestmark = pytest.mark.few_texts


def norms_of(o: Organism, ids: list[int]) -> torch.Tensor:
    return norms(o.model, torch.tensor([ids]))[o.truth.sink_layer, 0]


def word_of(o: Organism, group: int) -> str:
    return str(o.tokenizer.decode([o.tokens_of(group)[0]]))


def measured(o: Organism, **options) -> Repeat:
    return repeat(o.model, tokenizer=o.tokenizer, **options)


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


def test_a_marked_word_becomes_a_sink_where_its_norm_crosses_half_of_the_spike(llama):
    """As many repetitions alone, and one fewer, stand on both sides of it; a word of no group never gets there."""
    expected = llama.truth.repeats_expected or 0
    result = measured(llama, tokens=[word_of(llama, 0), word_of(llama, -1)], max_repeats=4 * expected)
    norm, sweep = result.reading, result.reading.sweep
    assert result.sink_layer == llama.truth.sink_layer
    marked = int(norm.repeats[0])
    assert 0.6 * expected <= marked <= 1.5 * expected and np.isnan(norm.repeats[1])
    for count in (marked - 1, marked):
        alone = norms_of(llama, llama.repeated(count, sweep.ids[0])[0].tolist())
        assert (alone[-1] >= alone[0] / 2) == (count == marked)
    assert norm.norms[0, 1].max() < 0.1 * norm.reference
    assert [row["repeats"] for row in result.rows()] == [marked, None]
    (claim,) = result.claims
    assert claim.verdict == "sufficient"


@pytest.mark.parametrize("group", [0, -1])
def test_copies_stand_beside_one_copy_and_other_tokens_at_the_same_position(llama, group):
    """A word that no head marks reaches nothing, and the most that it reached is said."""
    result = measured(llama, tokens=[word_of(llama, group)], max_repeats=40)
    (claim,), (word,) = result.claims, result.reading.sweep.ids
    setup = setup_of(llama)
    rows = beside_copies(setup, torch.tensor([[llama.tokenizer.bos_token_id, *[word] * 40]]), 1)
    copies, single, others = (rows[0] for rows in rows)
    assert (single[1:] == word).nonzero().flatten().tolist() == [39] and not (others == word).any()
    shares = [float(norms_of(llama, row.tolist())[-1]) / result.reading.reference for row in (copies, single, others)]
    assert [claim.value, *[one.value for one in claim.contrasts]] == pytest.approx(shares, rel=1e-3)
    assert (claim.verdict == "sufficient") == (shares[0] - max(shares[1:]) >= 0.5)
    assert claim.search.most == pytest.approx(claim.value)


def test_ablation_takes_the_planted_neurons_and_gives_the_norms_of_ablated_passes(two):
    words, layer = [word_of(two, 0), word_of(two, 1)], two.truth.sink_layer
    count = 2 * (two.truth.repeats_expected or 0)
    result = measured(two, tokens=words, max_repeats=count, ablate=True)
    norm, sweep = result.reading, result.reading.sweep
    assert layer is not None and norm.conditions == ("intact", "set", "control")
    assert set(sites_of(norm.zeroed[1])) == set(two.truth.neurons)
    assert len(norm.zeroed[2]) == len(norm.zeroed[1]) and not set(norm.zeroed[2]) & set(norm.zeroed[1])
    rows = torch.tensor([[two.tokenizer.bos_token_id, *[word] * count] for word in sweep.ids])
    for condition, sites in enumerate(norm.zeroed):
        with zeroed(two.model, sites_of(sites)):
            expected = norms(two.model, rows)[layer]
        assert norm.norms[condition] == pytest.approx(expected[:, sweep.counts].numpy(), rel=2e-3)
    claim, _ = result.claims
    left, chance = 1 - norm.lost[1:].mean(1)
    assert (
        claim.verdict == "needed"
        and claim.value == pytest.approx(left)
        and claim.control.value == pytest.approx(chance)
    )


def test_where_the_spike_is_elsewhere_its_norm_is_the_reference_and_its_place_is_named(tmp_path):
    """Norms of delimiters from plain passes; nothing is said of a first token."""
    m = hard("two_delimiters", "llama")
    options = {"tokenizer": m.tokenizer, "text": text_file(m, tmp_path), "max_repeats": 6}
    result = repeat(m.model, **options)
    ids = m.natural(40, 64)
    every = norms(m.model, ids)[result.sink_layer]
    there = ids == m.truth.delimiters[0]
    assert result.reading.place == f"{m.tokenizer.decode([m.truth.delimiters[0]])!r} wherever it stands"
    assert result.reading.reference == pytest.approx(float(every[there].median()), rel=0.1)
    assert result.reading.reference > 3 * float(every[:, 0].median())
    attended = repeat(m.model, read="attention", **options)
    for said in (str(result), str(attended)):
        assert result.reading.place in said and "first token" not in said
    delimiter, word = (m.tokenizer.decode([token]) for token in (m.truth.delimiters[0], m.truth.delimiters[0] + 1))
    known = repeat(m.model, tokens=[delimiter, word], **options)
    assert known.reading.repeats[0] == 1


def test_a_spike_at_one_position_of_any_text_is_not_made_by_repetition():
    norms = torch.tensor([1.0, 1, 9, 1, 9, 9, 9])
    assert [repeats_until_half(norms[:end], 10.0) for end in (4, 6, 7)] == [None, 5, 5]
    assert repeats_until_half(torch.tensor([9.0, 1, 1]), 10.0) == 1


# --- attention -----------------------------------------------------------------------------------------------------


def test_every_special_token_of_a_text_stands_before_the_repetitions():
    m = hard("all_specials", "qwen3")
    found = repeat(m.model, read="distance", tokenizer=m.tokenizer, prefix="", max_repeats=4).reading
    assert found.sweep.before == tuple(m.tokenizer.convert_ids_to_tokens(list(m.truth.before)))


def test_attention_of_each_class_is_that_of_whole_matrices(llama, tmp_path):
    """In natural text, with copies, and with one copy; and what the copies get together."""
    count, text = 60, text_file(llama, tmp_path, 1, length=900)
    result = measured(llama, read="attention", tokens=[word_of(llama, 0)], max_repeats=count, text=text)
    found, bos = result.reading, llama.tokenizer.bos_token_id
    natural = text_rows(llama.tokenizer, text.read_text(), 1, count + 1 + TAIL, bos)
    setup = setup_of(llama, text=text)
    copies, single, _ = beside_copies(setup, torch.tensor([[bos, *[found.sweep.ids[0]] * count]]), 1)
    ids = torch.cat([torch.cat([natural[:, :-TAIL], copies, single]), natural[:, -TAIL:].expand(3, -1)], 1)
    every = attention(llama.model, ids).mean(2)[..., -TAIL:, :]  # layer sequence query key
    assert found.received[:, 0] == pytest.approx(every[..., 0].mean(-1).T.numpy(), abs=1e-5)
    there = every[..., 1 : count + 1]
    assert found.received[:, 1] == pytest.approx(there.mean((-1, -2)).T.numpy(), abs=1e-5)
    visible = torch.ones(ids.shape[1], ids.shape[1]).tril()[-TAIL:]
    behind = visible[:, count + 1 :].bool()
    seen = every[..., count + 1 :][..., behind].mean(-1)
    assert found.received[:, 2] == pytest.approx(seen.T.numpy(), abs=1e-5)
    fair = 1 / visible.sum(1)
    assert found.uniform[:, 1] == pytest.approx(float(fair.mean()), rel=1e-4)
    assert found.layer == llama.truth.sink_layer + 1
    together = there[found.layer].sum(-1).mean(-1).tolist()
    (claim,) = result.claims
    values = [claim.contrasts[1].value, claim.value, claim.contrasts[0].value]
    assert values == pytest.approx(together, abs=1e-4)


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
    assert tuple(np.flatnonzero(np.isfinite(attention_.received[0, 1]))) == layers


# --- answers, errors, files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": ["poem book"]}, r"'poem book' is not one known token here, but \['poem', 'book'\]; give a string"),
        ({"tokens": ["poem"], "prefix": "a poem of"}, r"--prefix 'a poem of' contains the repeated token 'poem'"),
        ({"max_repeats": 2048}, r"--max-repeats 2048 and .* the context of .* is 2048: the largest is \d+$"),
        ({"prefix": "of " * 2048, "tokens": ["poem"]}, r"2\d\d\d tokens around them .*: give a shorter --prefix"),
        ({"tokens": ["all"], "read": "distance"}, "--tokens all belongs to --read norm"),
        ({"tokens": ["all"], "prefix": "a poem"}, "--prefix belongs to --tokens WORD: leave it out, or ask for that"),
        ({"ablate": True, "read": "attention"}, "--ablate belongs to --read norm"),
        ({"patch": "p.json"}, "--patch belongs to --read probability"),
        ({"sample": 4}, "--sample belongs to --tokens all"),
    ],
)
def test_bad_input_is_refused_in_one_line(llama, options, message):
    with refused(message):
        measured(llama, **options)
