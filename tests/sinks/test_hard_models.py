"""find_sinks on models that are not the textbook case: whatever it says of them has to be so."""

from __future__ import annotations

import random
import re
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from intervention_kit import bridge_of, nnsight_of
from organisms import FAMILIES, Organism, organism
from organisms.hard import HARD, HardModel, depth, hard

from sinkscope.sinks.first_token.find import FindSinks, find_sinks

CASES = [(name, family) for name, families in HARD.items() for family in families]
# Of each kind one family, so that every family has its turn; the others, and other seeds, are slow.
DEEP = {"small_stages": "neox"}  # 28 layers and more: the family whose layers are the fastest
FAST = [(name, DEEP.get(name, families[k % len(families)])) for k, (name, families) in enumerate(HARD.items())]
SEEDS = (0, 1, 2)
ALSO = {"embedding_spike": {"token embedding"}}  # what else carries it: there the embedding is the spike


def found(model: Any, tokenizer: Any, text: str, **options: Any) -> FindSinks:
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        return find_sinks(model, tokenizer=tokenizer, text=file.name, **({"max_repeats": 8} | options))


def look(h: HardModel, **options: Any) -> FindSinks:
    return found(h.model, h.tokenizer, h.text(), **options)


def mistakes(h: HardModel, result: FindSinks) -> list[str]:
    """Everything in which the result differs from what was planted."""
    truth, spike, sink = h.truth, result.norm_spike, result.attention_sink
    at_first = spike is not None and 0 in spike.positions
    attended = {} if sink is None else {p.position: p.token for p in sink.positions}
    sets = {
        kind: [frozenset(s.edit_sites) for s in result.causal_sets if s.kind == kind] for kind in ("minimal", "backup")
    }
    delimiters = {h.tokenizer.decode([token]): frozenset(sites) for token, sites in truth.later.items()}
    with_spike = {token: sites for token, sites in delimiters.items() if sites}
    later = {s.token: frozenset() if s.set is None else frozenset(s.set.edit_sites) for s in result.later_sinks}
    carriers = {truth.carried_by} | ALSO.get(h.name, set())
    pairs = {
        "spike": (at_first, truth.spike),
        "sink": (0 in attended, truth.sink),
        "sink layer": (result.sink_layer, truth.sink_layer),
        "sinks behind the first token": (sorted(t for p, t in attended.items() if p), sorted(delimiters)),
        "spikes behind the first token": (later, with_spike),
        "backup": (sets["backup"], [frozenset(truth.backup)] if truth.backup else []),
        "shared dimensions": (sorted(result.shared_dims), sorted(truth.shared_dims)),
        "step up": (spike.step_up if at_first and truth.step_up else (), truth.step_up),
        "step down": (spike.step_down if at_first else (), truth.step_down),
    }
    wrong = [f"{name}: found {got}, planted {wanted}" for name, (got, wanted) in pairs.items() if got != wanted]
    if (None if sink is None else sink.carried_by) not in carriers:
        wrong.append(f"carried by: found {None if sink is None else sink.carried_by}, planted {carriers}")
    if not (sets["minimal"] and sets["minimal"][0] in truth.sets if truth.sets else not sets["minimal"]):
        wrong.append(f"minimal set: found {sets['minimal']}, planted {[set(s) for s in truth.sets]}")
    return [*wrong, *unproven(h, result), *misleading(h, result)]


def unproven(h: HardModel, result: FindSinks) -> list[str]:
    """Sets whose numbers are no proof."""
    wrong: list[str] = []
    for s in result.causal_sets:
        drops = {"sink layer": s.drop_sink_layer, "last layer": s.drop_last_layer}
        drops |= (
            {"attention": s.drop_attention or 0.0}
            if s.kind == "minimal" and h.truth.sink and h.truth.carried_by == "spike"
            else {}
        )
        for name, drop in drops.items():
            if s.kind == "minimal" and not (drop > 0.5 and drop > s.control):
                wrong.append(f"{s.kind} set {s.edit_sites}: {name} drop {drop:.2f}, control {s.control:.2f}")
    causal = {n.site for n in result.causal}
    actors = frozenset().union(*h.truth.sets)
    if causal - actors - stage_sites(h, result):
        wrong.append(f"causal: found {causal}, planted {set(actors)}")
    return wrong


def stage_sites(h: HardModel, result: FindSinks) -> set[tuple[int, ...]]:
    """Neurons of smaller stages: they make their part of the norm."""
    return {n.site for n in result.causal if n.layer in h.truth.step_up and n.layer != h.truth.sink_layer}


def misleading(h: HardModel, result: FindSinks) -> list[str]:
    """What the conclusion says that is not so."""
    text, truth = result.conclusion(), h.truth
    attended = truth.sink or bool(truth.later) or truth.carried_by == "learned logits"
    risen = truth.spike or any(truth.later.values())
    beginning = {
        (True, True): "Norm spike and attention sink",
        (True, False): "Norm spike without an attention sink",
        (False, True): "Attention sink without a norm spike",
        (False, False): "Neither a norm spike nor an attention sink",
    }[risen, attended]
    wrong = [] if text.startswith(beginning) else [f"the conclusion does not begin with {beginning!r}"]
    actors = {str(site[-1]) for sites in truth.sets for site in sites}
    named = set(re.findall(r"\.N(\d+)", text))
    wrong += [f"the conclusion names neuron {n}" for n in named - actors]
    layers = {str(site[0]) for sites in truth.sets for site in sites} | {str(i) for i in truth.step_up}
    layers |= {str(layer) for layer, _ in truth.marking} | ({"0"} if h.name == "mlp_mark" else set())
    wrong += [f"the conclusion names layer {n}" for n in set(re.findall(r"(?:layer |L)(\d+)", text)) - layers]
    return [*wrong, *([f"conclusion: {text}"] if wrong else [])]


