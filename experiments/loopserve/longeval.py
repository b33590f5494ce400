"""Observation 4 and Fig. 4 of the LoopServe paper: which queries find the tokens that an answer attends to.

    python -m experiments.loopserve.longeval MODEL --topics 5_topics.jsonl [--page PAGE] [--out figures]

The first prompts of LongEval's topic retrieval (github.com/DachengLi1/LongChat, folder longeval/evaluation,
Apache-2.0) and pieces of the text that ships, all cut to one length, are answered greedily with the question before the
context, in the middle of it, and after it. A token's importance is the attention that it receives from a set of
queries, summed over these queries, all heads and layers; the important ones are a tenth of the prompt. Numbers alone
are kept, and no text of the files.
"""

from __future__ import annotations

import hashlib
import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Bool, Float
from plotly.subplots import make_subplots
from torch import Tensor

from experiments.drawn import PLACES, draw, markdown, put_table
from experiments.record import Row, value_of_each, write_record
from experiments.script import run
from sinkscope.errors import SinkscopeError
from sinkscope.files.records import read_rows
from sinkscope.generation.decode import decode
from sinkscope.measure import Setup
from sinkscope.models.target import Target
from sinkscope.models.text import text_rows
from sinkscope.opening.load import load
from sinkscope.results.style import BLUE, ORANGE, figure_of
from sinkscope.sparse.attention import Scores, line_sums
from sinkscope.sparse.lines import scores_of

ASKED = "\n\nQuestion: What is this text about?\n\nAnswer:"  # about ordinary text
END = "Now the record ends."  # of the context, in LongEval's topics
POSITIONS = ("begin", "middle", "end")
WINDOW = 8  # queries in a block
BEFORE = 8  # blocks of the prompt's end
TENTH = 0.1  # of a prompt's tokens are important
ROWS = (  # what the table says: part of the paper, name, part of the result, place in it
    ("Obs. 4, Fig. 2 c", "important tokens found, question at the beginning", "positions", "begin"),
    ("", "in the middle", "positions", "middle"),
    ("", "at the end", "positions", "end"),
    ("Fig. 4 a", "found by the last block of the prompt", "blocks", "-1"),
    ("", "by the first block of the answer, without its own queries", "apart", "0"),
    ("Fig. 4 b", "shared by blocks of the answer, one apart", "distances", "1"),
    ("", "farthest apart", "distances", None),
)


