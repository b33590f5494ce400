"""Draw ways of using a model for as long as one likes: `python -m tests.ways --seconds 600 [--only edit=zero]`."""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
import warnings
from functools import partial
from typing import Any

import torch

from .draws import DIMENSIONS, PLAIN, drawn, smaller, text_of
from .edits import Draw
from .promises import check


def fixed_by(words: list[str]) -> dict[str, Any]:
    """Values that `--only dimension=value` asks for."""
    fixed: dict[str, Any] = {}
    for word in words:
        name, _, given = word.partition("=")
        values = {str(value): value for value in DIMENSIONS.get(name, ())}
        if given not in values:
            expected = f"one of {', '.join(values)}" if values else f"a dimension: {', '.join(DIMENSIONS)}"
            sys.exit(f"error: --only {word}: expected {expected}")
        fixed[name] = values[given]
    return fixed


def kind_of(draw: Draw, said: str) -> tuple[str, str]:
    """What tells one kind of failure from another: what is left of the draw but its family, and the promise."""
    return text_of({**draw, "family": PLAIN["family"]}), said.partition(":")[0]


def breaks(promise: str, seed: int, draw: Draw) -> bool:
    """Whether a draw breaks this promise."""
    return (check(draw, seed) or "").partition(":")[0] == promise


def walk(seconds: float, seed: int, fixed: dict[str, Any]) -> int:
    """Draw for so many seconds and print each kind of failure when it is first met; how many there were."""
    generator, begin = random.Random(seed), time.monotonic()
    kinds: dict[tuple[str, str], list[str]] = {}
    count = 0
    while time.monotonic() - begin < seconds:
        draw = drawn(generator, fixed)
        if draw is None:
            sys.exit(f"error: --only {fixed}: no draw has these values together")
        count += 1
        said = check(draw, count)
        if said is None:
            continue
        small = smaller(draw, partial(breaks, said.partition(":")[0], count))
        kind = kind_of(small, said)
        kinds.setdefault(kind, []).append(small["family"])
        if len(kinds[kind]) == 1:
            shown = check(small, count) or said
            print(f"[{count}, {time.monotonic() - begin:.0f} s] {shown} | {text_of(small)}", flush=True)
    print(f"{count} draws, {len(kinds)} kinds of failures")
    for (text, promise), families in sorted(kinds.items(), key=lambda item: -len(item[1])):
        print(f"{len(families):4} {promise} | {text} | {', '.join(sorted(set(families)))}")
    return len(kinds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], metavar="DIMENSION=VALUE")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    sys.exit(walk(chosen.seconds, chosen.seed, fixed_by(chosen.only)) > 0)


if __name__ == "__main__":
    main()
