"""Makes the loop organism in the package and the prompts of its set of `bench --task loops`, each with its truth.

    python -m experiments.make_organism [--model FOLDER] [--texts FILE]

The model is `loop_organism` of the tests with an end of sequence, and without noise, so the weights compress to almost
nothing. It has its vocabulary in a fixed order, the ring. Tokens at even places of the ring look back about 64 tokens,
and the others about 512. Without copies, it generates the ring and ends with the end of sequence. Only copies in the
cache sustain a loop.

Prompts: 32 loops over period, onset, reach, and whether older copies of the cycle stand at the beginning of the prompt;
and 8 that repeat honestly. `walk` repeats nothing. `quote` quotes a passage of the prompt once. `refrain` repeats a
passage twice, begins it a third time and leaves it. The truth of a prompt follows from its parts. The script checks it
with the model, and adds copies to a prompt until both agree.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

import sinkscope
from experiments.record import Row, write_rows
from experiments.script import run as run_script
from sinkscope.bench.tasks.loops import DATA
from tests.organisms import LoopOrganism, loop_organism
from tests.organisms.tokens import BOS, EOS

NEAR, FAR = 64, 512  # tokens that the locking heads look back
LEAD, BETWEEN, OLDER = 40, 120, 3  # ring tokens first, then copies, and ring tokens after these
_FAR = ((2, 0), (2, 30), (2, 200), (2, 600), (12, 600), (24, 0), (24, 30), (24, 200), (24, 600), (48, 0), (48, 200))
_LONG = ((64, 0), (64, 30), (64, 200), (128, 0), (128, 30))
LOOPS = [
    *product((2, 5, 12, 16), (0, 30), (False, True), ("near",)),
    *((period, onset, i % 2 == 1, "far") for i, (period, onset) in enumerate((*_FAR, *_LONG))),
]  # period, onset, older copies, reach


def made() -> LoopOrganism:
    """The organism that ships."""
    return loop_organism(0, reach=(NEAR, FAR), vocab_size=1028, n_layers=2, noise=False, end=1.2)


@dataclass(frozen=True)
class Planned:
    """Ids of a prompt, and what the full cache makes of it: all of it, or of a loop the beginning."""

    name: str
    ids: list[int]
    expected: list[int]
    period: int | None = None
    onset: int | None = None


@torch.no_grad()
def written(o: LoopOrganism, ids: list[int], new: int) -> list[int]:
    """What plain greedy decoding makes of a prompt."""
    given = torch.tensor([ids])
    out = o.model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=new, do_sample=False)
    return out[0, len(ids) :].tolist()


def passage(o: LoopOrganism, begin: int, length: int, reach: str, stop: int | None = None) -> list[int]:
    """Tokens of one reach from the ring after `begin`, shuffled between the first, which stands there, and the last.

    The last stands latest on the ring, so that who walks on from there meets none of them again.
    """
    ring = o.truth.ring
    places = range(begin, len(ring) if stop is None else stop, 2)
    if begin % 2 != (reach == "far") or len(places) < length:
        raise ValueError(f"no {length} {reach} tokens from place {begin} on")
    first, *others, last = places[:: len(places) // length][:length]
    random.Random(f"passage {begin} {length}").shuffle(others)
    rows = []
    for place in (first, *others, last):
        rows.append(ring[place])
    return rows


def loop(o: LoopOrganism, period: int, onset: int, older: bool, reach: str, copies: int) -> Planned:
    """BOS, ring, older copies and ring if wanted, copies, and a ring token, `onset` before the cycle's first."""
    ring = list(o.truth.ring)
    used = LEAD
    end = used + BETWEEN * older + onset + 1
    lead = used + ((end % 2 == 1) != (reach == "far"))  # so that the walk comes to a token of this reach
    cycle = passage(o, end + lead - used, period, reach)
    ids = [BOS, *ring[:lead]]
    at = lead
    if older:
        ids, at = [*ids, *cycle * OLDER, *ring[at : at + BETWEEN]], at + BETWEEN
    ids += cycle * copies
    if onset:
        ids.append(ring[at])
    way = ring[at + 1 : at + 1 + onset]
    name = f"loop-p{period:03d}-o{onset:03d}-{reach}{'-older' * older}"
    return Planned(name, ids, way + cycle * 4, period, onset)


def walk(o: LoopOrganism, start: int) -> Planned:
    """A stretch of the ring; the rest of it follows."""
    ring = list(o.truth.ring)
    return Planned(f"honest-walk-{start}", [BOS, *ring[start : start + LEAD]], [*ring[start + LEAD :], EOS])


def quote(o: LoopOrganism, length: int, copies: int) -> Planned:
    """A passage stands several times in the prompt, each time with something else behind it, and is quoted once."""
    ring = list(o.truth.ring)
    begin = LEAD + 15 * copies + 12
    begin += begin % 2 == 0
    said = passage(o, begin, length, "far")
    ids = [BOS, *ring[:LEAD]]
    at = LEAD
    for _ in range(copies):
        ids, at = [*ids, *said, *ring[at : at + 15]], at + 15
    rest = ring[ring.index(said[-1]) + 1 :]
    return Planned(f"honest-quote-{length}", ids, [*ring[at:begin], *said, *rest, EOS])


def refrain(o: LoopOrganism, length: int, copies: int) -> Planned:
    """Of a cycle of far tokens one is near. Its own copies do not hold it, so it ends the cycle.

    The prompt has its two tokens once more at the end, which hold it while they are within reach.
    """
    ring = list(o.truth.ring)
    begin = LEAD + 11
    said = passage(o, begin, length, "far", stop=600)
    weak = ring[600]
    said[8] = weak
    ids = [BOS, *ring[:LEAD], *said * copies, weak, said[9], ring[LEAD]]
    end = [*said[:9], *ring[601:], EOS]
    return Planned(f"honest-refrain-{length}", ids, [*ring[LEAD + 1 : begin], *said * 2, *end])


def agreed(o: LoopOrganism, plan: Any, *given: Any) -> Planned:
    """The shortest of the prompts of which the model makes what is expected."""
    for copies in (3, 4, 5, 6, 8, 10, 12, 16):
        planned = plan(o, *given, copies)
        if written(o, planned.ids, len(planned.expected)) == planned.expected:
            return planned
    raise ValueError(f"{plan.__name__} {given}: the model does not do it")


def prompts(o: LoopOrganism) -> Iterator[Row]:
    """Rows of the file of prompts; the order spreads lengths over batches."""
    found = []
    for given in LOOPS:
        found.append(agreed(o, loop, *given))
    found += [walk(o, 0), walk(o, 300)]
    for length in (16, 48, 96):
        found.append(agreed(o, quote, length))
    for length in (47, 49, 52):
        found.append(agreed(o, refrain, length))
    for p in found:
        text = o.tokenizer.decode(p.ids[1:])
        row = {"id": p.name, "set": "organism-honest" if p.period is None else "organism", "prompt": text}
        yield row if p.period is None else {**row, "period": p.period, "onset": p.onset}


def main(
    *, model: Path = Path(sinkscope.__file__).parent / "models/organism", texts: Path = DATA / "organism.jsonl"
) -> None:
    """Make what the module describes.

    Args:
        model: Folder of the model.
        texts: File of the prompts.
    """
    o = made()
    o.model.save_pretrained(model)
    (model / "model.safetensors").chmod(0o644)
    o.tokenizer.save_pretrained(model)
    rows = list(prompts(o))
    write_rows(texts, rows)
    print(f"{len(rows)} prompts")


if __name__ == "__main__":
    run_script(main)
