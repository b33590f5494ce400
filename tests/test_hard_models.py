"""find_sinks on models that are not the textbook case: whatever it says of them has to be so."""

from __future__ import annotations

import re
import tempfile
from typing import Any

import pytest
from organisms.hard import HARD, HardModel, hard

from sinkscope.sinks.first_token.find import FindSinks, find_sinks

CASES = [(name, family) for name, families in HARD.items() for family in families]
# Of each kind one family, so that every family has its turn; the others, and other seeds, are slow.
FAST = [(name, families[k % len(families)]) for k, (name, families) in enumerate(HARD.items())]
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
        kind: [frozenset(s.numbers) for s in result.causal_sets if s.kind == kind] for kind in ("minimal", "backup")
    }
    delimiters = {h.tokenizer.decode([token]): frozenset(sites) for token, sites in truth.later.items()}
    with_spike = {token: sites for token, sites in delimiters.items() if sites}
    later = {s.token: frozenset() if s.set is None else frozenset(s.set.numbers) for s in result.later_sinks}
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
        drops |= {"attention": s.drop_attention or 0.0} if s.kind == "minimal" and h.truth.sink else {}
        for name, drop in drops.items():
            if s.kind == "minimal" and not (drop > 0.5 and drop > s.control):
                wrong.append(f"{s.kind} set {s.numbers}: {name} drop {drop:.2f}, control {s.control:.2f}")
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
    named = set(re.findall(r"neurons? (\d+)", text))
    wrong += [f"the conclusion names neuron {n}" for n in named - actors]
    layers = {str(site[0]) for sites in truth.sets for site in sites} | {str(i) for i in truth.step_up}
    layers |= {str(layer) for layer, _ in truth.marking}
    wrong += [f"the conclusion names layer {n}" for n in set(re.findall(r"layer (\d+)", text)) - layers]
    return [*wrong, *([f"conclusion: {text}"] if wrong else [])]


@pytest.mark.parametrize(("name", "family"), FAST)
def test_says_what_is_so(name: str, family: str) -> None:
    h = hard(name, family, 0)
    assert not (wrong := mistakes(h, look(h))), "\n".join([h.truth.note, *wrong])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "family"), CASES)
def test_says_what_is_so_of_more_seeds(name: str, family: str) -> None:
    wrong = [
        f"seed {seed}: {m}" for seed in (0, 1, 2) for h in [hard(name, family, seed)] for m in mistakes(h, look(h))
    ]
    assert not wrong, "\n".join(wrong)
