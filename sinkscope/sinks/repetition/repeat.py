"""What n repetitions of a token do to a model: one pass over the prefixes of a repetition for each reading."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from sinkscope.errors import SinkscopeError
from sinkscope.files.records import Natural
from sinkscope.measure import Setup, measurement
from sinkscope.sinks.repetition.readings import (
    TAIL,
    Resume,
    read_attention,
    read_norms,
    read_probabilities,
    read_vocabulary,
    sweep_of,
)
from sinkscope.sinks.repetition.result import Quantity, Repeat
from sinkscope.sinks.spikes.find import sinks_of

EVERY_TOKEN = ["all"]
NO_SPIKE = "No norm spike was found at the first token, so repetitions are compared with nothing; see `circuit`."


def refuse_unused(*, quantity: str, tokens: Sequence[str] | None, **options: Any) -> None:
    """Refuse options that the reading has no use for, before a model is opened.

    Raises:
        SinkscopeError: An option belongs to another reading.
    """
    every = list(tokens or ()) == EVERY_TOKEN
    if (options["sample"] or options["resume"]) and not every:
        raise SinkscopeError("--sample and --resume belong to --tokens all: leave them out, or ask for that")
    if every and (quantity != "norm" or options["prefix"]):
        raise SinkscopeError("--tokens all belongs to --quantity norm without --prefix: leave it out, or ask for that")


@measurement(
    check=refuse_unused,
)
def repeat(
    setup: Setup,
    *,
    quantity: Quantity = "norm",
    tokens: Sequence[str] | None = None,
    prefix: str | None = None,
    max_repeats: Annotated[int, Field(ge=2)] | None = None,
    sample: Natural | None = None,
    resume: Resume = None,
) -> Repeat:
    """Measure what n repetitions of a token do to its norm, its attention or the next token's probability.

    One causal pass per token contains every number of repetitions. A sequence is BOS, the prefix and the repetitions;
    without BOS and prefix, a word of the text that is not repeated stands first (Yona et al. 2025, Fig. 1, 2, 6
    and section 5). `patch make` and `patch eval` say what a patch changes.

    Args:
        quantity: What is read. "norm": projection of the repeated token on each spike of the first token; "attention"
            that copies and the sink receive; "probability" that the token comes once more.
        tokens: Words to repeat, each one token; all is the whole vocabulary. By default five words of the text.
        prefix: Text between BOS and the repetitions; it must not contain what is repeated. By default none.
        max_repeats: Number of repetitions. By default 1,024, or what the context holds.
        sample: With all tokens: only this many, drawn at random.
        resume: With all tokens: folder that keeps finished parts, so that an interrupted run can continue.
    """
    every = list(tokens or ()) == EVERY_TOKEN
    sweep = sweep_of(setup, None if every else tokens, prefix, max_repeats, TAIL if quantity == "attention" else 0)
    if quantity == "probability":
        return read_probabilities(sweep)
    sinks = sinks_of(setup)
    if quantity == "attention" and sinks.spikes:
        return read_attention(sweep, sinks.spikes[0])
    spikes = sinks.at_first
    if not spikes:
        return Repeat(quantity=quantity, instead=NO_SPIKE, effects=())
    if every:
        return read_vocabulary(setup, spikes, sweep.count, sample, resume)
    return read_norms(sweep, spikes)
