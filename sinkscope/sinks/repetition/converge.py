"""A repeated token looks more and more like a first token (Yona et al. 2025, theorem 4.1, figure 5, appendix D).

The output of attention on a prefix and n repetitions is compared with its output on the repeated token alone. One
causal pass over the prefix and N repetitions contains every n up to N: position k + n - 1 sees the prefix and n copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, ClassVar

import torch
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.measure import Positive, Result, Setup, measurement
from sinkscope.models.target import Target
from sinkscope.sinks.tokens import encode, known_token, pick_tokens, refuse_repeated, repetition_limit, single_token
from sinkscope.trace.attention import attention_rows

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
ROUNDING = 8.0  # distances below this many rounding errors of the largest output are ignored


@dataclass(frozen=True)
class Single:
    """A layer on `u` sequences of one token each, where attention can only attend to the token itself.

    Attributes:
        z: Values of every query head, `[u head d_head]`.
        out: Output of the attention, `[u d_model]`.
    """

    z: Tensor
    out: Tensor


@dataclass(frozen=True)
class SameNumbers:
    """The n from which two outputs, rounded to `dtype`, are equal.

    Attributes:
        dtype: "bfloat16" or "float16".
        repeats: Smallest n from which all components are equal, up to the last n. None if there is none.
        expected: The n at which they would become equal if the distance continued to fall as 1 / n (a power of two
            times the last n). Given only if the theorem applies and the model runs in float32; None if `repeats` is
            known.
    """

    dtype: str
    repeats: int | None
    expected: int | None


@dataclass(frozen=True)
class Seen:
    """One repeated token at one layer, for every n from 1 to N.

    Attributes:
        row: Row of the batch.
        layer: Layer number.
        whole: Distance of the attention's outputs, `[n]`.
        heads: Distance of what each head writes, `[head n]`.
        norm: Norm of the single token's output.
        head_norms: Norm of what each head writes for the single token, `[head]`.
        same: The n from which both outputs are equal, per dtype.
    """

    row: int
    layer: int
    whole: Tensor
    heads: Tensor
    norm: float
    head_norms: Tensor
    same: tuple[SameNumbers, ...]


@torch.no_grad()
def singles(target: Target, tokens: list[int], layers: list[int]) -> dict[int, Single]:
    """Run each token alone, all of them in one batch."""
    got: dict[int, Single] = {}

    def keep(layer: int, z: Tensor, out: Tensor) -> None:
        got[layer] = Single(z[:, 0], out[:, 0])

    _run(target, torch.tensor(tokens)[:, None], layers, keep)
    return got


@torch.no_grad()
def first_values(target: Target, single: Single) -> Tensor:
    """Norm of `v W_O` for every head and token, `[u head]`: a token alone attends only to its own value."""
    w = head_outputs(target, 0)
    return torch.stack([(single.z[:, h] @ w[h]).norm(dim=-1) for h in range(len(w))], -1)


@torch.no_grad()
def distances(
    target: Target, prefix: list[int], words: list[int], n: int, alone: dict[int, Single]
) -> tuple[list[Seen], Tensor, Tensor]:
    """Run the prefix and `n` repetitions of each word, one row per word, in one pass to the deepest layer of `alone`.

    Args:
        target: The model.
        prefix: Ids in front of every row.
        words: Ids to repeat.
        n: Number of repetitions.
        alone: The result of `singles` for `words`, in the same order.

    Returns:
        The distances, row by row and layer by layer; and for the first layer's attention, `[row head n]`, the spread of
        the scores and the weight of the prefix.
    """
    k, layers = len(prefix), list(alone)
    ids = torch.tensor([prefix + [w] * n for w in words])
    delta, weight = (torch.zeros(len(words), target.n_heads, n) for _ in range(2))
    found: list[Seen] = []

    def look(_layer: int, first: int, probs: Tensor) -> None:
        last = first + probs.shape[2]
        if last <= k:
            return
        start = max(first, k)
        p = probs[:, :, start - first :]
        seen = torch.arange(p.shape[-1], device=p.device) <= torch.arange(start, last, device=p.device)[:, None]
        lowest = torch.where(seen, p, torch.inf).amin(-1)
        delta[:, :, start - k : last - k] = (p.amax(-1).log() - lowest.log()).cpu()
        weight[:, :, start - k : last - k] = p[..., :k].sum(-1).cpu()

    def keep(layer: int, z: Tensor, out: Tensor) -> None:
        w, one = head_outputs(target, layer), alone[layer]
        for row in range(len(words)):
            moved = z[row, k:] - one.z[row]
            heads = torch.stack([(moved[:, h] @ w[h]).norm(dim=-1) for h in range(len(w))])
            own = torch.stack([(one.z[row, h] @ w[h]).norm() for h in range(len(w))])
            whole = (out[row, k:] - one.out[row]).norm(dim=-1)
            same = tuple(_same(name, out[row, k:], one.out[row]) for name in DTYPES)
            found.append(Seen(row, layer, whole.cpu(), heads.cpu(), float(one.out[row].norm()), own.cpu(), same))

    with attention_rows(target, look, layers=[0]):
        _run(target, ids, layers, keep)
    return sorted(found, key=lambda s: (s.row, s.layer)), delta, weight


def _run(target: Target, ids: Tensor, layers: list[int], keep: Callable[[int, Tensor, Tensor], None]) -> None:
    """One pass; `keep(layer, z [row pos head d_head], output [row pos d_model])` in float32 for each layer."""
    heads = target.n_heads

    def hook(layer: int) -> Any:
        def see(_module: object, args: tuple[Any, ...], _kwargs: object, out: Tensor) -> None:
            z = args[0].reshape(*ids.shape, heads, -1).float()
            keep(layer, z, out.reshape(*ids.shape, -1).float())

        return see

    pairs = [(target.sub(i, target.adapter.o), "post", hook(i)) for i in layers]
    with target.hooks(*pairs):
        target.forward(ids, upto=max(layers))


def head_outputs(target: Target, layer: int) -> Tensor:
    """W_O of every head, `[head d_head d_model]`, float32."""
    with target.loaded(layer):
        rows = target.rows_of(target.sub(layer, target.adapter.o), target.n_heads * target.head_width)
        return rows.T.float().unflatten(0, (target.n_heads, -1))


def rounding(target: Target, size: float) -> float:
    """The difference that rounding allows between two equal outputs of that size."""
    return ROUNDING * torch.finfo(target.dtype).eps * size


def slope(distance: Tensor, floor: float) -> float | None:
    """Exponent of n in the last decade of a curve over n = 1, 2, .., by log-log least squares; None without a fit."""
    n = torch.arange(1, len(distance) + 1, dtype=torch.float64)
    fit = (n >= len(distance) / 10) & (distance > floor)
    if len(distance) < 10 or not bool(fit[n >= len(distance) / 10].all()):
        return None
    x, y = n[fit].log(), distance[fit].double().log()
    x = x - x.mean()
    return float((x * (y - y.mean())).sum() / x.square().sum())


def _same(name: str, outs: Tensor, one: Tensor) -> SameNumbers:
    at = _same_from(outs, one, DTYPES[name])
    return SameNumbers(name, at, None if at is not None else _same_later(outs[-1], one, DTYPES[name], len(outs)))


def _same_from(outs: Tensor, one: Tensor, dtype: torch.dtype) -> int | None:
    other = (outs.to(dtype) != one.to(dtype)).any(-1).nonzero().flatten()
    first = int(other[-1]) + 2 if len(other) else 1
    return first if first <= len(outs) else None


def _same_later(last: Tensor, one: Tensor, dtype: torch.dtype, n: int) -> int | None:
    """If the difference at `n` continues to fall as 1 / n: the power of two times n from which it is zero."""
    for doubling in range(64):
        if bool(((one + (last - one) * math.ldexp(1.0, -doubling)).to(dtype) == one.to(dtype)).all()):
            return n << doubling
    return None


PREFIX = "some prefix:"  # this and the words are those of figure 5 of the paper
WORDS = ("cat", "dog", "the", "bla")
REPEATS = 500
_POINTS = 40  # points kept per curve, evenly spaced in log n


@dataclass(frozen=True)
class Prefix:
    """The text before the repetitions and its number of tokens `k`, BOS included."""

    text: str
    k: int


@dataclass(frozen=True)
class Curve:
    """Distance to the single token as a function of n, for one token, prefix, layer, and head or whole attention.

    Attributes:
        token: The repeated token.
        id: Its id.
        prefix: Index of the prefix in `Convergence.prefixes`.
        layer: Layer number.
        head: Query head. None for the attention's output, which is the sum over heads.
        reference: Norm of the single token's output.
        distance: L2 distance at `Convergence.counts`.
        exponent: Power of n by which the distance falls, fitted to the last decade; the theorem predicts -1. None if
            the distance is lost in rounding.
        bound: The bound `2 r k exp(delta) / n` at the same counts; for the whole output, its sum over heads. None if
            the theorem does not apply.
        r: Largest norm of `v W_O` of that head over the positions.
        delta: Largest spread of the scores in a row, over the rows of repetitions; the bound uses the spread of each
            row.
        closest: Largest ratio of distance to bound, over every n and not only those kept.
        same: For the whole output, the n from which both outputs are equal.
    """

    token: str
    id: int
    prefix: int
    layer: int
    head: int | None
    reference: float
    distance: tuple[float, ...]
    exponent: float | None
    bound: tuple[float | None, ...] | None
    r: float | None
    delta: float | None
    closest: float | None
    same: tuple[SameNumbers, ...]


@dataclass(frozen=True, kw_only=True)
class Convergence(Result):
    """The result of `convergence`.

    Attributes:
        outside: Why theorem 4.1 does not apply to the first layer of this model. None if it applies.
        window: The n at which the prefix leaves the first layer's sliding window, if this happens within the
            repetitions.
        counts: The values of n at which curves are kept.
        prefixes: The texts that stood before the repetitions.
        layers_read: Number of layers read.
        curves: All curves; see `Curve`.
    """

    kind: ClassVar[str] = "converge"
    percent: ClassVar[tuple[str, ...]] = ("closest_to_bound",)
    columns: ClassVar[tuple[str, ...]] = ("token", "layer", "alone", "first", "last", "exponent", "closest_to_bound")
    glossary: ClassVar[dict[str, str]] = {
        "k": "tokens of the prefix",
        "alone": "norm of the attention output at the token alone",
        "first": "distance to that after one repetition",
        "last": "distance after the largest number of repetitions",
        "bound": "bound of theorem 4.1 on the last distance",
        "closest_to_bound": "largest distance over its bound, at any number of repetitions",
        "bfloat16": "repetitions from which both outputs are the same numbers in bfloat16",
        "float16": "repetitions from which both outputs are the same numbers in float16",
    }

    outside: str | None
    window: int | None
    counts: tuple[int, ...]
    prefixes: tuple[Prefix, ...]
    layers_read: int
    curves: tuple[Curve, ...]

    @property
    def holds(self) -> bool | None:
        """Whether every head of the first layer stays within its bound at every n; None if there is no bound."""
        heads = [c.closest for c in self.curves if c.head is not None and c.closest is not None]
        return None if self.outside is not None else max(heads) <= 1

    def wholes(self, layer: int = 0) -> list[Curve]:
        """Curves of the attention's whole output at a layer."""
        return [c for c in self.curves if c.head is None and c.layer == layer]

    def rows(self) -> list[dict[str, Any]]:
        """One row per token, prefix and layer; the heads are in `curves`."""
        return [
            {
                "token": c.token,
                "k": self.prefixes[c.prefix].k,
                "layer": c.layer,
                "alone": c.reference,
                "first": c.distance[0],
                "last": c.distance[-1],
                "exponent": c.exponent,
                "bound": None if c.bound is None else c.bound[-1],
                "closest_to_bound": c.closest,
                **{s.dtype: s.repeats for s in c.same},
            }
            for c in self.curves
            if c.head is None
        ]

    def conclusion(self) -> str:
        """Whether repetition makes the token look like a first token, compared with one repetition and the bound."""
        n, whole = self.counts[-1], self.wholes()
        start, end = _relative(whole, 0), _relative(whole, -1)
        verdict = "brings the first layer closer" if end < start else "does not bring the first layer closer"
        said = (
            f"Repetition {'converges' if end < start / 2 else verdict} to the token alone: after {n} repetitions the "
            f"attention output of the first layer is {end:.2%} away from it, and {start:.2%} after one (medians over "
            "tokens)"
        )
        if self.outside is not None:
            return f"{said}; theorem 4.1 gives no bound here ({self.outside})."
        closest = max(c.closest for c in self.curves if c.head is not None and c.closest is not None)
        bound = "every head stays within" if self.holds else "a head exceeds"
        return f"{said}; {bound} the bound of theorem 4.1 (the closest reaches {closest:.1%} of it)."

    def details(self) -> list[str]:
        """What was read, the exponent, and the n from which both outputs are equal."""
        n, whole = self.counts[-1], self.wholes()
        lines = [
            f"A prefix with n repetitions is compared with the token alone, for n up to {n}, in {self.layers_read} of "
            f"{self.model.n_layers} layers."
        ]
        slopes = [c.exponent for c in whole if c.exponent is not None]
        if slopes:
            lines.append(
                f"The distance falls as n to the power {median(slopes):.2f} in the first layer (median, over the last "
                "decade of n; the theorem's bound has -1)."
            )
        for i, name in enumerate(s.dtype for s in whole[0].same):
            lines.append(_numbers(name, [c.same[i] for c in whole], n))
        return lines


