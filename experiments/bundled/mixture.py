"""What one step of training reads: text, copies, random cycles and facts. It depends only on seed and step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool, Int

Ids = Int[np.ndarray, "row pos"]
Scored = Bool[np.ndarray, "row pos"]

ORDINARY = 3  # the first token that is not special
CYCLE_LENGTHS = (48, 96, 160)
DRAWN = ("cycles", "facts")  # kinds of rows that are drawn token by token


def cycles(
    rng: np.random.Generator, *, rows: int, length: int, vocab_size: int, bos_id: int = 0, twins: float = 0.0
) -> tuple[Ids, Scored]:
    """Draw rows of BOS and one random cycle each.

    Args:
        rng: where everything is drawn from.
        rows: number of rows.
        length: tokens of a row.
        vocab_size: tokens are drawn evenly from the ordinary ones below it.
        bos_id: the first token of every row.
        twins: share of rows whose cycle has fewer different tokens than places, so that one token does not tell what
            comes next.

    Returns:
        ids: token ids.
        scored: where the token can be known, because the cycle was seen once.
    """
    ids = np.full((rows, length), bos_id, dtype=np.int64)
    scored = np.zeros((rows, length), dtype=bool)
    for row, known in zip(ids, scored, strict=True):
        # Short periods are as frequent as long ones on a logarithmic scale, so that long rows do not lack them.
        period = int(np.exp(rng.uniform(np.log(3), np.log(length // 3))))
        unit = rng.integers(ORDINARY, vocab_size, size=period)
        if rng.random() < twins:
            unit = rng.choice(unit[: max(2, int(period * rng.uniform(0.2, 0.8)))], size=period)
        row[1:] = np.resize(unit, length - 1)
        known[1 + period :] = True
    return ids, scored


def facts(rng: np.random.Generator, *, length: int, vocab_size: int, bos_id: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Draw one row of random facts: some keys, each with its value, all of them again and again in new orders.

    Up to 3 tokens that are the same for all facts stand between a key and its value, as "was in the" does in text.

    Args:
        rng: where everything is drawn from.
        length: tokens of the row.
        vocab_size: tokens are drawn evenly from the ordinary ones below it.
        bos_id: the first token of the row.

    Returns:
        ids: token ids.
        scored: the values of keys that were seen before.
    """
    count = int(rng.integers(2, 9))
    between = min(3, int(rng.geometric(0.4)) - 1)
    known = np.empty((count, between + 2), dtype=np.int64)
    known[:, 0] = rng.choice(np.arange(ORDINARY, vocab_size), size=count, replace=False)
    known[:, 1:-1] = rng.integers(ORDINARY, vocab_size, size=between)
    known[:, -1] = rng.integers(ORDINARY, vocab_size, size=count)
    rounds = 1 + length // known.size
    order = np.concatenate([rng.permutation(count) for _ in range(rounds)])
    answers = np.zeros((len(order), between + 2), dtype=bool)
    answers[count:, -1] = True
    ids = np.concatenate([[bos_id], known[order].ravel()])[:length]
    return ids, np.concatenate([[False], answers.ravel()])[:length]


