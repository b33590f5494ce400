"""A patch of the neurons that write a spike, made if what it does to repetition and to ordinary text proves it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import check_output
from sinkscope.files.progress import is_first
from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.measure import Number, Setup, Whole, measurement
from sinkscope.measure.margin import margin_of
from sinkscope.results.effect import Effect
from sinkscope.results.notation import count_of, word_list
from sinkscope.results.parts import Neuron
from sinkscope.sinks.first_tokens import spike_of
from sinkscope.sinks.patch.evaluate import PatchResult, draw
from sinkscope.sinks.patch.proof import AFTER, INTACT, ONCE, OTHERS, PATCHED, RANDOM, PatchProof, proof_of
from sinkscope.sinks.repetition.readings import effect_of_copies
from sinkscope.sinks.spikes.find import sinks_of
from sinkscope.sinks.tokens import Length, Pieces, repetition_limit

Verdict = Literal["made", "not-repaired", "refused", "no-sink", "no-repeats"]


def verdict_of(proof: PatchProof, limit: float) -> tuple[Verdict, str]:
    """Return the verdict on the patch of the first spike of a proof, and its reason.

    Args:
        proof: What the patch does.
        limit: Largest accepted relative increase of the perplexity.
    """
    failing, spike = proof.failing[0], proof.spikes[0]
    if not failing.any():
        tried = f"{proof.repeats:,} copies of {count_of(len(proof.words), 'word')}"
        return "no-repeats", f"{tried} do not reach half of the first token in the spike of {spike}."
    left = int((proof.has_spike[PATCHED, 0] & failing).sum())
    if left:
        return "not-repaired", f"under the patch, {count_of(left, 'word')} still reach the spike of {spike}."
    for one in proof.readings():
        if one.what == "attention" and one.spike == spike and not one.repaired[PATCHED]:
            given = f"{one.values[PATCHED]:.0%} of its attention (without it: {one.values[INTACT]:.0%})"
            return "not-repaired", f"under the patch, text after the copies still gives them {given}."
    rise = proof.ordinary.perplexity[PATCHED].change
    if not rise <= limit:
        return "refused", f"the perplexity of held-out text rises by {rise:.2%}, and the limit is {limit:.2%}."
    return "made", f"repeated words no longer reach the spike of {spike}, and text no longer attends to them."


@dataclass(frozen=True, kw_only=True)
class PatchMade(PatchResult):
    """A patch and the proof for it, or why there is none.

    Attributes:
        verdict: "made"; "not-repaired": repeated words reach the spike, or text after them attends to them; "refused":
            the patch would harm; "no-sink": there is nothing to patch; "no-repeats": repetition makes no sink, so
            nothing can be proved.
        reason: One sentence that explains the verdict.
        sites: The neurons of the patch.
        calibrated: Their neutral values.
    """

    verdict: Verdict
    reason: str
    sites: tuple[Neuron, ...] = ()
    calibrated: tuple[float, ...] = ()
    proof: PatchProof | None = None

    @property
    def exit_code(self) -> int:
        """Return 1 if there is no patch, whatever the reason: a script that goes on with the file must stop."""
        return int(self.verdict != "made")

    @property
    def patch(self) -> SinkPatch:
        """Return the patch.

        Raises:
            SinkscopeError: No patch was made.
        """
        if self.verdict != "made":
            raise SinkscopeError(f"no patch was made for {self.model.name}: {self.reason}")
        calibrated = dict(zip(self.sites, self.calibrated, strict=True))
        return SinkPatch(sites=self.sites, calibrated=calibrated, model=vars(self.model))

    def effects(self) -> tuple[Effect, Effect] | None:
        """Return what the patch takes from copies of the words that need repair, and what all copies have without it.

        None: no word needs repair.
        """
        proof = self.proof
        if proof is None or not proof.failing[0].any():
            return None
        along = torch.from_numpy(proof.along[:, 0])
        failing = along[:, proof.failing[0]]
        lost = 1 - failing[[PATCHED, RANDOM]] / failing[INTACT]
        patched, random = lost.mean(1).tolist()
        patch = Effect(patched, margin_of(lost[0].numpy()), {"random neurons": random})
        return patch, effect_of_copies(along[[INTACT, ONCE, OTHERS]])

    def numbers(self) -> list[Number]:
        """Return how much of the spike copies lose under the patch, and how much they have without it."""
        effects = self.effects()
        if effects is None or self.proof is None:
            return []
        lost = f"norm lost with {word_list(self.sites, 2)} patched"
        copies = f"norm with {self.proof.repeats} copies of a token"
        return [Number.of("norm.neurons", lost, effects[0]), Number.of("norm.tokens", copies, effects[1])]

    def conclusion(self) -> str:
        """Say what the patch does in its own spike, or why there is none."""
        if self.verdict != "made" or self.proof is None:
            return f"No patch was made: {self.reason}"
        return self.proof.sentences()[0]


@measurement(
    figure=draw,
    loading="whole",
)
def patch_make(
    setup: Setup,
    *,
    spike: Whole | None = None,
    max_repeats: Annotated[int, Field(ge=2)] | None = None,
    limit: Annotated[float, Field(ge=0, le=1e6)] = 0.01,
    pieces: Pieces = 32,
    length: Length = 64,
    out: str | Path | None = None,
) -> PatchMade:
    """Make a patch of the neurons that write a spike, and prove that it keeps repeated words from reaching the spike.

    With the neurons patched, repeated words must not reach half of the first token's projection on the spike's
    direction, text after them must give them less than half of the attention that it gives them otherwise, and the
    perplexity of held-out text must not rise; the same is measured with random neurons. The other spikes of the first
    token are read, too. (Yona et al. 2025, section 5.3, patch the neurons of their Table 1 by hand.)

    Args:
        spike: Number of the spike in `find_sinks`. By default, among the spikes of the first token that need
            neurons, the one that most heads read.
        max_repeats: Largest number of repetitions. By default 1,024, or what the context holds.
        limit: Largest accepted relative increase of the perplexity on held-out text; 0.01 is 1 %.
        pieces: Number of pieces of held-out text.
        length: Tokens per piece.
        out: Where the patch is written, if one is made.
    """
    if out is not None:
        check_output(out, ["sink-patch"])
    most = repetition_limit(setup.target, max_repeats, 1 + AFTER)
    sinks, chosen = sinks_of(setup), spike_of(setup, spike)
    setup.record(max_repeats=most)
    if chosen is None:
        reason = "no neurons are known that a norm spike at the first token needs, so there is nothing to patch."
        return PatchMade(verdict="no-sink", reason=reason)
    patch = replace(chosen.patch, model=vars(setup.info()))
    others = [spike for spike in sinks.at_first if spike is not chosen]
    proof = proof_of(setup, [chosen, *others], patch, most, pieces, length)
    verdict, reason = verdict_of(proof, limit)
    if out is not None and verdict == "made" and is_first():
        patch.save(out)
    values = tuple(patch.calibrated.values())
    return PatchMade(verdict=verdict, reason=reason, sites=patch.checked_sites, calibrated=values, proof=proof)
