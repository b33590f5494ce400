"""find_sinks against planted truth, and its shortcuts against the long way."""

from __future__ import annotations

import random
import secrets
from pathlib import Path

import pytest
import torch
from attack_kit import setup_of, text_file
from organisms import FAMILIES, KINDS, Organism, hard, organism
from organisms.plan import LEAST_LAYERS
from raw_kit import attention, zeroed
from refusals import refused

from sinkscope.hooks.edit.steer import Add
from sinkscope.measure.margin import margin_of
from sinkscope.models.target import Target
from sinkscope.opening.live import target_of
from sinkscope.sinks.find.find import find_sinks
from sinkscope.sinks.find.layer_scan import LayerReading, LayerScan, scan_layers
from sinkscope.sinks.find.result import FindSinks
from sinkscope.sinks.find.survey import Survey
from sinkscope.sinks.removal.search import smallest_set

WITH_SINK = tuple(kind for kind in KINDS if kind not in ("none", "massive_dim"))


pytestmark = pytest.mark.few_texts


def find_in(o: Organism, folder: Path, **options) -> FindSinks:
    text, limit = text_file(o, folder, 8), (o.model.config.max_position_embeddings or 1000) - 1
    return find_sinks(o.model, tokenizer=o.tokenizer, text=text, max_repeats=min(64, limit), **options)


def test_recovers_random_organisms_of_every_kind(tmp_path):
    """With the fewest layers that each kind needs, or one more; other organisms in every run."""
    seed = secrets.randbits(32)
    rng = random.Random(seed)
    for number, kind in enumerate(WITH_SINK):
        family = rng.choice([name for name, family in FAMILIES.items() if kind in family.kinds])
        n_layers = LEAST_LAYERS[kind] + number % 2
        o = organism(family, rng.getrandbits(30), kind=kind, bos=rng.random() < 0.5, n_layers=n_layers)
        found, truth = find_in(o, tmp_path), o.truth
        causal = {neuron.site for neuron in found.causal if neuron.layer == found.sink_layer}
        made = found.sink_layer, causal, found.spikes[0].step_up
        assert made == (truth.sink_layer, set(truth.neurons), truth.stages), (seed, family, kind)


def test_a_second_measurement_on_a_setup_runs_nothing_again(tmp_path, monkeypatch):
    o = organism("llama", 3)
    setup = setup_of(o, text=text_file(o, tmp_path, 8))
    first = find_sinks.on(setup, max_repeats=8)
    passes, forward = [], Target.forward
    monkeypatch.setattr(Target, "forward", lambda *args, **kwargs: (passes.append(1), forward(*args, **kwargs))[1])
    second = find_sinks.on(setup, max_repeats=8)
    assert not passes and second.details() == first.details() and second.claims == first.claims
    assert find_sinks.on(setup, max_repeats=9).repeats.max_repeats == 9 and passes


@pytest.mark.parametrize(("family", "neurons"), [("llama", 2), ("qwen3", 1)])
def test_the_margin_of_what_carries_attention_is_over_texts(family, neurons, tmp_path):
    """With one neuron, heads are read in the walk that compares it; with several, one by one."""
    o = organism(family, 3)
    assert len(o.truth.neurons) == neurons
    setup = setup_of(o, text=text_file(o, tmp_path, 8))
    (group,) = find_sinks.on(setup, max_repeats=8).sinks[0].groups
    claim = group.claim
    assert claim is not None and claim.draws == 4 and claim.verdict == "needed"
    ids = Survey.of(setup).received.ids[:4, :48]
    layers, numbers = zip(*[(head.layer, head.head) for head in group.heads], strict=True)
    received = []
    for sites in ((), tuple(part.site for part in claim.subject)):
        with zeroed(o.model, sites):
            received.append(attention(o.model, ids)[layers, :, numbers, 1:, 0].mean(-1))
    intact, left = (each.mean(0) for each in received)
    assert claim.value == pytest.approx(float(left.mean() / intact.mean()), rel=1e-3)
    assert claim.margin == pytest.approx(margin_of((left / intact).numpy()), rel=0.02)


def test_tokens_of_the_first_tokens_own_cluster_are_left_out_of_the_median():
    """BOS's neighbour is a sink at its first occurrence: a median of 1 and 90 would say that 45 repetitions do it."""
    o = organism("llama", 2)
    expected, bos = o.truth.repeats_expected or 0, o.tokenizer.bos_token_id
    twin, grouped, free = o.tokens_of(0)[1], o.tokens_of(0)[0], o.tokens_of(-1)[0]
    with torch.no_grad():
        o.model.get_input_embeddings().weight[twin] = o.model.get_input_embeddings().weight[bos]
    words = [o.tokenizer.decode([token]) for token in (twin, grouped, free)]
    result = find_sinks(o.model, tokens=words, tokenizer=o.tokenizer, max_repeats=2 * expected)
    repeats = result.repeats
    assert [token.repeats == 1 for token in repeats.tokens] == [True, False, False]
    assert repeats.median == repeats.tokens[1].repeats and 0.6 * expected <= (repeats.median or 0) <= 1.5 * expected
    assert repeats.tokens[2].repeats is None