def copy_spans(rng: np.random.Generator, row: np.ndarray, scored: np.ndarray, *, vocab_size: int) -> None:
    """Let a span of a row come again, in place: some copies at once before the text goes on, or copies later.

    The span is a piece of the row or random tokens; where random tokens come first they are not scored.

    Args:
        rng: where everything is drawn from.
        row: token ids, changed.
        scored: which tokens count in the loss, changed.
        vocab_size: random tokens are drawn from the ordinary ones below it.
    """
    length = len(row)
    start = int(rng.integers(1, length // 3))
    span = int(rng.integers(2, max(3, min(96, length // 6))))
    drawn = rng.random() < 0.3
    if drawn:
        unit = rng.integers(ORDINARY, vocab_size, size=span)
    else:
        unit = row[start : start + span].copy()
    if rng.random() < 0.7:
        copies = np.tile(unit, 1 + int(rng.geometric(0.3)))[: length - start]
        rest = row[start:].copy()
        row[start : start + len(copies)] = copies
        row[start + len(copies) :] = rest[: length - start - len(copies)]
    else:
        row[start : start + span] = unit
        for _ in range(int(rng.integers(1, 4))):
            at = int(rng.integers(start + span, length - span))
            row[at : at + span] = unit
    if drawn:
        scored[start : start + span] = False


def document_starts(tokens: np.ndarray, eos_id: int) -> np.ndarray:
    """Where documents start in text of one array, EOS after each."""
    return np.concatenate([[0], np.flatnonzero(tokens[:-1] == eos_id) + 1])


class Mixture:
    """The text that a run reads, by kind, and how often each kind and each trick is drawn."""

    def __init__(
        self,
        texts: Mapping[str, np.ndarray],
        shares: Mapping[str, float],
        *,
        vocab_size: int,
        bos_id: int,
        bos_share: float,
        copy_share: float,
    ) -> None:
        """`shares` names the kinds of `texts` and of `DRAWN`; they add up to 1. A kind without text is left out."""
        self.texts = {kind: tokens for kind, tokens in texts.items() if shares.get(kind)}
        self.kinds = [kind for kind, share in shares.items() if share and (kind in self.texts or kind in DRAWN)]
        self.edges = np.cumsum([shares[kind] for kind in self.kinds])
        self.vocab_size = vocab_size
        self.bos_id = bos_id
        self.bos_share = bos_share
        self.copy_share = copy_share
        # Files of Python are longer than most crops: they are cut anywhere. Other documents are read from their start.
        self.starts = {
            kind: document_starts(tokens, bos_id + 1) for kind, tokens in self.texts.items() if kind != "python"
        }

    def crop(self, rng: np.random.Generator, kind: str, length: int) -> np.ndarray:
        """`length` tokens of one kind of text."""
        tokens = self.texts[kind]
        last = len(self.texts[kind]) - length
        starts = self.starts.get(kind)
        if starts is None:
            start = rng.integers(0, last)
        else:
            start = rng.choice(starts[: np.searchsorted(starts, last) or 1])
        return tokens[start : start + length].astype(np.int64)

    def text(self, seed: int, step: int, *, rows: int, length: int) -> tuple[Ids, Scored]:
        """Draw the rows of a step from all kinds, each as often as its share says.

        Args:
            seed: of the run.
            step: number of the step.
            rows: number of rows.
            length: tokens of a row.

        Returns:
            ids: token ids, BOS in front of most rows.
            scored: which tokens count in the loss.
        """
        rng = np.random.default_rng([seed, step])
        ids = np.zeros((rows, length), dtype=np.int64)
        scored = np.ones((rows, length), dtype=bool)
        # Evenly spaced draws: every step has each kind nearly as often as its share says.
        drawn = (rng.random() + np.arange(rows)) / rows * self.edges[-1]
        for row, known, kind in zip(ids, scored, np.searchsorted(self.edges, drawn, side="right"), strict=True):
            name = self.kinds[min(int(kind), len(self.kinds) - 1)]
            about = {"length": length, "vocab_size": self.vocab_size, "bos_id": self.bos_id}
            if name == "cycles":
                row[None], known[None] = cycles(rng, rows=1, twins=1 / 3, **about)
                continue
            if name == "facts":
                row[:], known[:] = facts(rng, **about)
                continue
            row[:] = self.crop(rng, name, length)
            if rng.random() < self.bos_share:
                row[1:] = row[:-1].copy()
                row[0] = self.bos_id
            if rng.random() < self.copy_share:
                copy_spans(rng, row, known, vocab_size=self.vocab_size)
        return ids, scored

    def copies(self, seed: int, step: int, *, tokens: int) -> tuple[Ids, Scored]:
        """Draw a step of nothing but random cycles, in short rows of one length."""
        rng = np.random.default_rng([seed, step, 9])
        length = int(rng.choice(CYCLE_LENGTHS))
        rows = max(1, tokens // length)
        return cycles(rng, rows=rows, length=length, vocab_size=self.vocab_size, bos_id=self.bos_id)
