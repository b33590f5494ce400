"""`repeat --read norm` and `--read attention`: against planted truth and against the long way; what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attack_kit import setup_of, text_file
from covering import slow
from organisms import Organism, hard, organism
from organisms.decoders import byte_tokenizer, decoder
from raw_kit import attention, residuals, zeroed
from refusals import refused

from sinkscope.models.text import text_rows
from sinkscope.opening.live import target_of
from sinkscope.results.parts import sites_of
from sinkscope.sinks.repetition.attention import TAIL
from sinkscope.sinks.repetition.repeat import repeat
from sinkscope.sinks.repetition.result import Repeat
from sinkscope.sinks.repetition.sweep import beside_copies, sweep_of
from sinkscope.sinks.spikes.controls import random_neurons
from sinkscope.sinks.spikes.copies import half_reached
from sinkscope.sinks.spikes.spike import Spike
from sinkscope.sinks.spikes.steps import sinks_of

pytestmark = pytest.mark.few_texts


def word_of(o: Organism, group: int) -> str:
    return str(o.tokenizer.decode([o.tokens_of(group)[0]]))


def measured(o: Organism, **options) -> Repeat:
    return repeat(o.model, tokenizer=o.tokenizer, **options)


SPIKES: dict[int, Spike] = {}


def first_spike(o: Organism) -> Spike:
    """The spike of the intact model."""
    if id(o) not in SPIKES:
        SPIKES[id(o)] = sinks_of(setup_of(o)).at_first[0].spike
    return SPIKES[id(o)]


def along(o: Organism, rows: torch.Tensor) -> torch.Tensor:
    """Projection of each position on the spike's direction, by plain hooks: [row, position]."""
    spike = first_spike(o)
    states = residuals(o.model, rows)[spike.peak]
    return (states - spike.mean) @ spike.direction / spike.size


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


def test_a_marked_word_reaches_half_where_its_projection_does_and_a_word_of_no_group_never(llama):
    expected = llama.truth.repeats_expected or 0
    result = measured(llama, tokens=[word_of(llama, 0), word_of(llama, -1)], max_repeats=4 * expected)
    marked = int(result.repeats[0, 0])
    assert 0.6 * expected <= marked <= 1.5 * expected and np.isnan(result.repeats[0, 1])
    for count in (marked - 1, marked):
        alone = along(llama, llama.repeated(count, result.ids[0]))[0]
        assert (alone[-1] >= alone[0] / 2) == (count == marked)
    assert result.values[0, 1].max() < 0.1
    assert [row["repeats"] for row in result.rows()] == [marked, None]
    assert "1 in layers" in result.conclusion() and result.conclusion().startswith("Of 2 tokens")


@pytest.mark.parametrize("group", [0, -1])
def test_copies_stand_beside_one_copy_and_other_tokens_at_the_same_position(llama, group):
    """A word that no head marks reaches nothing."""
    result = measured(llama, tokens=[word_of(llama, group)], max_repeats=40)
    (claim,), (word,) = result.claims, result.ids
    copies = torch.tensor([[llama.tokenizer.bos_token_id, *[word] * 40]])
    single, others = (rows[0] for rows in beside_copies(setup_of(llama), copies, 1))
    assert (single[1:] == word).nonzero().flatten().tolist() == [39] and not (others == word).any()
    shares = along(llama, torch.stack([copies[0], single, others]))[:, -1].tolist()
    assert [claim.value, *[one.value for one in claim.contrasts]] == pytest.approx(shares, rel=1e-3, abs=1e-4)
    assert (claim.verdict == "sufficient") == (shares[0] - max(shares[1:]) >= 0.5)


def test_ablation_takes_the_planted_neurons_and_gives_the_projections_of_ablated_passes(two):
    words = [word_of(two, 0), word_of(two, 1)]
    result = measured(two, tokens=words, max_repeats=2 * (two.truth.repeats_expected or 0), ablate=True)
    assert len(result.conditions) == 3 and result.conditions[1].endswith(", needed neurons zeroed")
    claim, _ = result.claims
    assert set(sites_of(claim.subject)) == set(two.truth.neurons)
    random = random_neurons(target_of(two.model), claim.subject, 0)
    assert len(random) == len(claim.subject) and not set(random) & set(claim.subject)
    count = int(result.at[-1])
    rows = torch.tensor([[two.tokenizer.bos_token_id, *[word] * count] for word in result.ids])
    last = []
    first_spike(two)
    for condition, sites in enumerate([(), claim.subject, random]):
        with zeroed(two.model, sites_of(sites)):
            expected = along(two, rows)
        assert result.values[condition] == pytest.approx(expected[:, result.at].numpy(), rel=2e-3, abs=1e-3)
        last.append(expected[:, -1])
    left, chance = (float((each / last[0]).mean()) for each in last[1:])
    assert claim.verdict == "needed"
    assert [claim.value, claim.control.value] == pytest.approx([left, chance], rel=2e-3, abs=1e-3)


