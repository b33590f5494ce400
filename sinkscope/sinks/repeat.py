"""What n repetitions of a token do to a model: one pass over the prefixes of a repetition for each reading.

(Yona et al. 2025, Fig. 1 to 9.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from einops import einsum
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from sinkscope.engine.tap import attention_rows
from sinkscope.errors import SinkscopeError
from sinkscope.files.records import Natural
from sinkscope.files.store import Folder, Keyed
from sinkscope.hooks.trace import trace
from sinkscope.measure import Setup, measurement
from sinkscope.measure.margin import margin_of
from sinkscope.models.checkpoints.fingerprint import fingerprint_of
from sinkscope.models.draws import draws
from sinkscope.models.target import Target
from sinkscope.models.text import beginning, text_rows
from sinkscope.opening.load import open_target
from sinkscope.results.effect import Effect
from sinkscope.sinks.repeat_result import Quantity, Repeat
from sinkscope.sinks.spikes.copies import along_spikes, copies_of, half_reached
from sinkscope.sinks.spikes.find import sinks_of
from sinkscope.sinks.spikes.spike import Spike
from sinkscope.sinks.thresholds import HALF
from sinkscope.sinks.tokens import (
    TokenRows,
    hold_layers,
    pick_tokens,
    prefix_of,
    repeated,
    repetition_limit,
    sample_tokens,
    token_texts,
    vocabulary,
)

CURVE_POINTS = 160  # numbers of repetitions on a curve, evenly spaced in their logarithm


@dataclass(frozen=True)
class Sweep:
    """What is repeated.

    Attributes:
        setup: The model and its text.
        before: Number of tokens before the first repetition.
        rows: The sequences, each of which repeats a token.
        named: Whether the caller named the tokens. If so, effects are about these tokens, else about words in general.
    """

    setup: Setup
    before: int
    rows: TokenRows
    named: bool = False

    @property
    def count(self) -> int:
        """Return the number of repetitions in each sequence."""
        return self.rows.shape[1] - self.before

    @property
    def counts(self) -> Int[np.ndarray, " n"]:
        """Return the numbers of repetitions at which curves are given."""
        return np.unique(np.geomspace(1, self.count, CURVE_POINTS).round().astype(int))

    @property
    def words(self) -> list[int]:
        """Return the repeated tokens."""
        return self.rows[:, -1].tolist()

    def contrasts(self) -> tuple[TokenRows, TokenRows]:
        """Make two controls of equal length: ordinary tokens that end with one copy, and ordinary tokens alone."""
        ids, others = self.setup.ids[:, 1:].unique(), self.rows.clone()
        ordinary, places = ids[~torch.isin(ids, self.rows[:, -1])], others[:, self.before :]
        generator = draws(self.setup.seed, "tokens beside copies")
        places[:] = ordinary[torch.randint(len(ordinary), places.shape, generator=generator)]
        return append_copy(others, self.rows), others


def sweep_of(
    setup: Setup, tokens: Sequence[str] | None, prefix: str | None, max_repeats: int | None, after: int = 0
) -> Sweep:
    """Choose the tokens of a reading and build its sequences.

    What stands before a text (BOS, or several special tokens) and the prefix stand first; if neither, a word of the
    text does.

    Args:
        setup: The model and its text.
        tokens: The words to repeat. None: words of the text.
        prefix: Text before the repetitions.
        max_repeats: Number of repetitions. None: 1,024, or what the context holds.
        after: Positions of the context that are kept free for what follows.

    Raises:
        SinkscopeError: A word is not one token, or occurs in the prefix, or the context is too short.
    """
    words = pick_tokens(setup, tokens)
    leading = setup.tokenizer(prefix or "", add_special_tokens=False)["input_ids"]
    if not {*leading}.isdisjoint(words):
        raise SinkscopeError(f"--prefix {prefix!r} contains a repeated token, which would be one more repetition")
    # Any token in first place is marked, so it must not be a repeated one.
    before = [*beginning(setup.tokenizer, setup.bos), *leading] or prefix_of(setup, words)
    count = repetition_limit(setup.target, max_repeats, len(before) + after)
    setup.record(max_repeats=count)
    return Sweep(setup, len(before), repeated(before, words, count), named=tokens is not None)


def append_copy(others: TokenRows, rows: TokenRows) -> TokenRows:
    """Put one copy after other tokens, at the position of the last copy of each row."""
    return torch.cat([others[:, :-1], rows[:, -1:]], 1)


def effect_of_copies(values: Float[Tensor, "kind case"], exact: bool = False) -> Effect:
    """Return the effect of copies, mean over cases, beside one copy at the position of the last and other tokens.

    Args:
        values: What copies have, and one copy, and other tokens.
        exact: Whether the effect is about these cases alone.
    """
    value, single, others = values.mean(1).tolist()
    margin = 0.0 if exact else margin_of(values[0].numpy())
    return Effect(value, margin, {"one copy": single, "other tokens": others})


SEQUENCES = 4  # sequences per pass
TAIL = 64  # tokens of natural text after the repetitions; their attention is read
TOKENS = 64  # tokens of a vocabulary in one part

Resume = str | Path | None
"""The folder that keeps finished parts."""

Read = Callable[[TokenRows], Float[Tensor, "condition token n"]]
Turn = Callable[[Float[Tensor, " n"]], int | None]


def read_norms(sweep: Sweep, spikes: Sequence[Spike]) -> Repeat:
    """Project repeated tokens on the spikes of the first token.

    Args:
        sweep: What is repeated.
        spikes: The spikes.
    """

    def read(rows: TokenRows) -> Float[Tensor, "spike token n"]:
        return torch.stack(along_spikes(sweep.setup.target, spikes, rows))[:, :, sweep.before :]

    return _read(sweep, "norm", read, [spike.name for spike in spikes], half_reached)


def read_probabilities(sweep: Sweep) -> Repeat:
    """Read how likely each word comes once more.

    Args:
        sweep: What is repeated.
    """
    setup = sweep.setup
    if not setup.target.resident:  # logits need the whole model in memory
        model, options = setup.source
        setup = replace(setup, target=open_target(model, **options, whole=True))
        sweep = replace(sweep, setup=setup)

    def of_words(logits: Float[Tensor, "row pos vocab"]) -> Float[Tensor, "row pos word"]:
        return logits.float().softmax(-1)[..., sweep.words]

    def read(rows: TokenRows) -> Float[Tensor, "one token n"]:
        probability = trace(setup.target, rows, ["logits"], of_words, batch_size=1)["logits"]
        return probability[:, sweep.before :].diagonal(dim1=0, dim2=2).T[None]

    return _read(sweep, "probability", read, ["intact"], stopped_after, exact=sweep.named)


def _read(
    sweep: Sweep, quantity: Quantity, read: Read, conditions: Sequence[str], turn: Turn, *, exact: bool = False
) -> Repeat:
    """Read the copies, and what one copy and other tokens have at the position of the last.

    Args:
        sweep: What is repeated.
        quantity: What is read.
        read: Reads sequences.
        conditions: The names of what is read.
        turn: The number of repetitions after which a token turns; None if it does not.
        exact: Whether the effects are about these tokens alone.
    """
    values = read(sweep.rows)
    sweep.setup.progress("repetitions", 1, 2)
    last = torch.stack([values[..., -1], *(read(rows)[..., -1] for rows in sweep.contrasts())])
    return Repeat(
        quantity=quantity,
        copies=sweep.count,
        effects=tuple(effect_of_copies(last[:, number], exact) for number in range(len(conditions))),
        ids=tuple(sweep.words),
        conditions=tuple(conditions),
        tokens=token_texts(sweep.setup.target, sweep.words),
        at=sweep.counts,
        values=values[:, :, sweep.counts - 1].numpy(),
        repeats=np.array([[turn(row) for row in rows] for rows in values], dtype=float),
    )


@dataclass(frozen=True)
class VocabularyPart(Keyed):
    """Of some tokens of a vocabulary the number of repetitions, by spike."""

    identity: ClassVar[tuple[str, ...]] = ("part",)

    part: int
    repeats: list[list[int | None]]


def read_vocabulary(setup: Setup, spikes: Sequence[Spike], limit: int, sample: int | None, resume: Resume) -> Repeat:
    """Find the number of repetitions with which every token reaches half of the first token in each spike.

    Args:
        setup: The model and its text.
        spikes: The spikes of the first token.
        limit: Largest number of repetitions.
        sample: Number of tokens, drawn at random. None: all.
        resume: Folder that keeps finished parts; one made with other settings is refused.
    """
    target, ids = setup.target, vocabulary(setup.target, None)
    if sample is not None:
        ids = sample_tokens(ids, sample, setup.seed)
    hold_layers(target, max(spike.peak for spike in spikes))
    decisive = {
        "model": fingerprint_of(target),
        "dtype": str(target.dtype),
        "seed": setup.seed,
        "max_repeats": limit,
        "texts": sha256(f"{setup.ids.tolist()} {ids}".encode()).hexdigest()[:16],
    }
    folder, starts = None if resume is None else Path(resume) / "vocabulary", range(0, len(ids), TOKENS)
    with Folder(folder, decisive, VocabularyPart, option="--resume") as finished:
        for part, start in enumerate(starts):
            if part not in finished.records:
                some = ids[start : start + TOKENS]
                each = copies_of(target, spikes, some, prefix_of(setup, some), limit)
                finished.append([VocabularyPart(part, [[copies.half for copies in of_spike] for of_spike in each])])
            setup.progress("vocabulary", part + 1, len(starts))
        repeats = [np.array(finished.records[part].repeats, dtype=float) for part in range(len(starts))]
    return Repeat(
        quantity="norm",
        effects=(),
        conditions=tuple(spike.name for spike in spikes),
        ids=tuple(ids),
        tokens=token_texts(target, ids),
        repeats=np.concatenate(repeats, 1),
    )


def read_attention(sweep: Sweep, spike: Spike) -> Repeat:
    """Measure the attention that natural text gives to the place of the spike, and to the copies before it.

    The effect is the share of all attention that the copies together get in the first layer whose heads can read the
    spike. Controls: the same positions of natural text that ends with one copy, and of natural text.

    Args:
        sweep: What is repeated; the context has room for the tail.
        spike: The spike.
    """
    setup, target, before = sweep.setup, sweep.setup.target, sweep.before
    place = spike.place
    natural = text_rows(target.tokenizer, setup.halves.report, 1, sweep.rows.shape[1] + TAIL, setup.bos)
    natural[:, :before] = sweep.rows[:1, :before]
    single, _ = sweep.contrasts()
    ids = torch.cat([natural[:, :-TAIL], sweep.rows, single])
    ids = torch.cat([ids, natural[:, -TAIL:].expand(len(ids), -1)], 1)
    there = torch.zeros_like(ids, dtype=torch.bool)
    there[:, before:-TAIL] = True
    keys = torch.stack([place.matches(ids) & ~there, there], 2).float()
    received = attention_from(target, ids, keys, sweep.rows.shape[1], target.forward).mean(-1) / TAIL  # row place layer
    visible = torch.arange(sweep.rows.shape[1], ids.shape[1])[:, None] + 1
    times = received / (keys.cumsum(1)[:, -TAIL:] / visible).mean(1)[..., None]
    count = len(sweep.rows)
    parts = (1, count, count)
    layer = next((number for number in target.attending if number > spike.layers[0]), target.attending[-1])
    usual, copies, one_copy = received[:, 1, layer].split(parts)
    effect = effect_of_copies(torch.stack([copies, one_copy, usual.expand(count)]), exact=sweep.named)
    return Repeat(
        quantity="attention",
        copies=sweep.count,
        effects=(effect,),
        conditions=("natural text", "copies", "one copy"),
        values=torch.stack([part.mean(0) for part in times.split(parts)]).numpy(),
        ids=tuple(sweep.words),
        tokens=(place.label.words, "the copies' positions"),
        at=np.arange(target.n_layers),
        shown=layer,
    )


@torch.no_grad()
def attention_from(
    target: Target,
    ids: TokenRows,
    keys: Float[Tensor, "row pos kind"],
    begin: int,
    run: Callable[[TokenRows], object],
) -> Float[Tensor, "row kind layer head"]:
    """Sum the attention from the positions from `begin` on to kinds of keys over these queries.

    NaN in layers without softmax attention.

    Args:
        target: The model.
        ids: The sequences.
        keys: Which positions belong to which kind; 1 or 0.
        begin: The first of the positions whose attention is read.
        run: Runs some of the sequences through the model.
    """
    received = []
    for rows, kinds in zip(ids.split(SEQUENCES), keys.split(SEQUENCES), strict=True):
        total = torch.full((len(rows), keys.shape[2], target.n_layers, target.n_heads), torch.nan)
        total[:, :, target.attending] = 0

        def add(layer: int, _start: int, probs: Tensor, total: Tensor = total, kinds: Tensor = kinds) -> None:
            to_kinds = einsum(probs, kinds.to(probs.device), "row head query key, row key kind -> row head kind")
            total[:, :, layer] += to_kinds.transpose(1, 2).cpu()

        with attention_rows(target, add, begin=begin):
            run(rows)
        received.append(total)
    return torch.cat(received)


def stopped_after(probability: Float[Tensor, " n"]) -> int | None:
    """Return the first n from which on the probability stays below a half; None if it does not, or never was above."""
    likely = (probability >= HALF).nonzero().flatten().tolist()
    if not likely or likely[-1] == len(probability) - 1:
        return None
    return likely[-1] + 2


EVERY_TOKEN = ["all"]
NO_SPIKE = "No norm spike was found at the first token, so repetitions are compared with nothing; see `why_sink`."


def refuse_unused_options(*, quantity: str, tokens: Sequence[str] | None, **options: Any) -> None:
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
    check=refuse_unused_options,
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
    and section 5). `patch` says what a patch changes.

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
    room = TAIL if quantity == "attention" else 0
    sweep = sweep_of(setup, None if every else tokens, prefix, max_repeats, room)
    if quantity == "probability":
        return read_probabilities(sweep)
    sinks = sinks_of(setup)
    if quantity == "attention" and sinks.spikes:
        return read_attention(sweep, sinks.spikes[0].spike)
    spikes = [circuit.spike for circuit in sinks.at_first]
    if not spikes:
        return Repeat(quantity=quantity, instead=NO_SPIKE, effects=())
    if every:
        return read_vocabulary(setup, spikes, sweep.count, sample, resume)
    return read_norms(sweep, spikes)