@measurement(
    group="Repetition",
    figure="sinkscope.figures.repetition:convergence",
    command="converge",
    quick={"max_repeats": 24},
    scan={
        "order": 46,
        "seconds": [0.2, 0.6],
        "quick": {"max_repeats": 128},
        "numbers": {"distance from the lone token at the end": ["curves.*.distance.-1", "curves.*.distance.0"]},
        "facts": {"theorem 4.1 holds": "holds"},
    },
)
def convergence(
    setup: Setup,
    *,
    tokens: Sequence[str] | None = None,
    prefix: str | Sequence[str] = (PREFIX,),
    max_repeats: Positive | None = None,
    all_layers: bool = False,
    batch_size: Positive = 4,
) -> Convergence:
    """Measure how closely n repetitions bring a token to being the first one, for all n from one pass.

    The output of attention on a prefix and n repetitions is compared with its output on the token alone, without BOS.
    For the first layer, theorem 4.1 gives the bound `2 r k exp(delta) / n` per head, which is evaluated on the same
    run. In deeper layers the values at repeated positions differ, so there is no bound (Yona et al. 2025, Fig. 5).

    Args:
        tokens: Word to repeat, one token. By default the paper's words (cat, dog, the, bla) that are a single token,
            with words of the text added to make four.
        prefix: Text before the repetitions.
        max_repeats: Largest n. By default 500, or what the context holds.
        all_layers: Read every layer, and not only the first, even if the model is not in memory.
        batch_size: Tokens per pass.

    Example:
        sinkscope converge --model llama-2-7b --token cat
    """
    target = setup.target
    texts = [prefix] if isinstance(prefix, str) else list(prefix)
    before = [([] if setup.bos is None else [setup.bos]) + encode(setup, text) for text in texts]
    if not all(before):
        raise SinkscopeError("--prefix is empty and there is no BOS: nothing would stand before the token; give a word")
    words = _words(setup, tokens, texts, {i for ids in before for i in ids})
    longest = max(map(len, before))
    n = repetition_limit(target, max_repeats, longest, REPEATS)
    window = _first_window(target)
    outside = _outside(target, window, n + longest)
    layers = list(range(target.n_layers if all_layers or target.resident else 1))
    counts = _counts(n)
    curves: list[Curve] = []
    alone = singles(target, words, layers)
    for number, ids in enumerate(before):
        values = first_values(target, singles(target, ids, [0])[0]).cpu().amax(0)
        for start in range(0, len(words), batch_size):
            batch, part = words[start : start + batch_size], slice(start, start + batch_size)
            own = {i: type(one)(one.z[part], one.out[part]) for i, one in alone.items()}
            seen, delta, weight = distances(target, ids, batch, n, own)
            for one in seen:
                rows = values, delta[one.row], weight[one.row]
                curves += _curves(target, one, batch[one.row], number, len(ids), rows, outside, counts)
            done = number * len(words) + min(start + batch_size, len(words))
            setup.progress("repetitions", done, len(before) * len(words))
    setup.record(prefix=texts, max_repeats=n)
    return Convergence(
        outside=outside,
        window=window if window is not None and window <= n else None,
        counts=tuple(counts),
        prefixes=tuple(Prefix(target.tokenizer.decode(ids), len(ids)) for ids in before),
        layers_read=len(layers),
        curves=tuple(curves),
    )


