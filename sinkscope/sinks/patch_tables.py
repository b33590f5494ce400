"""The table of `patch`: what a patch changes at copies and in ordinary text, beside a patch of other neurons."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sinkscope.results.mean import Mean
from sinkscope.results.table import Row, column, detail, optional
from sinkscope.sinks.spikes.spike import layers_words


class Reading(StrEnum):
    """What is read."""

    NORM = "norm"  # the last copy on the direction of a spike
    ATTENTION = "attention"  # that text after copies gives to them
    NEXT = "next"  # the probability of one more copy
    PERPLEXITY = "perplexity"  # of ordinary text


class Outcome(StrEnum):
    """What the patch does to what needs repair."""

    REPAIRED = "repaired"
    NOT_REPAIRED = "not repaired"
    NOTHING = "nothing to do"


@dataclass(frozen=True, kw_only=True)
class Patched(
    Row,
    table="patch",
    title="after copies of a word",
    note="Repaired: the last copy has less than half of the first token's spike; later text gives the copies less than "
    "half of the attention; the word comes once more with at least 50%. Position 0 keeps its spike, so ordinary text "
    "loses less than where find-sinks zeroes the neurons there.",
):
    """What is read without a patch, with it, and with a patch of other neurons.

    Attributes:
        layers: The layers of the spike. None: it is of no spike.
        words: The words over which it is read; of ordinary text none.
    """

    key: Reading
    layers: tuple[int, int] | None = None
    words: tuple[str, ...] = ()

    intact: Mean | None = optional("without\npatch", "share", "What is read of the model as it is.")
    patched: Mean = column("with the\npatch", "share", "What is read with the patch; of the perplexity, its change.")
    control: Mean | None = optional(
        "control: other\nneurons patched", "share", "The same with a patch of other neurons of the same layers."
    )
    outcome: Outcome | None = optional("outcome", "word", "What the patch does to what needs repair.")
    one_copy: Mean | None = detail(
        "one copy",
        "share",
        "What one copy behind ordinary text has of the spike: a word that has half needs no repair.",
    )
    perplexity: Mean | None = detail("perplexity", "number", "Perplexity of the held-out text without a patch.")

    @property
    def group(self) -> str:
        """The heading under which it stands."""
        return "what is written" if self.layers is None else f"norm spike of {layers_words(*self.layers)}"

    @property
    def label(self) -> str:
        """What it is called."""
        match self.key:
            case Reading.NORM:
                return "last copy, % of the first token's spike (largest)"
            case Reading.ATTENTION:
                return "attention of later text on the copies (mean)"
            case Reading.NEXT:
                return "probability of one more copy (mean)"
            case Reading.PERPLEXITY:
                return "change of the perplexity of ordinary text"

    @property
    def short_label(self) -> str:
        """What a figure calls it."""
        words = {Reading.NORM: "spike of the last copy", Reading.ATTENTION: "attention on copies"}
        of_spike = "" if self.layers is None else f", {layers_words(*self.layers)}"
        return f"{words.get(self.key, self.label)}{of_spike}"
