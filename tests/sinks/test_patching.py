"""make_patch against planted neurons, and its refusals."""

from __future__ import annotations

import functools
import random
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from organisms import Organism
from organisms import organism as new_organism
from organisms.hard import HardModel, hard

import sinkscope.sinks.patch.make as patching
from sinkscope.errors import SinkscopeError
from sinkscope.files.result import Result
from sinkscope.interventions import Ablate, SinkPatch
from sinkscope.models.target import Target
from sinkscope.sinks.patch.evaluate import losses, perplexity_change
from sinkscope.sinks.patch.make import PatchMade, make_patch
from sinkscope.trace.run import trace

organism = functools.cache(new_organism)  # only read where nothing else is said


def _sites(made: PatchMade) -> set[tuple[int, ...]]:
    return {(n.layer, n.neuron) if n.expert is None else (n.layer, n.expert, n.neuron) for n in made.neurons}


def _text(o: Organism, folder: Path, count: int = 1000) -> Path:
    """Words at random: every token of the organism's own, none of them unknown."""
    rng = random.Random(o.seed)
    path = folder / "text.txt"
    path.write_text(" ".join(o.tokenizer.decode([rng.randrange(4, o.model.config.vocab_size)]) for _ in range(count)))
    return path


def _make(o: Organism, folder: Path, **changes: Any) -> PatchMade:
    most = 2 * (o.truth.repeats_expected or 50)
    options: dict[str, Any] = {"max_repeats": most, "words": 4, "pieces": 6, "length": 48, "text": _text(o, folder)}
    return make_patch(o.model, tokenizer=o.tokenizer, **(options | changes))


@functools.cache
def _made_once(family: str, seed: int, kind: str = "sink") -> tuple[Organism, PatchMade]:
    o = organism(family, seed, kind=kind)
    with TemporaryDirectory() as folder:
        return o, _make(o, Path(folder))


@pytest.mark.parametrize(
    ("family", "kind", "seed"),
    [
        ("llama", "sink", 5),
        ("qwen3", "gate", 2),
        ("mixtral", "up", 6),
        ("gemma2", "spread", 12),
        ("neox", "two_stage", 5),
    ],
)
def test_patch_is_the_planted_neurons(family: str, kind: str, seed: int) -> None:
    o, made = _made_once(family, seed, kind)
    # The early stage is two percent of the spike: no norm shows it, and half of the attention stays with it.
    wanted = {*o.truth.neurons, *o.truth.early_neurons}
    assert (made.verdict, _sites(made), made.sink_layer) == ("made", wanted, o.truth.sink_layer)
    assert made.held_out
    assert made.ceiling is not None
    assert all(t.patched <= made.ceiling < t.intact for t in made.held_out)


def test_saved_patch_repairs_what_it_says(tmp_path: Path) -> None:
    """Norms of a held-out token by `trace` under the loaded patch: the second way to the numbers of the table."""
    o, made = _made_once("llama", 5)
    made.patch.save(tmp_path / "patch.json")
    patch = SinkPatch.load(tmp_path / "patch.json")
    site = f"blocks.{made.layer}.hook_resid_post"
    token = made.held_out[0]
    ids = o.repeated(token.repeats, token.id)
    for edit, wanted in ((None, token.intact), (patch, token.patched)):
        if edit is None:
            norms = trace(o.model, ids, [site], "norm")[site]
        else:
            with edit.on(o.model):
                norms = trace(o.model, ids, [site], "norm")[site]
        assert float(norms[0, 1:].max()) == pytest.approx(wanted, rel=1e-4)
    assert made.perplexity is not None
    assert abs(made.perplexity.difference) < 1e-3 * made.perplexity.before


def test_smallest_set_comes_first_and_every_smaller_one_failed() -> None:
    o, made = _made_once("llama", 5)
    assert len(made.neurons) == len(o.truth.neurons) == 3
    assert made.tried[0].neurons == ()
    assert [len(t.neurons) for t in made.tried] == sorted(len(t.neurons) for t in made.tried)
    assert made.ceiling is not None
    assert [t.norm <= made.ceiling for t in made.tried] == [False] * (len(made.tried) - 1) + [True]
    assert sum(len(t.neurons) == 2 for t in made.tried) == 3


