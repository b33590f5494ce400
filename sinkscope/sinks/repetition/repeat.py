"""Norm of repeated tokens at the sink layer as a function of the number of repetitions, also with neurons zeroed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

import torch
from torch import Tensor

from sinkscope.files.notation import neuron_names
from sinkscope.files.result import cell
from sinkscope.interventions import Ablate
from sinkscope.measure import Positive, Result, Setup, measurement
from sinkscope.sinks.first_token.context import SinkContext
from sinkscope.sinks.first_token.layer_scan import LayerScan, norms_after, repeats_until_half, scan_layers
from sinkscope.sinks.first_token.neurons import verify_sink_layer
from sinkscope.sinks.tokens import (
    CYCLE,
    Repetitions,
    left_out_line,
    repetitions,
    replaced_line,
    single_words,
    words_to_repeat,
)

Sites = tuple[tuple[int, ...], ...]
POINTS = 1024  # points per curve; longer curves are thinned after `repeats` is read


@dataclass(frozen=True)
class Curve:
    """One sequence under one condition, at the sink layer.

    Attributes:
        condition: "intact", "one" (the largest sink neuron zeroed), "set" (all causal ones), "control" (random ones).
        sites: The neurons that were zeroed, (layer, neuron) or (layer, expert, neuron).
        first_norm: Norm of the first token.
        norms: Norm of the repeated token after each number of repetitions in `counts`.
        first_drop: Share of the intact norm that is lost at the first token. None for "intact".
        last_drop: Share of the intact norm that is lost at the last repetition.
    """

    condition: str
    sites: tuple[tuple[int, ...], ...]
    first_norm: float
    norms: tuple[float, ...]
    first_drop: float | None
    last_drop: float | None


@dataclass(frozen=True)
class RepeatedSequence:
    """A repeated token, or several tokens repeated in turn.

    Attributes:
        label: The text that is repeated.
        ids: The repeated tokens. More than one form a cycle, and repetitions then count tokens.
        repeats: First number of repetitions whose norm reaches half of the first token's. None if never.
        curves: The curves, the intact one first.
    """

    label: str
    ids: tuple[int, ...]
    repeats: int | None
    curves: tuple[Curve, ...]


@dataclass(frozen=True, kw_only=True)
class RepeatNorms(Result):
    """Norms of repeated tokens (Yona et al. 2025, Fig. 2, 3, 6, 7, 9): L2 of the residual stream after the sink layer.

    Attributes:
        sink_layer: Sink layer. None if the model has no sink; nothing was repeated then.
        neurons: Causal neurons of that layer, largest contribution first. Empty without `ablate`.
        first_norm: Norm of the first token of typical text: BOS, or without BOS the median over pieces.
        typical_norm: Median norm over later positions of typical text.
        typical_low: The 5 % quantile of these norms.
        typical_high: The 95 % quantile of these norms.
        max_repeats: Number of repetitions in every sequence.
        counts: Numbers of repetitions at which curves are given.
        before: The tokens before the first repetition.
        replaced: Pairs of (word of the paper that is not one token here, word that took its place).
        sequences: One sequence per token, then the cycle of all tokens, if that was requested.
    """

    kind: ClassVar[str] = "repeat"
    percent: ClassVar[tuple[str, ...]] = ("of_first", "lost_one", "lost_set", "lost_control")
    glossary: ClassVar[dict[str, str]] = {
        "repeated": "the token, or the cycle of tokens, that is repeated",
        "repeats": "repetitions until its norm is half of the first token's",
        "last_norm": "norm at the last repetition",
        "of_first": "that norm over the first token's",
        "lost_one": "share of that norm that zeroing the largest sink neuron takes away",
        "lost_set": "share that zeroing all causal neurons takes away",
        "lost_control": "share that zeroing as many random neurons takes away",
    }

    sink_layer: int | None
    neurons: tuple[tuple[int, ...], ...] = ()
    first_norm: float | None = None
    typical_norm: float | None = None
    typical_low: float | None = None
    typical_high: float | None = None
    max_repeats: int
    counts: tuple[int, ...]
    before: tuple[str, ...]
    replaced: tuple[tuple[str, str], ...]
    sequences: tuple[RepeatedSequence, ...] = ()

    def rows(self) -> list[dict[str, Any]]:
        """One row per sequence; `lost_*` is the share of the norm at the last repetition that zeroing removes."""
        return [
            {
                "repeated": s.label,
                "repeats": s.repeats,
                "last_norm": s.curves[0].norms[-1],
                "of_first": s.curves[0].norms[-1] / s.curves[0].first_norm,
                **{f"lost_{c.condition}": c.last_drop for c in s.curves[1:]},
            }
            for s in self.sequences
        ]

    def conclusion(self) -> str:
        """How many repetitions are needed, and the norm that typical text reaches."""
        if self.sink_layer is None:
            return "The model has no attention sink, so there is no layer at which to look at repetitions."
        single = [s.repeats for s in self.sequences if len(s.ids) == 1 and s.repeats != 1]
        got = [n for n in single if n is not None]
        if not single and len(self.sequences[0].ids) == 1:
            return "The first occurrence of every token is already a sink, so repetition has nothing to show here."
        if not got:
            return (
                f"No repeated token reaches half of the first token's norm within {self.max_repeats} repetitions "
                f"({len(single)} tokens); in typical text the median is {self._of_first(self.typical_norm)} of that "
                "norm."
            )
        return (
            f"A repeated token reaches half of the first token's norm after {median(got):.0f} repetitions (median of "
            f"{len(got)} of {len(single)} tokens); in typical text the median is {self._of_first(self.typical_norm)} "
            f"of that norm.{self._proof()}"
        )

    def details(self) -> list[str]:
        """Norms, tokens that never become a sink, the cycle, and the effect of ablation."""
        if self.sink_layer is None:
            return []
        lines = [
            f"The sink layer is layer {self.sink_layer}: after it the first token's norm is {self.first_norm:.4g}, "
            f"and that of typical text {self.typical_norm:.4g} "
            f"(5-95 %: {self.typical_low:.4g} to {self.typical_high:.4g})."
        ]
        single = [s for s in self.sequences if len(s.ids) == 1]
        if never := sum(s.repeats is None for s in single):
            lines.append(f"{never} of {len(single)} tokens never reach half of the first token's norm.")
        lines += left_out_line([s.label for s in single if s.repeats == 1])
        for s in self.sequences:
            if len(s.ids) > 1:
                when = "never reaches it" if s.repeats is None else f"reaches it after {s.repeats} tokens"
                lines.append(f"The cycle of {len(s.ids)} words {when}.")
        return lines + self._losses() + replaced_line(self.replaced)

    def _of_first(self, norm: float | None) -> str:
        return cell((norm or 0.0) / (self.first_norm or 1.0), percent=True)

    def _lost(self, number: int) -> str:
        """Median share of the norm at the last repetition that is missing in one of the curves."""
        reached = [s.curves[number].last_drop or 0.0 for s in self.sequences if s.repeats is not None]
        return cell(median(reached), percent=True)

    def _proof(self) -> str:
        """What zeroing all causal neurons takes away, beside its control; nothing without `ablate`."""
        numbers = {curve.condition: i for i, curve in enumerate(self.sequences[0].curves)}
        if "control" not in numbers:
            return ""
        causal = numbers.get("set", 1)
        return (
            f" Zeroing {neuron_names(self.sequences[0].curves[causal].sites)} takes away {self._lost(causal)} of the "
            f"norm at the last repetition; zeroing as many random neurons takes away {self._lost(numbers['control'])}."
        )

    def _losses(self) -> list[str]:
        if not self.settings.get("ablate"):
            return []
        if not self.neurons:
            return ["No single neuron of the layer is causal, so none was zeroed."]
        lines: list[str] = []
        reached = any(s.repeats is not None for s in self.sequences)
        for i, curve in enumerate(self.sequences[0].curves[1:], 1):
            last = f", and {self._lost(i)} of the norm at the last repetition (median)" if reached else ""
            what = "the random neurons " * (curve.condition == "control") + neuron_names(curve.sites)
            lines.append(
                f"Zeroing {what} takes away {cell(curve.first_drop, percent=True)} of the first token's norm{last}."
            )
        return lines


@measurement(
    group="Repetition",
    figure="sinkscope.figures.repetition:repeat_norms",
    command="repeat",
    quick={"max_repeats": 24, "ablate": True},
    scan={
        "order": 40,
        "seconds": [1.5, 1.5],
        "quick": {"ablate": True},
        "full": {"ablate": True},
        "numbers": {
            "norm after the last repetition": ["sequences.*.curves.0.norms.-1", "typical_norm", "typical_high"],
            "norm then lost without the neurons": [
                "sequences.*.curves.-2.last_drop",
                "sequences.*.curves.-1.last_drop",
                "sequences.*.curves.-1.last_drop",
            ],
        },
    },
)
def repeat_norms(
    setup: Setup,
    *,
    tokens: Sequence[str] | None = None,
    prefix: str | None = None,
    max_repeats: Positive | None = None,
    ablate: bool = False,
    batch_size: Positive = 4,
) -> RepeatNorms:
    """Measure the norm of repeated tokens at the sink layer, and what ablating sink neurons does to it.

    One causal pass per token contains every number of repetitions (Yona et al. 2025, Fig. 2). Without BOS and prefix, a
    word of the text that is not repeated stands first. If the model has no sink, `sink_layer` is None.

    Args:
        tokens: Word to repeat, one token. By default five words of the text; with --ablate the words of the paper.
        prefix: Text between BOS and the repetitions; it must not contain what is repeated.
        max_repeats: Number of repetitions. By default 1,024, or what the context holds.
        ablate: Repeat the measurement with the largest sink neuron zeroed, with all causal ones, and with as many
            random ones (Fig. 3 and 7), for each token and for the cycle of all, because the caption can be read both
            ways.
        batch_size: Sequences per pass.

    Example:
        sinkscope repeat --model llama-2-7b --ablate --html repeat.html
    """
    target = setup.target
    words, replaced = words_to_repeat(setup, tokens, prefix, CYCLE if ablate else ())
    cycles: list[tuple[int, ...]] = [(w,) for w in words]
    if ablate and len(words) > 1:
        cycles.append(tuple(words))
    asked = repetitions(setup, cycles, prefix, max_repeats)
    setup.record(max_repeats=asked.count)
    seen = scan_layers(target, setup.ids, whole=target.resident, progress=setup.progress)
    layer, counts = seen.sink_layer, _counts(asked.count)
    found: dict[str, Any] = {
        "max_repeats": asked.count,
        "counts": counts,
        "before": single_words(target.tokenizer, asked.ids[0, : asked.start].tolist()),
        "replaced": replaced,
    }
    if layer is None:
        return RepeatNorms(sink_layer=None, **found)
    neurons, conditions = _conditions(setup, seen) if ablate else ((), {})
    zeroed = {"intact": (), **conditions}
    norms: dict[str, Tensor] = {}
    for name, sites in zeroed.items():
        with Ablate(sites=list(sites)).on(target) if sites else nullcontext():
            norms[name] = norms_after(target, layer, asked.ids, batch_size, setup.progress, f"repetitions, {name}")
    low, typical, high = seen.layers[layer].typical_norms
    return RepeatNorms(
        sink_layer=layer,
        neurons=neurons,
        first_norm=_short(seen.layers[layer].first_norm),
        typical_norm=typical,
        typical_low=low,
        typical_high=high,
        sequences=tuple(
            _sequence(asked, row, counts, seen.layers[layer].first_norm, {n: v[row] for n, v in norms.items()}, zeroed)
            for row in range(len(asked.ids))
        ),
        **found,
    )


def _conditions(setup: Setup, scan: LayerScan) -> tuple[Sites, dict[str, Sites]]:
    """The causal neurons, and the neurons zeroed under each condition; empty if no neuron is causal."""
    proof = verify_sink_layer(SinkContext.of(setup, scan), 8)
    causal = tuple(n.site for n in proof.neurons if n.causal)
    if not causal:
        return (), {}
    many = {"set": causal} if len(causal) > 1 else {}
    return causal, {"one": causal[:1], **many, "control": proof.controls}


def _sequence(
    asked: Repetitions,
    row: int,
    counts: tuple[int, ...],
    first_norm: float,
    norms: dict[str, Tensor],
    zeroed: dict[str, Sites],
) -> RepeatedSequence:
    intact = norms["intact"]
    at = torch.tensor(counts) + asked.start - 1

    def curve(name: str) -> Curve:
        values = norms[name]
        first, last = (float(1 - values[i] / intact[i]) for i in (0, -1))
        drops = (None, None) if name == "intact" else (_short(first), _short(last))
        return Curve(name, zeroed[name], _short(float(values[0])), tuple(map(_short, values[at].tolist())), *drops)

    return RepeatedSequence(
        asked.labels[row],
        asked.cycles[row],
        repeats_until_half(intact[asked.start :], first_norm),
        tuple(curve(name) for name in norms),
    )


def _counts(most: int) -> tuple[int, ...]:
    """Every number of repetitions, or `POINTS` of them evenly spread, first and last among them."""
    return tuple(torch.linspace(1, most, min(most, POINTS), dtype=torch.float64).round().long().tolist())


def _short(value: float) -> float:
    return float(f"{value:.6g}")
