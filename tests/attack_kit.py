"""What the tests of attacks share: an organism's text, and its planted clusters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from organisms import Organism

from sinkscope.measure import Setup
from sinkscope.sinks.attack.attack import Trials, make_trials
from sinkscope.sinks.first_token.sets import causal_neurons


def words(o: Organism, rows: int = 64) -> str:
    """Text in the organism's own words: English would be one unknown word over and over, a repeated token."""
    return " ".join(o.tokenizer.decode(row[o.bos :]) for row in o.natural(rows, 64))


def text_file(o: Organism, folder: Path) -> Path:
    path = folder / "words.txt"
    path.write_text(words(o), encoding="utf-8")
    return path


def planted_clusters(o: Organism) -> dict[int, list[int]]:
    """Head -> tokens, as they were written into the weights."""
    return {
        heads[0]: tokens
        for group, heads in o.truth.group_heads.items()
        if len(tokens := [t for t, g in o.truth.groups.items() if g == group and t > 3]) > 1
    }


def mixed_clusters(o: Organism) -> dict[int, list[int]]:
    """As many clusters of the same sizes, each of all groups in turn: neighbours in it are of different groups."""
    groups = list(planted_clusters(o).values())
    count = min(map(len, groups))
    turns = [token for i in range(count) for token in (group[i] for group in groups)]
    return {head: turns[head * count : (head + 1) * count] for head in range(len(groups))}


def trials_of(o: Organism, folder: Path, **options: Any) -> Trials:
    options = {"bos": None, "prefix": "", "clusters": planted_clusters(o), "lengths": [4], "batch": 16} | options
    made = Setup.open(o.model, tokenizer=o.tokenizer, text=text_file(o, folder))
    layer, neurons = causal_neurons(made)
    assert layer == o.truth.sink_layer
    return make_trials(made, layer, neurons, **options)
