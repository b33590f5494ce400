"""What is refused by right, and the smallest draws of causes that were mended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .draws import draw_of
from .edits import EDITS, ROWS_SEEN, Draw
from .families import INSIDE
from .texts import ASSISTED

MOVES = ("reordered", "repeated")
SHAPES = ("a shape", "minference")
MEMORIES = ("mean", "head mean", "patch", "patch up")
READS = tuple(name for name, edit in EDITS.items() if edit.site not in (None, ROWS_SEEN))
KNOCKS = tuple(name for name, edit in EDITS.items() if edit.knocked is not None)
LEAVES_CACHE = (
    *("zero", "head", "add", "add embed", "add;zero", "expert", "value", "zero first", "add at", "patch calibrated"),
    *(*READS, *MEMORIES),
    *(name for name in KNOCKS if "|" not in name),
)
"""Edits that leave the cache and the attention alone."""


def _attends(draw: Draw) -> bool:
    """Whether the attention function is wrapped."""
    return draw["edit"] not in LEAVES_CACHE or draw["cache"] == "conversation"


def _owns_cache(draw: Draw) -> bool:
    return _attends(draw) and draw["edit"] not in ("observe", "rows")


def _reads_attention(draw: Draw) -> bool:
    """Whether something sees or changes the attention."""
    return _attends(draw) or "pattern" in draw["edit"] or draw["edit"] in KNOCKS


@dataclass(frozen=True)
class Refusal:
    """What is refused by right.

    Attributes:
        reaches: The draws.
        says: What the line says.
        always: Whether each of the draws has to be refused.
    """

    reaches: Callable[[Draw], bool]
    says: str
    always: bool = False


REFUSED = [
    Refusal(lambda draw: draw["family"] in INSIDE, "computes attention inside its modules"),
    Refusal(
        lambda draw: draw["wrapper"] == "nnsight" and draw["mode"] == "inference",
        "Inference tensors cannot be saved for backward",
    ),
    Refusal(
        lambda draw: draw["family"] == "codegen" and draw["edit"] == "head",
        "has no part 'o'",
    ),
    Refusal(lambda draw: draw["cache"] in MOVES and _owns_cache(draw), "rows of the cache changed places"),
    Refusal(
        lambda draw: draw["options"] == "beams" and _owns_cache(draw),
        "rows of the cache changed places",
    ),
    Refusal(
        lambda draw: draw["options"] == "no cache" and (_owns_cache(draw) or "mean" in draw["edit"]), "use_cache=False"
    ),
    Refusal(lambda draw: draw["options"] == "second text" and "guard" in draw["edit"], "guidance_scale", always=True),
    Refusal(lambda draw: draw["options"] in ASSISTED and _owns_cache(draw), "assisted generation"),
    Refusal(lambda draw: "static" in (draw["cache"], draw["options"]) and _attends(draw), "the cache is StaticCache"),
    Refusal(lambda draw: draw["family"] in INSIDE and draw["edit"] == "trace z", "hook_z' "),
    Refusal(lambda draw: draw["cache"] == "gradients" and draw["edit"] in SHAPES, "has no gradients"),
    Refusal(lambda draw: draw["edit"] == "half snapkv", "is below the 6 tokens that are always kept"),
    Refusal(lambda draw: draw["family"] == "gemma4", "whose positions are not known"),
    Refusal(lambda draw: draw["family"] == "gemma4" and _attends(draw), "attend to the keys of earlier layers"),
    Refusal(
        lambda draw: draw["attention"] == "own" and _reads_attention(draw),
        "attention is a function of your own",
        always=True,
    ),
    Refusal(
        lambda draw: draw["cache"].startswith("conversation") and draw["edit"] in (*MEMORIES, "patch;snapkv 12"),
        "tokens were read before this run was entered",
        always=True,
    ),
    Refusal(
        lambda draw: (
            draw["mask"] == "image" and draw["edit"] in (*SHAPES, "a shape 12", "minference 12", "loopserve 12")
        ),
        "reads prompts under causal masks",
    ),
    Refusal(lambda draw: draw["cache"] == "by hand", "is called by itself", always=True),
    Refusal(lambda draw: draw["padding"] == "right" and _attends(draw), "is padded on the right"),
]
"""A refusal that stands here is no failure; any other one is."""


def must_be_refused(draw: Draw) -> bool:
    """Whether a draw has to be refused."""
    return any(one.always and one.reaches(draw) for one in REFUSED)


def may_be_refused(draw: Draw, line: str | None = None) -> bool:
    """Whether a draw may be refused; with this line, if one is given."""
    return any(one.reaches(draw) and (line is None or one.says in line) for one in REFUSED)


MENDED = {
    "tokens that may be taken back are read as a prompt": draw_of(
        cache="generate", edit="a shape 12", options="lookup"
    ),
    "the whole text is read as a prompt at every token": draw_of(
        cache="generate", edit="a shape 12", options="no cache"
    ),
    "the last columns are read as the last queries": draw_of(
        mask="later turn", cache="turns", rows=2, edit="snapkv 12"
    ),
    "attention of padding among tokens counts": draw_of(mask="hole", cache="steps", rows=3, edit="h2o 12"),
    "padding among tokens parts neighbours in a pooling": draw_of(mask="hole", cache="generate", edit="snapkv 12"),
    "rows of a long prompt are shown in parts": draw_of(edit="rows", length=300),
    "a mask is made before tokens come back": draw_of(family="gemma3 image", cache="turns", edit="loopserve 12"),
    "a mask is made before tokens leave": draw_of(
        family="gemma3 image", cache="steps", rows=2, padding="left", edit="streaming 12"
    ),
    "a wrapper's own names of arguments": draw_of(wrapper="nnsight", family="gpt2", edit="zero"),
    "a copy shares what is known of its rows": draw_of(cache="copied", edit="snapkv 12"),
    "memory of rows that change places": draw_of(cache="reordered", edit="patch", rows=2),
    "a block on what is inside a wrapper": draw_of(other="thread that waits", wrapper="module", edit="head"),
    "memory of rows that are repeated": draw_of(cache="repeated", edit="patch"),
    "padding of rows that change places": draw_of(cache="reordered", edit="observe", rows=2, padding="left"),
    "a trace counts the padding": draw_of(edit="trace", family="gpt2", padding="left", rows=2),
    "a vector at the embedding is multiplied": draw_of(edit="add embed", family="granite"),
    "a mean of the prompt takes drafts in": draw_of(
        family="neox", cache="generate", edit="head mean", options="assistant", text="repeats", ends="none"
    ),
    "a layer of chunks attends beyond them": draw_of(family="llama4", cache="evicted", edit="streams"),
    "a mask of several parts is forgotten with its window": draw_of(
        family="gemma3 image", cache="evicted", edit="streams", length=300, rows=2, padding="left"
    ),
    "votes are rounded by autocast": draw_of(cache="steps", edit="h2o 12", mode="autocast", rows=2, padding="left"),
    "layers are called one by one": draw_of(cache="by hand", edit="zero"),
    "a vector at the embedding is normalised": draw_of(edit="add embed", family="bloom"),
}
"""The smallest draws that meet a cause, mended or planted, which the cover of all pairs may miss: they pass."""
