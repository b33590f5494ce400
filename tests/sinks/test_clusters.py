"""token_clusters against planted groups, and its batch of single heads against ablation head by head."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from organisms import FAMILIES, Organism, organism

from sinkscope.app.cli import main
from sinkscope.errors import SinkscopeError
from sinkscope.files.result import Result
from sinkscope.models.target import Target
from sinkscope.sinks.attack.clusters import HeadWork, TokenClusters, later_mean, pair_norms, token_clusters

HEADED = [f for f in FAMILIES if f != "gpt2"]


def _clusters(o: Organism, **kwargs: Any) -> TokenClusters:
    return token_clusters(o.model, tokenizer=o.tokenizer, **{"sample": 0, **kwargs})


def _planted(o: Organism) -> dict[int, int | None]:
    """The head of each token's group; None for tokens of none."""
    return {t: None if g < 0 else o.truth.group_heads[g][0] for t, g in o.truth.groups.items()}


@pytest.mark.parametrize(
    ("family", "bos"),
    [
        pytest.param(f, bos, marks=[] if bos == (i % 2 == 0) else [pytest.mark.slow])
        for i, f in enumerate(HEADED)
        for bos in (True, False)
    ],
)
def test_planted_groups_are_recovered_token_by_token(family: str, bos: bool) -> None:
    o = organism(family, 1, bos=bos)
    found, planted = _clusters(o), _planted(o)
    wrong = {i: (planted[i], h) for i, h in zip(found.ids, found.head, strict=True) if h != planted[i]}
    assert not wrong and len(found.ids) == o.model.config.vocab_size
    free = sum(h is None for h in planted.values())
    assert (found.silent, found.unserved, found.without_heads) == (free, 0, 0)
    assert sum(c.tokens for c in found.clusters) == len(found.ids) - free
    assert found.neuron == o.truth.neurons[0] or len(o.truth.neurons) > 1
    assert found.lda is not None and found.lda.fired > 0.95 and found.lda.quiet < 0.05


def _one_forward(o: Organism, layer: int, neuron: int, token: int, head: int, mean: torch.Tensor) -> float:
    """The neuron's activation in a forward pass of its own: what other heads write is exchanged by hand."""
    target = Target.of(o.model, o.tokenizer)
    out_proj, down = target.sub(0, target.adapter.o), target.sub(layer, target.adapter.down)
    stored = out_proj.weight.detach()  # GPT-2's is input x output
    weight = (stored.T if target.adapter.transposed_down else stored).unflatten(
        1, (target.n_heads, -1)
    )  # d_model head d_head
    got: list[float] = []

    def exchange(_m: object, args: Any, out: torch.Tensor) -> torch.Tensor:
        gap = (mean - args[0][0, 0]).unflatten(0, (target.n_heads, -1))
        return out + sum(weight[:, h] @ gap[h] for h in range(target.n_heads) if h != head)

    def read(_m: object, args: Any) -> None:
        got.append(float(args[0].reshape(-1, args[0].shape[-1])[0, neuron]))

    handles = [out_proj.register_forward_hook(exchange), down.register_forward_pre_hook(read)]
    with torch.no_grad():
        o.model(torch.tensor([[token]]))
    for handle in handles:
        handle.remove()
    return got[0]


@pytest.mark.parametrize("family", ["llama", "neox", "gemma2", "gpt2"])
def test_one_batch_of_heads_equals_a_forward_pass_for_each(family: str) -> None:
    o = organism(family, 2)
    target = Target.of(o.model, o.tokenizer)
    layer = o.truth.sink_layer
    assert layer is not None
    neuron, mean = o.truth.neurons[0][-1], later_mean(target, o.natural(2, 12))
    work = HeadWork(layer, neuron, 2.0, 0.5, mean, torch.zeros(target.d_model), 0.0)
    tokens = [1, 17]
    shares, _ = work.shares(target, tokens)
    for row, token in zip(shares, tokens, strict=True):
        alone = [_one_forward(o, layer, neuron, token, h, mean) for h in range(target.n_heads)]
        none = _one_forward(o, layer, neuron, token, -1, mean)
        torch.testing.assert_close(2.0 * row[1:], torch.tensor([none, *alone]), rtol=1e-4, atol=1e-4)


