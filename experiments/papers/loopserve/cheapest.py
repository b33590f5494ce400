"""How much dearer the lines that Algorithm 5 chooses are than the cheapest that hold as much (Theorem 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.papers.loopserve.asked import Named
from sinkscope.errors import SinkscopeError
from sinkscope.files.records import PositiveShare
from sinkscope.hooks.trace import trace
from sinkscope.measure import Mean, Natural, Result, Row, Setup, column, mean_of, measurement
from sinkscope.models.draws import draws
from sinkscope.sparse.attention import Scores
from sinkscope.sparse.head_lines import select_lines

MOST = 9  # tokens: all subsets of 18 lines are 262,144
RULES = ("Algorithm 5 as printed", "heaviest for its length first", "control: random order")


@dataclass(frozen=True, kw_only=True)
class Price(Row, table="prices", title="length of the chosen lines over that of the cheapest that hold as much"):
    """The price of a rule, mean over heads and pieces of text."""

    key: Named
    times: Mean | None = column("of the\ncheapest", "times", "Mean over heads, each beside its own cheapest choice.")


@dataclass(frozen=True, kw_only=True)
class Cheapest(Result):
    """Length of the lines that rules choose, over that of the cheapest, which all subsets are searched for."""

    rows: tuple[Price, ...]

    def conclusion(self) -> str:
        """Return the price of Algorithm 5 beside the other rules."""
        printed, greedy, control = (row.text("times") for row in self.rows)
        wins = self.rows[2].times.value <= self.rows[0].times.value  # pyright: ignore[reportOptionalMemberAccess]
        return (
            f"Lines by Algorithm 5 as printed are {printed} times as long as the cheapest lines that hold as much, by "
            f"a search of all subsets; the heaviest for its length first gives {greedy}, and the control, random "
            f"order, {control}{': no worse than Algorithm 5' if wins else ''}."
        )


@measurement()
def cheapest(setup: Setup, *, tokens: Natural = 8, alpha: PositiveShare = 0.955) -> Cheapest:
    """Compare the lines of greedy rules with the cheapest of all subsets, in the first tokens of texts.

    Args:
        tokens: Tokens of a piece; more take twice as many bits each.
        alpha: Share of the attention that lines have to hold.
    """
    if not 2 < tokens <= MOST:
        raise SinkscopeError(
            f"--tokens {tokens}: give 3 to {MOST}, because all subsets of twice as many lines are tried"
        )
    patterns = trace(setup.target, setup.ids[:, :tokens], "blocks.*.attn.hook_pattern")
    heads = torch.stack([*patterns.values()], 1).float().flatten(1, 2)  # text, head, query, key
    cells = cells_of_lines(tokens)
    lengths = cells.sum((1, 2))
    subsets = (torch.arange(1 << 2 * tokens)[:, None] >> torch.arange(2 * tokens)) & 1
    covered = (subsets.float() @ cells.flatten(1).float() > 0).float()
    prices = subsets @ lengths
    enough = alpha * tokens * (1 - 1e-6)
    found: list[Tensor] = []
    for number, own in enumerate(heads):
        setup.progress("texts", number, len(heads))
        held = covered @ own.flatten(1).T
        best = torch.where(held >= enough, prices[:, None], prices.max()).min(0).values
        lines = select_lines(scores_of_rows(own), alpha, sample=tokens)
        printed = torch.cat([lines.columns, lines.offsets], 1).long() @ lengths
        lot = torch.rand(len(own), 2 * tokens, generator=draws(setup.seed, f"order of lines in text {number}"))
        ways = printed, greedy(own, cells, enough), greedy(own, cells, enough, lot)
        found.append((torch.stack(ways) / best).double().mean(1))
    by_rule = torch.stack(found, 1)
    rows = [Price(key=Named(rule), times=mean_of(times)) for rule, times in zip(RULES, by_rule.numpy(), strict=True)]
    return Cheapest(rows=tuple(rows))


def cells_of_lines(tokens: int) -> Tensor:
    """Return the causal cells of each column and then of each diagonal, `[line query key]`."""
    query, key = torch.arange(tokens)[:, None], torch.arange(tokens)
    every = torch.arange(tokens)[:, None, None]
    return torch.cat([(key == every) & (key <= query), query - key == every]).long()


def scores_of_rows(rows: Tensor) -> Scores:
    """Return scores whose attention is given, `[head query key]`: queries are its logarithms, keys are unit vectors."""
    unit = torch.eye(rows.shape[-1]).expand(len(rows), -1, -1)
    return Scores(rows.clamp(min=1e-30).log(), unit, 1.0, None, None, None)


def greedy(rows: Tensor, cells: Tensor, enough: float, order: Any = None) -> Tensor:
    """Take lines until they hold enough, by what they add for their length or in an order; their summed lengths."""
    lengths = cells.sum((1, 2))
    left, taken = rows.flatten(1).clone(), torch.zeros(len(rows), len(lengths), dtype=torch.bool)
    for _ in lengths:
        open_heads = rows.sum((1, 2)) - left.sum(1) < enough
        worth = left @ cells.flatten(1).T.float() / lengths if order is None else order
        line = worth.masked_fill(taken, -torch.inf).argmax(1)
        taken[open_heads, line[open_heads]] = True
        left[open_heads] *= 1 - cells.flatten(1)[line[open_heads]]
    return taken.long() @ lengths