def test_copies_are_compared_with_one_copy_and_with_other_tokens_there():
    o = organism("llama", 5)
    word, limit = o.tokenizer.decode([o.tokens_of(0)[0]]), o.model.config.max_position_embeddings - 1
    found = find_sinks(o.model, tokenizer=o.tokenizer, tokens=[word], max_repeats=limit)
    assert found.repetition is not None and found.sink_layer is not None
    copies, same = found.repetition.claims
    ordinary = found.typical_norm[found.sink_layer] / found.spike_norm[found.sink_layer]
    assert copies.verdict == "sufficient" and copies.value > 0.5
    assert [contrast.value for contrast in copies.contrasts] == pytest.approx([ordinary] * 2, rel=0.5)
    assert same is not None and same.verdict == "needed" and same.value < 0.2 < 0.8 < same.control.value


def test_a_layer_that_gives_nan_is_named():
    o = organism("llama", 0)
    o.model.model.layers[1].mlp.down_proj.weight.data[:] = torch.nan
    with refused("layer 1 of .* gives infinite or NaN norms in torch.float32"):
        scan_layers(target_of(o.model, o.tokenizer), o.natural(), whole=True)


def reading(first: float, written: float = 0.0, typically_written: float = 0.0) -> LayerReading:
    """A layer of 4 dimensions after which the first token has this norm, in the direction of the first dimension."""
    spike = torch.eye(4)[0]
    norms, sample = torch.tensor([[first, 2.0, 2.0]]), torch.full((3, 1), typically_written) * spike
    return LayerReading(norms, norms, [], first * spike, 1.0, written * spike, sample)


def three_tokens() -> tuple[Target, torch.Tensor, torch.Tensor]:
    """A model, a text of three tokens, and its first position: the layers are made by hand."""
    return target_of(organism("llama", 0).model), torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, dtype=torch.long)


def test_a_stage_writes_far_more_along_the_spike_than_on_typical_text():
    """Layers 2 and 3 write a tenth of the spike's size; layer 2 writes half of that on typical text, too."""
    layers = [reading(2.0), reading(50.0, 50.0), reading(50.0, 5.0, 2.5), reading(50.0, 5.0, 0.5)]
    scan = LayerScan(*three_tokens(), layers)
    assert scan.stages == [1, 3] and scan.sink_layer == 1


@pytest.mark.parametrize("needed", [{3}, {2, 5}, {0, 4, 9}, set(range(12)), {1, 40}])
def test_the_smallest_set_is_found(needed):
    candidates = range(50)

    def remove(sets):
        return [1.0 if needed <= {*members} else None for members in sets]

    smallest = smallest_set(candidates, remove)
    assert {*smallest} == needed
    assert smallest_set(candidates[:1], remove) is None


def test_a_place_at_the_end_of_a_text_is_not_where_its_attention_is_read(tmp_path):
    m = hard("two_sinks", "llama")
    (delimiter,) = m.truth.delimiters
    ids = m.natural(8, 64)
    ids[ids == delimiter] += 1
    ids[[0, 1, 3, 2], [5, 9, 20, 63]] = delimiter
    text = tmp_path / "text.txt"
    text.write_text(" ".join(m.tokenizer.decode(row[1:]) for row in ids), encoding="utf-8")
    found = find_sinks(m.model, tokenizer=m.tokenizer, text=text, max_repeats=4)
    claims = [claim for claim in found.claims if claim.role == "carries"]
    assert len(claims) == 2
    for claim in claims:
        assert claim.verdict == "needed", claim


def test_an_edit_of_what_enters_a_layer_also_acts_where_passes_begin_there():
    """The same as an edit of what leaves the layer before; an edit behind the spike changes none of it."""
    o = organism("llama", 3)
    layer = o.truth.sink_layer
    vector = torch.randn(o.model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    found: list[tuple[float, ...]] = []
    for site in (f"{layer - 1}.hook_resid_post", f"{layer}.hook_resid_pre", f"{layer + 2}.hook_resid_pre"):
        with Add(vector, f"blocks.{site}").on(o.model):
            result = find_sinks(o.model, tokenizer=o.tokenizer, max_repeats=8)
        found.append(tuple(neuron.contribution_norm for neuron in result.neurons))
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert found[2] != pytest.approx(found[0], rel=1e-2)
