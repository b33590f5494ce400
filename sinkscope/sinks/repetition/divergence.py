"""Repeat a word: whether the model continues to repeat it, where it stops, and whether training text follows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.files.notation import neuron_names
from sinkscope.files.plain import pathless
from sinkscope.interventions import SinkPatch
from sinkscope.interventions.decode import greedy, repeat_probabilities
from sinkscope.measure import PIECE, Count, Option, Positive, Result, Setup, measurement
from sinkscope.models.target import Target
from sinkscope.models.text.corpus import CorpusIndex, open_corpus
from sinkscope.sinks.first_token.sets import causal_neurons
from sinkscope.sinks.patch.evaluate import held_out
from sinkscope.sinks.tokens import encode, refuse_repeated, repetition_limit, words_to_repeat

PREFIX = "Repeat:"  # Yona et al. 2025, Table 3
REPEATS = (50, 400)
_POINTS = 160  # points kept per curve


@dataclass(frozen=True)
class Curve:
    """p(next = word) after n repetitions, for every n, from one causal pass.

    Attributes:
        word: The word as text.
        id: Its id.
        prefix: Whether the prefix stands before the repetitions.
        patched: Whether the model runs under the patch.
        repeats: Values of n, thinned on a log scale.
        p: Probability of the word after n repetitions.
        caught: First n after which the word is the most likely token. None if never.
        left: First n after `caught` at which it no longer is. None if never.
    """

    word: str
    id: int
    prefix: bool
    patched: bool
    repeats: tuple[int, ...]
    p: tuple[float, ...]
    caught: int | None
    left: int | None


@dataclass(frozen=True)
class Leak:
    """The longest piece of a continuation that occurs verbatim in the corpus.

    Attributes:
        length: Length in bytes.
        tokens: Length of the same piece in tokens of the model.
        text: The piece.
        file: File that contains it (the first of several, in the order of the index).
    """

    length: int
    tokens: int
    text: str
    file: str


@dataclass(frozen=True)
class Continuation:
    """The model's greedy answer after `repeats` repetitions.

    Attributes:
        word: The repeated word. None for an ordinary prompt of the control.
        prefix: Whether the prefix stands before the repetitions.
        patched: Whether the model runs under the patch.
        repeats: Repetitions of the word in the prompt. For the control, the length of the prompt in tokens.
        kept: Tokens of the answer that continue the repetition, before the first other token.
        tokens: Tokens of the answer, including the end of sequence.
        follows: The text after the repetition.
        leak: The verbatim piece of `follows`. None if no corpus was given or nothing follows.
    """

    word: str | None
    prefix: bool
    patched: bool
    repeats: int
    kept: int
    tokens: int
    follows: str
    leak: Leak | None


@dataclass(frozen=True)
class Corpus:
    """The corpus that was searched."""

    name: str
    files: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Divergence(Result):
    """Repetition with and without a prefix, before and after the patch, and the text that follows.

    Attributes:
        sink_layer: Sink layer. None if the model has no sink, or if a patch was given (no sink is searched for then).
        neurons: Neurons of the patch. If empty, there was nothing to patch, and only `patched=False` was measured.
        prefix: The text before the words, in the half of the runs that have one.
        curves: One curve per word, prefix and patch.
        continuations: One continuation per word, number of repetitions, prefix and patch.
        control: Continuations of ordinary prompts, pieces of the held-out text, without a patch.
        corpus: The corpus that was searched. None if leakage was not measured.
    """

    kind: ClassVar[str] = "divergence"
    columns: ClassVar[tuple[str, ...]] = (
        "word",
        "prefix",
        "patched",
        "repeats",
        "kept",
        "leak_bytes",
        "follows",
    )
    glossary: ClassVar[dict[str, str]] = {
        "leak_bytes": "length of the longest piece of the answer that stands in the corpus",
        "leak_tokens": "the same piece in tokens of the model",
        "follows": "beginning of the text behind the repetition",
    }

    sink_layer: int | None
    neurons: tuple[tuple[int, ...], ...]
    prefix: str
    curves: tuple[Curve, ...]
    continuations: tuple[Continuation, ...]
    control: tuple[Continuation, ...]
    corpus: Corpus | None

    def rows(self) -> list[dict[str, Any]]:
        """One row per continuation, the control last. The text that follows is cut to 40 characters."""
        return [
            {
                **{k: v for k, v in asdict(c).items() if k not in ("follows", "leak")},
                "word": "(control)" if c.word is None else c.word,
                "leak_bytes": c.leak and c.leak.length,
                "leak_tokens": c.leak and c.leak.tokens,
                "follows": ascii(c.follows[:40])[1:-1],
            }
            for c in (*self.continuations, *self.control)
        ]

    def conclusion(self) -> str:
        """The probability that the repetition continues, without and with the patch."""
        n = self.curves[0].repeats[-1]
        bare = {c.patched: [d for d in self.curves if (d.prefix, d.patched) == (False, c.patched)] for c in self.curves}
        p = {patched: median(c.p[-1] for c in curves) for patched, curves in bare.items()}
        said = (
            f"after {n} repetitions without a prefix the repeated word has probability {p[False]:.2g} in the intact "
            f"model (median of {len(bare[False])} words)"
        )
        if True not in p:
            return f"There is no causal sink neuron to patch; {said}."
        change = "strengthens" if p[True] > 2 * p[False] else "weakens" if p[False] > 2 * p[True] else "hardly changes"
        return f"The patch {change} repetition: {said}, and {p[True]:.2g} under the patch."

    def details(self) -> list[str]:
        """Where repetition ends with and without the patch, and the length of verbatim pieces."""
        patch = f"The patch holds {neuron_names(self.neurons)}." if self.neurons else "No causal sink neuron was found."
        lines = [patch]
        for prefix, patched in sorted({(c.prefix, c.patched) for c in self.curves}):
            curves = [c for c in self.curves if (c.prefix, c.patched) == (prefix, patched)]
            left = [c.left for c in curves if c.left is not None]
            caught = sum(c.caught is not None for c in curves)
            when = f", at the median after {median(left):.0f} repetitions" if left else ""
            lines.append(
                f"{'With' if prefix else 'Without'} a prefix, the {'patched' if patched else 'intact'} model gives the "
                f"word probability {median(c.p[-1] for c in curves):.2g} after {curves[0].repeats[-1]} repetitions "
                f"(median of {len(curves)} words). {caught} words began to repeat, and {len(left)} stopped{when}."
            )
        for name, part in self.groups().items():
            leaks = [c.leak for c in part if c.leak is not None]
            if leaks:
                most = max(leaks, key=lambda leak: leak.length)
                lines.append(
                    f"The longest verbatim piece after {name} has {median(leak.length for leak in leaks):.0f} bytes in "
                    f"the median, and {most.length} at most ({most.tokens} token{'s' * (most.tokens != 1)})."
                )
        return lines

    def groups(self) -> dict[str, tuple[Continuation, ...]]:
        """Continuations in the groups that are compared: by repetitions and patch; ordinary prompts last."""
        parts: dict[str, tuple[Continuation, ...]] = {}
        for c in self.continuations:
            name = f"{c.repeats} repetitions" + (", patched" if c.patched else "")
            parts[name] = (*parts.get(name, ()), c)
        order = sorted(parts, key=lambda name: (parts[name][0].repeats, parts[name][0].patched))
        return {name: parts[name] for name in order} | ({"ordinary prompts": self.control} if self.control else {})


@dataclass(frozen=True)
class _Asking:
    """How the model is asked to go on: the longest answer, rows at a time, and what is searched for its pieces."""

    target: Target
    new_tokens: int
    batch_size: int
    corpus: CorpusIndex | None

    def answers(
        self,
        rows: Int[Tensor, "row pos"],
        words: Sequence[int | None],
        how: tuple[bool, bool],
        n: int,
        edit: SinkPatch | None = None,
    ) -> list[Continuation]:
        """What follows each row, greedily; `how` says whether it is behind the prefix and patched."""
        answers = [a for part in rows.split(self.batch_size) for a in greedy(self.target, part, self.new_tokens, edit)]
        return [self._continuation(word, how, n, answer) for word, answer in zip(words, answers, strict=True)]

    def _continuation(self, word: int | None, how: tuple[bool, bool], n: int, answer: list[int]) -> Continuation:
        kept = next((i for i, t in enumerate(answer) if t != word), len(answer))
        tokenizer = self.target.tokenizer
        follows = tokenizer.decode(answer[kept:], skip_special_tokens=True)
        name = None if word is None else tokenizer.decode([word])
        return Continuation(name, *how, n, kept, len(answer), follows, self._leak(follows))

    def _leak(self, follows: str) -> Leak | None:
        if self.corpus is None or not follows:
            return None
        found = self.corpus.longest(follows.encode())
        piece = follows.encode()[found.start : found.start + found.length].decode(errors="replace")
        count = len(self.target.tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"])
        return Leak(found.length, count, piece, found.file)


@measurement(
    group="Repetition",
    figure="sinkscope.figures.repetition:divergence",
    loading="whole",
    quick={"max_repeats": 16, "repeats": [4], "new_tokens": 4, "controls": 2, "tokens": ["the"]},
)
def divergence(
    setup: Setup,
    *,
    tokens: Sequence[str] | None = None,
    prefix: str = PREFIX,
    patch: Annotated[Any, Option(metavar="FILE")] = None,
    max_repeats: Positive | None = None,
    repeats: Sequence[Annotated[int, Option(name="--repeats", min=1)]] | None = None,
    new_tokens: Positive = 100,
    corpus: Annotated[str | Path | None, Option(metavar="DIR|stdlib")] = None,
    index: Annotated[str | Path | None, Option(metavar="FILE", writes=True)] = None,
    controls: Count = 20,
    batch_size: Positive = 8,
) -> Divergence:
    """Measure where a model stops repeating a word, before and after the patch, and whether training text follows.

    Each word is repeated with and without a prefix. The prefix reads like an instruction, but pretrained models
    continue a text and need not follow it. If the model has no sink, it is measured without a patch (Yona et al. 2025,
    section 5 and appendix C).

    Args:
        tokens: Word to repeat, one token. By default five words of the text.
        prefix: Text before the words in half of the runs.
        patch: The patch.json to measure; from Python also a `SinkPatch`. By default a patch of the causal neurons,
            which are searched for.
        max_repeats: Largest n of the curves. By default 1,024, or what the context holds.
        repeats: Number of repetitions after which the model continues. By default 50 (the paper's for Pythia) and 400.
        new_tokens: Maximum length of an answer in tokens.
        corpus: A folder of text, or "stdlib", the text that the model in the package was trained on; it is searched for
            the longest verbatim piece of each answer.
        index: File that stores the index of the corpus. By default it is stored beside the corpus.
        controls: Number of ordinary prompts to compare with, 64 tokens of held-out text each.
        batch_size: Rows that run together.

    Example:
        sinkscope divergence --token poem --corpus ./texts
    """
    edit = SinkPatch.load(patch) if isinstance(patch, str | os.PathLike) else patch
    target = setup.target
    ask = _Asking(target, new_tokens, batch_size, open_corpus(corpus, index, setup.progress))
    words, _ = words_to_repeat(setup, tokens, prefix)
    inside = encode(setup, prefix)
    if not inside:
        raise SinkscopeError(f"--prefix {prefix!r} has no tokens: give some text to put before the repeated words")
    refuse_repeated(setup, prefix, words)
    start = [] if setup.bos is None else [setup.bos]
    most = repetition_limit(target, max_repeats, len(start) + len(inside))
    counts = _continued(target, len(start) + len(inside), repeats, new_tokens)
    layer = None
    if edit is None:
        layer, neurons = causal_neurons(setup)
        calibrated = {n.site: n.neutral_post for n in neurons}
        edit = SinkPatch(sites=[n.site for n in neurons], calibrated=calibrated) if neurons else None
    runs = [(head, act) for head in (start, [*start, *inside]) for act in ([None] if edit is None else [None, edit])]
    todo, done = len(runs) * len(words) * (1 + len(counts)), 0
    curves: list[Curve] = []
    said: list[Continuation] = []
    for head, act in runs:
        how = head is not start, act is not None
        for word in words:
            curves.append(_curve(target, word, how, *repeat_probabilities(target, head, word, most, act)))
            setup.progress("repetitions", done := done + 1, todo)
        for n in counts:
            said += ask.answers(torch.tensor([[*head, *[w] * n] for w in words]), words, how, n, act)
            setup.progress("continuations", done := done + len(words), todo)
    setup.record(max_repeats=most, repeats=counts)
    for name, given in (("patch", patch), ("corpus", corpus)):
        setup.record(**{name: pathless(os.fspath(given)) if isinstance(given, str | os.PathLike) else None})
    sites = () if edit is None else edit.checked_sites
    return Divergence(
        sink_layer=layer,
        neurons=tuple(site.numbers for site in sites),
        prefix=prefix,
        curves=tuple(curves),
        continuations=tuple(said),
        control=tuple(_control(setup, controls, ask)),
        corpus=None if ask.corpus is None else Corpus(ask.corpus.name, len(ask.corpus.names), len(ask.corpus.data)),
    )


def _continued(target: Target, head: int, repeats: Sequence[int] | None, new: int) -> tuple[int, ...]:
    """The numbers of repetitions after which the model is asked to go on.

    Raises:
        SinkscopeError: The repetitions and the answer do not fit the context.
    """
    largest, most = (target.max_positions or 1 << 30) - head - new, max(repeats or (1,))
    target.check_length(f"a text of {most} repetitions behind {head} tokens", head + most, new, "repeat less often")
    return tuple(repeats or dict.fromkeys(min(n, largest) for n in REPEATS))


def _curve(target: Target, word: int, how: tuple[bool, bool], p: Tensor, likeliest: Tensor) -> Curve:
    is_word = (likeliest == word).tolist()
    caught = is_word.index(True) + 1 if True in is_word else None
    left = is_word.index(False, caught) + 1 if caught is not None and False in is_word[caught:] else None
    places = torch.logspace(0, torch.tensor(float(len(p))).log10().item(), _POINTS).round().long()
    shown = sorted({*places.clamp(1, len(p)).tolist(), *(n for n in (caught, left) if n is not None)})
    values = tuple(float(p[n - 1]) for n in shown)
    return Curve(target.tokenizer.decode([word]), word, *how, tuple(shown), values, caught, left)


def _control(setup: Setup, count: int, ask: _Asking) -> list[Continuation]:
    """The same for ordinary prompts, pieces of held-out text."""
    if not count:
        return []
    room_left = (setup.target.max_positions or 1 << 30) - ask.new_tokens
    ids = held_out(setup, count, min(PIECE, room_left))
    return ask.answers(ids, [None] * len(ids), (False, False), ids.shape[1])
