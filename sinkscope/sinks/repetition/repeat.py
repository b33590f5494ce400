"""What n repetitions of a token do to a model: one pass over the prefixes of a repetition for each reading."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from sinkscope.errors import SinkscopeError
from sinkscope.files.records import Natural
from sinkscope.measure import Option, Setup, measurement
from sinkscope.sinks.chunks import Resume
from sinkscope.sinks.repetition.attention import TAIL, read_attention
from sinkscope.sinks.repetition.norm import read_norms, read_vocabulary
from sinkscope.sinks.repetition.probability import read_probabilities
from sinkscope.sinks.repetition.result import Quantity, Repeat
from sinkscope.sinks.repetition.sweep import sweep_of
from sinkscope.sinks.spikes.steps import sinks_of

EVERY_TOKEN = ["all"]
OWN = {
    "ablate": "--quantity norm",
    "patch": "--quantity probability",
    "sample": "--tokens all",
    "resume": "--tokens all",
}
"""What an option belongs to."""
NO_SPIKE = "No norm spike was found at the first token, so repetitions are compared with nothing; see `circuit`."


def refuse_unused(*, quantity: str, tokens: Sequence[str] | None, **options: Any) -> None:
    """Refuse options that the reading has no use for, before a model is opened.

    Raises:
        SinkscopeError: An option belongs to another reading.
    """
    what = "--tokens all" if list(tokens or ()) == EVERY_TOKEN else f"--quantity {quantity}"
    for name, own in OWN.items():
        if options[name] and what != own:
            raise SinkscopeError(f"--{name} belongs to {own}, and not to {what}: leave it out, or ask for that")
    if what == "--tokens all" and (quantity != "norm" or options["prefix"]):
        raise SinkscopeError("--tokens all belongs to --quantity norm without --prefix: leave it out, or ask for that")


@measurement(
    group="Repetition",
    help="Measure what repeated tokens do to norm, attention or the next token.",
    check=refuse_unused,
)
def repeat(
    setup: Setup,
    *,
    quantity: Quantity = "norm",
    tokens: Annotated[Sequence[str] | None, Option("--tokens", metavar="A,B,...|all", reads="commas")] = None,
    prefix: str | None = None,
    max_repeats: Annotated[int, Field(ge=2)] | None = None,
    ablate: bool = False,
    patch: Annotated[Any, Option(metavar="FILE")] = None,
    sample: Natural | None = None,
    resume: Resume = None,
) -> Repeat:
    """Measure what n repetitions of a token do to its norm, its attention or the next token's probability.

    One causal pass per token contains every number of repetitions. A sequence is BOS, the prefix and the repetitions;
    without BOS and prefix, a word of the text that is not repeated stands first (Yona et al. 2025, Fig. 1, 2, 3, 6
    and Table 3).

    Args:
        quantity: What is read. "norm": projection of the repeated token on each spike of the first token; "attention"
            that copies and the sink receive; "probability" that the token comes once more, before and after a patch,
            and what the model writes after 50 and 400 repetitions.
        tokens: Words to repeat, each one token; all is the whole vocabulary. By default five words of the text.
        prefix: Text between BOS and the repetitions; it must not contain what is repeated. By default none.
        max_repeats: Number of repetitions. By default 1,024, or what the context holds.
        ablate: Read it also with the neurons zeroed that each spike needs, and with as many random ones.
        patch: The patch.json for the probability; from Python also a `SinkPatch`. By default a patch of the causal
            neurons, which are searched for.
        sample: With all tokens: only this many, drawn at random.
        resume: With all tokens: folder that keeps finished parts, so that an interrupted run can continue.

    Example:
        sinkscope repeat --model llama-2-7b --max-repeats 500
    """
    every = list(tokens or ()) == EVERY_TOKEN
    room = TAIL if quantity == "attention" else 0
    sweep = sweep_of(setup, None if every else tokens, prefix, max_repeats, room)
    if quantity == "probability":
        return read_probabilities(sweep, patch)
    sinks = sinks_of(setup)
    if quantity == "attention" and sinks.spikes:
        return read_attention(sweep, sinks.spikes[0].spike)
    if not sinks.at_first:
        return Repeat(quantity=quantity, instead=NO_SPIKE)
    if every:
        return read_vocabulary(setup, sinks.at_first, sweep.count, sample, resume)
    return read_norms(sweep, sinks.at_first, ablate)
