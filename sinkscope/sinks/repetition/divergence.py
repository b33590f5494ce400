"""Repeat a word: does the model go on repeating it, where does it leave off, and is what follows training text?"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import torch
from torch import Tensor

from sinkscope._plain import pathless
from sinkscope.errors import SinkscopeError
from sinkscope.interventions.decode import greedy, repeat_probabilities
from sinkscope.interventions.sink_patch import SinkPatch
from sinkscope.models.target import Target
from sinkscope.results import Result
from sinkscope.sinks.first_token.locate import PIECE, Setup, causal_neurons, setup
from sinkscope.sinks.first_token.tokens import pick_tokens
from sinkscope.sinks.first_token.walk import Progress
from sinkscope.sinks.patch.loss import held_out, whole
from sinkscope.text.corpus import CorpusIndex, open_corpus

PREFIX = "Repeat:"  # Yona et al. 2025, Table 3
REPEATS = (50, 400)
WORDS = 5  # of the text, where none are given
_POINTS = 160  # of a curve


@dataclass(frozen=True)
class Curve:
    """p(next = word) after n repetitions, for every n, from one causal pass.

    Attributes:
        word: as text.
        id: its id.
        prefix: behind the prefix.
        patched: under the patch.
        repeats: n, thinned on a log scale.
        p: probability of the word after n.
        caught: first n after which the word is the likeliest token; None: never.
        left: first n behind that after which it no longer is; None: never.
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
    """The longest piece of a continuation that stands in the corpus, word for word.

    Attributes:
        length: in bytes.
        tokens: the same piece in tokens of the model.
        text: the piece.
        file: where it stands (the first of several in the order of the index).
    """

    length: int
    tokens: int
    text: str
    file: str


