"""Cluster attacks against planted groups, and what they are made of against slower ways to the same."""

from __future__ import annotations

import functools
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from attack_kit import planted_clusters, setup_of, text_file
from covering import every_nth
from hypothesis import given, settings
from hypothesis import strategies as st
from organisms import Organism, hard
from organisms import organism as new_organism
from raw_kit import attention, blocks, down, inputs_edited, norms
from refusals import refused

from sinkscope.sinks.attack.attack import ClusterAttack, attack
from sinkscope.sinks.attack.attempts import PATCHES, Attempt, drawn_sequences, make_pools
from sinkscope.sinks.find.spikes import sink_spike

pytestmark = pytest.mark.few_texts

organism = functools.cache(new_organism)  # only read here


def attack_on(o: Organism, folder: Path, **options) -> ClusterAttack:
    options = {"clusters": planted_clusters(o), "lengths": [8], "sequences": 24, **options}
    return attack(o.model, tokenizer=o.tokenizer, text=text_file(o, folder), **options)


@functools.cache
def attack_once(family: str, seed: int, bos: bool = True) -> ClusterAttack:
    with TemporaryDirectory() as folder:
        return attack_on(organism(family, seed, bos=bos), Path(folder))


def by_kind(found: ClusterAttack) -> dict[tuple[str, str, str], Attempt]:
    """The attempts of the only length, by patch, context and source."""
    return {(one.patch, one.context, one.source): one for one in found.attempts}


@pytest.mark.parametrize(
    ("family", "seed", "bos"),
    every_nth([("llama", 1, False), ("neox", 2, True), ("qwen3_moe", 1, True)], 3),
)
def test_two_tokens_of_a_group_suffice_without_bos(family, seed, bos):
    found = attack_once(family, seed, bos)
    made = by_kind(found)
    assert {one.context for one in found.attempts} == {"BOS", "no BOS"} - ({"BOS"} if not bos else set())
    cluster, random = made["none", "no BOS", "cluster"], made["none", "no BOS", "random"]
    assert cluster.positions == cluster.most == made["none", "no BOS", "repeated"].positions == 1
    assert random.most < 0.2 and random.positions < 0.3
    if bos:  # BOS outweighs eight tokens
        assert made["none", "BOS", "cluster"].positions == 0


def test_rates_are_counts_of_norms_of_plain_passes():
    o = organism("neox", 2)
    found, layer = attack_once("neox", 2), o.truth.sink_layer
    assert layer is not None
    ordinary = sorted(set(range(o.model.config.vocab_size)) - set(o.tokenizer.all_special_ids))
    rows = drawn_sequences([torch.tensor(ordinary)], 8, 24, 0)
    first = norms(o.model, o.natural()[:, :1])[layer].median()
    share = norms(o.model, rows)[layer, :, 1:] / first
    hits, random = (share >= 0.5).double(), by_kind(found)["none", "no BOS", "random"]
    numbers = (hits.mean(1) >= 0.5).double().mean(), hits.mean()
    assert [random.most, random.positions] == pytest.approx([float(number) for number in numbers], rel=1e-4)
    assert 0 < random.positions < 1  # else this test shows nothing


def test_a_spike_that_is_not_at_the_first_token_is_named_and_not_attacked(tmp_path):
    m = hard("second_special", "llama")
    found = attack(m.model, tokenizer=m.tokenizer, text=text_file(m, tmp_path), lengths=[4], sequences=4)
    assert found.rows() == [] and found.clusters is None and found.claims == ()
    assert found.conclusion().startswith("MLPs make a norm spike at ") and "first token" not in found.conclusion()


