"""Attention over generation steps, and the heads that lock onto a loop (Xu et al. 2026, section 3.2, appendix E).

1. The text: given, or written by the model; its loop is found at the end. Beside it, ordinary text of the same length.
2. Both are read, and the attention of each layer arrives in rows (`HeadTracks`): on the suffix by distance, to be held
   beside the row one period earlier, and of the last steps as a picture.
3. A head's score is its mean over the second half of the loop, and its gain what that is above ordinary text.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from plotly.subplots import make_subplots
from torch import Tensor

from sinkscope.engine.attention import NAME, AttentionRows, attention_name
from sinkscope.errors import SinkscopeError
from sinkscope.generation.decode import decode
from sinkscope.hooks.edit.base import under
from sinkscope.hooks.edit.sites import head_of
from sinkscope.kv.watch import Observe
from sinkscope.loops.prompts import prompt_and_continuation
from sinkscope.loops.text.signals import Tail, end_loop
from sinkscope.measure import Mean, Natural, Result, Setup, measurement
from sinkscope.models.inputs import attending_layers, check_length, check_site, read_row
from sinkscope.models.layers import per_query_head
from sinkscope.models.target import Target
from sinkscope.models.text import text_rows
from sinkscope.results.headline import Headline, verdict_of
from sinkscope.results.notation import Head, count_of
from sinkscope.results.style import figure_of
from sinkscope.results.table import Row, Subject, column, whole

SUFFIX = 256  # positions, or three periods if longer: the window that LoopGuard monitors
LOCK_GAIN = 0.2  # gain from which a head counts as locked
SHOWN_HEADS = 4  # heads drawn if none are named, each from a different layer
PICTURE_STEPS, PICTURE_PERIODS = 48, 3  # the steps in the picture: the larger of the two, at most MOST_STEPS
MOST_STEPS = 256
COLUMNS_PER_STEP = 3  # positions in the picture
LayerHead = tuple[int, int]
"""(layer, query head)."""


class HeadTracks:
    """Accepts the attention rows of one layer over a sequence, in order; they may arrive in any number of calls.

    The suffix of a query are the last `suffix` positions up to its own, without the first position of the text, where
    sinks are. Memory: a picture and a number per position for each head, and `shift` rows of `suffix` offsets.

    Args:
        heads: Number of query heads.
        length: Length of the sequence, whose last token is not read.
        rows: Number of rows of the picture, which are the last steps.
        shift: Number of rows between two that are compared.
        suffix: Number of positions in the suffix.

    Attributes:
        scores: Score at every position that was seen, in parts.
        pictures: The picture, in parts.
    """

    def __init__(self, heads: int, length: int, rows: int, shift: int, suffix: int) -> None:
        self.length = length
        self.first_row = length - 1 - rows
        self.first_column = max(0, length - 1 - COLUMNS_PER_STEP * max(PICTURE_STEPS, rows))
        self.before = torch.zeros(heads, shift, suffix)  # the last rows by offset; missing ones share nothing
        self.scores: list[Float[Tensor, "head query"]] = []
        self.pictures: list[Float[Tensor, "head query column"]] = []

    def add(self, rows: AttentionRows) -> None:
        """Take some rows."""
        assert rows.pos is not None
        query_pos, pos = rows.query_pos[0], per_query_head(rows.pos, rows.probs.shape[1])[0, :, None]
        # The last place is that of -1, of no token.
        by_position = rows.probs.new_zeros(*rows.probs.shape[1:3], self.length + 1)
        by_position.scatter_add_(2, (pos % (self.length + 1)).expand_as(rows.probs[0]), rows.probs[0])
        _, shift, suffix = self.before.shape
        at = query_pos[:, None] - torch.arange(suffix, device=query_pos.device)
        offsets = by_position.gather(2, at.clamp(min=0).expand(len(by_position), -1, -1)) * (at > 0)
        earlier = torch.cat([self.before.to(offsets), offsets], 1)
        self.before = earlier[:, -shift:].clone()
        self.scores.append(torch.minimum(offsets, earlier[:, :-shift]).sum(-1).cpu())
        self.pictures.append(by_position[:, query_pos >= self.first_row, self.first_column : -2].cpu())


@dataclass(frozen=True, kw_only=True)
class HeadScore(
    Row,
    table="heads",
    title="heads",
    most=6,
    note="Same distances: of two queries one period apart, the attention that both give to keys at the same distance "
    "behind them (the sum over distances of the smaller of both); mean over the second half of the loop, or over the "
    f"same positions of ordinary text. A head locks if it gains at least {100 * LOCK_GAIN:.0f} points; high is neither "
    "good nor bad.",
):
    """How far the attention of a head repeats itself from one period to the next."""

    key: Head

    score: Mean = column(
        "same distances\nin the loop",
        "share",
        "Share of its attention that lies at the same distances as one period before: the sum, over the distances of "
        "the suffix, of the smaller of both attentions; mean over the second half of the loop.",
    )
    control_score: Mean = column(
        "control:\nordinary text", "share", "The same at the same positions of ordinary text of the same length."
    )
    gain: Mean = column("gain", "points", "Score in the loop minus that in ordinary text, in points.")

    @property
    def label(self) -> str:
        """What it is called."""
        return str(self.key)


@dataclass(frozen=True)
class LockKey:
    """How many heads lock, of which there is one number."""

    def __str__(self) -> str:
        return "heads that lock onto the loop"


@dataclass(frozen=True, kw_only=True)
class Locked(Row, table="locked", title="heads that lock", form="title"):
    """How many heads lock onto the loop, and the strongest beside ordinary text."""

    key: LockKey = LockKey()

    share: Mean = column("heads\nthat lock", "share", "Share of the heads that lock onto the loop.")
    opposite: Mean = column(
        "control: the\nother way round",
        "count",
        "Heads whose score is as much larger in ordinary text than in the loop.",
    )
    strongest: Mean = column("the strongest:\nin the loop", "share", "Score of the head with the largest gain.")
    strongest_control: Mean = column("in ordinary\ntext", "share", "Score of the same head in ordinary text.")


@dataclass(frozen=True, kw_only=True)
class Barcode(Result):
    """Attention over generation steps, and which heads lock onto the loop that the text ends in.

    Numbers of heads are means over the second half of the loop, or of the generated text where it does not loop.

    Attributes:
        prompt_tokens: Length of the prompt.
        steps: Number of generated tokens.
        period: Period of the loop in tokens. None if the text does not loop; scores then compare neighbouring rows.
        onset: Position of the loop's first token. None if the text does not loop.
        layers: The layers that were measured.
        score: Share of attention on the same offsets of the suffix as one period earlier.
        control_score: `score` at the same positions of ordinary text.
        shown: Names of the heads that are drawn.
        attention: Their attention, a row for each of the last steps and a column for each of the last positions.
        control_attention: The same in ordinary text.
        ids: The tokens, the prompt first.
    """

    prompt_tokens: int
    steps: int
    period: int | None
    onset: int | None
    layers: tuple[int, ...]
    score: Float[np.ndarray, "layer head"]
    control_score: Float[np.ndarray, "layer head"]
    shown: tuple[str, ...]
    attention: Float[np.ndarray, "shown row column"]
    control_attention: Float[np.ndarray, "shown row column"]
    ids: tuple[int, ...]

    @property
    def gain(self) -> Float[np.ndarray, "layer head"]:
        """Score minus the control's; heads are ranked by it."""
        return self.score - self.control_score

    @property
    def locked(self) -> list[LayerHead]:
        """The locked heads, largest gain first; none where the text is in no loop."""
        if self.onset is None:
            return []
        locked: list[LayerHead] = []
        for row in self.by_head():
            if row.gain.value >= LOCK_GAIN:
                locked.append((row.key.layer, row.key.head))
        return locked

    def by_head(self) -> list[HeadScore]:
        """Return one row per head, largest gain first."""
        rows: list[HeadScore] = []
        for number, head in np.ndindex(self.score.shape):
            score, control = float(self.score[number, head]), float(self.control_score[number, head])
            key = Head(self.layers[number], head)
            rows.append(HeadScore(key=key, score=Mean(score), control_score=Mean(control), gain=Mean(score - control)))
        return sorted(rows, key=lambda row: -row.gain.value)

    def subjects(self) -> list[Subject]:
        """Return how many heads lock onto the loop, and the score of every head."""
        heads = self.by_head()
        title = "Attention at the same distances as one"
        if self.onset is None:
            return [Subject(f"{title} token before", tuple(heads), "heads")]
        locked = Locked(
            share=Mean(len(self.locked) / self.score.size),
            opposite=whole(int((-self.gain >= LOCK_GAIN).sum())),
            strongest=heads[0].score,
            strongest_control=heads[0].control_score,
        )
        return [Subject(f"{title} period ({self.period} tokens) before", (locked, *heads), "loop")]

    def compared(self) -> list[Subject]:
        """Return how many heads lock: single heads have no margin."""
        if self.onset is None:
            return []
        (subject,) = self.subjects()
        return [replace(subject, rows=subject.rows[:1])]

    def conclusion(self) -> str:
        """Return how many heads lock onto the loop, and the strongest beside ordinary text."""
        if self.period is None:
            return f"The {self.steps} generated tokens end in no loop, so no head can lock onto one."
        (subject,) = self.subjects()
        locked, best = subject.rows[:2]
        assert isinstance(locked, Locked)
        heads = len(self.locked)
        lock, they, put = ("locks", "it", "puts") if heads == 1 else ("lock", "they", "put")
        return (
            f"{heads} of {self.score.size} heads {lock} onto the loop of {self.period} tokens: {they} {put} "
            f"at least {100 * LOCK_GAIN:.0f} points more of their attention at the same distances as one period before "
            f"than in ordinary text (control: {locked.text('opposite')} heads have as much more in ordinary text). "
            f"The strongest, {best.label}, has {locked.text('strongest')} there in the loop and "
            f"{locked.text('strongest_control')} in ordinary text."
        )

    def headlines(self) -> list[Headline]:
        """Return how many heads lock onto the loop, beside the heads that gain the other way round."""
        if self.onset is None:
            return []
        (subject,) = self.subjects()
        locked = subject.rows[0]
        assert isinstance(locked, Locked)
        heads = len(self.locked)
        verdict = verdict_of(heads, locked.opposite.value)
        found = f"{heads} of {self.score.size}"
        return [Headline("heads that lock", found, f"{locked.opposite.value:.0f} (reversed gain)", verdict)]

    def figure(self) -> go.Figure:
        """Draw what the loop adds to every head, and below the attention of heads in the last steps.

        Each row below is a head, in the generated text and in ordinary text. Steps run downwards, and darker is more.
        """
        titles = ["what the loop adds (gain), by layer and head", "score in ordinary text"]
        for head in map(html.escape, self.shown):
            titles += [f"{head}: generated", f"{head}: ordinary text"]
        fig: Any = make_subplots(len(titles) // 2, 2, subplot_titles=titles, horizontal_spacing=0.05)
        darkest = max(0.05, float(np.quantile(self.attention, 0.99))) ** 0.5
        for col, scores in enumerate((self.gain, self.control_score), 1):
            fig.add_heatmap(z=scores, y=self.layers, zmin=-1, zmax=1, colorscale="RdBu", row=1, col=col)
        for col, pictures in enumerate((self.attention, self.control_attention), 1):
            for row, picture in enumerate(np.sqrt(pictures, dtype=np.float32), 2):
                fig.add_heatmap(z=picture, zmin=0, zmax=darkest, colorscale="Greys", row=row, col=col)
        fig.update_traces(showscale=False)
        fig.update_yaxes(autorange="reversed")
        fig.update_yaxes(title_text="step", col=1)
        fig.update_yaxes(title_text="layer (heads to the right)", row=1, col=1)
        fig.update_xaxes(title_text="the last positions", row=len(self.shown) + 1)
        return figure_of(fig, self, width=1400, height=260 * len(self.shown) + 380, legend=-0.04, bottom=70)


@measurement(
    loading="whole",
    edits=True,
)
def barcode(
    setup: Setup,
    prompt: str | Sequence[int] | None = None,
    *,
    ids: Sequence[int] | None = None,
    max_new_tokens: Natural | None = None,
    heads: Sequence[str | tuple[int, int]] | None = None,
) -> Barcode:
    """Find the heads that lock onto a loop, and draw attention step by step while a model falls into it.

    At every position, the attention on the suffix is indexed by offset (distance back) and compared with the row one
    period earlier. The score is the share on the same offsets. A head that always looks one token back scores high in
    any text, so heads are ranked by the increase over ordinary text (Xu et al. 2026, sections 1 and 3.2; pictures as in
    appendix E, Fig. 5). A model whose attention cannot be observed (BLOOM, Falcon, GPT-J, MPT) raises an
    `UnsupportedError`.

    Args:
        prompt: Text to continue greedily until it loops; from Python also ids. By default the beginning of the typical
            text.
        ids: A complete sequence to measure instead of generating one.
        max_new_tokens: Tokens to generate. By default 512, or as many as the context holds.
        heads: Draw these heads, and measure only their layers. By default up to four heads that the loop changes most.
    """
    named = _named_heads(setup.target, heads or ())
    layers = sorted({layer for layer, _ in named}) or attending_layers(setup.target, None)
    row, prompt_tokens = _row_to_read(setup, prompt, ids, max_new_tokens)
    loop = end_loop(row)
    tail = loop or Tail(1, prompt_tokens, 0)
    ordinary: list[int] = text_rows(setup.target.tokenizer, setup.halves.choose, 1, len(row), setup.bos)[0].tolist()
    late = (tail.start + len(row) - 1) // 2  # numbers of heads are means from here on
    score, pictures = _scored(setup, row, prompt_tokens, layers, tail.period, late)
    control_score, control_pictures = _scored(setup, ordinary, prompt_tokens, layers, tail.period, late)
    drawn = named or _most_changed(score - control_score, layers)
    shown = [layers.index(layer) for layer, _ in drawn], [head for _, head in drawn]
    return Barcode(
        prompt_tokens=prompt_tokens,
        steps=len(row) - prompt_tokens,
        period=None if loop is None else loop.period,
        onset=None if loop is None else loop.start,
        layers=tuple(layers),
        score=score,
        control_score=control_score,
        shown=tuple(str(Head(*head)) for head in drawn),
        attention=pictures[shown],
        control_attention=control_pictures[shown],
        ids=tuple(row),
    )


def _named_heads(target: Target, heads: Sequence[str | tuple[int, int]]) -> list[LayerHead]:
    """The heads that are named, each once.

    Raises:
        SinkscopeError: The model has no such head.
    """
    named = list(dict.fromkeys(map(head_of, heads)))
    for layer, head in named:
        check_site(target, layer, head=head)
    return named


def _row_to_read(
    setup: Setup, prompt: str | Sequence[int] | None, ids: Sequence[int] | None, max_new_tokens: int | None
) -> tuple[list[int], int]:
    """The tokens that are read, and the length of their prompt: ids as they are, or a prompt and what follows it.

    Raises:
        SinkscopeError: Both are given, or fewer than two tokens follow the prompt.
    """
    if ids is None:
        row, prompt_tokens = prompt_and_continuation(setup, prompt, max_new_tokens)
    elif prompt is None and max_new_tokens is None:
        row, prompt_tokens = read_row(setup.target, ids), 1
        check_length(setup.target, "the input", len(row))
    else:
        raise SinkscopeError("ids are a whole sequence: give no prompt and no max_new_tokens beside them")
    steps = len(row) - prompt_tokens
    if steps < 2:
        raise SinkscopeError(
            f"{count_of(steps, 'token')} behind the first {prompt_tokens}: a barcode needs 2, so give longer ids, a "
            "larger max_new_tokens, or a prompt that the model continues"
        )
    return row, prompt_tokens


def _scored(
    setup: Setup, ids: list[int], prompt: int, layers: list[int], shift: int, late: int
) -> tuple[Float[np.ndarray, "layer head"], Float[np.ndarray, "layer head row column"]]:
    """The mean scores of a text from a position on, and its pictures."""
    scores, pictures = _record(setup, ids, prompt, layers, shift)
    with np.errstate(under="ignore"):  # whatever the caller has set: shares may be tiny
        return scores[:, :, late:].mean(2), pictures


def _record(
    setup: Setup, ids: list[int], prompt: int, layers: list[int], shift: int
) -> tuple[Float[np.ndarray, "layer head query"], Float[np.ndarray, "layer head row column"]]:
    """The scores and pictures of a text that is read in one pass, or by tokens where interventions act between."""
    new = len(ids) - prompt
    rows = min(new, max(PICTURE_STEPS, PICTURE_PERIODS * shift), MOST_STEPS)
    suffix = max(SUFFIX, 3 * shift)
    tracks = {layer: HeadTracks(setup.target.n_heads, len(ids), rows, shift, suffix) for layer in layers}
    observer = Observe(lambda rows: tracks[rows.layer].add(rows), layers)
    surrounded = attention_name(setup.target.config) == NAME  # by interventions that the caller entered
    if setup.edit is None and not surrounded:
        with under(observer, setup.target):
            setup.target.forward(torch.tensor([ids[:-1]]))
    else:
        acting = observer if setup.edit is None else setup.edit | observer
        decode(setup.target, [ids[:prompt]], new, acting, [ids[prompt:]])
    scores = [torch.cat(track.scores, 1) for track in tracks.values()]
    pictures = [torch.cat(track.pictures, 1) for track in tracks.values()]
    return torch.stack(scores).numpy(), torch.stack(pictures).double().round(decimals=3).numpy()


def _most_changed(gain: Float[np.ndarray, "layer head"], layers: list[int]) -> list[LayerHead]:
    """In each layer the head that the loop changes most, and among those the heads that it changes most."""
    order = np.argsort(-gain.max(1), kind="stable")[:SHOWN_HEADS]
    return [(layers[place], int(gain[place].argmax())) for place in order]
