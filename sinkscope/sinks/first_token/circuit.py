"""The circuit of the attention sink, from the first token to the heads that attend to it, with evidence per step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sinkscope.files.notation import neuron_name
from sinkscope.files.tables import percent
from sinkscope.measure import Positive, Result, Setup, measurement
from sinkscope.sinks.first_token.circuit_steps import READS, Attended, Marking, Step, Steps
from sinkscope.sinks.first_token.find import FindSinks, find_sinks
from sinkscope.sinks.tokens import in_words


@dataclass(frozen=True, kw_only=True)
class Circuit(Result):
    """How the first token becomes a sink, step by step.

    Attributes:
        first_token: The token that stands first in the texts.
        sink_layer: The last layer whose MLP makes the spike. None if no MLP does.
        spike_by: The component that makes the spike: "MLP" or another one. None if there is no spike, or no single
            maker.
        neurons: The smallest set that makes the spike, such as "L1.N912". If empty, none was found and the whole MLP of
            the sink layer stands for it.
        repeated: The token that is repeated. None if there is no spike, or if repetition makes none.
        repeats: How often it is repeated.
        carried_by: What the keys of the reading heads need: "spike" or the names of other components. None if no head
            reads.
        attention: Attention of the reading heads to the first token. None if no head reads it.
        learned_logits: Mean share of all attention that goes to learned sink logits. None if the model has none.
        marking: Groups of components that mark the first token: groups of layers first, then groups of heads in a
            layer.
        steps: The edges of the circuit, from the first token to the heads.
        error: Largest distance of a sum of shares from the model's own value, relative to the largest such value.
    """

    percent: ClassVar[tuple[str, ...]] = (
        "share",
        "necessity",
        "necessity_control",
        "sufficiency",
        "sufficiency_control",
    )
    table_of: ClassVar[str] = "steps"
    columns: ClassVar[tuple[str, ...]] = (
        "step",
        "source",
        "target",
        "share",
        "necessity",
        "necessity_control",
        "sufficiency",
    )
    table_without: ClassVar[tuple[str, ...]] = ("layer",)

    first_token: str
    sink_layer: int | None
    spike_by: str | None = None
    neurons: tuple[str, ...] = ()
    repeated: str | None = None
    repeats: int | None = None
    carried_by: str | None = None
    attention: Attended | None = None
    learned_logits: float | None = None
    marking: tuple[Marking, ...] = ()
    steps: tuple[Step, ...] = ()
    error: float | None = None

    def conclusion(self) -> str:
        """The circuit in one sentence, with its control."""
        a, logits = self.attention, ""
        if self.learned_logits is not None and a is None:
            logits = f" (learned sink logits take {percent(self.learned_logits)} of all attention)"
        if self.sink_layer is None and self.spike_by is None and a is None:
            return f"No circuit: no MLP raises the first token's norm, and no head attends to the first token{logits}."
        made = "No MLP raises the first token's norm, but heads attend to it"
        if self.sink_layer is not None or self.spike_by is not None:
            made = self._spike()
        if a is None:
            return f"{made}; no head attends to the first token{logits}."
        carried = "the spike" if self.carried_by == "spike" else self.carried_by
        control = "" if a.control is None else f" ({a.control:.2f} in the random control)"
        if self.neurons and self.carried_by != "spike":
            made += "; heads do not need the spike"
        return (
            f"{made}; without {carried} the attention of the heads that read the first token falls from {a.intact:.2f} "
            f"to {a.without:.2f}{control}."
        )

    def _spike(self) -> str:
        if self.sink_layer is None:
            return f"The {self.spike_by} makes the first token's spike without an MLP"
        writes = "s" * (len(self.neurons) < 2)
        by = in_words(self.neurons) if self.neurons else f"The MLP of layer {self.sink_layer}"
        marks = next(m for m in self.marking if m.place == "first token")
        control = ""
        if marks.necessity_control is not None:
            control = f", and at most {percent(marks.necessity_control)} without as many random heads"
        return (
            f"{by} write{writes} the first token's spike because {in_words(marks.by)} "
            f"mark{'s' * (len(marks.by) == 1)} it: "
            f"without {'this mark' if len(marks.by) == 1 else 'these marks'} {percent(marks.necessity)} of the spike "
            f"is lost{control}"
        )

    def details(self) -> list[str]:
        """How the marks combine, repetition, learned sink logits, and the numerical error of the shares."""
        said = {
            "alone": "suffices alone",
            "all needed": "are all needed, and none suffices",
            "in series": "work one after the other, and each is needed",
            "any suffices": "do the same work, and any of them suffices",
            "together": "do it together",
        }
        lines = []
        for m in self.marking:
            what = "What the keys need" if m.place == "keys" else f"Mark of the {m.place}"
            lost = f"without {'it' if len(m.components) == 1 else 'them'} {percent(m.necessity)} is lost"
            lines.append(f"{what}: {in_words(m.components)} {said[m.relation]}; {lost}.")
        if self.repeated is not None:
            lines.append(f"The repetition is {self.repeated!r}, {self.repeats} times.")
        if self.attention is not None:
            many = len(self.attention.heads)
            heads = "1 head gives" if many == 1 else f"{many} heads give"
            lines.append(f"{heads} the first token at least {READS} of the attention of later tokens.")
        if self.learned_logits is not None and self.attention is not None:
            lines.append(f"Learned sink logits take {percent(self.learned_logits)} of the attention of all heads.")
        if self.error is not None:
            lines.append(f"Shares sum to the model's own inputs up to {self.error:.0e} of the largest.")
        return lines


def _opened(setup: Setup, found: FindSinks) -> tuple[int | None, Steps]:
    """The layer that completes the spike, and the steps about the neurons that `find_sinks` found."""
    best = next((s for s in found.causal_sets if s.kind != "backup"), None)
    every = [*(() if best is None else best.edit_sites), *(n.site for n in found.causal)]
    sites = () if found.sink_layer is None else tuple(dict.fromkeys(every))
    layer = None if found.sink_layer is None else max(found.sink_layer, *(site[0] for site in sites), 0)
    backups = tuple(site for one in found.causal_sets if one.kind == "backup" for site in one.edit_sites)
    return layer, Steps.of(setup, layer, sites, found.shared_dims).pruned(backups)


@measurement(
    group="Sinks",
    figure="sinkscope.figures.circuit:draw_circuit",
    quick={"max_repeats": 64},
    scan={
        "order": 10,
        "seconds": [4.5, 6.0],
        "quick": {"max_repeats": 300},
        "streams": False,
        "numbers": {
            "effect lost without a step, median": ["steps.*.necessity", "steps.*.necessity_control"],
            "attention without what carries it": ["attention.without", "attention.control"],
        },
        "facts": {"what the reading heads need": "carried_by"},
    },
)
def circuit(
    setup: Setup, *, token: str | None = None, heads: Positive = 6, max_repeats: Positive | None = None
) -> Circuit:
    """Trace the circuit of the attention sink from the first token to the heads that read it, and verify each step.

    Every input along the way is split into exact shares of the components that write into it. Each component is then
    replaced at the first token by what it writes at a typical token (necessity), and the reverse (sufficiency), with
    random components as the control. For a model without a spike or without a sink, the result says so.

    Args:
        token: The token to repeat. By default one of five words of the text, drawn by the seed.
        heads: Number of reading heads to list, those with most attention first.
        max_repeats: Largest number of repetitions. By default 1,024, or what the context holds.

    Example:
        sinkscope circuit --model llama-2-7b --html circuit.html
    """
    found = find_sinks.on(setup, tokens=None if token is None else [token], max_repeats=max_repeats)
    layer, made = _opened(setup, found)
    repeated, repeats, attention = None, None, None
    sink = found.attention_sink
    reader = made.reader() if sink is not None and any(p.position == 0 for p in sink.positions) else None
    by_spike = reader is not None and made.carries(reader)
    if layer is not None:
        made.spike(layer, reader if by_spike else None)
        reached = [t for t in found.repeats.tokens if t.repeats is not None and t.repeats > 1]
        repeated = min(reached, key=lambda t: t.repeats or 0, default=None)
        if repeated is not None:
            repeats = made.repetition(repeated.id, repeated.repeats or 0)
    if reader is not None:
        attention = made.keys(reader, by_spike, heads)
    return Circuit(
        first_token=setup.tokenizer.decode(made.ids[0, :1].tolist()),
        sink_layer=layer,
        spike_by=None if found.norm_spike is None or 0 not in found.norm_spike.positions else found.norm_spike.made_by,
        neurons=tuple(neuron_name(*site) for site in made.sites),
        repeated=None if repeated is None else repeated.token,
        repeats=repeats,
        carried_by=None if attention is None else attention[0],
        attention=None if attention is None else attention[1],
        learned_logits=made.learned(),
        marking=tuple(made.marking),
        steps=tuple(made.steps),
        error=max(made.errors, default=None),
    )
