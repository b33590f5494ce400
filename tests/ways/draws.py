"""Draws: a value of each dimension. How they are drawn, which of them cover all pairs, and how one is made smaller."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations
from typing import Any

import torch

from .calls import CALLS
from .edits import EDITS, ROWS_SEEN, Draw
from .families import ENDS, FAMILIES
from .knockouts import knockouts
from .masks import MASKS, POSITIONS
from .settings import ATTENTIONS, HOOKS, MODES, OTHERS, WRAPPERS
from .texts import ASSISTED, OPTIONS, ROW_ALONE
from .ways import TEXTS, WAYS

EDITS.update(knockouts())
DIMENSIONS: dict[str, Mapping[Any, Any]] = {
    "family": FAMILIES,
    "attention": ATTENTIONS,
    "wrapper": WRAPPERS,
    "rows": dict.fromkeys((1, 2, 3)),
    "padding": dict.fromkeys(("none", "left", "right")),
    "length": dict.fromkeys((20, 1, 2, 300, 600)),
    "cache": WAYS,
    "call": CALLS,
    "mask": MASKS,
    "positions": POSITIONS,
    "edit": EDITS,
    "other": OTHERS,
    "options": OPTIONS,
    "hooks": HOOKS,
    "text": dict.fromkeys(TEXTS),
    "ends": dict.fromkeys(ENDS),
    "dtype": dict.fromkeys(("float32", "bfloat16", "float16")),
    "mode": MODES,
    "device": dict.fromkeys(("cpu", *(["cuda"] if torch.cuda.is_available() else []))),
}
"""All values of each dimension; the first one is the plain one."""
PLAIN: dict[str, Any] = {name: next(iter(values)) for name, values in DIMENSIONS.items()}


def draw_of(**values: Any) -> dict[str, Any]:
    """The plain draw with some other values."""
    assert values.keys() <= PLAIN.keys(), values
    return {**PLAIN, **values}


def text_of(draw: Draw) -> str:
    """What is not plain in a draw, as `--only` takes it."""
    said = [f"{name}={value}" for name, value in draw.items() if value != PLAIN[name]]
    return ", ".join(said) or "nothing special"


def allowed(draw: Draw) -> bool:
    """Whether there is an answer by plain means: each value fits, and so do those that meet."""
    for name, values in DIMENSIONS.items():
        row = values[draw[name]]
        if hasattr(row, "fits") and not row.fits(draw):
            return False
    return _meet(draw) and (not EDITS[draw["edit"]].alone or _has_row_alone(draw))


def _meet(draw: Draw) -> bool:
    """Whether values that depend on each other have an answer together."""
    edit = EDITS[draw["edit"]]
    if EDITS[draw["edit"]].site == ROWS_SEEN and draw["other"] in ("plain thread", "thread with a trace"):
        return False  # calls of a thread without a block are seen, too
    if draw["hooks"] != "none" and draw["other"] in ("plain thread", "thread that waits"):  # which they act in, too
        return False
    if draw["other"] == "thread that waits" and draw["cache"].startswith("looping"):
        return False  # the bare call that replays a text would be refused
    if draw["padding"] != "none" and (draw["rows"] == 1 or draw["length"] <= 4):
        return False
    if draw["padding"] == "right" and draw["cache"] not in ("none", "gradients"):  # has no meaning for a cache
        return False
    if (draw["edit"] == "streams") != (draw["cache"] == "evicted"):
        return False
    if draw["options"] != "greedy" and draw["cache"] != "generate":
        return False
    if draw["options"] in ASSISTED and draw["wrapper"] == "offloaded":  # plain models cannot do it
        return False
    if draw["dtype"] != "float32" and draw["cache"] not in ("none", "generate"):
        return False
    if _rounds(draw) and draw["options"] in ("drawn", "second text"):  # what is written does not follow from logits
        return False
    if edit.acts != (draw["cache"] == "looping") or edit.steers != (draw["cache"] in ("steered", "ss.generate")):
        return edit.acts == (draw["cache"] == "looping") and not edit.steers and draw["cache"] != "steered"
    if edit.site == ROWS_SEEN:
        return draw["hooks"] == "none"
    if edit.site is not None:
        return draw["cache"] == "none" and draw["call"] == "keyword" and draw["wrapper"] != "nnsight"
    return True


def _rounds(draw: Draw) -> bool:
    return draw["dtype"] != "float32" or draw["mode"] == "autocast"


def _has_row_alone(draw: Draw) -> bool:
    """Whether an intervention with a memory has its answer on each row by itself."""
    family = FAMILIES[draw["family"]]
    if WAYS[draw["cache"]].alone is None or draw["padding"] == "right" or draw["length"] < 20:
        return False
    if draw["cache"] == "generate" and (draw["rows"] > 1 or draw["options"] not in ROW_ALONE):
        return False  # rows end at different times
    if counts_padding(draw) and EDITS[draw["edit"]].budget and family.absolute:
        return False  # policies count real tokens
    return draw["dtype"] == "float32"  # under autocast nothing is compared


def counts_padding(draw: Draw) -> bool:
    """Whether a model that is not told positions counts the padding in front of a row, too."""
    takes = FAMILIES[draw["family"]].positions and draw["positions"] == "counted"
    padded = draw["padding"] == "left" or draw["mask"] in ("hole", "later turn")
    return padded and takes and not WAYS[draw["cache"]].tokens


def drawn(generator: random.Random, fixed: Mapping[str, Any]) -> dict[str, Any] | None:
    """A random draw; half of its dimensions stay plain, so that rare values meet and a failing draw is small.

    None: the fixed values fit no draw, or hardly any.
    """
    for _ in range(5000):
        draw = dict(PLAIN)
        for name, values in DIMENSIONS.items():
            if name in fixed:
                draw[name] = fixed[name]
            elif name in ("family", "edit", "cache") or generator.random() < 0.4:
                draw[name] = generator.choice(list(values))
        if allowed(draw):
            return draw
    return None


def smaller(draw: Draw, fails: Callable[[Draw], bool]) -> dict[str, Any]:
    """Put each dimension back to its plain value as long as the draw still fails, until none can be."""
    small, again = dict(draw), True
    while again:
        again = False
        for name, plain in PLAIN.items():
            if small[name] == plain:
                continue
            less = {**small, name: plain}
            if allowed(less) and fails(less):
                small, again = less, True
    return small


def pairs_of(draw: Draw, names: Iterable[str]) -> set[tuple[str, Any, str, Any]]:
    """The pairs of values that meet in a draw."""
    return {(first, draw[first], second, draw[second]) for first, second in combinations(names, 2)}


RARE = {
    "mode": ("inference", "autocast", "training"),
    "wrapper": ("compiled", "lora", "offloaded"),
    "call": ("embeds", "everything"),
    "length": (300, 600),
    "other": tuple(OTHERS)[1:],
    "cache": ("copied from", "repeated", "conversation", "turns", "evicted", "by hand"),
    "options": ("dry", "assistant", "static"),
    "edit": (
        *("guard", "h2o", "snapkv", "loopserve", "zero;full", "add;zero", "loopserve 0", "add embed"),
        *("streaming 12", "h2o 12", "tova 12", "adakv 12", "pyramid 12", "progressive 12"),
        *("guard steers", "value", "zero first", "add at", "zero|streaming 12", "patch;snapkv 12"),
        *("half snapkv", "a shape", "a shape 12", "minference", "minference 12", "patch up", "streams"),
        *("patch calibrated", "trace zero", "trace post", "trace z", "trace logits"),
    ),
}
"""Values that take long or are like others: the suite meets each of them once, and `-m slow` in many draws."""


def cover(fixed: Mapping[str, Any], tries: int = 8, seed: int = 0) -> list[dict[str, Any]]:
    """Draws in which each pair of values that can meet does so at least once, all but pairs with a family.

    Families take turns: each meets every value of every other dimension only in `-m slow`.
    """
    generator = random.Random(seed)
    names = [name for name in DIMENSIONS if name != "family"]
    missing: set[tuple[str, Any, str, Any]] = set()
    for first, second in combinations(names, 2):
        for one in _usual(first):
            missing |= {(first, one, second, other) for other in _usual(second)}
    families, chosen = list(FAMILIES), []
    for pair in sorted(missing, key=str):
        first, one, second, other = pair
        best, most = None, 0
        for _ in range(tries if pair in missing else 0):
            draw = _completed({first: one, second: other, **fixed}, families[len(chosen) % len(families)], generator)
            if draw is None:
                continue
            new = len(pairs_of(draw, names) & missing)
            if new > most:
                best, most = draw, new
        missing.discard(pair)
        if best is not None:
            chosen.append(best)
            missing -= pairs_of(best, names)
    for name in RARE:
        for value in RARE[name]:
            draw = drawn(generator, {"wrapper": PLAIN["wrapper"], name: value, **fixed})
            if draw is not None:
                chosen.append(draw)
    return chosen


def _usual(name: str) -> list[Any]:
    return [value for value in DIMENSIONS[name] if value not in RARE.get(name, ())]


def _completed(values: Mapping[str, Any], family: str, generator: random.Random) -> dict[str, Any] | None:
    """A draw with these values, as full of others as it can be; None if nothing fits them."""
    draw = {**PLAIN, "family": family, **values}
    if not allowed(draw):
        draw = {**PLAIN, **values, "family": generator.choice(list(FAMILIES))}
        for name in ("rows", "cache", "edit", "length", "attention"):
            if name not in values:
                draw[name] = generator.choice(_usual(name))
        if not allowed(draw):
            return None
    order = [name for name in DIMENSIONS if name not in values and name != "family"]
    generator.shuffle(order)
    for name in order:
        other = {**draw, name: generator.choice(_usual(name))}
        if allowed(other):
            draw = other
    return draw
