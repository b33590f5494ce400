"""What the tests of attacks share: an organism's text, and its planted clusters."""

from __future__ import annotations

from pathlib import Path

from organisms import Organism
from organisms.hard import HardModel
from organisms.places import PlacesModel


def text_file(o: Organism | HardModel, folder: Path, rows: int = 64, *, length: int = 64, seed: int = 0) -> Path:
    """Text in the model's own words: English would be one unknown word over and over, a repeated token."""
    path = folder / "words.txt"
    ids = o.natural(rows, length, seed)[:, int(getattr(o, "bos", True)) :]
    path.write_text(" ".join(o.tokenizer.decode(row) for row in ids), encoding="utf-8")
    return path


def own_text(m: HardModel | PlacesModel, folder: Path, *rows: int) -> Path:
    """The text of a planted model as a file."""
    path = folder / "text.txt"
    path.write_text(m.text(*rows), encoding="utf-8")
    return path


def planted_clusters(o: Organism) -> dict[int, list[int]]:
    """Head -> tokens, as they were written into the weights."""
    clusters = {}
    for group, heads in o.truth.group_heads.items():
        tokens = [token for token, own in o.truth.groups.items() if own == group and token > 3]
        if len(tokens) > 1:
            clusters[heads[0]] = tokens
    return clusters