@pytest.mark.parametrize(("name", "family"), FAST)
def test_says_what_is_so(name: str, family: str) -> None:
    """Of the seeds, the one with the fewest layers."""
    h = hard(name, family, min(SEEDS, key=lambda seed: depth(name, family, seed)))
    assert not (wrong := mistakes(h, look(h))), "\n".join([h.truth.note, *wrong])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "family"), CASES)
def test_says_what_is_so_of_more_seeds(name: str, family: str) -> None:
    wrong = [f"seed {seed}: {m}" for seed in SEEDS for h in [hard(name, family, seed)] for m in mistakes(h, look(h))]
    assert not wrong, "\n".join(wrong)


def test_streamed_layers_are_read_until_attention_agrees(tmp_path: Path) -> None:
    """Layers 1 and 2 of 28 or more make a norm that stands out and stays flat for a third of the model."""
    h = hard("small_stages", "gpt2", 1)
    h.model.save_pretrained(tmp_path / "model")
    h.tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(h.text(), encoding="utf-8")
    result = find_sinks(str(tmp_path / "model"), text=str(tmp_path / "text.txt"), max_repeats=8)
    assert not (wrong := mistakes(h, result)), "\n".join(wrong)


OTHERS = [
    pytest.param(name, family, kind, marks=[] if kind is by_default else pytest.mark.slow)
    for name, family, by_default in (
        ("backup_next", "mixtral", nnsight_of),
        ("position", "gpt2", bridge_of),
        ("learned_logits", "gpt_oss", bridge_of),
    )
    for kind in (bridge_of, nnsight_of)
]


@pytest.mark.parametrize(("name", "family", "kind"), OTHERS)
def test_other_kinds_of_model(name: str, family: str, kind: Callable[[Any, Any], Any]) -> None:
    h = hard(name, family, 1)
    result = found(kind(h.model, h.tokenizer), h.tokenizer, h.text())
    assert not (wrong := mistakes(h, result)), "\n".join(wrong)


@pytest.mark.parametrize(("name", "family"), [("bos_only", "neox"), ("token_embedding", "gpt2"), ("plain", "gemma2")])
def test_without_bos(name: str, family: str) -> None:
    """Texts that begin with a word: nothing where only BOS is marked, and else what is so with BOS."""
    h = hard(name, family, 1)
    result = look(h, bos=False)
    if h.truth.bos_only:
        assert result.norm_spike is None and result.attention_sink is None and result.causal_sets == ()
        assert result.conclusion().startswith("Neither a norm spike nor an attention sink")
    else:  # two words of one group at the beginning are two spikes: only what makes the first one is compared
        assert result.norm_spike is not None and 0 in result.norm_spike.positions
        assert result.sink_layer == h.truth.sink_layer and result.minimal is not None
        assert frozenset(result.minimal.edit_sites) in h.truth.sets


def test_a_sink_at_another_position_than_the_first() -> None:
    """The embeddings of positions 0 and 1 change places, so heads attend to position 1, whatever stands there."""
    h = hard("position", "gpt2", 0)
    with torch.no_grad():
        weight = h.model.transformer.wpe.weight
        weight[[0, 1]] = weight[[1, 0]]
    result = look(h)
    assert result.norm_spike is None and result.attention_sink is not None
    assert [(p.position, p.token) for p in result.attention_sink.positions] == [(1, "")]
    assert result.attention_sink.carried_by == "position embedding"
    assert "attend to position 1, whatever stands there" in result.conclusion()


# --- ordinary models without a sink --------------------------------------------------------------------------------


def attended(o: Organism) -> int:
    """How many heads attend to the first token by chance, from the model's own attention."""
    usual = o.model.config._attn_implementation
    o.model.set_attn_implementation("eager")
    with torch.no_grad():
        out = o.model(o.natural(6, 64), output_attentions=True, use_cache=False)
    o.model.set_attn_implementation(usual)
    return int((torch.stack(out.attentions)[..., 0].mean((1, 3)) > 0.25).sum())


def nothing_in(count: int, layers: tuple[int, ...]) -> None:
    """Of models with as many layers as one of these numbers."""
    seed = secrets.randbits(32)
    rng, wrong, chance = random.Random(seed), list[str](), 0
    for _ in range(count):
        family, kind, bos = rng.choice(list(FAMILIES)), rng.choice(["none", "massive_dim"]), rng.random() < 0.5
        number = rng.getrandbits(30)
        o = organism(family, number, kind=kind, bos=bos, n_layers=rng.choice(layers))
        if attended(o) > 1:  # a sink by chance
            chance += 1
            continue
        result = found(o.model, o.tokenizer, " ".join(o.tokenizer.decode(row[o.bos :]) for row in o.natural(6, 64)))
        says = result.conclusion()
        nothing = result.norm_spike is None and result.attention_sink is None and result.sink_layer is None
        if not (nothing and result.causal_sets == () and says.startswith("Neither a norm spike nor an attention sink")):
            wrong.append(f"{family} {number} {kind} bos {bos}: {says}")
    assert not wrong and chance < 0.1 * count + 2, f"seed {seed}: {chance} by chance\n" + "\n".join(wrong)


def test_ten_ordinary_models_have_neither() -> None:
    nothing_in(10, (4, 5))


@pytest.mark.slow
def test_a_hundred_ordinary_models_have_neither() -> None:
    nothing_in(100, (4, 5, 6, 7, 8))
