"""What a command says that needs neurons of a norm spike, of a model whose MLPs make none."""

from __future__ import annotations

from dataclasses import dataclass

from sinkscope.sinks.first_token.attention_received import attention_received
from sinkscope.sinks.first_token.context import SinkContext


@dataclass(frozen=True)
class SpikeAbsence:
    """No MLP makes a norm spike at the first token. That says nothing of attention, so both are looked at.

    Attributes:
        sink: Whether heads attend to some position, or to learned sink logits.
        length: Length of the texts in which attention was read.
    """

    sink: bool
    length: int

    @classmethod
    def of(cls, context: SinkContext) -> SpikeAbsence | None:
        """What there is instead; None if an MLP makes a spike."""
        if context.sink_layer is not None:
            return None
        received = attention_received(context.target, context.ids, layers=len(context.scan.layers))
        return cls(received.attended, context.ids.shape[1])

    def sentence(self, consequence: str) -> str:
        """Why something cannot be measured, and what there is.

        Args:
            consequence: What cannot be measured, as a clause.
        """
        attention = f"there is no attention sink in texts of {self.length} tokens"
        if self.sink:
            attention = "the model has an attention sink, see `circuit`"
        return f"No MLP makes a norm spike at the first token, so {consequence}; {attention}."