def test_later_mean_is_that_of_later_positions_head_by_head() -> None:
    o = organism("qwen2", 1)
    target, ids = Target.of(o.model, o.tokenizer), o.natural(2, 10)
    seen: list[torch.Tensor] = []
    handle = target.sub(0, "self_attn.o_proj").register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    with torch.no_grad():
        o.model(ids)
    handle.remove()
    torch.testing.assert_close(later_mean(target, ids), seen[0][:, 1:].reshape(-1, seen[0].shape[-1]).mean(0))


def test_no_single_head_and_not_in_layer_0_are_answers() -> None:
    spread = _clusters(organism("llama", 1, kind="spread"))
    assert not spread.clusters and spread.unserved > 100 and "No single head" in str(spread)
    for late in (organism("llama", 1, kind="late_mark"), organism("gpt2", 1)):
        found = _clusters(late)
        grouped = sum(g >= 0 for g in late.truth.groups.values()) or len(found.ids)
        assert not found.clusters and found.without_heads == grouped and "not made in layer 0" in str(found)
    none = _clusters(organism("llama", 0, kind="none"))
    assert none.sink_layer is None and none.ids == () and "no attention sink" in str(none)
    assert none.figure() is not None


def test_pairs_of_a_cluster_make_a_sink_and_others_do_not() -> None:
    o = organism("llama", 3)
    found = _clusters(o, sample=16)
    pairs = found.pairs
    assert pairs is not None and pairs.same_head is not None and pairs.other_head is not None
    assert pairs.same_head > 0.9 and pairs.other_head < 0.1 and pairs.adjusted_rand > 0.9
    assert pairs.clusters == len(set(pairs.heads))
    assert found.sink_layer is not None
    first = o.natural(4)[:, :1]
    norm = pair_norms(Target.of(o.model, o.tokenizer), found.sink_layer, list(pairs.ids[:3]), first, batch_size=2)
    with torch.no_grad():  # transformers' own hidden states
        of_first = o.model(first, output_hidden_states=True).hidden_states[found.sink_layer + 1][:, 0].norm(dim=-1)
        second = o.model(torch.tensor([[pairs.ids[2], pairs.ids[1]]]), output_hidden_states=True)
    norm_there = second.hidden_states[found.sink_layer + 1][0, 1].norm()
    torch.testing.assert_close(norm[2, 1], norm_there / of_first.median(), rtol=1e-4, atol=1e-5)


def test_tokens_of_a_head_are_sorted_and_whole() -> None:
    o = organism("mistral", 2)
    found, planted = _clusters(o), _planted(o)
    head = found.clusters[0].head
    mine = found.tokens_of(head)
    best = dict(zip(found.ids, found.best, strict=True))
    assert set(mine) == {t for t, h in planted.items() if h == head}
    assert [best[t] for t in mine] == sorted((best[t] for t in mine), reverse=True)


def test_batches_change_nothing_and_the_result_survives_a_file(tmp_path: Path) -> None:
    o = organism("mixtral", 1)
    one, other = _clusters(o, batch_size=31, sample=4), _clusters(o, sample=4)
    assert (one.head, one.sufficing, one.pairs) == (other.head, other.sufficing, other.pairs)
    torch.testing.assert_close(torch.tensor(one.best), torch.tensor(other.best), atol=2e-4, rtol=1e-4)
    one.save(tmp_path / "c.json")
    assert Result.load(tmp_path / "c.json") == one
    drawn = one.figure()
    bars = dict(zip(drawn.data[0].x, drawn.data[0].y, strict=True))
    assert bars["silent"] == one.silent and bars[f"L0.H{one.clusters[0].head}"] == one.clusters[0].tokens


class _Kill(BaseException):
    pass


