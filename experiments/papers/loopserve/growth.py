"""How costs of methods grow with the length of a prompt: the exponents of Table 3, counted and not timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

from experiments.papers.loopserve.asked import asked
from sinkscope.bench.answer import answer_rows, mean_known
from sinkscope.bench.methods import make_method
from sinkscope.measure import Mean, Natural, Result, Row, Setup, column, measurement

METHODS = ("full", "a-shape:local=96", "tri-shape:local=96", "minference:vertical=64:slash=64", "streaming:96")
METHODS += ("snapkv:96", "adakv:96", "random:96", "loopserve:96")


@dataclass(frozen=True)
class Method:
    """A method of fixed size."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, kw_only=True)
class Growth(
    Row,
    table="growth",
    title="factor by which a prompt of twice the length costs more, as a power of two",
    note="0: as much as before; 1: in proportion to the length; 2: to its square. Random keeps a fixed part, too.",
):
    """The exponents of a method: of cells of the prompt, of tokens read in a step, and of tokens held."""

    key: Method
    prompt: Mean = column("cells of\nthe prompt", "number", "Power of the number of cells of attention.")
    read: Mean = column("tokens read\nin a step", "number", "Power of the tokens that a decoding step reads.")
    held: Mean = column("tokens\nheld", "number", "Power of the most tokens in the cache.")


@dataclass(frozen=True, kw_only=True)
class MethodGrowth(Result):
    """Powers of the length of a prompt with which costs of methods grow between two lengths."""

    rows: tuple[Growth, ...]

    def conclusion(self) -> str:
        """Return the powers of LoopServe beside the full cache and a random part of fixed size."""
        rows = {row.key.name.partition(":")[0]: row for row in self.rows}
        ours, full, control = rows["loopserve"], rows["full"], rows["random"]
        return (
            f"Twice the prompt costs LoopServe 2^{ours.text('prompt')} times the cells (the full cache: "
            f"2^{full.text('prompt')}) and 2^{ours.text('read')} times the tokens read in a step. A random part of "
            f"fixed size, the control, costs 2^{control.text('prompt')} and 2^{control.text('read')}."
        )


@measurement(loading="whole")
def growth(
    setup: Setup, *, methods: Sequence[str] = METHODS, dialogues: Natural = 2, length: Natural = 256, new: Natural = 40
) -> MethodGrowth:
    """Count what methods of fixed size cost at a length and at twice the length.

    Args:
        methods: Names with their budgets or settings, as for `sinkscope bench`; full, loopserve and random among them.
        dialogues: Number of dialogues, with the question at the end.
        length: Tokens of the shorter prompt.
        new: Tokens of an answer.
    """
    costs: dict[str, list[tuple[float, float, float]]] = {}
    for at, size in enumerate((length, 2 * length)):
        prompts = asked(setup, dialogues, size, "end", chat=False)
        wanted = [answer.tokens for answer in answer_rows(setup.target, prompts, new)]
        along = [[*tokens, *[tokens[-1]] * (new - len(tokens))] for tokens in wanted]  # of one length
        for number, method in enumerate(methods):
            setup.progress("methods", at * len(methods) + number, 2 * len(methods))
            made = [one.metrics for one in answer_rows(setup.target, prompts, new, make_method(method), along=along)]
            cells, read, held = (mean_known(one[key] for one in made) for key in ("cells", "read", "cached_peak"))
            share = 1.0 if cells is None else cells
            costs.setdefault(method, []).append((share * size * (size + 1) / 2, read or 0.0, held or 0.0))
    rows: list[Growth] = []
    for method, (short, long) in costs.items():
        prompt, read, held = (Mean(log2(late / early)) for early, late in zip(short, long, strict=True))
        rows.append(Growth(key=Method(method), prompt=prompt, read=read, held=held))
    return MethodGrowth(rows=tuple(rows))
