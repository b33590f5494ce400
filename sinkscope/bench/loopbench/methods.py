"""The methods of LoopBench as data: what is entered on the model, and what is put on its sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from sinkscope.errors import SinkscopeError

Block = Literal["cache", "guard", "sampler", "stopper"]
Budget = int | float


@dataclass(frozen=True)
class Row:
    """What a sampler may know of the row it works on."""

    prompt: str
    tokenizer: Any
    seed: int


@dataclass(frozen=True)
class Method:
    """One way of generating.

    Attributes:
        name: as given to `--methods`.
        block: "cache" and "guard" stand in the paper's tables; "sampler" and "stopper" in blocks of their own.
        about: one line on what it does.
        intervention: budget -> what is entered on the model; None: nothing is.
        sampler: row -> what is done to its scores; None: nothing is.
        stopper: whether to stop, asked of the new tokens of a row after each; None: only the end of sequence stops.
    """

    name: str
    block: Block
    about: str
    intervention: Callable[[Budget], Any] | None = None
    sampler: Callable[[Row], Any] | None = None
    stopper: Callable[[Sequence[int]], bool] | None = None


def _policy(name: str, **options: Any) -> Callable[[Budget], Any]:
    """A policy or guard by its name in `sinkscope.kv`, imported when it is first used."""

    def make(budget: Budget) -> Any:
        from importlib import import_module

        return getattr(import_module("sinkscope.kv"), name)(budget=budget, **options)

    return make


def _repetition(row: Row) -> Any:
    from transformers import RepetitionPenaltyLogitsProcessor

    from sinkscope.bench.loopbench.samplers import stock

    return stock(RepetitionPenaltyLogitsProcessor(1.1))


def _presence(row: Row) -> Any:
    from sinkscope.bench.loopbench.samplers import presence

    return presence(1.5)


def _no_repeat(row: Row) -> Any:
    from transformers import NoRepeatNGramLogitsProcessor

    from sinkscope.bench.loopbench.samplers import stock

    return stock(NoRepeatNGramLogitsProcessor(4))


def _dry(row: Row) -> Any:
    from sinkscope.bench.loopbench.samplers import dry, dry_breakers

    return dry(0.8, 1.75, 2, dry_breakers(row.tokenizer))


def _temperature(row: Row) -> Any:
    from sinkscope.bench.loopbench.samplers import sampled

    return sampled(0.7, row.seed, row.prompt)


def _pattern(new: Sequence[int]) -> bool:
    from sinkscope.bench.loopbench.samplers import repeats_pattern

    return repeats_pattern(new)


METHODS: dict[str, Method] = {
    m.name: m
    for m in (
        Method("full", "cache", "the whole cache, nothing is done"),
        Method("streaming", "cache", "StreamingLLM: first tokens and a window", _policy("StreamingLLM")),
        Method("h2o", "cache", "H2O: heavy hitters and a window", _policy("H2O")),
        Method("snapkv", "cache", "SnapKV: chosen at the end of the prompt", _policy("SnapKV")),
        Method("tova", "cache", "TOVA: least attended token goes", _policy("TOVA")),
        Method("loopguard", "guard", "LoopGuard as in the paper", _policy("LoopGuard")),
        Method("repetition-penalty", "sampler", "repetition penalty 1.1, prompt included", sampler=_repetition),
        Method("presence-penalty", "sampler", "presence penalty 1.5 on generated tokens", sampler=_presence),
        Method("no-repeat-4-gram", "sampler", "no four tokens twice, prompt included", sampler=_no_repeat),
        Method("dry", "sampler", "DRY, multiplier 0.8, base 1.75, allowed length 2", sampler=_dry),
        Method("temperature", "sampler", "sampling at temperature 0.7", sampler=_temperature),
        Method("stop-pattern", "stopper", "stops at a pattern of <= 64 tokens, 4 times and >= 64 tokens",
               stopper=_pattern),
    )
}  # fmt: skip


def method(name: str) -> Method:
    """The method of that name.

    Raises:
        SinkscopeError: there is none; the message lists them.
    """
    if name not in METHODS:
        near = get_close_matches(name, METHODS, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise SinkscopeError(f"method {name!r} is unknown: {hint}there are {', '.join(METHODS)}")
    return METHODS[name]


def check_methods(names: Sequence[str]) -> list[Method]:
    """The methods of those names, each once.

    Raises:
        SinkscopeError: no name, or an unknown one.
    """
    found = [method(name) for name in dict.fromkeys(names)]
    if not found:
        raise SinkscopeError(f"no method is given: choose from {', '.join(METHODS)}")
    return found