def _curves(
    target: Target,
    seen: Seen,
    word: int,
    number: int,
    k: int,
    rows: tuple[Tensor, Tensor, Tensor],
    outside: str | None,
    counts: list[int],
) -> list[Curve]:
    """The attention's output and each head; `rows` are the prefix' values, and spread and prefix weight of layer 0."""
    whole, heads, first = seen.whole, seen.heads, seen.layer == 0
    values, delta, weight = rows
    n, at = torch.arange(1, len(whole) + 1), torch.tensor(counts) - 1
    r = torch.maximum(values, seen.head_norms)
    bounds = 2 * k * r[:, None] * delta.exp() / n if first and outside is None else None
    if first and not target.adapter.absolute_positions and not target.adapter.learned_sinks:
        # Without weight on the prefix both outputs are the token's value and differ only by rounding.
        gone = (weight == 0).all(0)
        whole, heads = whole.masked_fill(gone, 0.0), heads.masked_fill(gone, 0.0)

    def curve(head: int | None, distance: Tensor, size: float, bound: Tensor | None) -> Curve:
        floor = rounding(target, max(size, float(r.max()) if first else 0.0))
        ratio = None if bound is None else torch.where(distance > floor, distance / bound, 0.0)
        of_head = head is not None and bound is not None
        # The output itself needs spare digits: an already rounded value can lie on the boundary between two numbers.
        extrapolate = first and outside is None and torch.finfo(target.dtype).bits > 16
        same = seen.same if extrapolate else tuple(replace(s, expected=None) for s in seen.same)
        return Curve(
            target.tokenizer.decode([word]),
            word,
            number,
            seen.layer,
            head,
            size,
            tuple(distance[at].tolist()),
            slope(distance, floor),
            None if bound is None else tuple(map(_finite, bound[at].tolist())),
            float(r[head]) if of_head else None,
            _finite(float(delta[head].max())) if of_head else None,
            None if ratio is None else float(ratio.max()),
            same if head is None else (),
        )

    limits = [None] * (1 + len(heads)) if bounds is None else [bounds.sum(0), *bounds]
    each = [curve(h, heads[h], float(seen.head_norms[h]), limits[1 + h]) for h in range(len(heads))]
    return [curve(None, whole, seen.norm, limits[0]), *each]


