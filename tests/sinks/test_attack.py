"""Cluster attacks against planted groups, and what they are made of against slower ways to the same."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from attack_kit import mixed_clusters, planted_clusters, text_file, trials_of
from hypothesis import given, settings
from hypothesis import strategies as st
from organisms import Organism
from organisms import organism as new_organism
from scipy.stats import binomtest

from sinkscope.app.cli import main
from sinkscope.errors import SinkscopeError
from sinkscope.files.result import Result
from sinkscope.sinks.attack.attack import AttackRow, ClusterAttack, cluster_attack, wilson
from sinkscope.sinks.attack.vocabulary import coordinate, drawn_sequences, greedy, make_pools, repeat, round_trip

organism = functools.cache(new_organism)  # only read here


def _attack(o: Organism, folder: Path, **options: Any) -> ClusterAttack:
    options = {
        "clusters": planted_clusters(o),
        "lengths": [8],
        "sequences": 24,
        "searched": 0,
        "prefix": "",
        **options,
    }
    return cluster_attack(o.model, tokenizer=o.tokenizer, text=text_file(o, folder), **options)


@functools.cache
def _attack_once(family: str, seed: int, bos: bool = True) -> ClusterAttack:
    with TemporaryDirectory() as folder:
        return _attack(organism(family, seed, bos=bos), Path(folder))


def _only(result: ClusterAttack, context: str, source: str) -> AttackRow:
    (row,) = [a for a in result.attacks if (a.context, a.source) == (context, source)]
    return row


@pytest.mark.parametrize(("family", "seed", "bos"), [("llama", 1, False), ("qwen3_moe", 1, True), ("neox", 2, True)])
def test_two_tokens_of_a_group_suffice_without_bos(family: str, seed: int, bos: bool) -> None:
    o, found = organism(family, seed, bos=bos), _attack_once(family, seed, bos)
    cluster, random = _only(found, "no BOS", "cluster"), _only(found, "no BOS", "random")
    assert cluster.first == 2 and cluster.positions == cluster.most.share == 1 and cluster.most.low > 0.8
    assert _only(found, "no BOS", "repeated").positions == 1
    assert random.most.share < 0.2 and random.positions < 0.3
    assert {c.head for c in found.clusters} == set(planted_clusters(o))
    if bos:  # BOS outweighs eight tokens
        assert _only(found, "BOS", "cluster").any.share == 0


def test_a_wrong_assignment_makes_no_attack(tmp_path: Path) -> None:
    o = organism("llama", 1, bos=False)
    wrong = _only(_attack(o, tmp_path, clusters=mixed_clusters(o)), "no BOS", "cluster")
    assert wrong.most.share < 0.2 and wrong.positions < 0.3


def test_behind_bos_it_takes_as_many_tokens_as_a_repetition(tmp_path: Path) -> None:
    o = organism("qwen3", 50)  # its groups have more tokens than that
    found = _attack(o, tmp_path, lengths=[70], sequences=8, bos=True)
    cluster, expected = _only(found, "BOS", "cluster"), o.truth.repeats_expected
    assert expected is not None and cluster.first is not None
    assert 0.6 * expected <= cluster.first <= 1.3 * expected  # the range that holds for repetitions
    assert cluster.any.share == 1 and not any(cluster.by_position[: int(0.6 * expected)])
    assert _only(found, "BOS", "random").any.share == 0
    assert [a.context for a in found.attacks] == ["BOS"] * 3


def test_found_clusters_do_as_well_as_planted_ones(tmp_path: Path) -> None:
    found = _attack(organism("llama", 1, bos=False), tmp_path, clusters=None)
    assert _only(found, "no BOS", "cluster").most.share == 1


def test_norms_are_those_of_single_plain_passes(tmp_path: Path) -> None:
    o = organism("llama", 0)
    trials = trials_of(o, tmp_path)
    rows, _ = drawn_sequences(trials.pools, 6, 5, 0)
    layer = o.truth.sink_layer
    assert layer is not None
    first = o.model(o.natural()[:, :1], output_hidden_states=True).hidden_states[layer + 1][:, 0].norm(dim=-1)
    for context in trials.contexts:
        norms = trials.norms(context, rows)
        start = max(len(context.lead), 1)
        for row, ours in zip(rows, norms, strict=True):
            ids = torch.tensor([[*context.lead, *row]])
            plain = o.model(ids, output_hidden_states=True).hidden_states[layer + 1][0, start:].norm(dim=-1)
            torch.testing.assert_close(ours, plain / first.median(), rtol=1e-4, atol=1e-5)


def test_rates_are_counts_of_norms(tmp_path: Path) -> None:
    o = organism("llama", 0)
    found = _attack(o, tmp_path, thresholds=[0.3, 0.5, 0.9])
    trials = trials_of(o, tmp_path)
    rows, _ = drawn_sequences(trials.everyone, 8, 24, 0)
    row = _only(found, "no BOS", "random")
    norms = trials.norms(trials.contexts[1], rows).tolist()
    hits = [[n >= 0.5 for n in one] for one in norms]
    assert row.any.share == sum(map(any, hits)) / 24
    assert row.most.share == sum(sum(h) >= len(h) / 2 for h in hits) / 24
    assert row.positions == pytest.approx(sum(map(sum, hits)) / (24 * 7))
    assert row.any_swept == pytest.approx([sum(max(n) >= t for n in norms) / 24 for t in (0.3, 0.5, 0.9)])
    assert 0 < row.any.share < 1  # else this test shows nothing


def _pools(sizes: list[int]) -> dict[int, torch.Tensor]:
    ids = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(1)).tolist()
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return make_pools({h: ids[s : s + n] for h, (s, n) in enumerate(zip(starts, sizes, strict=True))}, len(ids), set())


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(2, 30), min_size=1, max_size=4),
    length=st.integers(2, 20),
    count=st.integers(1, 9),
    candidates=st.integers(2, 4),
    seed=st.integers(0, 1 << 62),
)
def test_sequences_repeat_nothing_stay_in_their_cluster_and_searches_gain(
    sizes: list[int], length: int, count: int, candidates: int, seed: int
) -> None:
    pools = _pools(sizes)
    worth = torch.rand(sum(sizes), generator=torch.Generator().manual_seed(seed))

    def score(ids: torch.Tensor) -> torch.Tensor:
        return worth[ids]

    rows, heads = drawn_sequences(pools, length, count, seed)
    assert len(rows) == (count if max(sizes) >= length else 0)
    grown, of = greedy(score, pools, length, count, candidates, seed)
    better = coordinate(score, rows, heads, pools, candidates, seed)
    for ids, owners in ((rows, heads), (grown, of), (better, heads)):
        assert len(ids) == len(rows)
        for row, head in zip(ids.tolist(), owners.tolist(), strict=True):
            assert len(set(row)) == length and set(row) <= set(pools[head].tolist())
    assert (score(better).mean(1) >= score(rows).mean(1) - 1e-6).all()


def test_searches_find_better_sequences_than_chance() -> None:
    pools, worth = _pools([64]), torch.linspace(0, 1, 64)
    rows, heads = drawn_sequences(pools, 8, 16, 0)
    drawn = worth[rows].mean()
    assert worth[greedy(lambda ids: worth[ids], pools, 8, 16, 8, 0)[0]].mean() > drawn + 0.2
    assert worth[coordinate(lambda ids: worth[ids], rows, heads, pools, 8, 0)].mean() > drawn + 0.2


def test_a_repetition_is_of_the_same_tokens() -> None:
    rows, _ = drawn_sequences(_pools([9, 9]), 4, 3, 0)
    assert repeat(rows).tolist() == [[row[0]] * 4 for row in rows.tolist()]


def test_round_trip_sees_tokens_that_join() -> None:
    tokenizer = organism("qwen2", 0).tokenizer  # pieces of words: some join when written side by side
    alone = tokenizer.convert_tokens_to_ids(["p", "o", "Ġ"])
    assert round_trip(tokenizer, torch.tensor([alone[:2], alone[2:] + alone[:1]])) < 1
    assert round_trip(organism("llama", 0).tokenizer, torch.tensor([[7, 9], [12, 8]])) == 1


@settings(max_examples=30)
@given(trials=st.integers(1, 2000), share=st.floats(0, 1))
def test_the_interval_is_wilsons(trials: int, share: float) -> None:
    successes = round(trials * share)
    ours = wilson(successes, trials)
    theirs = binomtest(successes, trials).proportion_ci(method="wilson")
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-6)
    assert ours.share == successes / trials


def test_saved_results_come_back_and_batches_do_not_matter(tmp_path: Path) -> None:
    o = organism("llama", 1, bos=False)
    found = _attack(o, tmp_path, searched=2, sequences=9)
    assert Result.from_dict(found.to_dict()) == found
    assert {a.source for a in found.attacks} == {"cluster", "random", "repeated", "greedy", "coordinate"}
    other = _attack(o, tmp_path, searched=2, sequences=9, batch=7)
    assert [(a.example, a.any, a.most) for a in other.attacks] == [(a.example, a.any, a.most) for a in found.attacks]


def test_resumed_after_a_kill(tmp_path: Path) -> None:
    o = organism("llama", 1, bos=False)
    whole = _attack_once("llama", 1, False)
    folder = tmp_path / "kept"

    class Killed(Exception):  # noqa: N818
        pass

    def kill(_what: str, done: int, _total: int) -> None:
        if done == 4:
            raise Killed

    with pytest.raises(Killed):
        _attack(o, tmp_path, batch=8, resume=folder, progress=kill)
    assert 0 < (folder / "attacks" / "runs.jsonl").read_bytes().count(b"\n") < 9
    assert _attack(o, tmp_path, batch=8, resume=folder).attacks == whole.attacks
    with pytest.raises(SinkscopeError, match="other settings"):
        _attack(o, tmp_path, batch=8, resume=folder, seed=1)


@pytest.mark.slow
def test_two_workers_give_the_same_table(tmp_path: Path) -> None:
    o = organism("llama", 1, bos=False)
    assert _attack(o, tmp_path, batch=8, workers=2).attacks == _attack_once("llama", 1, False).attacks


def test_no_sink_is_an_answer(tmp_path: Path) -> None:
    found = cluster_attack(
        (o := organism("llama", 3, kind="none")).model, tokenizer=o.tokenizer, text=text_file(o, tmp_path)
    )
    assert found.sink_layer is None and found.attacks == () and "no sink" in found.summary()
    assert found.figure() is not None


def test_no_cluster_is_an_answer(tmp_path: Path) -> None:
    found = _attack(organism("llama", 1), tmp_path, clusters={}, lengths=[4], sequences=4, searched=0)
    assert found.attacks == () and "serves two tokens" in found.summary()


def test_lengths_that_no_cluster_has(tmp_path: Path) -> None:
    o = organism("llama", 1, bos=False)
    assert _attack(o, tmp_path, lengths=[4, 60]).unfilled == (60,)
    with pytest.raises(SinkscopeError, match=r"--length 60 is more than the 5. tokens of the largest cluster"):
        _attack(o, tmp_path, lengths=[60])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": [1]}, "--length 1: expected a whole number from 2"),
        ({"lengths": []}, "at least 2"),
        ({"sequences": 0}, "--sequences 0: expected a whole number from 1"),
        ({"searched": -1}, "--searched -1"),
        ({"workers": 0}, "--workers 0"),
        ({"thresholds": [0.0]}, "above 0"),
        ({"clusters": {0: [5, 100_000]}}, "token 100000 of head 0 is not in the vocabulary"),
        ({"bos": True}, "no BOS token"),
        ({"lengths": [100_000]}, "--length 100000 .*but the context of"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SinkscopeError, match=message) as caught:
        _attack(organism("llama", 1, bos=False), tmp_path, **options)
    assert "\n" not in str(caught.value)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    o = organism("llama", 1, bos=False)
    folder, text = o.save(tmp_path / "model"), text_file(o, tmp_path)
    words = ["--model", str(folder), "--text", str(text), "--length", "6", "--sequences", "10", "--prefix", ""]
    assert main(["attack", *words, "--searched", "0", "--json", "-"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["kind"] == "attack"
    most = {a["source"]: a["most"]["share"] for a in shown["result"]["attacks"]}
    assert most["cluster"] == most["repeated"] == 1 and most["random"] < 0.5
    assert main(["attack", *words, "--length", "1"]) == 2
    shown = capsys.readouterr().err
    assert "--length" in shown and "2" in shown and shown.count("\n") == 1
    assert main(["attack", "--detect", "--workers", "2", *words]) == 2
    assert "--workers 2: this run has no use for it; leave it out" in capsys.readouterr().err


def test_the_picture_shows_the_numbers(tmp_path: Path) -> None:
    found = _attack(organism("llama", 0), tmp_path, lengths=[4, 8], searched=2, sequences=8)
    traces = found.figure().data
    for row in found.attacks:
        if row.length == 8:
            assert any(t.y == pytest.approx(row.by_position) and t.x[-1] == 8 for t in traces if len(t.x) > 2)
            assert any(t.y == pytest.approx(row.any_swept) for t in traces if len(t.y) == len(found.thresholds))


def test_no_bos_changes_what_stands_before_an_attack_and_not_what_counts_as_success(tmp_path: Path) -> None:
    o = organism("llama", 1)
    both, without = _attack_once("llama", 1), _attack(o, tmp_path, bos=False)
    assert without.reference == both.reference and without.settings["bos"] is False
    assert {a.context for a in both.attacks} == {"BOS", "no BOS"} and {a.context for a in without.attacks} == {"no BOS"}
    assert without.attacks == tuple(a for a in both.attacks if a.context == "no BOS")
