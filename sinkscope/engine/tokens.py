"""Where the tokens of a batch stand: their columns, their documents, and their positions in documents.

A *column* counts the tokens of a row with padding, as masks and caches of transformers do. A *document* is what a token
sees, directly or through others: a row is one document, unless texts were packed into it. A *position* counts the real
tokens of a document from 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinkscope.errors import UnsupportedError


@dataclass(frozen=True, eq=False)
class TokenPositions:
    """The tokens of a batch, by column.

    Attributes:
        pos: Position of every token in its document; -1 at padding.
        length: Number of real tokens in each row.
        seen: Number of columns.
        document: Number of the document of every token, from 0 in each row. None if each row is one document.
    """

    pos: Int[Tensor, "batch seen"]
    length: Int[Tensor, " batch"]
    seen: int
    document: Int[Tensor, "batch seen"] | None = None

    @classmethod
    def none(cls, batch: int, device: torch.device) -> TokenPositions:
        """Return the positions of rows without tokens."""
        nothing = torch.zeros(batch, 0, dtype=torch.int64, device=device)
        return cls(nothing, torch.zeros(batch, dtype=torch.int64, device=device), 0)

    @classmethod
    def of(cls, pos: Int[Tensor, "batch seen"], document: Int[Tensor, "batch seen"] | None = None) -> TokenPositions:
        """Return tokens with these positions."""
        return cls(pos, (pos >= 0).sum(1), pos.shape[1], document)

    @cached_property
    def padded(self) -> int:
        """Number of the first columns among which all padding is; whoever asks first waits for the device."""
        columns = (self.pos < 0).any(0).nonzero()
        return int(columns[-1]) + 1 if len(columns) else 0

    def read(self, real: Bool[Tensor, "batch new"], starts: Bool[Tensor, "batch new"] | None = None) -> TokenPositions:
        """Return these tokens and new ones.

        Args:
            real: Which of the new ones are no padding.
            starts: Which of them begin a document after others of their row. None: none does.
        """
        if starts is None and self.document is None:
            count = real.cumsum(1)
            later = torch.where(real, self.length[:, None] + count - 1, -1)
            length = self.length + count[:, -1] if real.shape[1] else self.length
            return TokenPositions(torch.cat([self.pos, later], 1), length, self.seen + real.shape[1])
        later = torch.zeros_like(self.length)[:, None]
        if self.seen:  # tokens go on in the last document
            later = self.documents.amax(1, keepdim=True)
        if starts is not None:
            later = later + (starts & real).cumsum(1)
        return self._followed_by(real, later.expand(real.shape))

    def read_under(self, sees: Bool[Tensor, "batch new seen"]) -> TokenPositions:
        """Return these tokens followed by new ones, whose documents are read from the columns that they see.

        A token is real if a different token sees it, or if it sees itself and a different token. A token that neither
        sees nor is seen by any other is padding at the ends of its row, and its own document between real tokens. At
        the end of a later call it may begin a document that the next call continues, so it is not padding there. A
        token that sees no earlier token begins a document; any other token belongs to the document of the first token
        that it sees.

        Raises:
            UnsupportedError: A token is seen that an earlier call took for padding.
        """
        past, new = self.seen, sees.shape[1]
        column = torch.arange(past + new, device=sees.device)
        own = column[past:]
        others = sees & (own[:, None] != column)
        is_seen, sees_itself = others[:, :, past:].any(1), sees[:, own - past, own]
        real = is_seen | (others.any(2) & sees_itself)
        alone = sees_itself & ~real
        before, after = real.cumsum(1) > 0, real.flip(1).cumsum(1).flip(1) > 0
        if past:
            before = before | (self.length > 0)[:, None]
        real = real | (alone & before & (after | (past > 0))) | (alone & ~(before | after))
        if past and bool((others[:, :, :past].any(1) & (self.pos < 0)).any()):  # a prompt has nothing to wait for
            raise UnsupportedError(
                "a token is seen that the first call took for padding, because it saw itself alone and nothing saw it: "
                "let that call end before the text that this token begins, or hold a token more"
            )
        root = torch.where(others & (column < own[:, None]), column, past + new).amin(2)
        root = torch.where(root == past + new, own, root)
        while True:  # a window hides the first token from later ones: what they see leads to it
            further = torch.where(root >= past, root.gather(1, (root - past).clamp(min=0)), root)
            if bool((further == root).all()):
                break
            root = further
        roots = torch.cat([self.documents, root + past + new], 1)  # numbers apart from those of earlier documents
        document = torch.where(root < past, roots.gather(1, root), root + past + new)
        return self._followed_by(real, document)

    @property
    def documents(self) -> Int[Tensor, "batch seen"]:
        """Number of the document of every token."""
        return torch.zeros_like(self.pos) if self.document is None else self.document

    def _followed_by(self, real: Tensor, document: Tensor) -> TokenPositions:
        """These tokens followed by new ones; `real` and `document` describe the new ones, in any numbering."""
        everything, column = torch.cat([self.pos >= 0, real], 1), torch.arange(self.seen + real.shape[1])
        column = column.to(real.device)
        numbers = torch.cat([self.documents, document], 1)
        is_earlier = (column < column[self.seen :, None]) & everything[:, None]
        same = (document[:, :, None] == numbers[:, None]) & is_earlier
        pos = torch.where(real, same.sum(2), -1)
        starts = torch.cat([self.pos == 0, pos == 0], 1)
        # Numbers by the order in which documents begin; padding takes that of the document before it.
        first = torch.where(same, column, self.seen + real.shape[1]).amin(2)
        first = torch.where(pos > 0, first, column[self.seen :])
        number = (starts.cumsum(1) - 1).clamp(min=0).gather(1, first)
        whole = TokenPositions.of(torch.cat([self.pos, pos], 1))
        if self.document is None and not bool((number > 0).any()):
            return whole
        return TokenPositions.of(whole.pos, torch.cat([self.documents, number], 1))

    def first(self, count: int) -> TokenPositions:
        """Return the first columns alone."""
        if count >= self.seen:
            return self
        return TokenPositions.of(self.pos[:, :count], None if self.document is None else self.document[:, :count])

    def of_rows(self, rows: Int[Tensor, " row"]) -> TokenPositions:
        """Return the tokens of other rows of the batch, by their numbers."""
        rows = rows.to(self.pos.device)
        return TokenPositions(
            self.pos[rows], self.length[rows], self.seen, None if self.document is None else self.document[rows]
        )

    def columns_of(self, pos: Int[Tensor, "batch *n slot"]) -> Int[Tensor, "batch *n slot"]:
        """Return the column of the token at each position; -1 where the position is -1.

        Raises:
            UnsupportedError: Texts are packed into a row, so that a position is that of several tokens.
        """
        self.check_one_document("the columns of positions")
        columns = self._column_table.to(pos.device)
        flat = torch.where(pos < 0, self.seen, pos).flatten(1)
        return columns.gather(1, flat).view(pos.shape)

    @cached_property
    def _column_table(self) -> Int[Tensor, "batch _"]:
        """The column of each position of a row; -1 after them."""
        columns = torch.full((len(self.pos), self.seen + 1), -1, dtype=torch.int64, device=self.pos.device)
        at = torch.where(self.pos < 0, self.seen, self.pos)  # what padding writes is not read
        columns.scatter_(1, at, torch.arange(self.seen, device=at.device).expand_as(at))
        columns[:, self.seen] = -1
        return columns

    def check_one_document(self, what: str) -> None:
        """Refuse rows into which several texts are packed.

        Raises:
            UnsupportedError: There is such a row.
        """
        if self.document is not None:
            raise UnsupportedError(
                f"several texts are packed into a row, and {what} would mix them: give each text a row of its own"
            )
