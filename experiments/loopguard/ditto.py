"""Self-reinforcement (Xu et al. 2022, DITTO): how much likelier each copy makes the next, and which heads copy.

    python -m experiments.loopguard.ditto [--model NAME|FOLDER] [--period 4 ...] [--units 8] [--heads N] [--out figures]

Random cycles and sentences of the typical text are repeated up to 17 times. Heads are ranked by their induction score
(Olsson et al. 2022); the best ones, as few as remove half of the copying, are replaced by their mean over typical text
at every position except the first. The control replaces as many random other heads (median over draws). A model that
copies neither cycles nor sentences does not loop because of its cache, so LoopGuard cannot end its loops.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from einops import rearrange, repeat
from jaxtyping import Float, Int
from plotly.subplots import make_subplots
from torch import Tensor

from experiments.drawn import save
from experiments.record import record
from experiments.script import run
from sinkscope.measure import Setup
from sinkscope.measure.style import BLUE, GREY, RED, finished
from sinkscope.models.hooks import on_input
from sinkscope.models.target import Target
from sinkscope.trace import attention_rows, trace

COPIES = (0, 1, 2, 4, 8, 16)  # copies of a unit before the one that is measured
COPIED = 0.1  # rise of the probability from which a model counts as copying
TWICE = 64  # random tokens, repeated once, on which heads are scored
SENTENCE = range(4, 49)  # tokens of a sentence
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # numbers of heads that are tried
Head = tuple[int, int]


@torch.no_grad()
def copy_probabilities(
    forward: Callable[[Tensor], Tensor], units: Int[Tensor, "unit token"], copies: int, bos: int | None
) -> Float[Tensor, "3 unit copy token"]:
    """Repeat units and read how the model predicts each of their tokens.

    Args:
        forward: Returns the logits of ids, `[row pos vocab]`.
        units: Token ids without BOS, on the model's device.
        copies: Number of copies that follow the first one.
        bos: The token placed in front. None: there is none, and the first token has no prediction (NaN).

    Returns:
        For each token: its probability, whether it exceeds the first copy's, and whether it is the top prediction.
    """
    ids = repeated(units, copies + 1, bos)
    logits = forward(ids)[:, :-1].float()
    own = logits.gather(-1, ids[:, 1:, None])[..., 0]
    both = torch.stack([(own - logits.logsumexp(-1)).exp(), (own >= logits.amax(-1)).float()])
    if bos is None:
        both = torch.nn.functional.pad(both, (1, 0), value=torch.nan)
    by_copy = rearrange(both, "kind unit (copy token) -> kind unit copy token", copy=copies + 1).cpu()
    probability, likeliest = by_copy
    first = probability[:, :1]
    increased = (probability > first) + 0 * first  # NaN stays NaN
    return torch.stack([probability, increased, likeliest])


def repeated(units: Int[Tensor, "unit token"], times: int, bos: int | None) -> Int[Tensor, "unit pos"]:
    """Units in a row, after BOS if there is one."""
    ids = repeat(units, "unit token -> unit (copy token)", copy=times)
    if bos is None:
        return ids
    return torch.nn.functional.pad(ids, (1, 0), value=bos)


@torch.no_grad()
def head_scores(target: Target, units: Int[Tensor, "unit token"], bos: int | None) -> Float[Tensor, "score layer head"]:
    """Induction and previous-token score of every head, on tokens that occur twice.

    Returns:
        The mean attention from a position of the second copy to the one after its counterpart in the first, and the
        mean attention from a position to the one before it.
    """
    ids, start, period = repeated(units, 2, bos), int(bos is not None), units.shape[1]
    scores = torch.zeros(2, target.n_layers, target.n_heads)

    def see(layer: int, _first: int, probs: Tensor) -> None:
        for kind, (back, query) in enumerate(((period - 1, start + period), (1, start + 1))):
            diagonal = probs.diagonal(-back, -2, -1)[..., query - back :]
            scores[kind, layer] = diagonal.mean((0, -1)).cpu()

    with attention_rows(target, see, rows_per_chunk=ids.shape[1]):
        target.forward(ids)
    return scores


def most_copies(target: Target, period: int) -> int:
    """How many copies of a unit fit into the context after the first one."""
    return min(COPIES[-1], ((target.max_positions or 1 << 30) - 1) // period - 1)


def cycles(setup: Setup, rows: int, length: int, generator: torch.Generator) -> Int[Tensor, "row token"]:
    """Ordinary tokens, drawn evenly."""
    tokens = set(range(min(len(setup.tokenizer), int(setup.target.config.vocab_size))))
    ordinary = torch.tensor(sorted(tokens.difference(setup.tokenizer.all_special_ids)))
    return ordinary[torch.randint(len(ordinary), (rows, length), generator=generator)]


def sentences(setup: Setup, count: int, generator: torch.Generator) -> list[Int[Tensor, " token"]]:
    """Sentences of the text that the tokenizer knows and that fit with all copies, in random order."""
    lines = re.split(r"(?<=[.!?])\s+", setup.text)
    unknown = getattr(setup.tokenizer, "unk_token_id", None)
    units: list[Tensor] = []
    for number in torch.randperm(len(lines), generator=generator).tolist():
        line = " ".join(["", *lines[number].split()])
        ids = setup.tokenizer(line, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) in SENTENCE and unknown not in ids and most_copies(setup.target, len(ids)) == COPIES[-1]:
            units.append(torch.tensor(ids))
        if len(units) == count:
            break
    return units


@dataclass(frozen=True)
class HeadMeans:
    """A model whose heads can be replaced by their mean output over later positions of typical text."""

    setup: Setup
    means: Float[Tensor, "layer head d_head"]

    @classmethod
    def of(cls, setup: Setup) -> HeadMeans:
        """Means over the pieces of typical text."""
        sites = [f"blocks.{layer}.attn.hook_z" for layer in range(setup.n_layers)]
        outputs = trace(setup.target, setup.ids, sites, lambda z: z[:, 1:].float().mean(1))
        return cls(setup, torch.stack([outputs[site].mean(0) for site in sites]))

    def logits(self, ids: Tensor, without: Sequence[Head]) -> Tensor:
        """Logits with heads replaced at every position but the first."""
        target, hooks = self.setup.target, []
        for layer in {layer for layer, _ in without}:
            heads = [head for own, head in without if own == layer]

            def replaced(z: Tensor, layer: int = layer, heads: list[int] = heads) -> Tensor:
                by_head = rearrange(z.clone(), "row pos (head d_head) -> row pos head d_head", head=target.n_heads)
                by_head[:, 1:, heads] = self.means[layer, heads].to(z)
                return rearrange(by_head, "row pos head d_head -> row pos (head d_head)")

            hooks.append((target.output_projection(layer), "pre", on_input(replaced)))
        with target.hooks(*hooks):
            return target.hf(input_ids=ids, use_cache=False).logits

    def curves(self, groups: dict[str, list[Tensor]], without: Sequence[Head]) -> dict[str, Float[Tensor, "3 copy"]]:
        """What `copy_probabilities` says of each group, as means over tokens and units."""
        curves: dict[str, Tensor] = {}
        for name, units in groups.items():
            rows: list[Tensor] = []
            for unit in units:  # one at a time, because vocabularies are large
                ids = unit[None].to(self.setup.target.device)
                copies = most_copies(self.setup.target, len(unit))
                values = copy_probabilities(lambda ids: self.logits(ids, without), ids, copies, self.setup.bos)
                rows.append(values.nanmean((1, 3)))
            curves[name] = torch.stack(rows).mean(0)
        return curves


def measure(setup: Setup, periods: Sequence[int], units: int, heads: int | None, draws: int) -> dict[str, Any]:
    """Curves by kind of unit, scores of heads `[layer head]`, and which heads were replaced."""
    target, total = setup.target, setup.n_layers * setup.n_heads
    generator = torch.Generator().manual_seed(setup.seed)
    groups = {f"period {period}": list(cycles(setup, units, period, generator)) for period in periods}
    random_groups = dict(groups)
    lines = sentences(setup, units, generator)
    if lines:
        groups["sentences"] = lines
    induction, previous = head_scores(target, cycles(setup, units, TWICE, generator), setup.bos)
    ranked = [divmod(place, target.n_heads) for place in induction.flatten().argsort(descending=True).tolist()]
    means = HeadMeans.of(setup)
    after = max(n for n in COPIES if n <= min(8, most_copies(target, max(periods))))

    def level(curves: dict[str, Tensor], copies: int) -> float:
        return float(torch.stack([curves[name][0, copies] for name in random_groups]).mean())

    intact = means.curves(groups, [])
    first, copied = level(intact, 0), level(intact, after)
    result: dict[str, Any] = {"after": after, "first": first, "copied": copied, "ablated": None, "control": None}
    without: list[dict[str, Tensor]] = []
    size = 0
    if copied - first >= COPIED:
        sizes = [heads] if heads else [n for n in SIZES if n <= max(1, total // 4)]
        for size in sizes:
            left = level(means.curves(random_groups, ranked[:size]), after)
            if left <= (first + copied) / 2:
                break
        without.append(means.curves(groups, ranked[:size]))
        for _ in range(draws):
            others = torch.randperm(total - size, generator=generator)[:size] + size
            without.append(means.curves(groups, [ranked[place] for place in others.tolist()]))
        drawn = torch.tensor([level(curves, after) for curves in without[1:]])
        result |= {"ablated": level(without[0], after), "control": float(drawn.quantile(0.5))}
    curves: list[dict[str, Any]] = []
    for name, values in intact.items():
        shown = [n for n in COPIES if n < values.shape[1]]
        curve: dict[str, Any] = {"name": name, "units": len(groups[name]), "copies": shown}
        for kind, row in zip(("probability", "increased", "likeliest"), values, strict=True):
            curve[kind] = row[shown].tolist()
        if without:
            drawn = torch.stack([curves_of[name][0] for curves_of in without[1:]])
            curve["ablated"] = without[0][name][0][shown].tolist()
            curve["control"] = drawn.quantile(0.5, 0)[shown].tolist()
            curve["control_low"] = drawn.amin(0)[shown].tolist()
        curves.append(curve)
    scores = {"induction": induction.tolist(), "previous_token": previous.tolist()}
    return result | {"curves": curves, "heads": scores, "replaced": [list(head) for head in ranked[:size]]}


def summary(result: dict[str, Any]) -> str:
    """The conclusion in one sentence."""
    many, then = len(result["replaced"]), f"probability {result['copied']:.2f} after {result['after']} copies"
    if result["ablated"] is None:
        return without_cycles(result)
    control = f"{result['control']:.2f} without {many} others"
    return (
        f"The next token of a repeated cycle has {then} ({result['first']:.2f} the first time), "
        f"{result['ablated']:.2f} without the {many} heads of largest induction score, {control}"
    )


def without_cycles(result: dict[str, Any]) -> str:
    """What a model copies that does not copy random cycles: sentences, or nothing that was tried."""
    after = result["after"]
    cycle = f"the next token of a random cycle has {result['copied']:.2f} ({result['first']:.2f})"
    for curve in result["curves"]:
        if curve["name"] == "sentences":
            first = curve["probability"][0]
            copied = curve["probability"][curve["copies"].index(after)]
            verdict = "neither sentences nor random cycles"
            if copied - first >= COPIED:
                verdict = "sentences and no random cycles"
            said = f"probability {copied:.2f} after {after} copies ({first:.2f} the first time)"
            return f"The model copies {verdict}: the next token of a sentence has {said}, {cycle}"
    return f"The model copies no random cycles: {cycle} after {after} copies (the first time); no sentence was tried"


def figure(data: dict[str, Any]) -> Any:
    """The probability over copies, with heads replaced and the control, and the scores of all heads."""
    result = data["result"]
    titles = [curve["name"] for curve in result["curves"]] + ["induction score", "previous-token score"]
    fig: Any = make_subplots(rows=1, cols=len(titles), subplot_titles=titles, horizontal_spacing=0.035)
    series = (("probability", "intact", BLUE), ("ablated", "without copying heads", RED), ("control", "others", GREY))
    for col, curve in enumerate(result["curves"], 1):
        for kind, name, color in series:
            if kind in curve:
                x = [str(n) for n in curve["copies"]]
                fig.add_scatter(x=x, y=curve[kind], name=name, line_color=color, showlegend=col == 1, row=1, col=col)
        fig.update_xaxes(title_text="copies before", type="category", row=1, col=col)
        fig.update_yaxes(range=[-0.03, 1.03], row=1, col=col)
    for col, scores in enumerate(result["heads"].values(), len(result["curves"]) + 1):
        fig.add_heatmap(z=scores, zmin=0, zmax=1, colorscale="Viridis", showscale=col == len(titles), row=1, col=col)
        fig.update_xaxes(title_text="head", row=1, col=col)
        fig.update_yaxes(title_text="layer", autorange="reversed", row=1, col=col)
    return finished(fig, None, summary(result), width=280 * len(titles) + 100, height=450)


def main(
    *,
    model: str | None = None,
    period: Sequence[int] | None = None,
    units: int = 8,
    heads: int | None = None,
    draws: int = 5,
    out: Path = Path("figures"),
) -> None:
    """Make what the module describes.

    Args:
        model: Short name, hub id or folder; default: the model in the package.
        period: Of random cycles; default: 4, 16 and 48.
        units: Cycles of each period, and sentences.
        heads: To replace; default: as few as remove half of the copying.
        draws: Of other heads for the control.
    """
    started = time.perf_counter()
    setup = Setup.open(model, loading="whole")
    periods = period or [4, 16, 48]
    result = measure(setup, periods, units, heads, draws)
    settings = {"model": setup.target.name, "periods": periods, "units": units, "draws": draws}
    save("ditto", record("loopguard-ditto", result, settings, started=started), figure, out)
    print(f"{summary(result)}.")


if __name__ == "__main__":
    run(main)