def _finite(value: float) -> float | None:
    """None for the infinity that a weight of 0 gives."""
    return value if value < float("inf") else None


def _relative(curves: list[Curve], at: int) -> float:
    return median(c.distance[at] / c.reference if c.reference else 0.0 for c in curves)


def _numbers(dtype: str, found: list[SameNumbers], n: int) -> str:
    got = [s.repeats for s in found if s.repeats is not None]
    if got:
        over = f"{len(got)} of {len(found)} tokens"
        return f"In {dtype} both outputs are the same numbers from n = {median(got):.0f} on ({over})."
    later = [s.expected for s in found if s.expected is not None]
    rest = (
        f"; if the distance keeps falling as 1 / n, they will agree from about {median(later):.2g} on" if later else ""
    )
    return f"In {dtype} both outputs differ up to n = {n}{rest}."


def _words(setup: Setup, tokens: Sequence[str] | None, texts: list[str], used: set[int]) -> list[int]:
    """The tokens requested, or else words of the paper and of the text that occur in no prefix."""
    tokenizer = setup.tokenizer
    if tokens:
        words = [single_token(tokenizer, string) for string in tokens]
        for text in texts:
            refuse_repeated(setup, text, words)
        return words
    found = [known_token(tokenizer, string) for string in WORDS]
    found += pick_tokens(tokenizer, setup.ids, None, setup.seed, 2 * len(WORDS) + len(used))
    return list(dict.fromkeys(w for w in found if w is not None and w not in used))[: len(WORDS)]


def _first_window(target: Target) -> int | None:
    """Number of tokens in the first layer's window, including the query's own; None if it has no window."""
    window, kinds = getattr(target.config, "sliding_window", None), getattr(target.config, "layer_types", None)
    return None if not window or (kinds and kinds[0] != "sliding_attention") else int(window)


def _outside(target: Target, window: int | None, length: int) -> str | None:
    if target.adapter.absolute_positions:
        return "absolute positions make a token's value depend on where it stands"
    if target.adapter.learned_sinks:
        return "learned sink logits take weight from the token alone, which repetition gives back"
    if window is not None and window < length:
        return f"the first layer has a sliding window of {window} tokens, which the prefix leaves"
    return None


def _counts(n: int) -> list[int]:
    """Values of n from 1 to n: all small ones, then evenly spaced in log n."""
    spread = torch.logspace(0, torch.tensor(float(n)).log10().item(), _POINTS).round().int().tolist()
    return sorted({*spread, 1, n})
