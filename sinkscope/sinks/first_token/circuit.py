"""The circuit of the attention sink, from the first token to the heads that attend to it, each step with its proof."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from sinkscope.measure import Positive, Result, Setup, measurement
from sinkscope.sinks.first_token.circuit_steps import READS, Attended, Marking, Step, Steps, and_, site_name
from sinkscope.sinks.first_token.tokens import pick_tokens
from sinkscope.sinks.first_token.walk import causal_neurons, repeat_limit

WORDS = 3  # of the text that are repeated until one makes a spike


@dataclass(frozen=True, kw_only=True)
class Circuit(Result):
    """How the first token becomes a sink, step by step.

    Attributes:
        first_token: the token that stands first in the texts.
        sink_layer: whose MLP makes the spike; None: no MLP does.
        neurons: that write it, such as "L1.N912"; empty: no single one is causal, and the whole MLP stands for them.
        repeated: the token that is repeated; None: there is no spike, or repetition makes none.
        repeats: how often it is repeated.
        carried_by: what the reading heads' keys need: "spike", the names of other components, or None: no head reads.
        attention: None where no head reads the first token.
        marking: between layers first, then between the heads of a layer.
        steps: from the first token to the heads.
        error: largest distance of a sum of shares from the model's own value, over the largest such value.
    """

    percent: ClassVar[tuple[str, ...]] = (
        "share",
        "necessity",
        "necessity_control",
        "sufficiency",
        "sufficiency_control",
    )

    first_token: str
    sink_layer: int | None
    neurons: tuple[str, ...] = ()
    repeated: str | None = None
    repeats: int | None = None
    carried_by: str | None = None
    attention: Attended | None = None
    marking: tuple[Marking, ...] = ()
    steps: tuple[Step, ...] = ()
    error: float | None = None

    def rows(self) -> list[dict[str, Any]]:
        """One row per step, without the layer."""
        return [{name: value for name, value in vars(step).items() if name != "layer"} for step in self.steps]

    def conclusion(self) -> str:
        """The circuit in one sentence, with the control beside it."""
        if self.sink_layer is None and self.attention is None:
            return "No circuit: no MLP raises the first token's norm, and no head attends to the first token."
        if self.sink_layer is None:
            made = "No MLP raises the first token's norm, but heads attend to it"
        else:
            made = f"{and_(self.neurons) if self.neurons else f'The MLP of layer {self.sink_layer}'} "
            made += f"write{'s' * (len(self.neurons) < 2)} the first token's spike"
            marks = next((m for m in self.marking if m.place == "first token"), None)
            if marks is not None:
                made += f" where {and_(marks.by)} mark{'s' * (len(marks.by) == 1)} it"
                made += f" ({_percent(marks.necessity)} of the spike is lost without"
                if marks.necessity_control is not None:
                    made += f", {_percent(marks.necessity_control)} without random heads"
                made += ")"
        a = self.attention
        if a is None:
            return f"{made}; no head attends to the first token."
        carried = "the spike" if self.carried_by == "spike" else self.carried_by
        control = "" if a.control is None else f" (random control {a.control:.2f})"
        return (
            f"{made}; without {carried} the attention of the heads that read the first token falls from {a.intact:.2f} "
            f"to {a.without:.2f}{control}."
        )

    def details(self) -> list[str]:
        """How the marks work together, repetition, learned sink logits, and how exact the shares are."""
        said = {
            "alone": "does it alone",
            "all needed": "are all needed: none suffices",
            "in series": "act one after the other: each is needed",
            "any suffices": "do the same: any of them suffices",
            "together": "do it together",
        }
        lines = [
            f"Marking of the {m.place}: {and_(m.components)} {said[m.relation]} (lost without: {_percent(m.necessity)})."
            for m in self.marking
        ]
        if self.repeated is not None:
            lines.append(f"Repetition: {self.repeated!r} is repeated {self.repeats} times, which makes a spike, too.")
        if self.attention is not None:
            lines.append(f"{len(self.attention.heads)} heads give the first token at least {READS} of their attention.")
        if self.attention is not None and self.attention.learned is not None:
            lines.append(f"Learned sink logits take {_percent(self.attention.learned)} of the attention of all heads.")
        if self.error is not None:
            lines.append(f"Shares sum to the model's own inputs up to {self.error:.0e} of the largest.")
        return lines


def _percent(value: float) -> str:
    return f"{value:.0%}".replace("-0%", "0%")


@measurement(group="Sinks", figure="sinkscope.figures.circuit:draw_circuit", quick={"max_repeats": 64})
def circuit(
    setup: Setup, *, token: str | None = None, heads: Positive = 6, max_repeats: Positive | None = None
) -> Circuit:
    """Follow the circuit of the attention sink from the first token to the heads that attend to it, with proofs.

    Every input on the way is split into exact shares of the components that write into it. Every component is then
    replaced at the first token by what it gives at a typical one (necessity), and the other way round (sufficiency),
    with random components as the control. A model without a spike, or without a sink, is an answer.

    Args:
        token: The token that is repeated. By default one of three words of the text, drawn by the seed.
        heads: Reading heads that are listed, those with most attention first.
        max_repeats: Largest number of repetitions. By default 1,024, or what the context holds.
    """
    limit = repeat_limit(setup.target, max_repeats)
    layer, found = causal_neurons(setup)
    sites = tuple(n.site for n in found)
    words = pick_tokens(setup.tokenizer, setup.ids, None if token is None else [token], setup.seed, WORDS)
    setup.record(max_repeats=limit)
    made, repeated = Steps.of(setup, layer, sites), None
    if layer is not None:
        made.spike(layer)
        repeated = made.repetition(words, limit)
    carried, attention = made.keys(heads) or (None, None)
    return Circuit(
        first_token=setup.tokenizer.decode(made.ids[0, :1].tolist()),
        sink_layer=layer,
        neurons=tuple(map(site_name, sites)),
        repeated=None if repeated is None else setup.tokenizer.decode([repeated[0]]),
        repeats=None if repeated is None else repeated[1],
        carried_by=carried,
        attention=attention,
        marking=tuple(made.marking),
        steps=tuple(made.steps),
        error=max(made.errors, default=None),
    )