def test_listing_1_spreads_the_sink_of_a_second_token_and_our_patch_ends_it():
    found = attack_once("neox", 2)
    made = by_kind(found)
    assert [row["patch"] for row in found.rows()] == [patch for patch in PATCHES for _ in range(6)]
    for source in ("cluster", "repeated"):
        plain = [made[patch, "no BOS", source] for patch in PATCHES]
        assert [one.positions for one in plain] == [1, 1, 0, 1]
        none, listing, patch, random = (one.divergence for one in plain)
        assert none > 0.1 and listing > 0.1 and random == pytest.approx(none, rel=0.2) and patch == 0
    for one in found.attempts:
        if (one.context, one.source) == ("no BOS", "cluster") and one.patch != "patch":
            assert one.attention > one.uniform
    assert max(one.attention for one in found.attempts if one.patch == "patch") == 0
    assert max(made[patch, "BOS", "cluster"].positions for patch in PATCHES) == 0
    attacked, listing, patch = found.attacked
    assert attacked.contrasts[1].value == pytest.approx(made["none", "no BOS", "random"].positions)
    assert patch.contrasts[1].value == pytest.approx(made["random neurons", "no BOS", "cluster"].positions)
    assert [claim.verdict for claim in (attacked, listing, patch)] == ["sufficient", "not shown", "needed"]


def test_attention_and_divergence_against_plain_hooks(tmp_path):
    o = organism("llama", 1)
    found, layer = attack_on(o, tmp_path, sequences=4), o.truth.sink_layer
    rows = drawn_sequences(make_pools(planted_clusters(o), o.model.config.vocab_size, {0, 1, 2, 3}), 8, 4, 0)
    setup = setup_of(o, text=text_file(o, tmp_path))
    ids = torch.cat([rows, setup.ids[:1, -16:].expand(4, -1)], 1)
    high = (norms(o.model, ids)[layer] >= 0.5 * norms(o.model, setup.ids[:, :1])[layer].median()).float()
    high[:, 0] = high[:, 8:] = 0
    received = torch.einsum("lrhqk,rk->lrhq", attention(o.model, ids), high)[layer + 1 :, :, :, 8:].mean()
    cluster = by_kind(found)["none", "no BOS", "cluster"]
    assert cluster.attention == pytest.approx(float(received), rel=1e-3)
    fair = high.sum(1, keepdim=True) / torch.arange(9, 25)
    assert cluster.uniform == pytest.approx(float(fair.mean()), rel=1e-4)

    neutral = {neuron.neuron: neuron.neutral_post for neuron in sink_spike(setup).neurons}

    def held(post):
        for neuron, value in neutral.items():
            post[:, 1:, neuron] = value
        return post

    with torch.no_grad():
        intact = o.model(ids).logits[:, 7].softmax(-1)
        with inputs_edited(down(blocks(o.model)[layer]), held):
            patched = o.model(ids).logits[:, 7].softmax(-1)
    divergence = (patched * (patched / intact).log()).sum(-1).mean()
    assert cluster.divergence == pytest.approx(float(divergence), rel=1e-2)


def pools_of(sizes: list[int]) -> list[torch.Tensor]:
    ids = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(1)).split(sizes)
    return make_pools({head: part.tolist() for head, part in enumerate(ids)}, sum(sizes), set())


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(2, 30), min_size=1, max_size=4),
    length=st.integers(2, 20),
    count=st.integers(1, 9),
    seed=st.integers(0, 1 << 62),
)
def test_sequences_repeat_nothing_and_stay_in_their_cluster(sizes, length, count, seed):
    pools = pools_of(sizes)
    drawn = drawn_sequences(pools, length, count, seed)
    large = [set(pool.tolist()) for pool in pools if len(pool) >= length]
    assert len(drawn) == (count if large else 0)
    for number, row in enumerate(drawn.tolist()):
        assert len(set(row)) == length and set(row) <= large[number % len(large)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": []}, "--length"),
        ({"clusters": {0: [5, 100_000]}}, "expected token ids from 0 to .*, and not 5 to 100000"),
        ({"bos": True}, "no BOS token"),
        ({"lengths": [60]}, r"--length 60 is more than the 5. tokens of the largest cluster"),
        ({"lengths": [100_000]}, "--length 100000 .*but the context of"),
    ],
)
def test_bad_input(options, message, tmp_path):
    with refused(message):
        attack_on(organism("llama", 1, bos=False), tmp_path, **options)
