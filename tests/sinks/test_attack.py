"""Attacks on planted groups: the clusters, and what sequences of their tokens do, against slower ways to the same."""

from __future__ import annotations

import functools
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from attack_kit import setup_of, text_file
from covering import slow
from hypothesis import given, settings
from hypothesis import strategies as st
from organisms import Organism, hard
from organisms import organism as new_organism
from raw_kit import attention, blocks, down, inputs_edited, norms
from refusals import refused
from sinkscope.sinks.find.spikes import sink_spike

from sinkscope.errors import SinkscopeError
from sinkscope.results.parts import Head
from sinkscope.sinks.attack import clusters as module
from sinkscope.sinks.attack.attack import ClusterAttack, attack
from sinkscope.sinks.attack.attempts import Attempt, drawn_sequences
from sinkscope.sinks.attack.clusters import head_activations

pytestmark = pytest.mark.few_texts

organism = functools.cache(new_organism)  # only read here


# --- clusters --------------------------------------------------------------------------------------------------------


def planted_heads(o: Organism, ids: np.ndarray) -> np.ndarray:
    """The head of each token's group; NaN for tokens of none."""
    groups = [o.truth.groups[token] for token in ids.tolist()]
    return np.array([np.nan if group < 0 else o.truth.group_heads[group][0] for group in groups])


@pytest.mark.parametrize(
    ("family", "bos"),
    [
        ("qwen3", False),
        *(slow(*case) for case in (("gemma2", True), ("neox", False), ("mixtral", True))),
    ],
)
def test_planted_groups_are_recovered_token_by_token(family, bos):
    o = organism(family, 1, bos=bos)
    result = attack(o.model, tokenizer=o.tokenizer, sequences=0)
    found, planted = result.clusters, planted_heads(o, result.clusters.ids)
    np.testing.assert_array_equal(found.head, planted)
    assert len(found.ids) == o.model.config.vocab_size
    (claim,) = result.claims
    served = np.isfinite(planted)
    assert claim.value == pytest.approx(served.mean()) and claim.verdict == "sufficient"
    assert [contrast.value for contrast in claim.contrasts] == pytest.approx([0, 0], abs=0.05)
    assert set(claim.subject) == {Head(0, int(head)) for head in planted[served]}
    assert sum(row["tokens"] for row in result.rows()) == served.sum()


def test_a_run_that_was_broken_off_goes_on_with_the_same_table(tmp_path, monkeypatch):
    o = new_organism("llama", 1)
    measured = functools.partial(attack, o.model, tokenizer=o.tokenizer, sequences=0)
    monkeypatch.setattr(module, "ROWS", 60)
    whole = measured().to_dict()["result"]
    asked = []

    def breaking(*args):
        asked.append(args[-1])
        if len(asked) == 4:
            raise KeyboardInterrupt
        return head_activations(*args)

    monkeypatch.setattr(module, "head_activations", breaking)
    with pytest.raises(KeyboardInterrupt):
        measured(resume=tmp_path)
    assert measured(resume=tmp_path).to_dict()["result"] == whole
    del asked[3]  # which is asked again
    assert [token for tokens in asked for token in tokens] == whole["clusters"]["ids"]
    with torch.no_grad():
        o.model.model.layers[-1].mlp.down_proj.weight[0, 0] += 1
    with pytest.raises(SinkscopeError, match=r"other settings .*model"):
        measured(resume=tmp_path)


# --- sequences of their tokens ---------------------------------------------------------------------------------------


def attack_on(o: Organism, folder: Path, **options) -> ClusterAttack:
    options = {"lengths": [8], "sequences": 24, **options}
    return attack(o.model, tokenizer=o.tokenizer, text=text_file(o, folder), **options)


@functools.cache
def attack_once(family: str, seed: int, bos: bool = True) -> ClusterAttack:
    with TemporaryDirectory() as folder:
        return attack_on(organism(family, seed, bos=bos), Path(folder))


def by_kind(found: ClusterAttack) -> dict[tuple[str, str, str], Attempt]:
    """The attempts of the only length, by patch, context and source."""
    return {(one.patch, one.context, one.source): one for one in found.attempts}


def test_rates_are_counts_of_norms_of_plain_passes():
    o = organism("neox", 2)
    found, layer = attack_once("neox", 2), o.truth.sink_layer
    assert layer is not None
    ordinary = sorted(set(range(o.model.config.vocab_size)) - set(o.tokenizer.all_special_ids))
    rows = drawn_sequences([ordinary], 8, 24, 0)
    first = norms(o.model, o.natural()[:, :1])[layer].median()
    hits = (norms(o.model, rows)[layer, :, 1:] / first >= 0.5).double()
    random = by_kind(found)["none", "no BOS", "random"]
    assert random.positions == pytest.approx(float(hits.mean()), rel=1e-4)
    assert 0 < random.positions < 1  # else this test shows nothing


