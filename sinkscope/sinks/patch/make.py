"""A patch for a model nobody has looked at: find the neurons, take as few as suffice, verify, and refuse to harm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.interventions.base import Intervention
from sinkscope.interventions.sink_patch import SinkPatch
from sinkscope.measure import Option, Output, Positive, Result, Setup, measurement
from sinkscope.models.target import Target, first_tensor
from sinkscope.sinks.first_token.ablation import Neuron, numbers, prove
from sinkscope.sinks.first_token.tokens import pick_tokens
from sinkscope.sinks.first_token.walk import prefixes, repeat_limit, repeat_until_half, walk
from sinkscope.sinks.patch.loss import Change, held_out, losses, perplexity_change, under

HEADROOM = 1.5  # times the 95 % line: one position of ordinary text in twenty lies above that line anyway
TOP_K = 8
Verdict = Literal["made", "refused", "no-sink", "no-repeats"]


@dataclass(frozen=True)
class PatchedNeuron:
    """A neuron of the patch and its neutral value, the median of `hook_post` on typical text."""

    layer: int
    expert: int | None
    neuron: int
    calibrated: float

    @property
    def site(self) -> tuple[int, ...]:
        """(layer, neuron) or (layer, expert, neuron), as interventions take it."""
        return numbers(self.layer, self.expert, self.neuron)


@dataclass(frozen=True)
class Tried:
    """A set of causal neurons, and the largest norm of the repeated tokens it was chosen with, under its patch."""

    neurons: tuple[tuple[int, ...], ...]
    norm: float


@dataclass(frozen=True)
class HeldOutToken:
    """A token that took no part in the choice, repeated `repeats` times; norms are the largest after the first token.

    Attributes:
        token: as text.
        id: its id.
        repeats: length of the repetition.
        intact: without the patch.
        patched: with it.
    """

    token: str
    id: int
    repeats: int
    intact: float
    patched: float


@dataclass(frozen=True, kw_only=True)
class PatchMade(Result):
    """A patch and the evidence for it, or why there is none.

    Attributes:
        verdict: "made"; "refused": `reason` says why; "no-sink": the model has none; "no-repeats": it has one, but
            repetition makes none.
        reason: one sentence.
        neurons: the smallest set of causal neurons that suffices; of a refused patch, the set that was examined.
        causal: number of causal neurons it was chosen from.
        sink_layer: None: no sink.
        layer: where norms were read: the last layer that builds the spike.
        first_norm: the first token's norm there.
        typical_low: 5 % of the norms on typical text there.
        typical_norm: their median.
        typical_high: 95 %.
        ceiling: norms up to here count as typical: 1.5 times the 95 % line.
        tried: every set that was tried, in order; the first is the empty one.
        unreached: words that no repetition turned into a sink; they say nothing about a patch.
        held_out: the tokens the patch was verified with.
        perplexity: on pieces of typical text that took no part in the choice.
        limit: largest relative rise of the perplexity that is accepted.
    """

    kind: ClassVar[str] = "patch-make"

    verdict: Verdict
    reason: str
    neurons: tuple[PatchedNeuron, ...] = ()
    causal: int = 0
    sink_layer: int | None = None
    layer: int | None = None
    first_norm: float | None = None
    typical_low: float | None = None
    typical_norm: float | None = None
    typical_high: float | None = None
    ceiling: float | None = None
    tried: tuple[Tried, ...] = ()
    unreached: int = 0
    held_out: tuple[HeldOutToken, ...] = ()
    perplexity: Change | None = None
    limit: float

    @property
    def patch(self) -> SinkPatch:
        """The patch.

        Raises:
            SinkscopeError: none was made.
        """
        if self.verdict != "made":
            raise SinkscopeError(f"no patch was made for {self.model.name}: {self.reason}", page="no-sink")
        sites: dict[Any, float] = {n.site: n.calibrated for n in self.neurons}
        return SinkPatch(sites=tuple(sites), calibrated=sites, model=asdict(self.model))

    def rows(self) -> list[dict[str, Any]]:
        """One row per held-out token."""
        return [asdict(t) for t in self.held_out]

    def conclusion(self) -> str:
        """Whether there is a patch, and what it does to held-out tokens and text."""
        if self.verdict != "made" or self.perplexity is None or self.ceiling is None:
            return f"No patch was made: {self.reason}"
        rise = self.perplexity.difference / self.perplexity.before
        good = sum(t.patched <= self.ceiling for t in self.held_out)
        before = sum(t.intact <= self.ceiling for t in self.held_out)
        return (
            f"A patch of {len(self.neurons)} neuron{'s' * (len(self.neurons) > 1)} repairs repetition: {good} of "
            f"{len(self.held_out)} held-out tokens keep a typical norm when they are repeated ({before} without the "
            f"patch), and the perplexity of held-out text changes by {rise:+.3%}."
        )

    def details(self) -> list[str]:
        """The neurons, and the evidence."""
        lines: list[str] = []
        if self.neurons:
            names = ", ".join(
                f"layer {n.layer}" + (f" expert {n.expert}" if n.expert is not None else "") + f" neuron {n.neuron}"
                for n in self.neurons
            )
            lines.append(
                f"Neurons: {names} ({len(self.neurons)} of {self.causal} causal ones; {len(self.tried) - 1} sets were "
                "tried)."
            )
        if self.held_out and self.ceiling is not None:
            lines.append(
                f"Norms up to {self.ceiling:.4g} in layer {self.layer} count as typical; the first token's is "
                f"{self.first_norm:.4g}."
            )
        if self.perplexity is not None:
            p = self.perplexity
            se = "" if p.se is None else f" +- {p.se / p.before:.3%}"
            lines.append(
                f"Perplexity on held-out text: {p.before:.4g} -> {p.after:.4g} ({p.difference / p.before:+.3%}{se}, "
                f"limit {self.limit:+.1%})."
            )
        return lines


def _check(tokens: Sequence[str] | None, **_: object) -> None:
    if tokens is not None and len(set(tokens)) < 2:
        raise SinkscopeError(
            f"{len(set(tokens))} token to repeat: at least two different ones are needed, one to choose the patch with "
            "and one to verify it"
        )


def _write(made: PatchMade, path: str) -> str | None:
    """A refusal is an error, because a script that goes on to use the patch must stop; nothing to patch is none."""
    if made.verdict == "refused":
        raise SinkscopeError(f"no patch was written: {made.reason}", page="no-sink")
    if made.verdict != "made":
        return f"{Path(path).name} was not written: there is nothing to patch"
    return made.patch.save(path)


@measurement(
    group="Sinks",
    figure="sinkscope.figures.patch:draw_make",
    command="patch make",
    loading="whole",
    check=_check,
    quick={"words": 1, "max_repeats": 300, "pieces": 2, "length": 16},
    outputs=[Output("out", "Where the patch is written, if one is made.", _write, required=True)],
)
def make_patch(
    setup: Setup,
    *,
    tokens: Sequence[str] | None = None,
    words: Positive = 8,
    max_repeats: Annotated[int, Option(min=2)] | None = None,
    limit: Annotated[float, Option(min=0, max=1e6)] = 0.01,
    pieces: Annotated[int, Option(min=2)] = 32,
    length: Annotated[int, Option(min=8)] = 256,
    batch_size: Positive = 8,
) -> PatchMade:
    """Find the smallest set of causal neurons whose patch keeps repeated tokens from becoming sinks.

    Every set is tried by real passes under a `SinkPatch`, smaller sets first and of one size those of larger
    contributions first, until the norm of the repeated tokens stays typical; then tokens that took no part in the
    choice and held-out text are measured. A patch that harms is refused. (Yona et al. 2025, section 5.3, patch the
    neurons of their Table 1 by hand.)

    Args:
        tokens: Words to repeat, one token each, at least two: every other one is held out. By default words of the
            text.
        words: Words that are drawn to choose with, and as many to verify with.
        max_repeats: Largest number of repetitions. By default 1,024, or what the context holds.
        limit: Largest relative rise of the perplexity on held-out text that is accepted; 0.01 is 1 %.
        pieces: Pieces of held-out text.
        length: Tokens of a piece.
        batch_size: Rows that run together.
    """
    target = setup.target
    most = repeat_limit(target, max_repeats)
    setup.record(max_repeats=most)
    fields: dict[str, Any] = {"limit": limit}
    seen = walk(target, setup.ids, whole=True, progress=setup.progress)
    if (sink_layer := seen.sink_layer()) is None:
        reason = "it has no attention sink at the first token, so there is nothing to patch."
        return PatchMade(verdict="no-sink", reason=reason, **fields)
    layer = max(seen.stages())
    names = ("typical_low", "typical_norm", "typical_high")
    fields |= dict(zip(names, seen.typical[layer], strict=True))
    ceiling = HEADROOM * fields["typical_high"]
    fields |= {"sink_layer": sink_layer, "layer": layer, "first_norm": seen.first[layer], "ceiling": ceiling}
    drawn = pick_tokens(setup.tokenizer, setup.ids, tokens, setup.seed, 2 * words)
    starts = prefixes(setup, drawn)
    found = repeat_until_half(target, sink_layer, drawn, starts, most, setup.progress).repeats
    reached = [(w, p, n) for w, p, n in zip(drawn, starts, found, strict=True) if n is not None]
    fields["unreached"] = len(drawn) - len(reached)
    if len(reached) < 2:
        reason = (
            f"it has a sink, but {fields['unreached']} of {len(drawn)} words repeated {most} times make none, so there "
            "is nothing to patch or to verify with; a larger --max-repeats may find some."
        )
        return PatchMade(verdict="no-repeats", reason=reason, **fields)
    # Twice as many repetitions as the slowest word needs: well inside the sink, and no longer than that.
    count = min(most, 2 * max(n for _, _, n in reached))
    rows = torch.tensor([[p, *[w] * count] for w, p, _ in reached])
    candidates = _candidates(setup, sink_layer, seen.stages())
    chosen, fields["tried"] = _smallest(setup, candidates, layer, rows[::2], ceiling, batch_size)
    fields["causal"] = len(candidates)
    if chosen is None:
        what = "no set of the causal neurons suffices" if candidates else "no neuron is causal by itself"
        reason = f"{what}: the norm of repeated tokens does not fall to the typical range."
        return PatchMade(verdict="refused", reason=reason, **fields)
    fields["neurons"] = tuple(PatchedNeuron(n.layer, n.expert, n.neuron, n.neutral_post) for n in chosen)
    verify, patch = rows[1::2], _patch(chosen)
    intact, patched = (largest_norms(target, layer, verify, edit, batch_size) for edit in (None, patch))
    fields["held_out"] = tuple(
        HeldOutToken(setup.tokenizer.decode([w]), w, count, before, after)
        for (w, _, _), before, after in zip(reached[1::2], intact.tolist(), patched.tolist(), strict=True)
    )
    ids = held_out(setup, pieces, length)
    read = [losses(target, ids, edit, batch_size, setup.progress) for edit in (None, patch)]
    change = fields["perplexity"] = perplexity_change(*read)
    return PatchMade(**_verdict(int((patched > ceiling).sum()), len(verify), change, limit), **fields)


def _verdict(above: int, tokens: int, change: Change, limit: float) -> dict[str, Any]:
    rise = change.difference / change.before
    if above:
        reason = f"{above} of {tokens} held-out tokens keep a norm above the typical range."
    elif not rise <= limit:
        reason = f"it would harm: the perplexity on held-out text rises by {rise:.2%}, the limit is {limit:.2%}."
    else:
        return {
            "verdict": "made",
            "reason": "repeated tokens keep a typical norm, and ordinary text is read as before.",
        }
    return {"verdict": "refused", "reason": reason}


@torch.no_grad()
def largest_norms(
    target: Target, layer: int, rows: Int[Tensor, "row pos"], edit: Intervention | None, batch_size: int
) -> Float[Tensor, " row"]:
    """Per row, the largest norm of the residual stream after `layer` at positions behind the first."""
    norms: list[Tensor] = []

    def keep(_m: object, _a: object, _k: object, out: Any) -> None:
        norm = torch.linalg.vector_norm(first_tensor(out), dim=-1, dtype=torch.float32)
        norms.append(norm[:, 1:].amax(1).cpu())
        target.stop()

    for batch in rows.split(batch_size):
        with under(edit, target), target.hooks((target.layers[layer], "post", keep)):
            target.forward(batch)
    return torch.cat(norms)


def _candidates(setup: Setup, sink_layer: int, stages: list[int]) -> list[Neuron]:
    """Causal neurons of the sink layer, largest contribution first, then those of other stages."""
    generator = torch.Generator().manual_seed(setup.seed)
    return list(prove(setup.target, setup.ids, sink_layer, TOP_K, generator, None, stages).causal)


def _smallest(
    setup: Setup, candidates: list[Neuron], layer: int, rows: Tensor, ceiling: float, batch_size: int
) -> tuple[tuple[Neuron, ...] | None, tuple[Tried, ...]]:
    """The smallest set whose patch keeps the norms below the ceiling, None if none does; and all that were tried."""
    tried: list[Tried] = []
    for size in range(len(candidates) + 1):
        for some in combinations(candidates, size):
            edit = _patch(some) if some else None  # no neuron at all: how far there is to fall
            worst = float(largest_norms(setup.target, layer, rows, edit, batch_size).max())
            tried.append(Tried(tuple(n.site for n in some), worst))
            setup.progress("sets of neurons", len(tried), 2 ** len(candidates))
            if some and worst <= ceiling:
                return some, tuple(tried)
    return None, tuple(tried)


def _patch(neurons: Sequence[Neuron]) -> SinkPatch:
    return SinkPatch(sites=[n.site for n in neurons], calibrated={n.site: n.neutral_post for n in neurons})
