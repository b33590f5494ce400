"""What a patch repairs of what repeated words break, and what it costs on ordinary text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import plotly.express as px
import plotly.graph_objects as go
from pydantic import Field

from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.measure import Option, Result, Setup, measurement
from sinkscope.results.notation import count_of, short_sentence, word_list
from sinkscope.results.parts import Neuron, in_words
from sinkscope.results.style import figure_of
from sinkscope.results.tables import Table
from sinkscope.sinks.held_out import Length, Pieces
from sinkscope.sinks.patch.patches import read_patch_argument
from sinkscope.sinks.patch.proof import CASES, RANDOM, PatchProof, Repair, proof_of
from sinkscope.sinks.spikes.find import first_spikes
from sinkscope.sinks.spikes.survey import survey_of
from sinkscope.sinks.tokens import repetition_limit


@dataclass(frozen=True, kw_only=True)
class PatchEvaluation(Result):
    """What a patch repairs, and what it costs.

    Attributes:
        neurons: Neurons of the patch.
        proof: What it does to repeated words in each spike of the first token, and to ordinary text.
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

    neurons: tuple[Neuron, ...]
    proof: PatchProof

    def conclusion(self) -> str:
        """Say what the patch repairs and what it does not, beside random neurons."""
        proof, repairs = self.proof, self.proof.repairs()
        if not proof.spikes:
            return f"The patch of {in_words(self.neurons, 3)} has nothing to repair: the first token has no spike."
        if not repairs:
            words = count_of(len(proof.words), "word")
            return f"There is nothing to repair: of {words}, none has a spike only after {proof.repeats:,} copies."
        good = [one for one in repairs if one.patched]
        bad = [one for one in repairs if not one.patched]
        said = f"repairs {_in_words(good)}, but not {_in_words(bad)}"
        if not good or not bad:
            said = f"repairs {_in_words(good)}" if good else f"does not repair {_in_words(bad)}"
        chance = [one for one in repairs if one.random]
        control = f"random neurons repair {_in_words(chance) if chance else 'nothing'}"
        return short_sentence(
            f"At copies, the patch of {in_words(self.neurons, most)} {said} ({control})." for most in (3, 1)
        )

    def details(self) -> list[str]:
        """Say what is read in each spike, after copies and on ordinary text."""
        return self.proof.sentences()

    def rows(self) -> Table:
        """Return a row for each number that is read without a patch, with it, and with a random one."""
        proof, rows = self.proof, list[tuple[str, str | None, Any]]()
        for number, spike in enumerate(proof.spikes):
            rows.append(("last copy", spike, proof.furthest(number)))
            rows.append(("attention to copies", spike, proof.attention(number)))
        changes = [one.change for one in proof.ordinary.perplexity]
        rows += [("one more copy", None, proof.one_more()), ("change of the perplexity", None, changes)]
        table: Table = []
        for reading, spike, cases in rows:
            if cases is not None:
                numbers = dict(zip(self.percent, map(float, cases), strict=True))
                table.append({"reading": reading, "spike": spike, **numbers})
        return table


def _in_words(repairs: Sequence[Repair]) -> str:
    parts: list[str] = []
    for spike in dict.fromkeys(one.spike for one in repairs):
        what = word_list([one.what for one in repairs if one.spike == spike])
        parts.append(f"{what} in {spike}" if spike else f"the {what}")
    return word_list(parts)


def draw(result: PatchEvaluation) -> go.Figure:
    """Draw what is read at copies without the patch, with it, and with random neurons."""
    rows: Table = []
    for row in result.rows()[:-1]:
        reading = " in ".join(filter(None, (row["reading"], row["spike"])))
        rows += [{"reading": reading, "case": case, "share": row[case]} for case in result.percent]
    axes: dict[str, Any] = {"x": "reading", "y": "share", "color": "case", "barmode": "group"}
    fig = px.bar(rows, **axes, labels={"reading": "", "share": ""}) if rows else go.Figure()
    return figure_of(fig.update_yaxes(tickformat=".0%"), result, width=900, height=480)


@measurement(
    group="Sinks",
    help="Measure what a patch repairs and costs.",
    figure=draw,
    words="patch eval",
    loading="whole",
    check=read_patch_argument,
)
def patch_eval(
    setup: Setup,
    patch: Annotated[Any, Option(metavar="FILE", required=True)] = None,
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

    Example:
        sinkscope patch eval --model llama-2-7b --patch patch.json
    """
    edit = read_patch_argument(patch)
    edit.check(setup.target)
    most = repetition_limit(setup.target, max_repeats)
    setup.record(patch=None if isinstance(patch, SinkPatch) else Path(patch).name, max_repeats=most)
    spikes = first_spikes(survey_of(setup, setup.bos), setup.tokenizer)
    proof = proof_of(setup, spikes, edit, most, pieces, length)
    return PatchEvaluation(neurons=edit.checked_sites, proof=proof)
