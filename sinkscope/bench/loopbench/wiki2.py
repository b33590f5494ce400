"""The prompt of 2WikiMultihopQA in LongBench (Bai et al. 2024; Xu et al. 2026, Table 2)."""

from __future__ import annotations

HEAD = (
    "Below are several passages and, after them, a question about what they say. Reply with the answer alone, without "
    "any further words.\n\nPassages:\n"
)
TAIL = "\n\nUsing the passages above, reply with the answer alone, without any further words.\n\nQuestion: {}\nAnswer:"


def wiki2_prompt(passages: str, question: str) -> str:
    """LongBench's prompt in our own words: instruction, passages, instruction, question."""
    return f"{HEAD}{passages}{TAIL.format(question)}"