def test_a_spike_that_is_not_at_the_first_token_is_named_and_not_attacked(tmp_path):
    m = hard("second_special", "llama")
    found = attack(m.model, tokenizer=m.tokenizer, text=text_file(m, tmp_path), lengths=[4], sequences=4)
    assert found.rows() == [] and found.clusters is None and found.claims == ()
    assert found.conclusion().startswith("No neurons are known that make a norm spike at the first token")


@pytest.mark.parametrize(("family", "seed", "bos"), [("llama", 1, False), ("neox", 2, True)])
def test_listing_1_spreads_the_sink_of_a_second_token_and_our_patch_ends_it(family, seed, bos):
    """GPT-NeoX has no up factor that Listing 1 could hold."""
    found = attack_once(family, seed, bos)
    made = by_kind(found)
    success = {patch: one.positions for (patch, *kind), one in made.items() if kind == ["no BOS", "cluster"]}
    assert {one.context for one in found.attempts} == {"BOS", "no BOS"} - ({"BOS"} if not bos else set())
    if bos:  # it outweighs eight tokens
        assert made["none", "BOS", "cluster"].positions == 0
    listing = {"Listing 1": 1} if family == "llama" else {}
    assert success == {"none": 1, **listing, "patch": 0, "random neurons": 1}
    none, patched, random = (made[patch, "no BOS", "cluster"] for patch in ("none", "patch", "random neurons"))
    assert none.divergence == 0 and patched.divergence > 0.1 and random.divergence < 0.2 * patched.divergence
    assert none.attention > 1.2 * made["none", "no BOS", "random"].attention > 0
    attacked, _ = found.claims
    assert attacked.verdict == "sufficient" and attacked.contrasts[1].value < 0.3
    assert attacked.contrasts[1].value == pytest.approx(made["none", "no BOS", "random"].positions)


def test_attention_and_divergence_against_plain_hooks(tmp_path):
    o = organism("llama", 1)
    found, layer = attack_on(o, tmp_path, sequences=4), o.truth.sink_layer
    setup = setup_of(o, text=text_file(o, tmp_path))
    left_out = {*o.tokenizer.all_special_ids}
    _, *pools = ([token for token in ids if token not in left_out] for ids in found.clusters.pools)
    rows = drawn_sequences(pools, 8, 4, 0)
    ids = torch.cat([rows, setup.ids[:1, -16:].expand(4, -1)], 1)
    received = attention(o.model, ids)[layer + 1 :, ..., 8:, 1:8].sum(-1).mean()
    made = by_kind(found)
    assert made["none", "no BOS", "cluster"].attention == pytest.approx(float(received), rel=1e-3)
    neutral = {neuron.neuron: neuron.neutral_post for neuron in sink_spike(setup).neurons}

    def held(post):
        for neuron, value in neutral.items():
            post[:, 1:, neuron] = value
        return post

    with torch.no_grad():
        intact = o.model(rows).logits[:, -1].softmax(-1)
        with inputs_edited(down(blocks(o.model)[layer]), held):
            patched = o.model(rows).logits[:, -1].softmax(-1)
    divergence = (patched * (patched / intact).log()).sum(-1).mean()
    assert made["patch", "no BOS", "cluster"].divergence == pytest.approx(float(divergence), rel=1e-2)


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(2, 30), min_size=1, max_size=4),
    length=st.integers(2, 20),
    count=st.integers(1, 9),
    seed=st.integers(0, 1 << 62),
)
def test_sequences_repeat_nothing_and_stay_in_their_cluster(sizes, length, count, seed):
    sizes.append(length)
    ends = np.cumsum(sizes).tolist()
    pools = [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    large = [set(pool) for pool in pools if len(pool) >= length]
    drawn = drawn_sequences(pools, length, count, seed)
    assert drawn.shape == (count, length)
    for number, row in enumerate(drawn.tolist()):
        assert len(set(row)) == length and set(row) <= large[number % len(large)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": []}, "--length"),
        ({"bos": True}, "no BOS token"),
        ({"lengths": [60]}, r"--length: the largest cluster, and the context, hold 5. tokens; give at most that"),
    ],
)
def test_bad_input(options, message, tmp_path):
    with refused(message):
        attack_on(organism("llama", 1, bos=False), tmp_path, **options)