def test_where_the_spike_is_elsewhere_nothing_is_said_of_copies_and_attention_names_the_place(tmp_path):
    m = hard("two_delimiters", "llama")
    options = {"tokenizer": m.tokenizer, "text": text_file(m, tmp_path, 20), "max_repeats": 6}
    attended = repeat(m.model, read="attention", **options)
    names = [f"{m.tokenizer.decode([token])!r} wherever it stands" for token in m.truth.delimiters]
    assert any(name in str(attended) for name in names)
    assert "first token" not in str(attended)
    assert repeat(m.model, **options).conclusion().startswith("No norm spike was found at the first token")


def test_half_is_reached_where_the_next_copy_reaches_it_too():
    along = torch.tensor([0.1, 0.1, 0.9, 0.1, 0.9, 0.9, 0.9])
    assert [half_reached(along[:end].clone()) for end in (4, 6, 7)] == [None, 5, 5]
    assert half_reached(torch.tensor([0.9, 0.1, 0.1])) is None


# --- attention -----------------------------------------------------------------------------------------------------


def test_every_special_token_of_a_text_stands_before_the_repetitions():
    m = hard("all_specials", "qwen3")
    sweep = sweep_of(setup_of(m), None, None, 4)
    assert sweep.rows[0, : sweep.before].tolist() == list(m.truth.before) and sweep.count == 4


def test_attention_of_each_place_is_that_of_whole_matrices(llama, tmp_path):
    """In natural text, with copies, and with one copy; and what the copies get together."""
    count, text = 60, text_file(llama, tmp_path, 1, length=900)
    result = measured(llama, read="attention", tokens=[word_of(llama, 0)], max_repeats=count, text=text)
    bos = llama.tokenizer.bos_token_id
    natural = text_rows(llama.tokenizer, text.read_text(), 1, count + 1 + TAIL, bos)
    copies = torch.tensor([[bos, *[result.ids[0]] * count]])
    single, _ = beside_copies(setup_of(llama, text=text), copies, 1)
    ids = torch.cat([torch.cat([natural[:, :-TAIL], copies, single]), natural[:, -TAIL:].expand(3, -1)], 1)
    every = attention(llama.model, ids).mean(2)[..., -TAIL:, :]  # layer sequence query key
    fair = float((1 / torch.arange(count + 2, ids.shape[1] + 1)).mean())
    there = every[..., 1 : count + 1].sum(-1).mean(-1)
    assert result.values[:, 0] == pytest.approx(every[..., 0].mean(-1).T.numpy() / fair, rel=1e-3, abs=1e-5)
    assert result.values[:, 1] == pytest.approx(there.T.numpy() / count / fair, rel=1e-3, abs=1e-5)
    layer = sinks_of(setup_of(llama)).spikes[0].spike.first + 1
    assert [row["attention"] for row in result.rows()[1::2]] == result.values[:, 1, layer].tolist()
    (claim,) = result.claims
    values = [claim.contrasts[1].value, claim.value, claim.contrasts[0].value]
    assert values == pytest.approx(there[layer].tolist(), abs=1e-4)


@pytest.mark.parametrize("first", [True, slow(False)])
def test_readings_of_attention_leave_layers_without_it_out(first):
    """Hybrids whose attention layers are 0, 2, ... or 1, 3, ...: the theorem holds for layer 0 only."""
    model, tokenizer = decoder("lfm2"), byte_tokenizer()
    if first:
        model, tokenizer = (hybrid := hard("plain", "lfm2")).model, hybrid.tokenizer
    kinds = model.config.layer_types
    layers = [number for number, kind in enumerate(kinds) if kind == "full_attention"]
    options = {"tokenizer": tokenizer, "prefix": "a", "max_repeats": 4}
    distance = repeat(model, read="distance", **options)
    assert distance.conditions[::3] == (f"layer {layers[0]}", f"layer {layers[-1]}")
    assert np.isfinite(distance.values[[0, 3]]).all() and np.isfinite(distance.values[1]).all() == first
    if first:  # the other has no spike
        attended = repeat(model, read="attention", **options)
        assert np.flatnonzero(np.isfinite(attended.values[0, 1])).tolist() == layers


# --- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": ["poem book"]}, r"'poem book' is not one known token here, but \['poem', 'book'\]; give a string"),
        ({"tokens": ["poem"], "prefix": "a poem of"}, r"--prefix 'a poem of' contains a repeated token"),
        ({"max_repeats": 2048}, r"--max-repeats 2048 and .* the context of .* is 2048: there is room for \d+$"),
        ({"prefix": "of " * 2048, "tokens": ["poem"]}, r"2\d\d\d tokens around them .*: there is room for 0"),
        ({"tokens": ["all"], "read": "distance"}, "--tokens all belongs to --read norm"),
        (
            {"tokens": ["all"], "prefix": "a poem"},
            "--tokens all belongs to --read norm without --prefix: leave it out, or ask for that",
        ),
        ({"ablate": True, "read": "attention"}, "--ablate belongs to --read norm"),
        ({"patch": "p.json"}, "--patch belongs to --read probability"),
        ({"resume": "parts"}, "--resume belongs to --tokens all, and not to --read norm"),
    ],
)
def test_bad_input_is_refused_in_one_line(llama, options, message):
    with refused(message):
        measured(llama, **options)
