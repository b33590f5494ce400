"""Which attention heads mark the first token (Yona et al. 2025, section 4.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from sinkscope.figures.heads import draw
from sinkscope.measure import Positive, Result, Setup, measurement
from sinkscope.sinks.first_token.ablation import DRAWS
from sinkscope.sinks.first_token.head_replacement import Replacement
from sinkscope.sinks.first_token.locate import causal_neurons
from sinkscope.sinks.first_token.marking import First, Head, Marking
from sinkscope.sinks.first_token.tokens import first_tokens, single_token


@dataclass(frozen=True, kw_only=True)
class MarkingHeads(Result):
    """Which heads mark the first token.

    Attributes:
        sink_layer: where the marked neurons are; None: the model has no sink, and everything else is empty.
        neurons: the sink neurons whose activation is measured; in a mixture (expert, neuron); empty: no single one is
            causal, and the whole MLP of the sink layer stands for them.
        answer: "single head": for most first tokens one head suffices; "several heads": it takes more than one;
            "several layers": no layer's heads by themselves make the mark, together they do; "no head": they do not;
            "no token fires": none of the tokens given makes a sink when it stands first; "no sink".
        marking_layer: the layer whose heads make it; None if there is none.
        layer_drops: per layer up to the sink layer, lost with all its heads replaced (median over first tokens).
        all_drop: lost with all heads of all these layers replaced.
        single_share: share of the first tokens that fire for which one head suffices.
        heads: every head of layers 0 to the sink layer, marking heads first.
        first_tokens: every token that was put first.
    """

    kind: ClassVar[str] = "heads"
    percent: ClassVar[tuple[str, ...]] = ("drop", "largest_drop", "bos_drop", "alone", "control")

    sink_layer: int | None
    neurons: tuple[tuple[int, ...], ...]
    answer: str
    marking_layer: int | None = None
    layer_drops: tuple[float, ...] = ()
    all_drop: float | None = None
    single_share: float | None = None
    heads: tuple[Head, ...] = ()
    first_tokens: tuple[First, ...] = ()

    def rows(self) -> list[dict[str, Any]]:
        """One row per head, at most 16 of them."""
        return [{k: v for k, v in vars(h).items() if k != "largest_drop"} for h in self.heads[:16]]

    def conclusion(self) -> str:
        """Which heads mark the first token, and what other heads lose."""
        if self.sink_layer is None:
            return "The model has no attention sink, so no head marks the first token for one."
        said = {
            "several layers": "No layer's heads mark the first token alone; those of several layers together do.",
            "no head": "No head marks the first token: attention does not make the mark.",
            "no token fires": "None of the tokens given makes a sink when it stands first; give other tokens.",
        }
        if self.marking_layer is None:
            return said[self.answer]
        names = ", ".join(f"L{h.layer}.H{h.head}" for h in self.heads if h.serves)
        fire = [f for f in self.first_tokens if f.fires]
        lost = [f.set_drop for f in fire if f.set_drop is not None]
        chance = [f.control_drop for f in fire if f.control_drop is not None]
        beside = ""
        if lost and chance:
            beside = (
                f": replacing them takes away {_percent(_median(lost))} of the mark, and replacing as many other "
                f"heads takes away at most {_percent(_median(chance))} (median over tokens, largest of {DRAWS} draws)"
            )
        return f"The heads {names} mark the first token{beside}."

    def details(self) -> list[str]:
        """The neurons, the layers, and how many heads a token needs."""
        if self.sink_layer is None:
            return []
        fire = [f for f in self.first_tokens if f.fires]
        names = ", ".join(" ".join(map(str, n)) for n in self.neurons) or "none is causal alone; the whole MLP is used"
        lines = [
            f"Sink layer {self.sink_layer}; sink neurons: {names}.",
            f"{len(fire)} of {len(self.first_tokens)} tokens make them fire when they stand first.",
        ]
        if self.layer_drops:
            drops = ", ".join(f"layer {i} {d:.0%}" for i, d in enumerate(self.layer_drops))
            lines.append(f"Lost when all heads of a layer are replaced: {drops}; all layers {_percent(self.all_drop)}.")
        if self.marking_layer is not None and self.answer == "single head":
            lines.append(f"A single head suffices for {_percent(self.single_share)} of the first tokens.")
        elif self.marking_layer is not None:
            sizes = sorted(len(f.heads) for f in fire if f.heads)
            usual = sizes[len(sizes) // 2] if sizes else 0
            lines.append(f"No single head suffices for most first tokens; the median token needs {usual}.")
        return lines


@measurement(group="Sinks", figure=draw, command="heads", quick={"count": 2})
def marking_heads(
    setup: Setup,
    *,
    tokens: Sequence[str] | None = None,
    count: Positive = 32,
    batch_size: Positive | None = None,
) -> MarkingHeads:
    """Find the attention heads that mark the first token, by what replacing their output does to the sink neurons.

    A head's output at the first position (`hook_z`, before the output projection) is replaced by its mean over later
    positions of typical text. Different tokens may be marked by different heads, so many tokens are put first, each
    alone and without BOS, beside BOS itself. A model without a sink is an answer: `sink_layer` is None
    (Yona et al. 2025, section 4.3).

    Args:
        tokens: Words to put first, one token each. By default `count` tokens of the text, drawn by the seed.
        count: Tokens of the text to put first.
        batch_size: Rows of a pass. By default as many as a bounded memory allows.
    """
    target = setup.target
    words = (
        first_tokens(target, setup.ids, count, setup.seed)
        if not tokens
        else list(dict.fromkeys(single_token(target.tokenizer, t) for t in tokens))
    )
    layer, neurons = causal_neurons(setup)
    place: dict[str, Any] = {"sink_layer": layer, "neurons": tuple(n.site[1:] for n in neurons if n.layer == layer)}
    if layer is None:
        return MarkingHeads(**place, answer="no sink")
    work = Marking(setup, Replacement.of(target, layer, neurons, setup.ids), batch_size, setup.progress)
    return MarkingHeads(**place, **work.measure(words))


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}".replace("-0%", "0%")


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
