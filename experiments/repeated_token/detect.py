"""How well sink neurons at later positions distinguish attacks from text, code and honest repetition.

    python -m experiments.repeated_token.detect [--model NAME] [--length N ...] [--sequences N] [--out figures]

The score of a position is the value of each sink neuron over its value at a first token, averaged over the neurons. A
rule "2 of 4" raises the alarm when two of the last four positions score enough. The score of a sequence under a rule is
the largest threshold at which the alarm would be raised somewhere, so one pass gives the whole curve. Positives are the
cluster attacks and repetitions that made a sink at some position (norm >= half of a first token's); negatives are
pieces of the same length in the same context.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotly.express as px
import torch
from einops import reduce
from jaxtyping import Float, Int
from torch import Tensor

import sinkscope as ss
from experiments.drawn import save
from experiments.harmless import honest_repetition, source_code
from experiments.record import record
from experiments.script import run
from sinkscope.display.style import finished
from sinkscope.measure import Setup
from sinkscope.measure.rate import wilson
from sinkscope.models.text import text_rows
from sinkscope.sinks.attack.sequences import attack_contexts, drawn_sequences, make_pools, repeated_first

RULES = ((1, 1), (2, 4), (4, 8), (8, 16))  # (hits, window)
FALSE_ALARMS = 0.01  # the false-alarm rate at which detection is reported
THRESHOLD = 0.5  # share of a first token's score that counts as a hit
BATCH = 64  # sequences per pass


@dataclass(frozen=True)
class Watch:
    """The sink neurons of one MLP or expert, and what their values are compared with.

    Attributes:
        model: The model.
        layer: Their layer, after which norms are read.
        neurons: Their numbers.
        levels: Value of each at a first token.
        reference: Norm of a first token.
    """

    model: Any
    layer: int
    neurons: list[int]
    levels: Float[Tensor, " neuron"]
    reference: float

    def values(self, ids: Int[Tensor, "row pos"]) -> tuple[Float[Tensor, "row pos neuron"], Float[Tensor, "row pos"]]:
        """Values of the neurons, and norms after their layer."""
        post, resid = f"blocks.{self.layer}.mlp.hook_post", f"blocks.{self.layer}.hook_resid_post"

        def shortened(tensor: Tensor) -> Tensor:
            if tensor.shape[-1] == self.model.config.hidden_size:
                return tensor.float().norm(dim=-1)
            return tensor[..., self.neurons].float()

        traced = ss.trace(self.model, ids, [post, resid], reduce=shortened, batch_size=BATCH)
        return traced[post], traced[resid]

    def scores(self, lead: Sequence[int], rows: Int[Tensor, "row pos"]) -> tuple[Tensor, Tensor]:
        """How sink-like the positions of each sequence are, and whether its norm makes it an attack."""
        before = torch.tensor(lead, dtype=torch.long).expand(len(rows), -1)
        values, norms = self.values(torch.cat([before, rows], dim=1))
        attacked = slice(max(len(lead), 1), None)
        scores = reduce(values / self.levels, "row pos neuron -> row pos", "mean")
        return scores[:, attacked], (norms[:, attacked] >= self.reference / 2).any(1)


def watched(setup: Setup) -> Watch | None:
    """The causal neurons of one layer; None if the model has none, or if the first is of an expert."""
    sinks = ss.find_sinks.on(setup)
    causal = sorted(sinks.causal, key=lambda neuron: -neuron.contribution_norm)
    if not causal or causal[0].expert is not None:
        return None
    same = [neuron.neuron for neuron in causal if neuron.layer == causal[0].layer]
    nothing = Watch(setup.target.hf, causal[0].layer, same, torch.ones(len(same)), 1.0)
    values, norms = nothing.values(setup.ids[:, :1])
    levels = values[:, 0].median(0).values
    return Watch(setup.target.hf, causal[0].layer, same, levels, float(norms[:, 0].median()))


def peak(scores: Float[Tensor, "row pos"], hits: int, window: int) -> Float[Tensor, " row"]:
    """The largest threshold at which "`hits` of the last `window` positions" holds somewhere in each row."""
    padded = torch.nn.functional.pad(scores, (window - 1, 0), value=-math.inf)
    return padded.unfold(1, window, 1).topk(hits, dim=-1).values[..., -1].max(1).values


def cut_at(quiet: Float[Tensor, " piece"], rate: float) -> float:
    """The lowest score that at most a share `rate` of harmless pieces exceeds; minus infinity if all may."""
    allowed = math.floor(rate * len(quiet) + 1e-9)
    if allowed >= len(quiet):
        return -math.inf
    return float(quiet.sort(descending=True).values[allowed])


def area(loud: Float[Tensor, " attack"], quiet: Float[Tensor, " piece"]) -> float:
    """Area under the ROC curve: share of pairs in which the attack scores higher, ties counted half."""
    order = quiet.sort().values
    below = torch.searchsorted(order, loud)
    not_above = torch.searchsorted(order, loud, right=True)
    return float((below + not_above).double().mean() / 2 / len(quiet))


def measure(setup: Setup, lengths: Sequence[int], sequences: int) -> list[dict[str, Any]]:
    """One row for each context, length, attack, harmless text and rule."""
    watch = watched(setup)
    clusters = ss.attack.on(setup, sequences=0).clusters
    if watch is None or clusters is None:
        return []
    contexts = attack_contexts(setup, None)
    left_out = {int(token) for token in setup.tokenizer.all_special_ids}
    for lead in contexts.values():
        left_out |= set(lead)
    served = {head: clusters.tokens_of(head) for head in clusters.heads}
    pools = make_pools(served, int(setup.target.config.vocab_size), left_out)
    texts = {"text": setup.text, "code": source_code(), "repetition": honest_repetition(seed=setup.seed)}
    rows: list[dict[str, Any]] = []
    for length in lengths:
        pieces = {name: text_rows(setup.tokenizer, text, sequences, length, None) for name, text in texts.items()}
        drawn = drawn_sequences(pools, length, sequences, setup.seed)
        if not len(drawn):
            continue
        for context, lead in contexts.items():
            quiet = {name: watch.scores(lead, piece)[0] for name, piece in pieces.items()}
            quiet["all"] = torch.cat(list(quiet.values()))
            for attack, ids in (("cluster", drawn), ("repeated", repeated_first(drawn))):
                scores, sinks = watch.scores(lead, ids)
                for harmless, of_text in quiet.items():
                    for hits, window in RULES:
                        if hits <= scores.shape[1]:
                            loud, low = peak(scores, hits, window)[sinks], peak(of_text, hits, window)
                            place = {"context": context, "length": length, "attack": attack, "harmless": harmless}
                            rows.append(
                                {**place, "rule": f"{hits} of {window}", **judged(loud, low), "tried": len(ids)}
                            )
            setup.progress("detection", len(rows), 0)
    return rows


def judged(loud: Float[Tensor, " attack"], quiet: Float[Tensor, " piece"]) -> dict[str, Any]:
    """How well a rule separates attacks from harmless pieces."""
    alarms = wilson(int((quiet >= THRESHOLD).sum()), len(quiet))
    row: dict[str, Any] = {"attacks": len(loud), "harmless_pieces": len(quiet), "false_alarms": alarms.share}
    if len(loud):
        cut = cut_at(quiet, FALSE_ALARMS)
        row["auroc"] = area(loud, quiet)
        row["detected"] = float((loud > cut).float().mean())
        row["detected_here"] = wilson(int((loud >= THRESHOLD).sum()), len(loud)).share
    return row


def figure(data: dict[str, Any]) -> Any:
    """Draw the share of cluster attacks detected at 1 % false alarms, by length, rule and context."""
    rows = [row for row in data["result"]["rows"] if row["attack"] == "cluster" and row["harmless"] == "all"]
    rows = [row for row in rows if "detected" in row]
    axes: dict[str, Any] = {"x": "length", "y": "detected", "color": "rule", "facet_col": "context"}
    fig = px.line(rows, **axes, log_x=True, markers=True, range_y=(-0.03, 1.03))
    lowest: dict[str, float] = {}
    for row in rows:
        lowest[row["rule"]] = min(row["detected"], lowest.get(row["rule"], 1.0))
    best, worst = max(lowest, key=lowest.__getitem__), min(lowest, key=lowest.__getitem__)
    found = (
        f"At 1 % false alarms the rule {best} detects {lowest[best]:.0%} of the cluster attacks at every length, "
        f"{worst} as few as {lowest[worst]:.0%}"
    )
    return finished(fig, None, found, width=1200, height=480)


def main(
    *, model: str | None = None, length: Sequence[int] | None = None, sequences: int = 1000, out: Path = Path("figures")
) -> None:
    """Make what the module describes.

    Args:
        model: Short name, hub id or folder; default: the model in the package.
    """
    started = time.perf_counter()
    setup = Setup.open(ss.load(model, backend="hf"))
    lengths = length or [8, 32, 128]
    rows = measure(setup, lengths, sequences)
    settings = {"model": setup.target.name, "lengths": lengths, "sequences": sequences, "threshold": THRESHOLD}
    text = record("attack-detect", {"rows": rows}, settings, started=started, device=setup.target.device)
    save("attack_detect", text, figure, out)


if __name__ == "__main__":
    run(main)
