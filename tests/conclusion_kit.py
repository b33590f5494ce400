"""What every conclusion keeps to: at most 30 words, and one number with its control."""

from __future__ import annotations

import re

CONDITIONS = r"heaviest [\d.]+%| in \d+% of (?:all )?texts|\([^()]*\)(?! take)"  # where something holds, and asides


def check_size(conclusion: str):
    """Conditions (the share of texts, asides in brackets) are no part of the finding."""
    for sentence in re.split(r"(?<=\.) (?=[A-Z])", conclusion.strip()):  # one for each question that is answered
        assert sentence and len(sentence.split()) <= 30, (len(sentence.split()), conclusion)
        shares = re.findall(r"-?\d[\d.]*%", re.sub(CONDITIONS, "", sentence))
        assert len(shares) <= 2, (shares, conclusion)
    assert not re.search(
        r"\bnan\b|-0(\.0+)?%|  |(?<![\w.,])(?<!the )1 (tokens|repetitions|layers|neurons|heads|words)\b", conclusion
    ), conclusion
