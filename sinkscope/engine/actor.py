"""What acts in a forward call, at three moments, and what it may take back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Bool
from torch import Tensor

from sinkscope.engine.attention import Attention
from sinkscope.engine.step import Step


@dataclass(frozen=True, eq=False)
class TakeBack:
    """Tokens that leave the output and the cache, although they were written.

    Attributes:
        kept: Columns of the cache that stay, by row: False at padding and at removed tokens.
        reread: The last token that stays of each row that lost some; it is read again.
        ended: Rows that have ended.
    """

    kept: Bool[Tensor, "row column"]
    reread: dict[int, int]
    ended: list[bool]


class Actor:
    """Base of what acts in the calls of a block. Override the moments at which it does.

    A block asks its actors in the order in which they were entered: all of them before the model reads, all of them in
    the attention of each layer, all of them after logits exist.

    Attributes:
        reads_logits: Whether `after` reads logits; if none of a block's actors does, it is called when the decoder has
            ended.
    """

    reads_logits: ClassVar[bool] = True

    def before(self, step: Step) -> None:
        """Act before the model reads: cache and rows may change."""

    def attends(self, step: Step) -> bool:
        """Return whether `attend` has something to do in the layers of a call; if nobody has, the model runs alone."""
        return False

    def attend(self, step: Step, attention: Attention) -> None:
        """Act in the attention of a layer: ask for rows (`show`), hide keys (`hide`), or compute it (`compute`)."""

    def after(self, step: Step) -> TakeBack | None:
        """Act after logits exist, which may be changed in place; return what is to be taken back."""
        return None