@dataclass(frozen=True)
class Continuation:
    """What the model says, greedily, after `repeats` repetitions.

    Attributes:
        word: as text; None for an ordinary prompt of the control.
        prefix: behind the prefix.
        patched: under the patch.
        repeats: of the word in the prompt; for the control, tokens of the prompt.
        kept: tokens of the answer that go on repeating, before the first other one.
        tokens: of the answer, up to and with the end of sequence.
        follows: the text behind the repetition.
        leak: of `follows`; None where no corpus was given or nothing follows.
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
    """What was searched."""

    name: str
    files: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Divergence(Result):
    """Repetition with and without a prefix, before and after the patch, and what comes of it.

    Attributes:
        sink_layer: None where the model has no sink, or where a patch was given (the sink is not searched then).
        neurons: of the patch; empty: nothing to patch, so only `patched=False` was measured.
        prefix: the text before the words, for the half of the runs that have one.
        curves: per word, prefix and patch.
        continuations: per word, number of repetitions, prefix and patch.
        control: the same for ordinary prompts, pieces of the held-out text, without a patch.
        corpus: None: leakage was not measured.
    """

    kind: ClassVar[str] = "divergence"

    sink_layer: int | None
    neurons: tuple[tuple[int, ...], ...]
    prefix: str
    curves: tuple[Curve, ...]
    continuations: tuple[Continuation, ...]
    control: tuple[Continuation, ...]
    corpus: Corpus | None

    def rows(self) -> list[dict[str, Any]]:
        """One row per continuation, the control last; what follows is cut to 40 characters."""
        out = []
        for c in (*self.continuations, *self.control):
            row: dict[str, Any] = {"word": "(control)" if c.word is None else c.word}
            row |= {k: v for k, v in asdict(c).items() if k not in ("word", "follows", "leak")}
            leak = c.leak
            row |= {"leak_bytes": leak and leak.length, "leak_tokens": leak and leak.tokens}
            out.append(row | {"follows": ascii(c.follows[:40])[1:-1]})
        return out

    def summary(self) -> str:
        """Where repetition ends, with and without the patch, and how long verbatim pieces are."""
        sites = ", ".join("/".join(map(str, n)) for n in self.neurons)
        lines = [
            f"{self.model.name}: " + (f"patch of {sites}" if sites else "no patch: no causal sink neuron was found")
        ]
        for prefix in (False, True):
            for patched in sorted({c.patched for c in self.curves}):
                curves = [c for c in self.curves if (c.prefix, c.patched) == (prefix, patched)]
                left = [c.left for c in curves if c.left is not None]
                text = f"{_name(prefix, patched)}: p(word) after {curves[0].repeats[-1]} repetitions "
                text += f"{median(c.p[-1] for c in curves):.2g} (median of {len(curves)} words); "
                text += f"{sum(c.caught is not None for c in curves)} caught on, {len(left)} left off"
                lines.append(text + (f" (median n {median(left):.0f})." if left else "."))
        for name, part in self.groups().items():
            leaks = [c.leak for c in part if c.leak is not None]
            if leaks:
                most = max(leaks, key=lambda leak: leak.length)
                lines.append(
                    f"Longest verbatim piece, {name}: median {median(leak.length for leak in leaks):.0f} bytes, "
                    f"largest {most.length} ({most.tokens} token{'s' * (most.tokens != 1)})."
                )
        return "\n".join(lines)

    def groups(self) -> dict[str, tuple[Continuation, ...]]:
        """Continuations by what they are compared as: number of repetitions, patched or not; ordinary prompts last."""
        parts: dict[str, tuple[Continuation, ...]] = {}
        for c in self.continuations:
            name = f"{c.repeats} repetitions" + (", patched" if c.patched else "")
            parts[name] = (*parts.get(name, ()), c)
        order = sorted(parts, key=lambda name: (parts[name][0].repeats, parts[name][0].patched))
        return {name: parts[name] for name in order} | ({"ordinary prompts": self.control} if self.control else {})


def _name(prefix: bool, patched: bool) -> str:
    return ("With" if prefix else "Without") + " prefix, " + ("patched" if patched else "intact")


def divergence(
    model: object = None,
    *,
    tokens: Sequence[str] | None = None,
    prefix: str = PREFIX,
    patch: SinkPatch | str | os.PathLike[str] | None = None,
    max_repeats: int | None = None,
    repeats: Sequence[int] | None = None,
    new_tokens: int = 100,
    corpus: str | os.PathLike[str] | None = None,
    index: str | os.PathLike[str] | None = None,
    controls: int = 20,
    batch_size: int = 8,
    tokenizer: Any = None,
    bos: bool | None = None,
    text: str | Path | None = None,
    seed: int = 0,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Divergence:
    """Repeat words, with and without a prefix, before and after the patch (Yona et al. 2025, section 5, appendix C).

    Pretrained models continue a text; they need not follow the instruction that the prefix reads like.

    Args:
        model: see `find_sinks`; a model given by name is loaded whole.
        tokens: words to repeat, one token each; None: five words of the text.
        prefix: text before the words in half of the runs.
        patch: a `SinkPatch` or the path of a patch.json; None: the patch of the causal neurons, which are searched.
        max_repeats: largest n of the curves; None: 1,024, or what the context holds.
        repeats: numbers of repetitions that are continued; None: 50 (the paper's for Pythia) and 400.
        new_tokens: longest answer.
        corpus: a folder of text, or "stdlib", the text the model in the package was trained on: the longest verbatim
            piece of each answer is searched there.
        index: file that keeps the index of the corpus; None: see `sinkscope.text.corpus.open_corpus`.
        controls: ordinary prompts, 64 tokens of held-out text each.
        batch_size: rows that run together.
        tokenizer: for live models that carry none.
        bos: begin sequences with BOS; None: where the tokenizer has one.
        text: file of typical text; None: the text that ships.
        seed: of the choice of words.
        revision: of a hub id.
        dtype: for models given by name.
        device: for models given by name.
        trust_remote_code: run code that comes with the checkpoint.
        progress: called as `progress(what, done, total)`.

    A model without a sink is an answer: it is measured without a patch.

    Raises:
        SinkscopeError: bad input; the prefix contains a repeated word; more repetitions than the context holds; the
            index of the corpus is missing.
    """
    if new_tokens < 1 or controls < 0 or batch_size < 1:
        raise SinkscopeError(
            f"new tokens {new_tokens}, controls {controls}, batch size {batch_size}: expected at least 1, 0 and 1"
        )
    edit = patch if patch is None or isinstance(patch, SinkPatch) else SinkPatch.load(patch)
    searched = open_corpus(corpus, index, progress)
    live = whole(
        model, tokenizer=tokenizer, revision=revision, dtype=dtype, device=device, trust_remote_code=trust_remote_code
    )
    made = setup(live, tokenizer=tokenizer, bos=bos, text=text, seed=seed)
    target = made.target
    words = _words(made, tokens, prefix)
    heads = _heads(made, words, prefix)
    most, counts = _limits(target, len(heads[1]), max_repeats, repeats, new_tokens)
    layer = None
    if edit is None:
        layer, neurons = causal_neurons(made)
        if neurons:
            edit = SinkPatch(sites=[n.site for n in neurons], calibrated={n.site: n.neutral_post for n in neurons})
    edits = [None] if edit is None else [None, edit]
    todo, done = len(heads) * len(edits) * len(words) * (1 + len(counts)), 0
    curves: list[Curve] = []
    said: list[Continuation] = []
    for behind, head in enumerate(heads):
        for act in edits:
            settings = bool(behind), act is not None
            for word in words:
                p, likeliest = repeat_probabilities(target, head, word, most, act)
                curves.append(_curve(target, word, settings, p, likeliest))
                done += 1
                if progress is not None:
                    progress("repetitions", done, todo)
            for n in counts:
                for start in range(0, len(words), batch_size):
                    some = words[start : start + batch_size]
                    answers = greedy(target, torch.tensor([[*head, *[w] * n] for w in some]), new_tokens, act)
                    said += [
                        _continuation(target, w, settings, n, answer, searched)
                        for w, answer in zip(some, answers, strict=True)
                    ]
                    done += len(some)
                    if progress is not None:
                        progress("continuations", done, todo)
    return Divergence(
        model=made.info(),
        settings={
            "tokens": None if tokens is None else list(tokens),
            "max_repeats": most,
            "repeats": list(counts),
            "new_tokens": new_tokens,
            "patch": None if patch is None or isinstance(patch, SinkPatch) else pathless(os.fspath(patch)),
            "corpus": None if corpus is None else pathless(os.fspath(corpus)),
            "controls": controls,
            "bos": made.bos is not None,
            "text": None if text is None else Path(text).name,
            "seed": seed,
            "revision": revision,
            "batch_size": batch_size,
        },
        provenance=made.provenance(),
        sink_layer=layer,
        neurons=()
        if edit is None
        else tuple(
            (s.layer, s.neuron) if s.expert is None else (s.layer, s.expert, s.neuron) for s in edit.checked_sites
        ),
        prefix=prefix,
        curves=tuple(curves),
        continuations=tuple(said),
        control=_control(made, controls, new_tokens, batch_size, searched),
        corpus=None if searched is None else Corpus(searched.name, len(searched.names), len(searched.data)),
    )


def _words(made: Setup, tokens: Sequence[str] | None, prefix: str) -> list[int]:
    """What to repeat; words that are drawn are not in the prefix, those asked for may be, and are refused later."""
    tokenizer = made.target.tokenizer
    if tokens:
        return pick_tokens(tokenizer, made.ids, tokens, made.seed)
    inside = tokenizer(prefix, add_special_tokens=False)["input_ids"]
    drawn = pick_tokens(tokenizer, made.ids, None, made.seed, WORDS + len(inside))
    return [w for w in drawn if w not in inside][:WORDS] or drawn[:WORDS]


def _heads(made: Setup, words: list[int], prefix: str) -> tuple[list[int], list[int]]:
    """Ids before the repetition, without and with the prefix."""
    tokenizer = made.target.tokenizer
    start = [] if made.bos is None else [made.bos]
    inside = [int(i) for i in tokenizer(prefix, add_special_tokens=False)["input_ids"]]
    if not inside:
        raise SinkscopeError(f"--prefix {prefix!r} has no tokens: give some text to put before the repeated words")
    for word in words:
        if word in inside:
            raise SinkscopeError(
                f"the prefix {prefix!r} contains the repeated token {tokenizer.decode([word])!r}; its first occurrence "
                "would count as a repetition: give another --prefix or --token"
            )
    return start, [*start, *inside]


def _limits(
    target: Target, head: int, most: int | None, repeats: Sequence[int] | None, new: int
) -> tuple[int, tuple[int, ...]]:
    context = target.max_positions or 1 << 30
    if most is not None and not 1 <= most <= context - head:
        raise SinkscopeError(
            f"--max-repeats {most} does not fit the context of {context} tokens behind a prefix of {head}; the largest "
            f"is {context - head}"
        )
    room = context - head - new
    if room < 1:
        raise SinkscopeError(f"--new-tokens {new} leaves no room in the context of {context} tokens; give fewer")
    for n in repeats or ():
        if not 1 <= n <= room:
            raise SinkscopeError(
                f"{n} repetitions and {new} new tokens do not fit the context of {context} tokens behind a prefix of "
                f"{head}; expected 1 to {room} repetitions"
            )
    return most or min(1024, context - head), tuple(repeats or dict.fromkeys(min(n, room) for n in REPEATS))


def _curve(target: Target, word: int, settings: tuple[bool, bool], p: Tensor, likeliest: Tensor) -> Curve:
    is_word = (likeliest == word).tolist()
    caught = is_word.index(True) + 1 if True in is_word else None
    left = is_word.index(False, caught) + 1 if caught is not None and False in is_word[caught:] else None
    places = torch.logspace(0, torch.tensor(float(len(p))).log10().item(), _POINTS).round().long()
    shown = sorted({*places.clamp(1, len(p)).tolist(), *(n for n in (caught, left) if n is not None)})
    values = tuple(float(p[n - 1]) for n in shown)
    return Curve(target.tokenizer.decode([word]), word, *settings, tuple(shown), values, caught, left)


def _continuation(
    target: Target, word: int | None, settings: tuple[bool, bool], n: int, answer: list[int], index: CorpusIndex | None
) -> Continuation:
    kept = next((i for i, t in enumerate(answer) if t != word), len(answer))
    tokenizer = target.tokenizer
    follows = tokenizer.decode(answer[kept:], skip_special_tokens=True)
    name = None if word is None else tokenizer.decode([word])
    return Continuation(name, *settings, n, kept, len(answer), follows, _leak(tokenizer, follows, index))


def _leak(tokenizer: Any, follows: str, index: CorpusIndex | None) -> Leak | None:
    if index is None or not follows:
        return None
    found = index.longest(follows.encode())
    piece = follows.encode()[found.start : found.start + found.length].decode(errors="replace")
    count = len(tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"])
    return Leak(found.length, count, piece, found.file)


def _control(made: Setup, count: int, new: int, batch_size: int, index: CorpusIndex | None) -> tuple[Continuation, ...]:
    if not count:
        return ()
    room = (made.target.max_positions or 1 << 30) - new
    ids = held_out(made, count, min(PIECE, room))
    out: list[Continuation] = []
    for start in range(0, len(ids), batch_size):
        for answer in greedy(made.target, ids[start : start + batch_size], new, None):
            out.append(_continuation(made.target, None, (False, False), ids.shape[1], answer, index))
    return tuple(out)
