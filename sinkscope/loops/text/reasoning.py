"""The marks between which a model writes its reasoning, as chat templates have them."""

from __future__ import annotations

REASONING_MARKS = {
    "</think>": "<think>",
    "[/THINK]": "[THINK]",
    "</thinking>": "<thinking>",
    "</reasoning>": "<reasoning>",
    "</thought>": "<thought>",
    "</seed:think>": "<seed:think>",
}
"""What ends a reasoning, and what begins it."""


def reasoning_end_in(template: str) -> str:
    """Return the mark that ends a reasoning in a chat template; empty if there is none."""
    return next((mark for mark in REASONING_MARKS if mark in template), "")


def is_reasoning(prompt: str, text: str, end: str) -> bool:
    """Return whether a text is inside its reasoning: begun in it, or in the prompt, and not ended.

    Args:
        prompt: The end of the prompt.
        text: What the model has written.
        end: The mark that ends a reasoning.
    """
    begin = REASONING_MARKS.get(end, end.replace("/", "", 1))
    return end not in text and (begin in text or prompt.rfind(begin) > prompt.rfind(end))