def test_harmful_patch_is_refused(tmp_path: Path) -> None:
    """The sink neuron also carries what the model says about ordinary text: its own samples become less likely."""
    o = new_organism("llama", 10, kind="up")  # to be changed
    [(layer, neuron)] = o.truth.neurons
    mlp = o.model.model.layers[layer].mlp
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        # A little of every token's content in the factor that decides about the sink, much of it in what is written:
        # ordinary tokens move the neuron by a small part of the sink's value, and the logits by a lot.
        row = mlp.up_proj.weight[neuron]
        noise = torch.randn(row.shape, generator=generator)
        column = mlp.down_proj.weight[:, neuron]
        spikes = torch.zeros_like(row, dtype=torch.bool)
        spikes[list(o.truth.residual_dims)] = True
        row.add_(torch.where(spikes, 0, 0.01 * row.norm() * noise))
        other = torch.randn(row.shape, generator=generator)
        column.add_(torch.where(spikes, 0, 0.5 * column.norm() * other / other.norm()))
    text = tmp_path / "samples.txt"
    text.write_text(_samples(o, 24, 48))
    made = _make(o, tmp_path, text=text, pieces=20)
    assert made.verdict == "refused"
    assert "would harm" in made.reason
    assert _sites(made) == set(o.truth.neurons)  # it would work, and harm
    assert made.perplexity is not None
    assert made.perplexity.difference / made.perplexity.before > 0.01
    with pytest.raises(SinkscopeError, match="would harm"):
        _ = made.patch
    # the limit is what refuses: with a generous one the same patch is made
    assert _make(o, tmp_path, text=text, pieces=20, limit=1e6).verdict == "made"


def _samples(o: Organism, rows: int, length: int) -> str:
    """What the model itself says, so that any other distribution is further from it."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.full((rows, 1), o.tokenizer.bos_token_id)
    with torch.no_grad():
        for _ in range(length):
            logits = o.model(ids).logits[:, -1]
            logits[:, :4] = -torch.inf
            ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1, generator=generator)], 1)
    return " ".join(o.tokenizer.decode(row[1:]) for row in ids)


def test_no_sink_and_no_repeats_are_answers(tmp_path: Path) -> None:
    none = _make(organism("llama", 0, kind="none"), tmp_path)
    assert (none.verdict, none.neurons, none.sink_layer) == ("no-sink", (), None)
    position = _make(organism("gpt2", 1), tmp_path, max_repeats=100)  # marked by its position: repetition does nothing
    assert (position.verdict, position.unreached) == ("no-repeats", 8)
    assert position.sink_layer is not None
    for made in (none, position):
        assert Result.from_dict(made.to_dict()) == made
        made.figure()


def test_neurons_that_do_not_suffice_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    o = organism("llama", 5)
    found = patching._candidates
    monkeypatch.setattr(patching, "_candidates", lambda *a: found(*a)[:2])
    made = _make(o, tmp_path)
    assert made.verdict == "not-repaired"
    assert "does not fall to the typical range" in made.reason
    assert made.neurons == ()


BACKUPS = [("backup_next", "llama"), ("backup_later", "neox")]


_planted = functools.cache(hard)


def _hard(name: str, family: str, folder: Path) -> tuple[HardModel, dict[str, Any]]:
    h = _planted(name, family)
    (folder / "text.txt").write_text(h.text(120))
    options = {"tokenizer": h.tokenizer, "text": folder / "text.txt", "max_repeats": 600, "words": 2}
    return h, options | {"pieces": 4, "length": 32}


@pytest.mark.parametrize(("name", "family"), BACKUPS)
def test_a_backup_neuron_is_patched_too(name: str, family: str, tmp_path: Path) -> None:
    """Held still, the sink neuron alone is replaced by another in a later layer: the patch needs both."""
    h, options = _hard(name, family, tmp_path)
    made = make_patch(h.model, **options)
    assert (made.verdict, _sites(made)) == ("made", set(h.truth.sets[0]))
    alone = next(t for t in made.tried if t.neurons == tuple(h.truth.sets[0] - set(h.truth.backup)))
    assert made.ceiling is not None and alone.norm <= made.ceiling  # which is typical where the sink was
    assert alone.returns_in == h.truth.backup[0][0]
    assert [one.layer for one in made.later] == list(range(made.layer or 0, h.model.config.num_hidden_layers))
    assert all(one.patched <= one.ceiling < one.intact for one in made.later)
    taken = [one for one in made.later[1:] if (one.ordinary_attention or 0) - (one.intact_attention or 0) > 0.1]
    assert taken and all((one.patched_attention or 0) > 0.8 * (one.ordinary_attention or 1) for one in taken)


@pytest.mark.parametrize(("name", "family"), BACKUPS)
def test_a_sink_that_returns_is_not_repaired(
    name: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the backup among the candidates, the norm is typical in the sink's layer and high after the backup's."""
    h, options = _hard(name, family, tmp_path)
    found = patching._candidates
    kept = set(h.truth.backup)
    monkeypatch.setattr(patching, "_candidates", lambda *a: [n for n in found(*a) if n.site not in kept])
    made = make_patch(h.model, **options)
    assert (made.verdict, made.neurons) == ("not-repaired", ())
    assert f"the sink returns in layer {h.truth.backup[0][0]}" in made.reason
    assert made.conclusion().startswith("Not repaired") and Result.from_dict(made.to_dict()) == made
    with pytest.raises(SinkscopeError, match="the sink returns"):
        _ = made.patch