@dataclass(frozen=True)
class Question:
    """Ids of a prompt in parts, without BOS, so that the question can be placed anywhere in the context."""

    start: list[int]
    context: list[int]
    question: list[int]

    def placed(self, position: str) -> list[int]:
        """The prompt with the question at "begin", "middle" or "end"."""
        at = {"begin": 0, "middle": len(self.context) // 2, "end": len(self.context)}[position]
        return [*self.start, *self.context[:at], *self.question, *self.context[at:]]


def split_prompt(prompt: str) -> tuple[str, str]:
    """Context and question of a prompt of LongEval's topics."""
    before, cue, after = prompt.partition(END)
    if not cue:
        raise SinkscopeError(f"the prompt has no {END!r}: give LongEval's topics")
    return f"{before}{cue} ", after.strip()


def questions(setup: Setup, file: Path | None, count: int, length: int, new: int) -> list[Question]:
    """Prompts of at most `length` tokens, which leave room for an answer of `new`; without a file, ordinary text."""

    def ids_of(text: str) -> list[int]:
        ids = setup.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids[int(ids[:1] == [setup.bos]) :]  # some tokenizers add it all the same

    start = [] if setup.bos is None else [setup.bos]
    named: list[tuple[list[int], list[int]]] = []
    if file is None:
        for ids in text_rows(setup.tokenizer, setup.text, count, length, setup.bos)[:, len(start) :].tolist():
            named.append((ids, ids_of(ASKED)))
    else:
        for _, row in read_rows(file, "LongEval's JSON lines"):
            context, question = split_prompt(row["prompt"])
            named.append((ids_of(context), ids_of(question)))
    limit = min(length, (setup.target.max_positions or length + new) - new)
    asked: list[Question] = []
    for context, question in named[:count]:
        most = limit - len(start) - len(question)
        if len(context) > most:  # the middle is cut, as in LongBench
            context = [*context[: most - most // 2], *context[len(context) - most // 2 :]]
        asked.append(Question(start, context, question))
    return asked


def importance(
    target: Target, ids: Tensor, prompt: int, ranges: Sequence[tuple[int, int]]
) -> list[Float[Tensor, " key"]]:
    """Attention that each of the first `prompt` tokens receives from the queries of each range."""
    totals = [torch.zeros(prompt) for _ in ranges]

    def add(_: int, scores: Scores) -> None:
        for total, (start, stop) in zip(totals, ranges, strict=True):
            received = line_sums(scores.part(start, stop))[:, 0].sum(0).cpu()[:prompt]
            total[: len(received)] += received

    with scores_of(target, add, list(range(target.n_layers))):
        target.forward(ids[None])
    return totals


def important(received: Float[Tensor, " key"]) -> Bool[Tensor, " key"]:
    """The tenth of the tokens that receive most."""
    chosen = torch.zeros(len(received), dtype=torch.bool)
    chosen[received.topk(max(1, round(TENTH * len(received)))).indices] = True
    return chosen


def token_overlap(target: Target, asked: Sequence[Question], new: int) -> Row:
    """Answer every prompt and compare which tokens queries attend to; means over prompts.

    Returns:
        "positions": the share of the answer's important tokens that the last block of the prompt finds; "blocks": the
        share that blocks before (negative) and in the answer find, with the question at the end ("apart": without the
        block's own queries); "distances": what blocks of an answer share.
    """
    shares: dict[str, dict[str, list[float]]] = {"positions": {}, "blocks": {}, "apart": {}, "distances": {}}

    def note(name: str, at: object, found: Bool[Tensor, " key"], truth: Bool[Tensor, " key"]) -> None:
        shares[name].setdefault(str(at), []).append(float((found & truth).sum() / truth.sum()))

    for question in asked:
        for position in POSITIONS:
            ids = question.placed(position)
            answer = decode(target, torch.tensor([ids]), new)[0][0]
            n = len(ids)
            places: list[int] = []
            if position == "end":
                places = [*range(-min(BEFORE, n // WINDOW), 0), *range(len(answer) // WINDOW)]
            ranges = [(max(0, n - WINDOW), n), (n, n + len(answer))]
            ranges += [(n + place * WINDOW, n + (place + 1) * WINDOW) for place in places]
            last, output, *parts = importance(target, torch.tensor([*ids, *answer]), n, ranges)
            note("positions", position, important(last), important(output))
            tops = {place: important(part) for place, part in zip(places, parts, strict=True)}
            for place, part in zip(places, parts, strict=True):
                note("blocks", place, tops[place], important(output))
                if place >= 0 and len(answer) != WINDOW:  # an answer of one block has no other queries
                    note("apart", place, tops[place], important(output - part))
                for other in range(place):
                    note("distances", place - other, tops[other], tops[place])
    return {name: {at: fmean(values) for at, values in found.items()} for name, found in shares.items()}


def table(sources: Sequence[Row]) -> str:
    """The numbers of each source at the paper's places."""
    rows: list[list[str]] = []
    for paper, said, part, place in ROWS:
        cells = [paper, said]
        for source in sources:
            at = place or max(source[part], key=int, default="")
            cells.append(f"{source[part][at]:.0%}" if at in source[part] else "-")
        rows.append(cells)
    return markdown(["part", "quantity", *value_of_each(sources, "name")], rows)


def figure(data: Row) -> Any:
    """Figs. 2 c, 4 a and 4 b, a colour for each source; dashed without a block's own queries."""
    titles = (
        "Fig. 2 c: important tokens that the last block finds",
        "Fig. 4 a: found by blocks (0: first of the answer)",
        "Fig. 4 b: shared by blocks of the answer, by distance",
    )
    fig: Any = make_subplots(1, 3, subplot_titles=titles, horizontal_spacing=0.06)
    told: list[str] = []
    for source, colour in zip(data["result"]["sources"], (BLUE, ORANGE), strict=True):
        name = html.escape(source["name"])
        curves = ((1, "positions", "solid"), (2, "blocks", "solid"), (2, "apart", "dash"), (3, "distances", "solid"))
        for column, part, dash in curves:
            x = [PLACES[at] if part == "positions" else int(at) for at in source[part]]
            style: Row = {"name": name, "legendgroup": name, "line": {"color": colour, "dash": dash}}
            fig.add_scatter(x=x, y=list(source[part].values()), showlegend=column == 1, row=1, col=column, **style)
        found = source["positions"]
        told.append(f"{name} {found['end']:.0%} and {found['begin']:.0%}")
    fig.update_yaxes(range=[0, 1.02], tickformat=".0%")
    title = f"Found by the last block, question at the end and at the beginning: {'; '.join(told)}"
    return figure_of(fig, None, title, width=1500, height=500, legend=-0.12)


def main(
    model: str,
    *,
    topics: Path,
    count: int = 12,
    length: int = 512,
    new: int = 32,
    out: Path = Path("figures"),
    page: Path | None = None,
) -> None:
    """Make what the module describes.

    Args:
        model: Name, folder or file.
        topics: LongEval's 5_topics.jsonl.
        count: Prompts of the file, pieces of ordinary text.
        length: Most tokens of each; longer ones lose their middle.
        new: Most tokens of an answer.
        page: Replace the table in this page.
    """
    torch.set_num_threads(1)
    setup = Setup.open(load(model), loading="whole")
    sources: list[Row] = []
    for name, file in (("ordinary text", None), ("LongEval topics", topics)):
        asked = questions(setup, file, count, length, new)
        sources.append({"name": name, **token_overlap(setup.target, asked, new)})
    digest = hashlib.sha256(topics.read_bytes()).hexdigest()
    origin = "LongEval, github.com/DachengLi1/LongChat, Apache-2.0"
    settings = {"model": setup.target.name, "count": count, "length": length, "new": new, "window": WINDOW}
    settings |= {"files": {topics.name: digest}, "origin": origin}
    draw(write_record(out / "loopserve_longeval.json", "loopserve-longeval", {"sources": sources}, settings), figure)
    print(made := table(sources))
    if page is not None:
        put_table(page, "loopserve.longeval", made)


if __name__ == "__main__":
    run(main)
