"""Patches of the neurons that write a spike: making one if a proof holds, and what one repairs and costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import plotly.express as px
import plotly.graph_objects as go
import torch
from pydantic import Field

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import check_output
from sinkscope.files.progress import is_first
from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.measure import Mean, Result, Row, Setup, Whole, measurement
from sinkscope.measure.margin import margin_of
from sinkscope.results.notation import count_of, short_sentence, word_list
from sinkscope.results.parts import Neuron
from sinkscope.results.row import row_beside
from sinkscope.results.style import figure_of
from sinkscope.results.tables import Table
from sinkscope.sinks.first_tokens import spike_of
from sinkscope.sinks.patch_proof import (
    AFTER,
    CASES,
    INTACT,
    ONCE,
    OTHERS,
    PATCHED,
    RANDOM,
    PatchProof,
    Reading,
    proof_of,
    read_patch_argument,
)
from sinkscope.sinks.repeat import effect_of_copies
from sinkscope.sinks.spikes.find import sinks_of
from sinkscope.sinks.spikes.spike import first_spikes
from sinkscope.sinks.spikes.survey import survey_of
from sinkscope.sinks.tokens import Length, Pieces, repetition_limit

Verdict = Literal["made", "given", "not-repaired", "refused", "no-sink", "no-repeats"]


ROWS = {"norm": "last copy", "attention": "attention to copies", "next token": "one more copy"}
"""What the rows of a table are called."""


@dataclass(frozen=True, kw_only=True)
class PatchResult(Result):
    """A patch with what it repairs and costs, or why none was made.

    Attributes:
        verdict: "made"; "given": it is that of a file; "not-repaired": repeated words reach the spike, or text after
            them attends to them; "refused": the patch would harm; "no-sink": there is nothing to patch; "no-repeats":
            repetition makes no sink, so nothing can be proved.
        reason: One sentence that explains the verdict.
        sites: The neurons of the patch.
        calibrated: Their neutral values.
        proof: What the patch does to repeated words in each spike of the first token, and to ordinary text. None: there
            is no patch.
    """

    kind = "patch"
    page = "measure/patch"
    percent = CASES[: RANDOM + 1]
    glossary: ClassVar = {
        "reading": "what is read at copies of the words that need repair, or of held-out text",
        "spike": "the spike of the first token, by its layers",
        "intact": "without a patch",
        "patched": "under the patch",
        "random": "under a patch of as many random neurons of the same layers",
    }

    verdict: Verdict
    reason: str
    sites: tuple[Neuron, ...] = ()
    calibrated: tuple[float, ...] = ()
    proof: PatchProof | None = None

    @property
    def exit_code(self) -> int:
        """Return 1 if no patch was made, whatever the reason: a script that goes on with the file must stop."""
        return int(self.verdict not in ("made", "given"))

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

    def findings(self) -> list[Row]:
        """Return what the patch takes from copies, and what it costs."""
        return [] if self.proof is None else findings_of(self.proof)

    def conclusion(self) -> str:
        """Say what the patch does in its own spike, or why there is none; of a given patch, what it repairs."""
        if self.verdict == "given" and self.proof is not None:
            return repairs_sentence(self.proof, self.sites)
        if self.verdict != "made" or self.proof is None:
            return f"No patch was made: {self.reason}"
        return self.proof.sentences()[0]

    def details(self) -> list[str]:
        """Say what is repaired, and what is read in each spike, after copies and on ordinary text."""
        if self.proof is None:
            return []
        lines = [repairs_sentence(self.proof, self.sites), *self.proof.sentences()]
        return [line for line in lines if line != self.conclusion()]

    def rows(self) -> Table:
        """Return a row for each number that is read without a patch, with it, and with a random one."""
        table: Table = []
        if self.proof is None:
            return table
        rows = [
            (ROWS[reading.what], reading.spike or None, reading.values.tolist()) for reading in self.proof.readings()
        ]
        rows.append(("change of the perplexity", None, [case.change for case in self.proof.ordinary.perplexity]))
        for name, spike, values in rows:
            table.append({"reading": name, "spike": spike, **dict(zip(self.percent, values, strict=True))})
        return table


def draw(result: PatchResult) -> go.Figure:
    """Draw what is read at copies without the patch, with it, and with random neurons."""
    rows: Table = []
    for row in result.rows()[:-1]:
        reading = " in ".join(filter(None, (row["reading"], row["spike"])))
        rows += [{"reading": reading, "case": case, "share": row[case]} for case in result.percent]
    axes: dict[str, Any] = {"x": "reading", "y": "share", "color": "case", "barmode": "group"}
    fig = px.bar(rows, **axes, labels={"reading": "", "share": ""}) if rows else go.Figure()
    return figure_of(fig.update_yaxes(tickformat=".0%"), result, width=900, height=480)


def repairs_sentence(proof: PatchProof, neurons: Sequence[Neuron]) -> str:
    """Say what the patch repairs and what it does not, beside random neurons.

    Args:
        proof: What the patch does.
        neurons: The neurons of the patch.
    """
    broken = [reading for reading in proof.readings() if reading.broken]
    if not proof.spikes:
        return f"The patch of {word_list(neurons, 3)} has nothing to repair: the first token has no spike."
    if not broken:
        words = count_of(len(proof.words), "word")
        return f"There is nothing to repair: of {words}, none has a spike only after {proof.repeats:,} copies."
    good = _in_words(reading for reading in broken if reading.repaired[PATCHED])
    bad = _in_words(reading for reading in broken if not reading.repaired[PATCHED])
    effect = f"does not repair {bad}"
    if good:
        effect = f"repairs {good}, but not {bad}" if bad else f"repairs {good}"
    chance = _in_words(reading for reading in broken if reading.repaired[RANDOM]) or "nothing"
    return short_sentence(
        f"At copies, the patch of {word_list(neurons, most)} {effect} (random neurons repair {chance})."
        for most in (3, 1)
    )


def findings_of(proof: PatchProof) -> list[Row]:
    """Return how much of the spike copies lose under the patch, how much they have without it, and what text costs."""
    _, patched, random = proof.ordinary.perplexity
    change = Mean(patched.change, patched.margin, kind="share")
    cost = row_beside("change of the perplexity", change, random.change, "random neurons")
    if not proof.spikes or not proof.failing[0].any():
        return [cost]
    failing = proof.failing[0]
    along = torch.from_numpy(proof.along[:, 0])
    lost = 1 - along[[PATCHED, RANDOM]][:, failing] / along[INTACT, failing]
    words = [word for word, fails in zip(proof.words, failing, strict=True) if fails]
    repaired = Mean(float(lost[0].mean()), margin_of(lost[0].numpy()), tuple(lost[0].tolist()), "share")
    copies = effect_of_copies(along[[INTACT, ONCE, OTHERS]])
    control, share = copies.control
    label = "norm that copies lose under the patch"
    return [
        row_beside(label, repaired, float(lost[1].mean()), "random neurons", texts=words),
        row_beside("norm with copies of a token", Mean(copies.value, copies.margin, kind="share"), share, control),
        cost,
    ]


def _in_words(readings: Iterable[Reading]) -> str:
    """Name readings, grouped by spike; empty without any."""
    of_spike: dict[str, list[str]] = {}
    for reading in readings:
        of_spike.setdefault(reading.spike, []).append(reading.what)
    parts: list[str] = []
    for spike, what in of_spike.items():
        parts.append(f"{word_list(what)} in {spike}" if spike else f"the {word_list(what)}")
    return word_list(parts) if parts else ""


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
    for reading in proof.readings():
        if reading.what == "attention" and reading.spike == spike and not reading.repaired[PATCHED]:
            share = f"{reading.values[PATCHED]:.0%} of its attention (without it: {reading.values[INTACT]:.0%})"
            return "not-repaired", f"under the patch, text after the copies still gives them {share}."
    rise = proof.ordinary.perplexity[PATCHED].change
    if not rise <= limit:
        return "refused", f"the perplexity of held-out text rises by {rise:.2%}, and the limit is {limit:.2%}."
    return "made", f"repeated words no longer reach the spike of {spike}, and text no longer attends to them."


def refuse_both(file: Any = None, out: Any = None, spike: Any = None, **_: Any) -> None:
    """Refuse a file that is evaluated together with what only making a patch uses.

    Raises:
        SinkscopeError: `file` is given with `out` or `spike`, or holds no patch.
    """
    if file is None:
        return
    for name, value in (("out", out), ("spike", spike)):
        if value is not None:
            raise SinkscopeError(f"--{name} has no effect with --file, which holds a patch: leave one of both out")
    read_patch_argument(file)


@measurement(
    figure=draw,
    loading="whole",
    check=refuse_both,
)
def patch(
    setup: Setup,
    *,
    file: Any = None,
    spike: Whole | None = None,
    max_repeats: Annotated[int, Field(ge=2)] | None = None,
    limit: Annotated[float, Field(ge=0, le=1e6)] = 0.01,
    pieces: Pieces = 32,
    length: Length = 64,
    out: str | Path | None = None,
) -> PatchResult:
    """Make a patch of the neurons that write a spike, prove it, and say what it repairs and costs.

    With the neurons patched, repeated words must not reach half of the first token's projection on the spike's
    direction, text after them must give them less than half of the attention that it gives them otherwise, and the
    perplexity of held-out text must not rise. Everything is read without the patch, with it, and with a patch of as
    many random neurons of the same layers, also in the other spikes of the first token. (Yona et al. 2025, section
    5.3, patch the neurons of their Table 1 by hand.)

    Args:
        file: A patch that exists, which is evaluated instead; from Python also a `SinkPatch`.
        spike: Number of the spike in `find_sinks`. By default, among the spikes of the first token that need
            neurons, the one that most heads read.
        max_repeats: Largest number of repetitions. By default 1,024, or what the context holds.
        limit: Largest accepted relative increase of the perplexity on held-out text; 0.01 is 1 %.
        pieces: Number of pieces of held-out text.
        length: Tokens per piece.
        out: Where the patch is written, if one is made.
    """
    most = repetition_limit(setup.target, max_repeats, 1 + AFTER)
    if file is not None:
        return evaluated(setup, file, most, pieces, length)
    if out is not None:
        check_output(out, ["sink-patch"])
    sinks, chosen = sinks_of(setup), spike_of(setup, spike)
    setup.record(max_repeats=most)
    if chosen is None:
        reason = "no neurons are known that a norm spike at the first token needs, so there is nothing to patch."
        return PatchResult(verdict="no-sink", reason=reason)
    edit = replace(chosen.patch, model=vars(setup.info()))
    others = [circuit.spike for circuit in sinks.at_first if circuit is not chosen]
    proof = proof_of(setup, [chosen.spike, *others], edit, most, pieces, length)
    verdict, reason = verdict_of(proof, limit)
    if out is not None and verdict == "made" and is_first():
        edit.save(out)
    values = tuple(edit.calibrated.values())
    return PatchResult(verdict=verdict, reason=reason, sites=edit.checked_sites, calibrated=values, proof=proof)


def evaluated(setup: Setup, file: Any, most: int, pieces: int, length: int) -> PatchResult:
    """Read what a patch that exists repairs and costs, in each spike of the first token.

    Args:
        setup: The model and its text.
        file: The file of the patch, or a `SinkPatch`.
        most: Number of repetitions.
        pieces: Number of pieces of held-out text.
        length: Tokens per piece.
    """
    edit = read_patch_argument(file)
    edit.check(setup.target)
    setup.record(file=None if isinstance(file, SinkPatch) else Path(file).name, max_repeats=most)
    spikes = first_spikes(survey_of(setup, setup.bos), setup.tokenizer)
    proof = proof_of(setup, spikes, edit, most, pieces, length)
    return PatchResult(verdict="given", reason="it was given.", sites=edit.checked_sites, proof=proof)
