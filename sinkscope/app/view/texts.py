"""The text of a view: a story, or one that is given."""

from __future__ import annotations

from sinkscope.errors import SinkscopeError
from sinkscope.files.plain import check_encodable
from sinkscope.measure import Setup
from sinkscope.models.inputs import check_length
from sinkscope.models.text import beginning

MOST_TOKENS = 512
STORY = (
    "Once upon a time, there was a little bird who lived in a tall tree. Every day she sang a song for her friends. "
    'One day, a big cat came to the tree and said, "Can you sing for me, too?" The little bird was scared, but she'
)


def ids_of(setup: Setup, text: str) -> list[int]:
    """Return the tokens of a text, after BOS if there is one.

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
