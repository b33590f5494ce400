"""What n repetitions of a token do to a model: one pass over the prefixes of a repetition for each reading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import plotly.graph_objects as go

from sinkscope.errors import SinkscopeError
from sinkscope.files.jobs import check_workers
from sinkscope.files.result import Number
from sinkscope.measure import Option, Positive, Result, Setup, measurement
from sinkscope.measure.style import finished
from sinkscope.sinks.chunks import ChunkRun
from sinkscope.sinks.first_token.absence import SpikeAbsence
from sinkscope.sinks.repetition.atlas import AtlasReading, read_vocabulary
from sinkscope.sinks.repetition.attention import TAIL, AttentionReading, read_attention
from sinkscope.sinks.repetition.distance import DistanceReading, read_distances
from sinkscope.sinks.repetition.norm import NormReading, read_norms
from sinkscope.sinks.repetition.probability import ProbabilityReading, in_memory, read_probabilities
from sinkscope.sinks.repetition.sweep import Sweep, sweep_rows
from sinkscope.sinks.tokens import replaced_line

EVERY_TOKEN = "all"


@dataclass(frozen=True, kw_only=True)
class Repeat(Result):
    """One reading of a model over the number of repetitions of a token.

    Attributes:
        read: "norm": norm at the sink layer; "attention": attention to the first token and to tokens of high norm;
            "distance": distance of the attention's output to that on the token alone; "probability": probability that
            the token comes once more, and what follows.
        sink_layer: Layer that makes the norm spike. None if there is none, or if the reading does not need it.
        sweep: What was repeated. None if every token of the vocabulary was.
        norm: The reading "norm". None for other readings, and if no MLP makes a norm spike.
        attention: The reading "attention".
        distance: The reading "distance".
        probability: The reading "probability".
        atlas: The reading "norm" of every token of the vocabulary.
        absence: What there is instead of a reading "norm", if no MLP makes a norm spike.
    """

    kind: ClassVar[str] = "repeat"
    percent: ClassVar[tuple[str, ...]] = (
        "of_first",
        "lost_one",
        "lost_set",
        "lost_control",
        "to_first",
        "to_high_norm",
        "tail_to_first",
        "tail_to_high_norm",
        "closest_to_bound",
    )
    glossary: ClassVar[dict[str, str]] = {
        "repeated": "the token, or the cycle of tokens, that is repeated",
        "repeats": "repetitions until its norm is half of the first token's",
        "last_norm": "norm at the last repetition",
        "last": "value at the last repetition",
        "of_first": "norm at the last repetition over the first token's",
        "lost_one": "share of that norm that zeroing the largest sink neuron takes away",
        "lost_set": "share that zeroing the set of sink neurons takes away",
        "lost_control": "share that zeroing as many random neurons takes away",
        "to_first": "attention that position 0 receives, mean over queries and heads",
        "to_high_norm": "attention that all positions of high norm receive together",
        "tail_to_first": "attention to position 0 from ordinary tokens at the end of the sequence",
        "tail_to_high_norm": "attention of those tokens to all positions of high norm",
        "alone": "norm of the attention's output on the token alone",
        "closest_to_bound": "largest distance of a head over its bound, at any number of repetitions",
        "kept": "tokens of the answer that continue the repetition",
        "follows": "beginning of the text behind the repetition",
        "resisting": "tokens that repetition does not make a sink",
        "median_repeats": "median number of repetitions that make the others a sink",
    }

    read: Literal["norm", "attention", "distance", "probability"]
    sink_layer: int | None = None
    sweep: Sweep | None = None
    norm: NormReading | None = None
    attention: AttentionReading | None = None
    distance: DistanceReading | None = None
    probability: ProbabilityReading | None = None
    atlas: AtlasReading | None = None
    absence: SpikeAbsence | None = None

    @property
    def reading(self) -> NormReading | AttentionReading | DistanceReading | ProbabilityReading | None:
        """The reading that was made of single tokens."""
        return self.norm or self.attention or self.distance or self.probability

    def conclusion(self) -> str:
        """The finding of the reading."""
        if self.atlas is not None:
            return self.atlas.conclusion()
        if self.absence is not None:
            return self.absence.sentence("there is no layer to read repetitions at")
        assert self.reading is not None and self.sweep is not None
        return self.reading.conclusion(self.sweep)

    def details(self) -> list[str]:
        """Lines of the reading, and the words of the paper that were replaced."""
        if self.atlas is not None:
            return self.atlas.details()
        if self.reading is None or self.sweep is None:
            return []
        return [*self.reading.details(self.sweep), *replaced_line(self.sweep.replaced)]

    def rows(self) -> list[dict[str, Any]]:
        """One row per token, and where there are several, per layer, sequence or answer."""
        if self.atlas is not None:
            return self.atlas.rows()
        if self.reading is None or self.sweep is None:
            return []
        return self.reading.rows(self.sweep)

    def shown_rows(self) -> list[dict[str, Any]]:
        """The first rows; of a vocabulary, one row per head of layer 0."""
        if self.atlas is not None:
            return self.atlas.head_rows()
        return super().shown_rows()

    def numbers(self) -> list[Number]:
        """The norm after the last repetition, and what ablation takes away of it."""
        if self.norm is None or self.sweep is None:
            return []
        return self.norm.numbers(self.sweep)


def draw(result: Repeat) -> go.Figure:
    """Draw the reading over the number of repetitions, a line per token; of a vocabulary, a histogram."""
    fig = go.Figure()
    if result.atlas is not None:
        fig = result.atlas.draw()
    elif result.reading is not None and result.sweep is not None:
        fig = result.reading.draw(result.sweep)
    height = 480
    if result.attention is not None:
        height = 200 + 300 * len(result.attention.to_first[0])
    return finished(fig, result, width=1200, height=height)


def refuse_unused(
    *, read: str, tokens: Sequence[str] | None, ablate: bool, patch: object, workers: int, sample: int | None, **_: Any
) -> None:
    """Refuse options that the reading has no use for, before a model is opened.

    Raises:
        SinkscopeError: An option belongs to another reading.
    """
    check_workers(workers)
    every = tokens is not None and list(tokens) == [EVERY_TOKEN]
    if every and read != "norm":
        raise SinkscopeError(f"--tokens all is read for its norm only: leave out --read {read}, or name some tokens")
    if ablate and (read != "norm" or every):
        raise SinkscopeError("--ablate belongs to --read norm of some tokens: leave it out")
    if patch is not None and read != "probability":
        raise SinkscopeError("--patch belongs to --read probability: give that, or leave --patch out")
    if sample is not None and not every:
        raise SinkscopeError(f"--sample {sample} draws from the vocabulary: give --tokens all, or leave it out")


@measurement(
    group="Repetition",
    figure=draw,
    command="repeat",
    quick={"max_repeats": 24, "ablate": True},
    check=refuse_unused,
)
def repeat(
    setup: Setup,
    *,
    read: Literal["norm", "attention", "distance", "probability"] = "norm",
    tokens: Annotated[Sequence[str] | None, Option("--tokens", metavar="A,B,...|all", reads="commas")] = None,
    prefix: str | None = None,
    max_repeats: Positive | None = None,
    ablate: bool = False,
    all_layers: bool = False,
    patch: Annotated[Any, Option(metavar="FILE")] = None,
    answer_after: Sequence[Annotated[int, Option(name="--answer-after", min=1)]] | None = None,
    new_tokens: Positive | None = None,
    sample: Positive | None = None,
    workers: Positive = 1,
    resume: Annotated[str | Path | None, Option(metavar="DIR", writes=True)] = None,
) -> Repeat:
    """Measure what n repetitions of a token do to its norm, its attention, its output or the next token's probability.

    One causal pass per token contains every number of repetitions. A sequence is BOS, the prefix and the repetitions;
    without BOS and prefix, a word of the text that is not repeated stands first (Yona et al. 2025, Fig. 1, 2, 3, 5, 6
    and Table 3).

    Args:
        read: "norm" of the repeated token at the sink layer; "attention" to the first token and to tokens of high norm;
            "distance" of the first attention layer's output to that on the token alone, with the bound of theorem 4.1;
            "probability" that the token comes once more, before and after a patch, and what the model writes.
        tokens: Words to repeat, each one token; all is the whole vocabulary. By default the words of the paper's
            figure, or five words of the text.
        prefix: Text between BOS and the repetitions; it must not contain what is repeated. By default none; with
            distance "some prefix:", with probability "Repeat:", as in the paper.
        max_repeats: Number of repetitions. By default 1,024, or what the context holds.
        ablate: Read the norm also with the largest sink neuron zeroed, with the whole set of `find_sinks`, and with
            as many random ones, for each token and for the cycle of all.
        all_layers: Read the distance in every layer, also of a model that is not in memory.
        patch: The patch.json for the probability; from Python also a `SinkPatch`. By default a patch of the causal
            neurons, which are searched for.
        answer_after: Number of repetitions after which the model answers. By default 50 and 400, or what the context
            holds beside the answer.
        new_tokens: Maximum length of an answer in tokens. By default 100, or a quarter of the context.
        sample: With all tokens: only this many, drawn at random.
        workers: With all tokens: number of processes; more than one run over Ray.
        resume: With all tokens: folder that keeps finished parts, so that an interrupted run can continue.

    Example:
        sinkscope repeat --read distance --model llama-2-7b --max-repeats 500
    """
    if tokens is not None and list(tokens) == [EVERY_TOKEN]:
        folder = None if resume is None else Path(resume)
        layer, atlas = read_vocabulary(setup, max_repeats, sample, ChunkRun(workers, folder))
        if isinstance(atlas, SpikeAbsence):
            return Repeat(read=read, absence=atlas)
        return Repeat(read=read, sink_layer=layer, atlas=atlas)
    after = TAIL if read == "attention" else 0
    words = None if tokens is None else list(tokens)
    rows = sweep_rows(setup, read, words, prefix, max_repeats, cycle=ablate, after=after)
    if read == "norm":
        layer, norm = read_norms(setup, rows, ablate)
        if isinstance(norm, SpikeAbsence):
            return Repeat(read=read, sweep=rows.sweep, absence=norm)
        return Repeat(read=read, sink_layer=layer, sweep=rows.sweep, norm=norm)
    if read == "attention":
        layer, attention = read_attention(setup, rows)
        return Repeat(read=read, sink_layer=layer, sweep=rows.sweep, attention=attention)
    if read == "distance":
        return Repeat(read=read, sweep=rows.sweep, distance=read_distances(setup, rows, all_layers))
    whole = in_memory(setup)
    probability = read_probabilities(whole, rows, patch, answer_after, new_tokens)
    setup.record(patch=None if patch is None else probability.neurons)
    return Repeat(read=read, sweep=rows.sweep, probability=probability)