def test_attention_that_does_not_come_back_is_not_repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that read the mark, not the spike, stay with the repeated tokens, whose norm is typical again."""
    o, made = _made_once("llama", 5)
    layer = o.truth.sink_layer
    assert layer is not None
    ids = o.repeated(made.held_out[0].repeats, made.held_out[0].id)
    at = made.later[1]
    for edit, wanted in ((None, at.intact_attention), (made.patch, at.patched_attention)):
        site, half = f"blocks.{at.layer}.attn.hook_pattern", ids.shape[1] // 2
        rows = [o.repeated(t.repeats, t.id) for t in made.held_out]
        with nullcontext() if edit is None else edit.on(o.model):
            probs = [trace(o.model, row, [site])[site][0, :, half:, 0] for row in rows]
        assert float(torch.stack(probs).mean()) == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    real = patching._attention_to_first
    monkeypatch.setattr(patching, "_attention_to_first", lambda t, la, r, e, b: real(t, la, r, None, b))
    kept = _make(o, tmp_path)
    assert (kept.verdict, _sites(kept)) == ("not-repaired", set())
    assert f"in layer {layer + 1} repeated tokens still take the attention" in kept.reason
    monkeypatch.setattr(patching, "_smallest", lambda s, c, *_: (tuple(c), ()))  # seen on held-out tokens alone
    last = _make(o, tmp_path)
    assert (last.verdict, _sites(last)) == ("not-repaired", set(o.truth.neurons))
    assert f"in layer {layer + 1} repeated tokens still take the attention: the first token receives" in last.reason


def test_of_a_large_causal_set_neurons_are_left_out_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    o, whole = _made_once("llama", 5)
    monkeypatch.setattr(patching, "MOST", 4)  # nothing, and one neuron alone
    made = _make(o, tmp_path)
    assert (made.verdict, _sites(made)) == (whole.verdict, _sites(whole)) == ("made", set(o.truth.neurons))
    assert [len(t.neurons) for t in made.tried][:4] == [0, 1, 1, 1] and len(made.tried[4].neurons) == made.causal


def test_perplexity_is_that_of_single_rows(tmp_path: Path) -> None:
    o = organism("llama", 3)
    target = Target.of(o.model, o.tokenizer)
    ids = o.natural(5, 20)
    edit = Ablate(layer=0, neurons=list(range(10)))
    before, after = losses(target, ids), losses(target, ids, edit, batch_size=2)

    def mean(rows: Any) -> float:
        total = 0.0
        for row in rows:
            logits = o.model(row[None]).logits[0].log_softmax(-1)
            total -= sum(float(logits[i, row[i + 1]]) for i in range(1, 19)) / 18
        return total / len(rows)

    with torch.no_grad():
        plain = mean(ids)
        with edit.on(o.model):
            edited = mean(ids)
    change = perplexity_change(before, after)
    assert change.before == pytest.approx(torch.tensor(plain).exp().item(), rel=1e-4)
    assert change.after == pytest.approx(torch.tensor(edited).exp().item(), rel=1e-4)
    pairs = after - before
    assert change.se == pytest.approx(float(pairs.std() / 5**0.5) * change.after, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tokens": ["poem"]}, "at least two different ones"),
        ({"tokens": ["poem", "no such word"]}, "is 3 tokens"),
        (
            {"max_repeats": 5000},
            "--max-repeats 5000 and .* the context of .* is 2048: the largest is 2047",
        ),
        ({"limit": -0.1}, "--limit -0.1: expected a number from 0"),
        ({"pieces": 1}, "--pieces 1: expected a whole number from 2"),
        ({"words": 0}, "--words 0: expected a whole number from 1"),
    ],
)
def test_bad_input(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(SinkscopeError, match=says):
        _make(organism("llama", 0), tmp_path, **options)
