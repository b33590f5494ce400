"""Prompts of one length that ask about one of several texts, with the question at the beginning, middle or end."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources

from sinkscope.errors import SinkscopeError
from sinkscope.measure import Setup
from sinkscope.models.draws import draws, some_of
from sinkscope.models.text import BETWEEN, KINDS, behind_beginning, plain_ids
from sinkscope.models.text.chat import chat_text

PLACES = ("begin", "middle", "end")
SHOWN = 3  # texts of a prompt; the last may be cut, and is never asked about
MARK = "@@@"


@dataclass(frozen=True)
class Named:
    """A method or a rule, by its name."""

    name: str

    def __str__(self) -> str:
        return self.name


@cache
def documents(kind: str) -> list[str]:
    """Return the texts of a kind in the package."""
    text = resources.files("sinkscope.models.text").joinpath(f"kinds/{kind}.txt").read_text("utf-8")
    return text.removesuffix("\n").split(BETWEEN)


def kinds_of(count: int) -> list[str]:
    """Return the kind of each dialogue, in turn."""
    return [KINDS[number % len(KINDS)] for number in range(count)]


def asked(setup: Setup, count: int, length: int, place: str, chat: bool) -> list[list[int]]:
    """Return prompts of `length` tokens, with a question about one of the texts that they show.

    Args:
        setup: The model.
        count: Number of prompts, of four kinds of text in turn.
        length: Tokens of each.
        place: Where the question stands.
        chat: Whether prompts are in the chat template.

    Raises:
        SinkscopeError: The length has no room for the question and the texts.
    """
    head, tail = framed(setup) if chat else (behind_beginning(setup.tokenizer, setup.bos, []), [])
    prompts: list[list[int]] = []
    for number, kind in enumerate(kinds_of(count)):
        lot = draws(setup.seed, f"texts of dialogue {number}")
        texts = some_of(documents(kind), SHOWN, lot)
        about = some_of(range(1, SHOWN), 1, lot)[0]
        question = plain_ids(setup.tokenizer, f"Question: What does text {about} say? Tell all of it.\n\n")
        shown = "".join(f"Text {at}:\n{text}\n\n" for at, text in enumerate(texts, 1))
        context = plain_ids(setup.tokenizer, shown)
        room = length - len(head) - len(tail) - len(question)
        while len(context) < room:  # a tokenizer with longer tokens
            context += plain_ids(setup.tokenizer, shown)
        if room < length // 2:
            raise SinkscopeError(f"--length {length}: only {room} tokens are left for texts; give more")
        cut = {"begin": 0, "middle": room // 2, "end": room}[place]
        prompts.append([*head, *context[:cut], *question, *context[cut:room], *tail])
    return prompts


def framed(setup: Setup) -> tuple[list[int], list[int]]:
    """Return what the chat template puts before and behind what the user says."""
    text = chat_text(setup.tokenizer, [{"role": "user", "content": MARK}], setup.target.name)
    head, _, tail = text.partition(MARK)
    return behind_beginning(setup.tokenizer, setup.bos, plain_ids(setup.tokenizer, head)), plain_ids(
        setup.tokenizer, tail
    )
