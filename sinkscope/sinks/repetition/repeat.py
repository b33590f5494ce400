"""What n repetitions of a token do to a model: one pass over the prefixes of a repetition for each reading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import plotly.graph_objects as go

from sinkscope.errors import SinkscopeError
from sinkscope.measure import Natural, Option, Result, Setup, measurement
from sinkscope.results.claims import Claims
from sinkscope.results.style import figure_of
from sinkscope.results.tables import Table
from sinkscope.sinks.chunks import Resume
from sinkscope.sinks.find.spikes import sink_spike, without_spike
from sinkscope.sinks.repetition.attention import TAIL, AttentionReading, read_attention
from sinkscope.sinks.repetition.distance import DistanceReading, read_distances
from sinkscope.sinks.repetition.norm import AtlasReading, NormReading, read_norms, read_vocabulary
from sinkscope.sinks.repetition.probability import ProbabilityReading, in_memory, read_probabilities
from sinkscope.sinks.repetition.sweep import sweep_rows

EVERY_TOKEN = "all"
SILENT = "The first layer's attention writes nothing on a token alone, so copies have nothing to be like."
AT_ONCE = "Every token reaches half of the norm of the spike at once, so repetition has nothing to show."


@dataclass(frozen=True, kw_only=True)
class Repeat(Result):
    """One reading of a model over the number of repetitions of a token.

    Attributes:
        read: "norm": norm at the sink layer; "attention": attention that each class of tokens receives;
            "distance": distance of the attention's output to that on the token alone; "probability": probability that
            the token comes once more, and what follows.
        sink_layer: Layer that makes the norm spike. None if there is none, or if the reading does not need it.
        reading: The curves and numbers of the reading. None if it needs a norm spike and no MLP makes one.
        instead: What there is instead of a finding.
    """

    percent = (
        "of_spike",
        "lost_set",
        "lost_control",
    )
    glossary: ClassVar = {
        "repeated": "the token, or the cycle of tokens, that is repeated",
        "last_norm": "norm at the last repetition",
        "last": "the same distance after the last repetition",
        "of_spike": "norm at the last repetition over that of the spike",
        "lost_set": "share of that norm that zeroing the set of sink neurons takes away",
        "lost_control": "share that zeroing as many random neurons takes away",
        "token_class": "there (the positions of the repetitions), sink (the place of the sink) or ordinary",
        "attention": "attention that one token of the class receives, mean over heads and the text behind",
        "uniform": "what it would receive if all visible tokens received the same",
        "alone": "norm of the attention's output on the token alone",
        "first": "its distance to the output after one repetition",
        "kept": "tokens of the answer that continue the repetition",
        "follows": "beginning of the text after the repetition",
    }

    read: Literal["norm", "attention", "distance", "probability"]
    sink_layer: int | None = None
    reading: NormReading | AttentionReading | DistanceReading | ProbabilityReading | AtlasReading | None = None
    instead: str | None = None

    @property
    def claims(self) -> Claims:
        """The claims of the reading."""
        return () if self.reading is None else self.reading.claims

    def facts(self) -> list[str]:
        """Lines of the reading."""
        return [] if self.reading is None else self.reading.facts()

    def rows(self) -> Table:
        """One row per token, and where there are several, per layer, sequence or answer."""
        return [] if self.reading is None else self.reading.rows()


def draw(result: Repeat) -> go.Figure:
    """Draw the reading over the number of repetitions, a line per token; of a vocabulary, a histogram."""
    fig: Any = go.Figure() if result.reading is None else result.reading.draw()
    return figure_of(fig, result, width=1200, height=fig.layout.height or 480)


def refuse_unused(
    *,
    read: str,
    tokens: Sequence[str] | None,
    prefix: str | None,
    ablate: bool,
    patch: object,
    sample: int | None,
    **_: Any,
) -> None:
    """Refuse options that the reading has no use for, before a model is opened.

    Raises:
        SinkscopeError: An option belongs to another reading.
    """
    every = tokens is not None and list(tokens) == [EVERY_TOKEN]
    unused = {
        "--tokens all belongs to --read norm": every and read != "norm",
        "--prefix belongs to --tokens WORD": prefix is not None and every,
        "--ablate belongs to --read norm with --tokens WORD": ablate and (read != "norm" or every),
        "--patch belongs to --read probability": patch is not None and read != "probability",
        "--sample belongs to --tokens all": sample is not None and not every,
    }
    for why, is_unused in unused.items():
        if is_unused:
            raise SinkscopeError(f"{why}: leave it out, or ask for that")


@measurement(
    group="Repetition",
    help="Measure what repeated tokens do to norm, attention or output.",
    figure=draw,
    check=refuse_unused,
)
def repeat(
    setup: Setup,
    *,
    read: Literal["norm", "attention", "distance", "probability"] = "norm",
    tokens: Annotated[Sequence[str] | None, Option("--tokens", metavar="A,B,...|all", reads="commas")] = None,
    prefix: str | None = None,
    max_repeats: Natural | None = None,
    ablate: bool = False,
    all_layers: bool = False,
    patch: Annotated[Any, Option(metavar="FILE")] = None,
    answer_after: Sequence[Annotated[Natural, Option(name="--answer-after")]] | None = None,
    new_tokens: Natural | None = None,
    sample: Natural | None = None,
    resume: Resume = None,
) -> Repeat:
    """Measure what n repetitions of a token do to its norm, its attention, its output or the next token's probability.

    One causal pass per token contains every number of repetitions. A sequence is BOS, the prefix and the repetitions;
    without BOS and prefix, a word of the text that is not repeated stands first (Yona et al. 2025, Fig. 1, 2, 3, 5, 6
    and Table 3).

    Args:
        read: "norm" of the repeated token at the sink layer; "attention" that each class of tokens receives;
            "distance" of the first attention layer's output to that on the token alone, with the bound of theorem 4.1;
            "probability" that the token comes once more, before and after a patch, and what the model writes.
        tokens: Words to repeat, each one token; all is the whole vocabulary. By default the words of the paper's
            figure, or five words of the text.
        prefix: Text between BOS and the repetitions; it must not contain what is repeated. By default none; with
            distance "some prefix:", with probability "Repeat:", as in the paper.
        max_repeats: Number of repetitions. By default 1,024, or what the context holds.
        ablate: Read the norm also with the sink neurons of `find_sinks` zeroed, and with as many random ones.
        all_layers: Read the distance in every layer, also of a model that is not in memory.
        patch: The patch.json for the probability; from Python also a `SinkPatch`. By default a patch of the causal
            neurons, which are searched for.
        answer_after: Number of repetitions after which the model answers. By default 50 and 400.
        new_tokens: Maximum length of an answer in tokens. By default 100.
        sample: With all tokens: only this many, drawn at random.
        resume: With all tokens: folder that keeps finished parts, so that an interrupted run can continue.

    Example:
        sinkscope repeat --read distance --model llama-2-7b --max-repeats 500
    """
    every = tokens is not None and list(tokens) == [EVERY_TOKEN]
    figure, room = "ablation" if ablate else read, TAIL if read == "attention" else 0
    sweep, ids = sweep_rows(setup, figure, None if every else tokens, prefix, max_repeats, room)
    if read == "distance":
        reading = read_distances(setup, sweep, ids, all_layers)
        return Repeat(read=read, reading=reading, instead=None if reading.claims else SILENT)
    if read == "probability":
        reading = read_probabilities(in_memory(setup), sweep, ids, patch, answer_after, new_tokens)
        return Repeat(read=read, reading=reading)
    made = sink_spike(setup)
    if read == "attention":
        reading = read_attention(setup, sweep, ids)
    elif made is None:
        return Repeat(read=read, instead=without_spike(setup, "there is no layer to read repetitions at"))
    elif every:
        reading = read_vocabulary(setup, made, sweep.max_repeats, sample, resume)
    else:
        reading = read_norms(setup, made, sweep, ids, ablate)
    layer, instead = None if made is None else made.scan.layer, None if reading.claims else AT_ONCE
    return Repeat(read=read, sink_layer=layer, reading=reading, instead=instead)
