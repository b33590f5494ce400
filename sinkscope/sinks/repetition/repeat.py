"""Norm of repeated tokens at the sink layer, over the number of repetitions, and with sink neurons zeroed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.interventions import Ablate
from sinkscope.models.target import Target, first_tensor
from sinkscope.results import Result, cell
from sinkscope.sinks.first_token.ablation import prove
from sinkscope.sinks.first_token.locate import Progress, Setup, setup
from sinkscope.sinks.first_token.walk import walk
from sinkscope.sinks.repetition.sequences import CYCLE, Repetitions, check, choose, repetitions, single_words

POINTS = 1024  # of a curve; longer ones are thinned, `repeats` is read before that


@dataclass(frozen=True)
class Curve:
    """One sequence under one condition, at the sink layer.

    Attributes:
        condition: "intact", "one" (the largest sink neuron zeroed), "set" (all causal ones), "control" (random ones).
        sites: what was zeroed, (layer, neuron) or (layer, expert, neuron).
        first_norm: of the first token.
        norms: of the repeated token after each number of repetitions in `counts`.
        first_drop: share of the intact norm that is lost at the first token; None for "intact".
        last_drop: the same at the last repetition.
    """

    condition: str
    sites: tuple[tuple[int, ...], ...]
    first_norm: float
    norms: tuple[float, ...]
    first_drop: float | None
    last_drop: float | None


@dataclass(frozen=True)
class RepeatedSequence:
    """A repeated token, or several in turn.

    Attributes:
        label: what is repeated.
        ids: the tokens; more than one are a cycle, and then repetitions count tokens.
        repeats: first number of repetitions whose norm reaches half of the first token's; None: never.
        curves: the intact one first.
    """

    label: str
    ids: tuple[int, ...]
    repeats: int | None
    curves: tuple[Curve, ...]


@dataclass(frozen=True, kw_only=True)
class RepeatNorms(Result):
    """Norms of repeated tokens (Yona et al. 2025, Fig. 2, 3, 6, 7, 9); L2 of the residual stream after the sink layer.

    Attributes:
        sink_layer: None: the model has no sink, and nothing was repeated.
        neurons: causal neurons of that layer, largest contribution first; empty without `ablate`.
        first_norm: of the first token of typical text: BOS, or without BOS the median over pieces.
        typical_norm: median over later positions of typical text.
        typical_low: 5 % of the same.
        typical_high: 95 % of the same.
        max_repeats: repetitions of every sequence.
        counts: numbers of repetitions that curves are given at.
        before: the tokens before the first repetition.
        replaced: (word of the paper that is not one token here, word that took its place).
        sequences: one per token, then the cycle of all, if that was asked for.
    """

    kind: ClassVar[str] = "repeat"
    percent: ClassVar[tuple[str, ...]] = ("lost_one", "lost_set", "lost_control")

    sink_layer: int | None
    neurons: tuple[tuple[int, ...], ...]
    first_norm: float | None
    typical_norm: float | None
    typical_low: float | None
    typical_high: float | None
    max_repeats: int
    counts: tuple[int, ...]
    before: tuple[str, ...]
    replaced: tuple[tuple[str, str], ...]
    sequences: tuple[RepeatedSequence, ...]

    def rows(self) -> list[dict[str, Any]]:
        """One row per sequence; `lost_*` is the share of the norm at the last repetition that zeroing takes."""
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

    def summary(self) -> str:
        """What was found, in a few lines."""
        if self.sink_layer is None:
            return f"{self.model.name}: no attention sink, so no layer at which to look at repetitions."
        lines = [
            f"{self.model.name}, sink layer {self.sink_layer}: norm of the first token {self.first_norm:.4g}, of "
            f"typical text {self.typical_norm:.4g} (5-95 %: {self.typical_low:.4g} to {self.typical_high:.4g})."
        ]
        got = sorted(s.repeats for s in self.sequences if len(s.ids) == 1 and s.repeats is not None)
        single = sum(len(s.ids) == 1 for s in self.sequences)
        if got:
            median = float(torch.tensor(got, dtype=torch.float64).quantile(0.5))
            lines.append(f"Repeats until half of the first token's norm: {median:.0f} (median over {len(got)} tokens).")
        if len(got) < single:
            lines.append(f"{single - len(got)} of {single} tokens never get there within {self.max_repeats}.")
        for s in self.sequences:
            if len(s.ids) > 1:
                when = "never gets there" if s.repeats is None else f"gets there after {s.repeats} tokens"
                lines.append(f"The cycle of {len(s.ids)} words {when}.")
        lines += self._losses()
        if self.replaced:
            pairs = ", ".join(f"{wanted!r} by {used!r}" for wanted, used in self.replaced)
            lines.append(f"Not one token here, so replaced: {pairs}.")
        return "\n".join(lines)

    def _losses(self) -> list[str]:
        if not self.settings["ablate"]:
            return []
        if not self.neurons:
            return ["No single neuron of the layer is causal, so none was zeroed."]
        lines: list[str] = []
        for curve in self.sequences[0].curves[1:]:
            here = [
                c for s in self.sequences if s.repeats is not None for c in s.curves if c.condition == curve.condition
            ]
            names = ", ".join(str(site[-1]) for site in curve.sites)
            drops = torch.tensor([c.last_drop for c in here], dtype=torch.float64)
            last = f"; {_percent(drops.quantile(0.5))} at the last repetition of those that get there" if here else ""
            what = "Random neurons" if curve.condition == "control" else "Neurons"
            what = what[:-1] if len(curve.sites) == 1 else what
            lines.append(
                f"{what} {names} zeroed: {_percent(curve.first_drop)} of the first token's norm is lost{last}."
            )
        return lines


def repeat_norms(
    model: object = None,
    *,
    tokenizer: Any = None,
    bos: bool | None = None,
    text: str | Path | None = None,
    tokens: Sequence[str] | None = None,
    prefix: str | None = None,
    max_repeats: int | None = None,
    ablate: bool = False,
    batch_size: int = 4,
    texts: int = 4,
    seed: int = 0,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> RepeatNorms:
    """Repeat tokens and watch their norm at the sink layer, in one causal pass per token (Yona et al. 2025, Fig. 2).

    Args:
        model: as for `find_sinks`.
        tokenizer: for live models that carry none.
        bos: begin sequences with BOS; None: where the tokenizer has one. Without BOS and prefix, a word of the text
            that is not repeated stands first.
        text: file of typical text; None: the neutral text that ships.
        tokens: strings to repeat, one token each; None: five words of the text, with `ablate` the words of the paper.
        prefix: text between BOS and the repetitions; it may not contain what is repeated.
        max_repeats: number of repetitions; None: 1,024, or what the context holds.
        ablate: the same with the largest sink neuron zeroed, with all causal ones, and with as many random ones
            (Fig. 3 and 7), for each token and for the cycle of all: the caption reads both ways.
        batch_size: sequences in a pass.
        texts: pieces of 64 tokens of typical text.
        seed: of random draws and of the choice of words.
        revision: of a hub id.
        dtype: of the weights of a model given by name.
        device: for models given by name.
        trust_remote_code: run code that comes with the checkpoint.
        progress: called as `progress(what, done, total)`.

    A model without a sink is an answer: `sink_layer` is None.

    Raises:
        SinkscopeError: bad input; the message is one line and says what to do.
    """
    check(max_repeats, batch_size, texts, seed)
    made = setup(
        model,
        tokenizer=tokenizer,
        bos=bos,
        text=text,
        texts=texts,
        seed=seed,
        revision=revision,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    target = made.target
    words, replaced = choose(made, tokens, prefix, CYCLE if ablate else ())
    cycles: list[tuple[int, ...]] = [(w,) for w in words]
    if ablate and len(words) > 1:
        cycles.append(tuple(words))
    asked = repetitions(made, cycles, prefix, max_repeats)
    seen = walk(target, made.ids, whole=target.resident, progress=progress)
    layer = seen.sink_layer()
    counts = _counts(asked.count)
    neurons: tuple[tuple[int, ...], ...] = ()
    sequences: tuple[RepeatedSequence, ...] = ()
    low, typical, high = (None, None, None) if layer is None else seen.typical[layer]
    if layer is not None:
        zeroed: dict[str, tuple[tuple[int, ...], ...]] = {"intact": ()}
        if ablate:
            neurons, conditions = _conditions(made, layer)
            zeroed |= conditions
        norms = {
            name: norms_at(target, layer, asked.ids, batch_size, sites, progress, f"repetitions, {name}")
            for name, sites in zeroed.items()
        }
        sequences = tuple(
            _sequence(asked, row, counts, seen.first[layer], {n: v[row] for n, v in norms.items()}, zeroed)
            for row in range(len(asked.ids))
        )
    return RepeatNorms(
        model=made.info(),
        settings={
            "bos": made.bos is not None,
            "text": None if text is None else Path(text).name,
            "texts": len(made.ids),
            "tokens": None if tokens is None else list(tokens),
            "prefix": prefix,
            "max_repeats": asked.count,
            "ablate": ablate,
            "batch_size": batch_size,
            "seed": seed,
            "revision": revision,
        },
        provenance=made.provenance(),
        sink_layer=layer,
        neurons=neurons,
        first_norm=None if layer is None else _short(seen.first[layer]),
        typical_norm=typical,
        typical_low=low,
        typical_high=high,
        max_repeats=asked.count,
        counts=counts,
        before=single_words(target.tokenizer, asked.ids[0, : asked.start].tolist()),
        replaced=replaced,
        sequences=sequences,
    )


@torch.no_grad()
def norms_at(
    target: Target,
    layer: int,
    ids: Int[Tensor, "row pos"],
    batch_size: int,
    zeroed: Sequence[tuple[int, ...]] = (),
    progress: Progress | None = None,
    what: str = "repetitions",
) -> Float[Tensor, "row pos"]:
    """Norm of the residual stream after a layer at every position, on the CPU; the pass ends there.

    Args:
        target: the model.
        layer: which layer.
        ids: the sequences.
        batch_size: rows in a pass.
        zeroed: neurons that are zeroed at all positions.
        progress: told of each batch.
        what: it is told.
    """
    kept: list[Tensor] = []

    def keep(_m: object, _a: object, _k: object, out: Any) -> None:
        kept.append(torch.linalg.vector_norm(first_tensor(out), dim=-1, dtype=torch.float32).cpu())
        target.stop()

    with (
        Ablate(sites=list(zeroed)).on(target) if zeroed else nullcontext(),
        target.hooks((target.layers[layer], "post", keep)),
    ):
        for start in range(0, len(ids), batch_size):
            target.forward(ids[start : start + batch_size])
            if progress is not None:
                progress(what, min(start + batch_size, len(ids)), len(ids))
    return torch.cat([part.reshape(-1, ids.shape[1]) for part in kept])


def _conditions(made: Setup, layer: int) -> tuple[tuple[tuple[int, ...], ...], dict[str, tuple[tuple[int, ...], ...]]]:
    """The causal neurons, and what is zeroed under which name; nothing where no neuron is causal."""
    proof = prove(made.target, made.ids, layer, 8, torch.Generator().manual_seed(made.seed), None)
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
    zeroed: dict[str, tuple[tuple[int, ...], ...]],
) -> RepeatedSequence:
    intact = norms["intact"]
    reached = (intact[asked.start :] >= first_norm / 2).nonzero().flatten()
    at = torch.tensor(counts) + asked.start - 1

    def curve(name: str) -> Curve:
        values = norms[name]
        first, last = (float(1 - values[i] / intact[i]) for i in (0, -1))
        drops = (None, None) if name == "intact" else (_short(first), _short(last))
        return Curve(name, zeroed[name], _short(float(values[0])), tuple(map(_short, values[at].tolist())), *drops)

    return RepeatedSequence(
        asked.labels[row],
        asked.cycles[row],
        int(reached[0]) + 1 if len(reached) else None,
        tuple(curve(name) for name in norms),
    )


def _counts(most: int) -> tuple[int, ...]:
    """Every number of repetitions, or `POINTS` of them evenly spread, first and last among them."""
    return tuple(torch.linspace(1, most, min(most, POINTS), dtype=torch.float64).round().long().tolist())


def _percent(share: Any) -> str:
    return cell(float(share), percent=True)


def _short(value: float) -> float:
    return float(f"{value:.6g}")
