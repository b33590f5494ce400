"""What a model writes after the beginning of a story, without the guard and with it."""

from __future__ import annotations

from sinkscope.app.view.result import Writing
from sinkscope.app.view.texts import ids_of
from sinkscope.hooks.edit.base import Intervention
from sinkscope.loops.generate import Generated, generate
from sinkscope.loops.guard import LoopGuard
from sinkscope.measure import Setup

LOOPING_STORY = "One day, the bird sang the same song again and again:"
STORY_TOKENS = 160  # enough for the model in the package to repeat itself, and for the guard to stop it


def writings(setup: Setup, edit: Intervention | None = None) -> tuple[Writing, ...]:
    """Return what the model writes after a story that it continues with copies, without the guard and with it.

    Args:
        setup: The model.
        edit: An edit of it. None: it is intact.

    Raises:
        SinkscopeError: The tokenizer knows no word of the story, or the text is too long for the model.
    """
    made: list[Writing] = []
    for name, guard in (("without the guard", False), ("with the guard", True)):
        ids = [ids_of(setup, LOOPING_STORY)]
        (answer,) = generate(setup.target, ids, interventions=edit, guard=guard, max_new_tokens=STORY_TOKENS)
        made.append(Writing(name, LOOPING_STORY, _pieces(setup, answer), answer.summary))
    return tuple(made)


def _pieces(setup: Setup, answer: Generated) -> tuple[str, ...]:
    """The text, divided where the guard took tokens back."""
    cuts: set[int] = set()
    for event in answer.events:
        if event.kind == LoopGuard.KIND:
            cuts.add(event.position + 1 - answer.prompt_tokens - event.data["taken_back"])
    pieces: list[str] = []
    begin = 0
    for cut in sorted(cuts):
        end = len(setup.tokenizer.decode(answer.tokens[:cut], skip_special_tokens=True))
        pieces.append(answer.text[begin:end])
        begin = end
    return (*pieces, answer.text[begin:])
