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
class Batch:
    """What a stopper may know of the rows it watches: columns of the prompts, ids that end a row, and W."""

    width: int
    ends: tuple[int, ...]
    window: int


@dataclass(frozen=True)
class Method:
    """One way of generating.

    Attributes:
        name: as given to `--methods`.
        block: "cache" and "guard" stand in the paper's tables; "sampler" and "stopper" in blocks of their own.
        about: one line on what it does.
        intervention: budget and window -> what is entered on the model; None: nothing is.
        sampler: row -> what is done to its scores; None: nothing is.
        stopper: batch -> logits processors to look on, and the stopping criterion; None: nothing stops early.
    """

    name: str
    block: Block
    about: str
    intervention: Callable[[Budget, int], Any] | None = None
    sampler: Callable[[Row], Any] | None = None
    stopper: Callable[[Batch], tuple[list[Any], Any]] | None = None


def _policy(name: str) -> Callable[[Budget, int], Any]:
    def make(budget: Budget, window: int) -> Any:
        from sinkscope.kv import make_policy

        return make_policy(name, budget=budget)

    return make


def _guard(**options: Any) -> Callable[[Budget, int], Any]:
    def make(budget: Budget, window: int) -> Any:
        from sinkscope.kv.loopguard import LoopGuard

        return LoopGuard(budget=budget, window=window, **options)

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


def _pattern(batch: Batch) -> tuple[list[Any], Any]:
    from sinkscope.bench.loopbench.samplers import PatternStop

    return [], PatternStop(batch.width)


def _monitor(batch: Batch) -> tuple[list[Any], Any]:
    from sinkscope.kv.loopguard import LoopReporter, LoopStopper
    from sinkscope.loops.monitor import MonitorSettings

    settings = MonitorSettings(window=batch.window, relapse=batch.window)
    reporter = LoopReporter(settings, eos_token_id=batch.ends)
    return [reporter], LoopStopper(reporter=reporter)


METHODS: dict[str, Method] = {
    m.name: m
    for m in (
        Method("full", "cache", "the whole cache, nothing is done"),
        Method("streaming", "cache", "StreamingLLM: first tokens and a window", _policy("streaming")),
        Method("h2o", "cache", "H2O: heavy hitters and a window", _policy("h2o")),
        Method("snapkv", "cache", "SnapKV: chosen at the end of the prompt", _policy("snapkv")),
        Method("tova", "cache", "TOVA: the least attended token goes", _policy("tova")),
        Method("loopguard", "guard", "LoopGuard as in the paper", _guard()),
        Method(
            "loopguard-window", "guard", "LoopGuard, its cache within the budget at all times", _guard(between="window")
        ),
        Method("loopguard-repeats", "guard", "LoopGuard that takes out older copies too", _guard(clean="repeats")),
        Method("loopguard-always", "guard", "pruning every 200 tokens", _guard(variant="always")),
        Method("loopguard-p1", "guard", "pruning on the top-1 streak alone", _guard(variant="p1")),
        Method("loopguard-ttr", "guard", "pruning on the type-token ratio alone", _guard(variant="ttr")),
        Method("loopguard-cr", "guard", "pruning on the compression ratio alone", _guard(variant="cr")),
        Method("loopguard-stall", "guard", "pruning on stalled novelty alone", _guard(variant="stall")),
        Method("loopguard-tail", "guard", "pruning on a repeating tail alone", _guard(variant="tail")),
        Method("repetition-penalty", "sampler", "repetition penalty 1.1, prompt included", sampler=_repetition),
        Method("presence-penalty", "sampler", "presence penalty 1.5 on generated tokens", sampler=_presence),
        Method("no-repeat-4-gram", "sampler", "no four tokens twice, prompt included", sampler=_no_repeat),
        Method("dry", "sampler", "DRY, multiplier 0.8, base 1.75, allowed length 2", sampler=_dry),
        Method("temperature", "sampler", "sampling at temperature 0.7", sampler=_temperature),
        Method(
            "stop-pattern", "stopper", "stops at a pattern of <= 64 tokens, 4 times and >= 64 tokens", stopper=_pattern
        ),
        Method("stop-monitor", "stopper", "stops where LoopGuard would prune", stopper=_monitor),
    )
}


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


def parse_budget(text: str) -> Budget:
    """A number of tokens, or a share of the prompt if there is a point in it.

    Raises:
        SinkscopeError: it is neither; a budget of 0, or a share above 1.
    """
    try:
        budget: Budget = float(text) if "." in text else int(text)
    except ValueError:
        budget = 0
    if not (0 < budget <= 1 if isinstance(budget, float) else budget >= 1):
        raise SinkscopeError(
            f"--budget {text}: expected a whole number of tokens from 1, or a share of the prompt above 0.0 and up to "
            "1.0"
        )
    return budget
