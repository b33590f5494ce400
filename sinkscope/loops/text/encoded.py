"""Base64 in a text, which is no text: zeros in it would look like a loop."""

from __future__ import annotations

import re
from itertools import groupby, pairwise

SHORTEST = 64  # characters of base64
SEEN = 32  # the first characters of a run, by which it is judged
CHANGES = 0.25  # of neighbours in base64 that are of different kinds: upper case, lower case, digits, signs
_PARTS = re.compile(r"([A-Za-z0-9+/_=-]+)|[^A-Za-z0-9+/_=-]+")
_MARK = "base64,"


class Readable:
    """Leaves base64 out of a text that arrives in pieces. A run of its characters is held until it is judged."""

    def __init__(self) -> None:
        self._held = ""  # a run that is not judged
        self._before = ""  # the last characters before it
        self._is_encoded: bool | None = None  # the last run, which may go on; None if it is not judged

    def feed(self, piece: str, last: bool = False) -> str:
        """Return what can be read of the text up to here."""
        readable: list[str] = []
        for part in _PARTS.finditer(piece):
            if part[1] is None:
                readable += [self._held, part[0]]
                self._before = (self._before + self._held + part[0])[-len(_MARK) :]
                self._held, self._is_encoded = "", None
                continue
            if self._is_encoded is None:
                self._held += part[1]
                if len(self._held) < SHORTEST:
                    continue
                self._is_encoded = self._before.endswith(_MARK) or looks_encoded(self._held[:SEEN])
                is_string = self._before.endswith(('"', "'", "`"))
                self._is_encoded = self._is_encoded or (is_string and set(self._held) == {"A"})  # zeros
                readable.append(self._held * (not self._is_encoded))
                self._before = self._held[-len(_MARK) :]
                self._held = ""
            elif not self._is_encoded:
                readable.append(part[1])
        if last:
            readable.append(self._held)
            self._held = ""
        return "".join(readable)


def looks_encoded(run: str) -> bool:
    """Return whether a run of letters, digits and signs is base64 and no word, name or path."""
    if not any(map(str.isdigit, run)) or not any(map(str.islower, run)):
        return False
    run = "".join(sign for sign, _ in groupby(run))  # zeros are runs of A
    kinds = [(sign.isupper(), sign.islower(), sign.isdigit()) for sign in run]
    changes = sum(kind != next_kind for kind, next_kind in pairwise(kinds))
    is_mixed = any(sign.isupper() and next_sign.isupper() for sign, next_sign in pairwise(run))
    return is_mixed and changes >= CHANGES * len(run)
