"""How repetition reinforces itself, and which heads carry it (Xu et al. 2022, "Learning to break the loop": DITTO)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.attention.locking import locking
from sinkscope.attention.texts import QueryHead
from sinkscope.errors import SinkscopeError
from sinkscope.measure import Option, Positive, Result, Setup, measurement
from sinkscope.models.target import Target
from sinkscope.sinks.first_token.marking_heads import Replacement, replacing
from sinkscope.trace import attention_rows

COPIES = (0, 1, 2, 4, 8, 16)  # copies of a unit before the one that is measured
AFTER = 8  # copies that the conclusion refers to
COPIED = 0.1  # rise of the probability from which a model counts as copying
TWICE = 64  # random tokens, repeated once, on which heads are scored
TOKENS = range(4, 49)  # lengths of sentences
SIZES = sorted(n << i for n in (1, 3) for i in range(16))  # set sizes: 1, 2, 3, 4, 6, 8, 12, 16, ...


@dataclass(frozen=True)
class CopyCurve:
    """Units of one kind, each repeated; values are means over their tokens, then over the units.

    Attributes:
        name: Name of the kind, such as "period 16" or "sentences".
        units: Number of units.
        copies: Number of complete copies before the one that is measured; 0 is the first occurrence. Numbers that
            exceed the context are left out.
        probability: Mean probability of the unit's tokens.
        increased: Share of tokens that are more probable than at their first occurrence.
        likeliest: Share of tokens that are the model's top prediction.
        ablated: Probability with the selected heads ablated; empty if nothing was ablated.
        control: Probability with the same number of random other heads ablated, median over draws.
        control_low: The same in the draw where it is smallest.
    """

    name: str
    units: int
    copies: tuple[int, ...]
    probability: tuple[float, ...]
    increased: tuple[float, ...]
    likeliest: tuple[float, ...]
    ablated: tuple[float, ...] = ()
    control: tuple[float, ...] = ()
    control_low: tuple[float, ...] = ()


@dataclass(frozen=True)
class CopyHead(QueryHead):
    """One query head.

    Attributes:
        induction: Mean attention from the second copy of random tokens to the token after the counterpart in the first.
        previous_token: Mean attention to the preceding position.
        locking: Gain in `sinkscope locking` on a repeated cycle; None if attention cannot be observed.
        ablated: Whether the head is in the group of heads that were ablated together.
    """

    induction: float
    previous_token: float
    locking: float | None
    ablated: bool


@dataclass(frozen=True, kw_only=True)
class Ditto(Result):
    """Self-reinforcement of repetition.

    Attributes:
        after: Number of copies that the conclusion refers to.
        first: Probability of the next token of a random cycle at its first occurrence; mean over periods, like the next
            three.
        copied: The same probability after `after` copies.
        ablated: `copied` with the induction heads ablated. None if nothing is copied and therefore nothing was ablated.
        control: `copied` with the same number of random other heads ablated, median over draws.
        curves: One curve per period, and one for sentences if the text contains suitable ones.
        heads: Every head, largest induction score first.
    """

    percent: ClassVar[tuple[str, ...]] = ("increased", "likeliest")
    columns: ClassVar[tuple[str, ...]] = (
        "unit",
        "copies",
        "probability",
        "ablated",
        "control",
        "increased",
        "likeliest",
    )

    after: int
    first: float
    copied: float
    ablated: float | None
    control: float | None
    curves: tuple[CopyCurve, ...]
    heads: tuple[CopyHead, ...]

    def rows(self) -> list[dict[str, Any]]:
        """One row per kind of unit and number of copies."""
        names = ("probability", "increased", "likeliest", "ablated", "control", "control_low")
        return [
            {"unit": c.name, "copies": n} | {name: getattr(c, name)[i] for name in names if getattr(c, name)}
            for c in self.curves
            for i, n in enumerate(c.copies)
        ]

    def conclusion(self) -> str:
        """The probability at first and after some copies, and with copying heads or others ablated."""
        many = sum(h.ablated for h in self.heads)
        heads, times = "1 head" if many == 1 else f"{many} heads", "copy" if self.after == 1 else "copies"
        then = f"fter {self.after} {times} the next token of a repeated cycle has probability {self.copied:.2f}"
        if self.ablated is None:
            return f"The model does not copy: a{then}, and {self.first:.2f} the first time."
        return (
            f"A{then} ({self.first:.2f} the first time); without the {heads} of largest induction score it has "
            f"{self.ablated:.2f}, without {heads} drawn from all others {self.control:.2f}."
        )

    def details(self) -> list[str]:
        """Reinforcement by kind of unit, the heads, and related commands."""
        best, previous = self.heads[0], max(self.heads, key=lambda h: h.previous_token)
        lines = [
            f"{c.name.capitalize()}, mean of {c.units}: the probability goes from {c.probability[0]:.2f} the first "
            f"time to {c.probability[1]:.2f} after 1 copy and {c.probability[-1]:.2f} after {c.copies[-1]}; then "
            f"{c.increased[-1]:.0%} of the tokens are more probable than the first time, and {c.likeliest[-1]:.0%} are "
            "the likeliest."
            for c in self.curves
        ]
        if names := ", ".join(f"{h} ({h.induction:.2f})" for h in self.heads if h.ablated):
            lines.append(f"Ablated heads and their induction scores: {names}; the control is the median of draws.")
        return [
            *lines,
            f"The largest induction score is {best.induction:.2f} ({best}), and the largest previous-token score is "
            f"{previous.previous_token:.2f} ({previous}).",
            f"`sinkscope barcode --head {best}` shows the attention of the best head step by step, "
            "and `sinkscope locking` shows when heads lock onto a loop.",
        ]


@measurement(
    group="Loops",
    figure="sinkscope.figures.attention:draw_ditto",
    loading="whole",
    quick={"periods": [4], "units": 2, "draws": 1},
    scan={
        "order": 50,
        "seconds": [1.7, 9.0],
        "quick": {"periods": [8], "units": 3, "draws": 2},
        "numbers": {
            "probability of a repeated cycle's token": ["copied", "first"],
            "the same without the copying heads": ["ablated", "control", "copied - control"],
        },
    },
)
def ditto(
    setup: Setup,
    *,
    periods: Annotated[Sequence[int], Option(min=2)] = (4, 16, 48),
    units: Positive = 8,
    heads: Positive | None = None,
    draws: Positive = 5,
) -> Ditto:
    """Measure how much more probable a text becomes with every copy, and which heads cause this.

    Cycles of random tokens, and sentences of the typical text, are repeated up to 17 times; the curve is the mean
    probability of a copy's tokens after 0, 1, 2, 4, 8 and 16 copies (Xu et al. 2022). Heads are ranked by their
    induction score (Olsson et al. 2022). The best ones are ablated together: their output is replaced by its mean over
    typical text at every position except the first. The control ablates the same number of random other heads.

    Args:
        periods: Length of the random cycles, in tokens.
        units: Number of cycles per period, and number of sentences.
        heads: Number of the best induction heads to ablate. By default the fewest that remove half of the copying, and
            at most a quarter of all heads.
        draws: Random draws of other heads for the control.

    Example:
        sinkscope ditto --model qwen3-1.7b --period 8
    """
    _check(setup.target, periods, heads)
    target, total = setup.target, setup.n_layers * setup.n_heads
    generator = torch.Generator().manual_seed(setup.seed)
    groups = {f"period {period}": list(_random(setup, units, period, generator)) for period in periods}
    cycles = list(groups.values())
    if sentences := _sentences(setup, units, generator):
        groups["sentences"] = sentences
    scores = head_scores(target, _random(setup, units, TWICE, generator), setup.bos)
    ranked = [divmod(i, target.n_heads) for i in scores[0].flatten().argsort(descending=True).tolist()]
    bench = Replacement.of(target, target.n_layers - 1, (), setup.ids)
    after = max(n for n in COPIES if n <= min(AFTER, _copies(target, max(periods))))

    def level(found: Sequence[Tensor], copies: int = after) -> float:
        return float(torch.stack([values[0, copies] for values in found[: len(cycles)]]).mean())

    intact = _read(setup, bench, groups.values(), [])
    first, copied = level(intact, 0), level(intact)
    sizes = [heads] if heads else [n for n in SIZES if n <= max(1, total // 4)]
    tried = ((n, level(_read(setup, bench, cycles, ranked[:n]))) for n in sizes[:-1])
    size, read = 0, list[list[Tensor]]()  # without the heads that copy, then without each draw of others
    if copied - first >= COPIED:
        size = next((n for n, left in tried if left <= (first + copied) / 2), sizes[-1])
        others = [torch.randperm(total - size, generator=generator)[:size] + size for _ in range(draws)]
        read = [_read(setup, bench, groups.values(), [ranked[i] for i in some]) for some in (range(size), *others)]
    locked = _locked(setup, cycles[len(cycles) // 2][0])
    return Ditto(
        after=after,
        first=first,
        copied=copied,
        ablated=level(read[0]) if read else None,
        control=float(torch.tensor([level(one) for one in read[1:]]).quantile(0.5)) if read else None,
        curves=tuple(_curve(*found) for found in zip(groups, groups.values(), intact, *read, strict=True)),
        heads=tuple(
            CopyHead(
                layer=head[0],
                head=head[1],
                induction=float(scores[0][head]),
                previous_token=float(scores[1][head]),
                locking=locked.get(head),
                ablated=place < size,
            )
            for place, head in enumerate(ranked)
        ),
    )


@torch.no_grad()
def copy_probabilities(
    forward: Callable[[Tensor], Tensor], units: Int[Tensor, "unit token"], copies: int, bos: int | None
) -> Float[Tensor, "3 unit copy token"]:
    """Repeat units and read how the model predicts each of their tokens (Xu et al. 2022).

    Args:
        forward: Returns the logits of ids, `[row pos vocab]`.
        units: Token ids without BOS, on the model's device.
        copies: Number of copies that follow the first one.
        bos: The token placed in front. None: there is none, and the first token has no prediction (NaN).

    Returns:
        For each token: its probability, whether it exceeds the first copy's, and whether it is the top prediction (0 or
        1).
    """
    ids = _repeated(units, copies + 1, bos)
    logits = forward(ids)[:, :-1].float()
    said = logits.gather(-1, ids[:, 1:, None])[..., 0]
    both = torch.stack([(said - logits.logsumexp(-1)).exp(), (said >= logits.amax(-1)).float()])
    both = torch.nn.functional.pad(both, (int(bos is None), 0), value=torch.nan)
    p, likeliest = both.unflatten(2, (copies + 1, -1)).cpu()
    return torch.stack([p, (p > p[:, :1]) + 0 * p[:, :1], likeliest])  # NaN stays NaN


@torch.no_grad()
def head_scores(target: Target, units: Int[Tensor, "unit token"], bos: int | None) -> Float[Tensor, "score layer head"]:
    """Induction and previous-token score of every head, on tokens that occur twice (Olsson et al. 2022).

    Args:
        target: The model.
        units: Random token ids without BOS; each row is repeated once.
        bos: The token placed in front. None: there is none.

    Returns:
        The mean attention from a position of the second copy to the one after its counterpart in the first, and the
        mean attention from a position to the one before it.
    """
    ids, start, period = _repeated(units, 2, bos), int(bos is not None), units.shape[1]
    found = torch.zeros(2, target.n_layers, target.n_heads)

    def see(layer: int, _first: int, probs: Tensor) -> None:
        for i, (back, query) in enumerate(((period - 1, start + period), (1, start + 1))):
            found[i, layer] = probs.diagonal(-back, -2, -1)[..., query - back :].mean((0, -1)).cpu()

    with attention_rows(target, see, rows_per_chunk=ids.shape[1]):
        target.forward(ids)
    return found


def _read(
    setup: Setup, bench: Replacement, groups: Iterable[Sequence[Tensor]], without: list[tuple[int, int]]
) -> list[Float[Tensor, "3 copy"]]:
    """For each group of units what `copy_probabilities` says, as means over tokens and units, with heads replaced."""
    target = setup.target
    edit = torch.tensor([[[(i, head) in without for head in range(target.n_heads)] for i in range(target.n_layers)]])

    def forward(ids: Tensor) -> Tensor:
        with target.hooks(*replacing(target, bench.means, edit, torch.arange(ids.shape[1]) > 0)):
            return target.hf(input_ids=ids, use_cache=False).logits

    def copied(unit: Tensor) -> Tensor:  # one at a time, because vocabularies are large
        found = copy_probabilities(forward, unit[None].to(target.device), _copies(target, len(unit)), setup.bos)
        return found.nanmean((1, 3))

    return [torch.stack([copied(unit) for unit in group]).mean(0) for group in groups]


def _copies(target: Target, period: int) -> int:
    """How many copies of a unit are read after the first one."""
    return min(COPIES[-1], ((target.max_positions or 1 << 30) - 1) // period - 1)


def _check(target: Target, periods: Sequence[int], heads: int | None) -> None:
    total = target.n_layers * target.n_heads
    if heads is not None and heads > total // 2:
        raise SinkscopeError(
            f"--heads {heads}: expected at most {total // 2}, half of the {total} heads of {target.name}, because as "
            "many others are the control"
        )
    if not periods:
        raise SinkscopeError("no period was given: expected at least one")
    if _copies(target, max(TWICE, *periods)) < 1:
        raise SinkscopeError(
            f"the context of {target.name} is {target.max_positions}: expected room for two copies of {TWICE} tokens "
            "and of the longest --period"
        )


def _repeated(units: Int[Tensor, "unit token"], times: int, bos: int | None) -> Int[Tensor, "unit pos"]:
    ids = units.repeat(1, times)
    return ids if bos is None else torch.nn.functional.pad(ids, (1, 0), value=bos)


def _random(setup: Setup, rows: int, length: int, generator: torch.Generator) -> Int[Tensor, "row token"]:
    """Ordinary tokens, drawn evenly."""
    known = set(range(min(len(setup.tokenizer), int(setup.target.config.vocab_size))))
    ordinary = torch.tensor(sorted(known.difference(setup.tokenizer.all_special_ids)))
    return ordinary[torch.randint(len(ordinary), (rows, length), generator=generator)]


def _sentences(setup: Setup, count: int, generator: torch.Generator) -> list[Int[Tensor, " token"]]:
    """Sentences of the text that the tokenizer knows and that fit with all copies, in random order."""
    lines = re.split(r"(?<=[.!?])\s+", setup.text)
    drawn = (" ".join(["", *lines[i].split()]) for i in torch.randperm(len(lines), generator=generator))
    units = (setup.tokenizer(line, add_special_tokens=False, verbose=False)["input_ids"] for line in drawn)
    lengths = [n for n in TOKENS if _copies(setup.target, n) == COPIES[-1]]
    unknown = getattr(setup.tokenizer, "unk_token_id", None)
    return [torch.tensor(ids) for ids in islice((u for u in units if len(u) in lengths and unknown not in u), count)]


def _curve(name: str, group: Sequence[Tensor], intact: Tensor, *read: Tensor) -> CopyCurve:
    """The values at `COPIES`; `read` is without the heads that copy, then without each draw of others."""
    shown, values = [n for n in COPIES if n < intact.shape[1]], [*intact]
    if read:
        drawn = torch.stack([one[0] for one in read[1:]])
        values += [read[0][0], drawn.quantile(0.5, 0), drawn.amin(0)]
    return CopyCurve(name, len(group), tuple(shown), *(tuple(v[shown].tolist()) for v in values))


def _locked(setup: Setup, unit: Int[Tensor, " token"]) -> dict[tuple[int, int], float]:
    """Gain of every head in `locking` on copies of a unit; empty where attention cannot be replaced (Falcon)."""
    ids = _repeated(unit[None], 1 + _copies(setup.target, len(unit)), setup.bos)[0].tolist()
    found = locking.on(setup, ids=ids, period=len(unit)).heads if setup.target.adapter.attention_interface else ()
    return {(h.layer, h.head): h.gain for h in found}
