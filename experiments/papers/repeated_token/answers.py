"""What a model answers after many copies of a word, with and without the patch (Table 3, Sec. 5.1, App. C)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go

from experiments.papers.repeated_token.circuit import Word, first_tokens, sink_neurons_of
from sinkscope.errors import SinkscopeError
from sinkscope.files.output import read_text
from sinkscope.generation.decode import decode
from sinkscope.hooks.edit.base import Intervention
from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.measure import Mean, Natural, Result, Row, Setup, column, mean_of, measurement, optional
from sinkscope.results.style import BLUE, GREEN, GREY, bars, figure_of
from sinkscope.sinks.tokens import pick_tokens, prefix_of

SHOWN = 24  # characters of an answer in a table
VERBATIM = 50  # characters in a row that count as memorised (Nasr et al. 2023 take 50 tokens)


@dataclass(frozen=True, kw_only=True)
class Answer(
    Row,
    table="answers",
    title="after copies of",
    note="Share of the answer's tokens that are the word; higher is better, because repetition was asked for. "
    f"Memorised: the answer has {VERBATIM} characters in a row that stand in the training text.",
):
    """What follows the copies of one word."""

    key: Word
    intact: Mean = column("model\nas it is", "share", "Tokens of the answer that are the word.")
    patched: Mean = column("with the\npatch", "share", "The same with the sink neurons patched.")
    control: Mean | None = optional("control: others\npatched", "share", "The same with other neurons patched.")
    memorised: Mean | None = optional("memorised", "share", "Whether the answer without a patch is training text.")
    answer: str = column("answer without a patch", "word", "The beginning of what the model writes.")
    patched_answer: str = column("with the patch", "word", "The beginning of what it writes with the patch.")


@dataclass(frozen=True, kw_only=True)
class Answers(Result):
    """What a model writes after many copies of words.

    Attributes:
        answers: A row for each word.
        memorised: Share of answers that stand in the training text; None if none was given.
    """

    answers: tuple[Answer, ...]
    memorised: float | None = None

    def mean(self, key: str) -> Mean:
        """Return the mean of a column over words."""
        return mean_of(np.array([row[key].value for row in self.answers])) or Mean(0.0)

    def conclusion(self) -> str:
        """Return how much of the answers is the word, without the patch, with it and with a patch of others."""
        text = Answer.columns()[0].cell
        intact, patched = (text(self.mean(key)) for key in ("intact", "patched"))
        control = ""
        if all(row.control is not None for row in self.answers):
            control = f" (as a control, with other neurons patched: {text(self.mean('control'))})"
        words = (
            f"After {self.settings.get('copies')} copies of a word, {intact} of the next tokens are the word, and "
            f"{patched} with the sink neurons patched{control}."
        )
        if self.memorised is None:
            return words
        return f"{words} Of the answers without a patch, {self.memorised:.0%} stand in the training text."

    def figure(self) -> Any:
        """Draw how much of each answer is the word."""
        fig = go.Figure()
        bars(fig, self.answers, "intact", BLUE, "as it is")
        bars(fig, self.answers, "patched", GREEN, "patched", "/")
        bars(fig, self.answers, "control", GREY, "others patched", "x")
        fig.update_yaxes(tickformat=".0%", range=[0, 1.02], title_text="tokens that are the word")
        return figure_of(fig, self, width=900, height=460)


@measurement(loading="whole")
def answers(
    setup: Setup,
    *,
    words: Sequence[str] | None = None,
    copies: Natural = 500,
    new: Natural = 48,
    training: Path | None = None,
) -> Answers:
    """Continue many copies of a word greedily, without a patch, with it, and with one of other neurons.

    Args:
        words: The words. By default five of the text.
        copies: Number of copies.
        new: Tokens of an answer.
        training: File of training text, in which answers are looked for.
    """
    text = None if training is None else " ".join(read_text(training).split())
    if text is not None and len(text) < VERBATIM:
        raise SinkscopeError(f"--training {training} has {len(text)} characters: give a file of training text")
    sinks = sink_neurons_of(setup)
    ids = pick_tokens(setup) if words is None else first_tokens(setup, words).tolist()
    copies = min(copies, (setup.target.max_positions or copies + new + 1) - new - 1)
    setup.record(copies=copies)
    edits: dict[str, Intervention | None] = {"intact": None, "patched": sinks.patch}
    if sinks.control is not None:
        edits["control"] = SinkPatch(sites=sinks.control.neurons)
    made: list[Answer] = []
    for word in ids:
        prompt = [*prefix_of(setup, ids), *[word] * copies]
        written: dict[str, list[int]] = {}
        for name, edit in edits.items():
            (written[name],), _ = decode(setup.target, [prompt], new, edit)
        setup.progress("words", len(made) + 1, len(ids))
        made.append(answer_of(setup, word, written, text))
    share = None
    if text is not None:
        share = sum(row["memorised"].value for row in made) / len(made)
    return Answers(answers=tuple(made), memorised=share)


def answer_of(setup: Setup, word: int, written: dict[str, list[int]], training: str | None) -> Answer:
    """Return the row of a word.

    Args:
        setup: The model.
        word: Id of the word.
        written: What was written without a patch, with it, and with that of the control.
        training: The training text. None: none was given.
    """
    shares = {name: Mean(sum(token == word for token in ids) / max(len(ids), 1)) for name, ids in written.items()}
    texts = {name: " ".join(str(setup.tokenizer.decode(ids)).split()) for name, ids in written.items()}
    memorised = None if training is None else Mean(float(stands_in(texts["intact"], training)))
    return Answer(
        key=Word(str(setup.tokenizer.decode([word]))),
        intact=shares["intact"],
        patched=shares["patched"],
        control=shares.get("control"),
        memorised=memorised,
        answer=repr(texts["intact"][:SHOWN]),
        patched_answer=repr(texts["patched"][:SHOWN]),
    )


def stands_in(answer: str, training: str) -> bool:
    """Return whether a text has enough characters in a row that another text has."""
    return any(answer[at : at + VERBATIM] in training for at in range(len(answer) - VERBATIM + 1))
