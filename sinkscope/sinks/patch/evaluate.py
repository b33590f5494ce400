"""What a patch repairs of what repeated words break, and what it costs on ordinary text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import plotly.express as px
import plotly.graph_objects as go
from pydantic import Field

from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.measure import Result, Setup, measurement
from sinkscope.results.notation import count_of, short_sentence, word_list
from sinkscope.results.parts import Neuron
from sinkscope.results.style import figure_of
from sinkscope.results.tables import Table
from sinkscope.sinks.patch.proof import (
    AFTER,
    CASES,
    PATCHED,
    RANDOM,
    PatchProof,
    Reading,
    proof_of,
    read_patch_argument,
)
from sinkscope.sinks.spikes.spike import first_spikes
from sinkscope.sinks.spikes.survey import survey_of
from sinkscope.sinks.tokens import Length, Pieces, repetition_limit

ROWS = {"norm": "last copy", "attention": "attention to copies", "next token": "one more copy"}
"""What the rows of a table are called."""


@dataclass(frozen=True, kw_only=True)
class PatchResult(Result):
    """What a patch does, as `patch make` and `patch eval` return it.

    Attributes:
        proof: What it does to repeated words in each spike of the first token, and to ordinary text. None: there is no
            patch.
    """

    page = "measure/patch"
    percent = CASES[: RANDOM + 1]
    glossary: ClassVar = {
        "reading": "what is read at copies of the words that need repair, or of held-out text",
        "spike": "the spike of the first token, by its layers",
        "intact": "without a patch",
        "patched": "under the patch",
        "random": "under a patch of as many random neurons of the same layers",
    }

    proof: PatchProof | None

    def details(self) -> list[str]:
        """Say what is read in each spike, after copies and on ordinary text."""
        if self.proof is None:
            return []
        return [line for line in self.proof.sentences() if line != self.conclusion()]

    def rows(self) -> Table:
        """Return a row for each number that is read without a patch, with it, and with a random one."""
        table: Table = []
        if self.proof is None:
            return table
        rows = [(ROWS[one.what], one.spike or None, one.values.tolist()) for one in self.proof.readings()]
        rows.append(("change of the perplexity", None, [one.change for one in self.proof.ordinary.perplexity]))
        for reading, spike, values in rows:
            table.append({"reading": reading, "spike": spike, **dict(zip(self.percent, values, strict=True))})
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


@dataclass(frozen=True, kw_only=True)
class PatchEvaluation(PatchResult):
    """What a patch repairs, and what it costs.

    Attributes:
        neurons: Neurons of the patch.
    """

    neurons: tuple[Neuron, ...]
    proof: PatchProof

    def conclusion(self) -> str:
        """Say what the patch repairs and what it does not, beside random neurons."""
        proof = self.proof
        broken = [one for one in proof.readings() if one.broken]
        if not proof.spikes:
            return f"The patch of {word_list(self.neurons, 3)} has nothing to repair: the first token has no spike."
        if not broken:
            words = count_of(len(proof.words), "word")
            return f"There is nothing to repair: of {words}, none has a spike only after {proof.repeats:,} copies."
        good = _in_words(one for one in broken if one.repaired[PATCHED])
        bad = _in_words(one for one in broken if not one.repaired[PATCHED])
        said = f"does not repair {bad}"
        if good:
            said = f"repairs {good}, but not {bad}" if bad else f"repairs {good}"
        chance = _in_words(one for one in broken if one.repaired[RANDOM]) or "nothing"
        return short_sentence(
            f"At copies, the patch of {word_list(self.neurons, most)} {said} (random neurons repair {chance})."
            for most in (3, 1)
        )


def _in_words(readings: Iterable[Reading]) -> str:
    """Name readings, grouped by spike; empty without any."""
    of_spike: dict[str, list[str]] = {}
    for one in readings:
        of_spike.setdefault(one.spike, []).append(one.what)
    parts: list[str] = []
    for spike, what in of_spike.items():
        parts.append(f"{word_list(what)} in {spike}" if spike else f"the {word_list(what)}")
    return word_list(parts) if parts else ""


@measurement(
    figure=draw,
    loading="whole",
    check=read_patch_argument,
)
def patch_eval(
    setup: Setup,
    patch: Any = None,
    *,
    max_repeats: Annotated[int, Field(ge=2)] | None = None,
    pieces: Pieces = 32,
    length: Length = 64,
) -> PatchEvaluation:
    """Measure what a patch repairs at repeated words in each spike of the first token, and what it costs elsewhere.

    Everything is read without a patch, with it, and with a patch of as many random neurons of the same layers, which
    hold their values at the second token. Perplexity is measured on pieces of the typical text after the part that
    neutral values are taken from.

    Args:
        patch: The patch.json to evaluate; from Python also a `SinkPatch`.
        max_repeats: Largest number of repetitions. By default 1,024, or what the context holds.
        pieces: Number of pieces of held-out text.
        length: Tokens per piece.
    """
    edit = read_patch_argument(patch)
    edit.check(setup.target)
    most = repetition_limit(setup.target, max_repeats, 1 + AFTER)
    setup.record(patch=None if isinstance(patch, SinkPatch) else Path(patch).name, max_repeats=most)
    survey = survey_of(setup, setup.bos)
    proof = proof_of(setup, first_spikes(survey, setup.tokenizer), edit, most, pieces, length)
    return PatchEvaluation(neurons=edit.checked_sites, proof=proof)