def test_a_killed_run_goes_on_with_the_same_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    o = organism("llama", 1)
    whole = _clusters(o, batch_size=60)
    real, calls = HeadWork.__call__, [0]

    def dying(self: HeadWork, target: Target, items: list[int]) -> Any:
        calls[0] += 1
        if calls[0] == 4:
            raise _Kill
        return real(self, target, items)

    monkeypatch.setattr(HeadWork, "__call__", dying)
    with pytest.raises(_Kill):
        _clusters(o, batch_size=60, resume=tmp_path / "r")
    runs = tmp_path / "r" / "runs.jsonl"
    assert runs.read_bytes().count(b"\n") == 3
    os.truncate(runs, runs.stat().st_size - 9)  # the last line was not written whole
    seen: list[tuple[str, int, int]] = []
    resumed = _clusters(o, batch_size=60, resume=tmp_path / "r", progress=lambda *p: seen.append(p))
    chunks = -(-len(whole.ids) // (60 // (whole.n_heads + 2)))
    assert calls[0] - 4 == chunks - 2
    for name in ("ids", "head", "best", "sufficing", "intact", "background", "clusters", "lda"):
        assert getattr(resumed, name) == getattr(whole, name), name
    counts = [done for what, done, _ in seen if what == "tokens x heads"]
    assert counts == sorted(counts) and counts[0] > 0 and counts[-1] == len(whole.ids)
    with pytest.raises(SinkscopeError, match=r"other settings \(.*threshold was 0.5, now 0.25"):
        _clusters(o, batch_size=60, resume=tmp_path / "r", threshold=0.25)
    with pytest.raises(SinkscopeError, match="model"):
        _clusters(organism("llama", 2), batch_size=60, resume=tmp_path / "r")
    with torch.no_grad():
        o.model.model.layers[-1].mlp.down_proj.weight[0, 0] += 1
    with pytest.raises(SinkscopeError, match="model was"):
        _clusters(o, batch_size=60, resume=tmp_path / "r")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(SinkscopeError, match="holds other files"):
        _clusters(o, resume=tmp_path / "mine")


def test_some_tokens_are_what_they_are_among_all() -> None:
    """Also a single one, which would make no plane by itself."""
    o = organism("llama", 0)
    every, token = _clusters(o, sample=0), o.tokens_of(0)[0]
    one = _clusters(o, sample=0, tokens=[o.tokenizer.decode([token])])
    assert (one.ids, one.head) == ((token,), (every.head[every.ids.index(token)],))
    assert one.best == (every.best[every.ids.index(token)],)
    assert one.lda is not None and one.lda.fired == 1.0 and one.lda.quiet == 0.0


def test_bad_input_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    o = organism("llama", 0)
    for arguments, words in (
        ({"threshold": 0.0}, "--threshold 0.0: expected a number from 0.001 up to 1"),
        ({"sample": -1}, "--sample"),
        ({"batch_size": 0}, "--batch-size"),
        ({"workers": 0}, "--workers 0"),
        ({"tokens": ["poem book"]}, "2 tokens"),
        ({"seed": -1}, "--seed -1: expected"),
    ):
        with pytest.raises(SinkscopeError, match=words):
            _clusters(o, **arguments)
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(SinkscopeError, match=r"sinkscope\[ray\]"):
        _clusters(o, workers=2)


def test_command_reads_a_folder_layer_by_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    o = organism("llama", 2)
    folder = str(o.save(tmp_path / "m"))
    capsys.readouterr()
    assert main(["clusters", "--model", folder, "--sample", "0", "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert result["head"] == [_planted(o)[i] for i in result["ids"]]


def test_bundled_model_learned_its_clusters() -> None:
    from sinkscope.measure import Setup

    made = Setup.open()
    tokenizer = made.target.tokenizer
    folder = Path(str(__import__("sinkscope").__file__)).parent / "models" / "bundled"
    circuit = json.loads((folder / "circuit.json").read_text())
    heads = {m["group"]: m["head"] for m in circuit["marking_heads"]}
    words = [
        i for i in range(300, 900, 5) if tokenizer(tokenizer.decode([i]), add_special_tokens=False)["input_ids"] == [i]
    ]
    found = token_clusters(made.target.hf, tokenizer=tokenizer, tokens=[tokenizer.decode([i]) for i in words], sample=0)
    truth = [heads.get(circuit["group_of_token"][i]) for i in found.ids]
    right = sum(a == b for a, b in zip(found.head, truth, strict=True))
    assert len(truth) > 50 and right >= 0.95 * len(truth)


@pytest.mark.slow
def test_two_processes_make_the_same_table(tmp_path: Path) -> None:
    o = organism("llama", 1)
    names = ("ids", "head", "best", "sufficing", "intact", "background", "clusters", "lda", "pairs")
    live, two = (_clusters(o, batch_size=60, sample=8, workers=n) for n in (1, 2))
    folder = o.save(tmp_path / "m")
    named, resumed = (token_clusters(folder, batch_size=60, sample=8, workers=n, resume=tmp_path / "r") for n in (2, 1))
    for name in names:
        assert getattr(live, name) == getattr(two, name), name
        assert getattr(named, name) == getattr(resumed, name), name
        assert getattr(live, name) == getattr(named, name), name
