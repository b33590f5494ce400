"""What a command says that needs neurons of a spike at the first token, of a model whose MLPs make none."""

from __future__ import annotations

from dataclasses import dataclass

from sinkscope.results.notation import word_list
from sinkscope.sinks.find.context import SinkContext, Survey


@dataclass(frozen=True)
class SpikeAbsence:
    """No MLP makes a norm spike at the first token. That says nothing of attention, so both are looked at.

    Attributes:
        sink: Words for the first kind of places of the attention sink, or for learned sink logits; empty if there is
            none.
        lengths: Lengths of the texts in which attention was read.
        spike: Words for a norm spike elsewhere; empty if there is none.
    """

    sink: str
    lengths: tuple[int, ...]
    spike: str = ""

    @classmethod
    def of(cls, survey: Survey, context: SinkContext) -> SpikeAbsence | None:
        """What there is instead; None if an MLP makes a spike at the first token.

        Args:
            survey: Where the sinks and the spikes are.
            context: The model at the first token.
        """
        if context.scan.sink_layer is not None:
            return None
        sink = ""
        if survey.sink is not None:
            sink = survey.sink.rules[0].words
        elif survey.received.learned_heads:
            sink = "their learned sink logits"
        spike = ""
        if survey.spike is not None and not survey.spike.is_first:
            spike = survey.spike.words
        return cls(sink, survey.lengths, spike)

    def sentence(self, consequence: str) -> str:
        """Why something cannot be measured, and what there is.

        Args:
            consequence: What cannot be measured, as a clause.
        """
        attention = f"there is no attention sink in texts of {word_list(self.lengths)} tokens"
        if self.sink:
            attention = f"heads attend to {self.sink}, see `circuit`"
        if self.spike:
            attention = f"its norm spike is at {self.spike}"
        return f"No MLP makes a norm spike at the first token, so {consequence}; {attention}."
