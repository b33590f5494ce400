"""The texts of a view: those that a model shows by default, and one that is typed."""

from __future__ import annotations

from sinkscope.app.view.model_sink import ModelSink
from sinkscope.errors import SinkscopeError
from sinkscope.files.plain import check_encodable
from sinkscope.measure import Setup
from sinkscope.models.checks import check_length
from sinkscope.models.text import beginning
from sinkscope.sinks.tokens import prefixes

MOST_TOKENS = 512
STORY = (
    "Once upon a time, there was a little bird who lived in a tall tree. Every day she sang a song for her friends. "
    'One day, a big cat came to the tree and said, "Can you sing for me, too?" The little bird was scared, but she'
)
AFTER_SINK = 16  # further repetitions that are shown after the one that makes a sink


def default_texts(sink: ModelSink) -> dict[str, list[int]]:
    """A story and, if repeating a word makes a sink, the word that needs fewest repetitions."""
    texts = {"a story": ids_of(sink.setup, STORY)}
    sinks: list[tuple[int, int, str]] = []
    for word in sink.sinks.repeats.tokens:
        if word.repeats is not None and 1 < word.repeats < MOST_TOKENS - AFTER_SINK:
            sinks.append((word.repeats, word.id, word.token))
    if sinks:
        repeats, number, token = min(sinks)
        count = repeats + AFTER_SINK
        texts[f"{token!r} {count} times"] = [*prefixes(sink.setup, [number]), *[number] * count]
    return texts


def ids_of(setup: Setup, text: str) -> list[int]:
    """The tokens of a text, after BOS if there is one.

    Raises:
        SinkscopeError: The text is empty, unknown to the tokenizer, or too long.
    """
    check_encodable(text, "the text")
    ids = setup.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if not text.strip() or set(ids) <= {setup.tokenizer.unk_token_id}:
        raise SinkscopeError(f"the text {text[:40]!r} has no word that this tokenizer knows: give another text")
    if setup.bos is not None and ids[0] != setup.bos:
        ids = [*beginning(setup.tokenizer, setup.bos), *ids]
    if len(ids) > MOST_TOKENS:
        raise SinkscopeError(
            f"the text has {len(ids)} tokens and a view shows {MOST_TOKENS} at most: give a shorter text"
        )
    check_length(setup.target, "the text", len(ids))
    return ids
