"""How well sink neurons at later positions distinguish attacks from text, code and honest repetition."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.files.notation import neuron_names
from sinkscope.files.rate import Rate, wilson
from sinkscope.interventions.edits import NeuronValues
from sinkscope.interventions.sink_detector import SinkDetector
from sinkscope.measure import Hidden, Option, Positive, Result, Setup, measurement
from sinkscope.models.target import Target
from sinkscope.models.text import honest_repetition, source_code, text_rows
from sinkscope.sinks.attack.attack import SUCCESS, Context, Trials, make_trials, refuse_no_lengths
from sinkscope.sinks.attack.vocabulary import drawn_sequences, repeat
from sinkscope.sinks.first_token.result import Neuron
from sinkscope.sinks.first_token.sets import causal_neurons

RULES = ((1, 1), (2, 4), (4, 8), (8, 16))  # (hits, window)
FALSE_ALARMS = 0.01  # the false-alarm rate at which detection is reported
FALSE_RATES = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


@dataclass(frozen=True)
class DetectRow:
    """One rule tested against one kind of harmless text.

    Attributes:
        context: "BOS", "no BOS" or "chat".
        length: Tokens per sequence, attacks and harmless ones.
        attack: "cluster" or "repeated".
        harmless: Kind of harmless text; "all" for all kinds together.
        hits: Number of positions that must exceed the threshold,
        window: within this number of latest positions.
        attacks: Sequences that made a sink at some position; these are to be detected.
        tried: Number of sequences tried.
        harmless_pieces: Number of pieces of harmless text.
        auroc: Probability that an attack scores above a harmless piece. None if no attack made a sink.
        detected: Share of attacks detected at no more than 1 % false alarms on this text. None if no attack made a
            sink.
        cut: Score from which that rule raises the alarm.
        detected_here: Share of attacks detected at the default threshold.
        false_alarms: Share of harmless pieces that raise the alarm at the default threshold.
        roc: Share detected at each of `false_rates`. Empty if no attack made a sink.
    """

    context: str
    length: int
    attack: str
    harmless: str
    hits: int
    window: int
    attacks: int
    tried: int
    harmless_pieces: int
    auroc: float | None
    detected: float | None
    cut: float | None
    detected_here: Rate | None
    false_alarms: Rate
    roc: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class AttackDetection(Result):
    """What an online rule on the sink neurons detects.

    Attributes:
        sink_layer: Sink layer. None if the model has no sink.
        sites: The neurons that are watched.
        levels: Value of each neuron at the first token.
        threshold: Default score that counts as a hit, as a share of a first token's score.
        false_rates: False-alarm rates at which `roc` is given.
        detections: One row for each context, length, attack, harmless text and rule.
    """

    page: ClassVar[str] = "measure/attack"
    kind: ClassVar[str] = "attack-detection"
    percent: ClassVar[tuple[str, ...]] = ("detected", "detected_here", "false_alarms")

    table_without: ClassVar[tuple[str, ...]] = ("roc", "tried")
    columns: ClassVar[tuple[str, ...]] = ("context", "length", "attack", "rule", "attacks", "auroc", "detected")
    glossary: ClassVar[dict[str, str]] = {"rule": '"2 of 4": an alarm is raised when two of the last four tokens count'}

    sink_layer: int | None
    sites: tuple[tuple[int, ...], ...] = ()
    levels: tuple[float, ...] = ()
    threshold: float
    false_rates: tuple[float, ...]
    detections: tuple[DetectRow, ...] = ()

    def detector(self, hits: int = 2, window: int = 4, threshold: float | None = None) -> SinkDetector:
        """The detector that was measured, ready to be applied to a model.

        Raises:
            SinkscopeError: The model has no sink, so there is nothing to watch.
        """
        if not self.sites:
            raise SinkscopeError(f"{self.model.name} has no sink, so there is no neuron to watch: use another model")
        cut = self.threshold if threshold is None else threshold
        return SinkDetector(sites=self.sites, levels=self.levels, threshold=cut, hits=hits, window=window)

    @property
    def only_harmless(self) -> str | None:
        """Name of the harmless text if there is only one, in which case there is no row "all"."""
        names = {d.harmless for d in self.detections}
        return names.pop() if len(names) == 1 else None

    def rows(self) -> list[dict[str, Any]]:
        """One row per context, length, attack, harmless text and rule."""
        return [row | {"rule": f"{row.pop('hits')} of {row.pop('window')}"} for row in super().rows()]

    def shown_rows(self) -> list[dict[str, Any]]:
        """The rows against all harmless texts together."""
        return [row for row in self.rows() if row["harmless"] in ("all", self.only_harmless)]

    def conclusion(self) -> str:
        """How well the best rule detects attacks, with its false alarms."""
        if self.sink_layer is None:
            return "The model has no sink, so there is nothing to detect."
        best = max((b for b in self._best().values() if b is not None), key=_merit, default=None)
        if best is None:
            return "No cluster attack made a sink, so there is nothing to detect."
        verdict = "can be detected" if (best.detected or 0.0) >= 0.5 else "are mostly missed"
        return f"Cluster attacks {verdict}: {_said(best)} ({best.length} tokens, {best.context})."

    def details(self) -> list[str]:
        """What is watched, and how well it separates attacks in each context and length."""
        if not self.sites:
            return []
        lines = [
            f"The rule watches {neuron_names(self.sites)}. A position counts if its value is at least "
            f"{self.threshold:g} of that at a first token."
        ]
        for (context, length), best in self._best().items():
            said = "no cluster attack made a sink" if best is None else _said(best)
            lines.append(f"{context}, {length} tokens: {said}.")
        return lines

    def _best(self) -> dict[tuple[str, int], DetectRow | None]:
        """The rule that detects most cluster attacks against all harmless text, for each context and length."""
        ours = [d for d in self.detections if d.attack == "cluster" and d.harmless in ("all", self.only_harmless)]
        places: dict[tuple[str, int], list[DetectRow]] = {}
        for d in ours:
            places.setdefault((d.context, d.length), []).extend([d] if d.detected is not None else [])
        return {place: max(here, key=_merit, default=None) for place, here in places.items()}


def _merit(row: DetectRow) -> tuple[float, float]:
    return row.detected or 0.0, row.auroc or 0.0


def _said(row: DetectRow) -> str:
    return (
        f"the rule {row.hits} of {row.window} finds {row.detected:.1%} of the {row.attacks} attacks that made a sink "
        f"({row.tried} were tried) at {FALSE_ALARMS:.0%} false alarms on harmless text, AUROC {row.auroc:.4f}"
    )


@dataclass(frozen=True, kw_only=True)
class _Recorder(SinkDetector):
    """Keeps the neurons' values instead of watching them."""

    into: list[Tensor] = field(default_factory=list)

    def new_values(self, values: NeuronValues) -> None:
        self.into.append(values.old.float().cpu())


@torch.no_grad()
def neuron_values(
    target: Target, sites: Sequence[tuple[int, ...]], ids: Int[Tensor, "row pos"], batch: int
) -> Float[Tensor, "row pos neuron"]:
    """`hook_post` of the neurons, from passes that end at their layer (for an expert, also where it was not chosen)."""
    recorder = _Recorder(sites=sites, levels=[1.0] * len(sites))
    with recorder.on(target):
        for part in ids.split(batch):
            target.forward(part, upto=sites[0][0])
    return torch.cat(recorder.into)


def make_detector(setup: Setup, neurons: Sequence[Neuron], threshold: float = 0.5) -> SinkDetector:
    """A detector for sink neurons, calibrated on the first tokens of the typical text.

    It watches neurons of one expert only: the one that writes most.
    """
    sites = [n.site for n in neurons if n.expert == neurons[0].expert]
    levels = neuron_values(setup.target, sites, setup.ids[:, :1], len(setup.ids))[:, 0].median(0).values
    return SinkDetector(sites=sites, levels=levels.tolist(), threshold=threshold)


@measurement(
    group="Repetition",
    figure="sinkscope.figures.vocabulary:detection",
    command="attack",
    flag="detect",
    quick={"lengths": [8], "sequences": 6, "prefix": ""},
    check=refuse_no_lengths,
)
def detect_attack(
    setup: Setup,
    *,
    clusters: Hidden = None,
    lengths: Sequence[Annotated[int, Option(min=2)]] = (8, 32, 128),
    sequences: Positive = 1000,
    harmless: Hidden = None,
    rules: Hidden = RULES,
    threshold: Annotated[float, Option(hidden=True)] = 0.5,
    bos: Annotated[bool | None, Option(own=True)] = None,
    prefix: str | None = None,
    batch: Annotated[int, Option(name="--batch-size", min=1)] = 64,
) -> AttackDetection:
    """Measure how well sink neurons reveal the attack: `SinkDetector` against text, code and honest repetition.

    The score of a sequence under a rule is the largest threshold at which the rule would raise the alarm somewhere, so
    one pass gives the whole curve. Positives are the attacks that made a sink at some position (norm >= half of BOS's);
    negatives are pieces of the same length in the same context. If the model has no sink, `sink_layer` is None.

    Args:
        clusters: Head -> token ids. By default `token_clusters` finds them.
        lengths: Tokens per sequence.
        sequences: Attacks of each kind, and the maximum number of pieces of each harmless text.
        harmless: Name -> text. By default the typical text, source code of Python's library, tables and songs.
        rules: Pairs (hits, window) of the running rule.
        threshold: Default score that counts as a hit.
        bos: Try the attack only with BOS, or only without. By default both are tried.
        prefix: Text of the chat before the attack; "" leaves the chat out. By default that of the tokenizer's chat
            template, or of a plain chat.
        batch: Sequences per pass.

    Example:
        sinkscope attack --detect --model llama-2-7b
    """
    if not rules:
        raise SinkscopeError("rules: none is given; give pairs of hits and window, such as (2, 4)")
    layer, neurons = causal_neurons(setup)
    lengths = sorted(set(lengths))
    setup.record(
        lengths=lengths,
        rules=[list(rule) for rule in rules],
        harmless=None if harmless is None else list(harmless),
        clusters="given" if clusters is not None else "token_clusters",
    )
    if layer is None or not neurons:
        return AttackDetection(sink_layer=layer, threshold=threshold, false_rates=FALSE_RATES)
    texts: Mapping[str, str] = harmless or {
        "text": setup.text,
        "code": source_code(),
        "repetition": honest_repetition(seed=setup.seed),
    }
    setup.record(harmless=list(texts))
    detector = make_detector(setup, neurons, threshold)
    for hits, window in rules:
        replace(detector, hits=hits, window=window)  # refuses an invalid rule
    trials = make_trials(setup, layer, neurons, bos=bos, prefix=prefix, clusters=clusters, lengths=lengths, batch=batch)
    found = list[DetectRow]()
    for done, length in enumerate(lengths):
        pieces = {name: text_rows(setup.tokenizer, text, sequences, length, None) for name, text in texts.items()}
        drawn, _ = drawn_sequences(trials.pools, length, sequences, setup.seed)
        for i, context in enumerate(trials.contexts, 1):
            if len(drawn):
                found += _compare(trials, context, detector, drawn, pieces, rules)
            setup.progress("detection", done * len(trials.contexts) + i, len(lengths) * len(trials.contexts))
    return AttackDetection(
        sink_layer=layer,
        sites=tuple(site.numbers for site in detector.checked_sites),
        levels=tuple(detector.levels),
        threshold=threshold,
        false_rates=FALSE_RATES,
        detections=tuple(found),
    )


def _compare(
    trials: Trials,
    context: Context,
    detector: SinkDetector,
    drawn: Int[Tensor, "row pos"],
    pieces: Mapping[str, Tensor],
    rules: Sequence[tuple[int, int]],
) -> list[DetectRow]:
    quiet = {name: _measure(trials, context, detector, rows)[0] for name, rows in pieces.items()}
    if len(quiet) > 1:
        quiet["all"] = torch.cat(list(quiet.values()))
    found = []
    for attack, rows in (("cluster", drawn), ("repeated", repeat(drawn))):
        scores, norms = _measure(trials, context, detector, rows)
        made_a_sink = (norms >= SUCCESS).any(1)
        for name, of_text in quiet.items():
            for hits, window in rules:
                if hits > scores.shape[1]:
                    continue
                loud, low = peak(scores, hits, window)[made_a_sink], peak(of_text, hits, window)
                what = {
                    "context": context.name,
                    "length": drawn.shape[1],
                    "attack": attack,
                    "harmless": name,
                    "hits": hits,
                    "window": window,
                    "tried": len(rows),
                }
                found.append(_row(what, loud, low, detector.threshold))
    return found


def _measure(
    trials: Trials, context: Context, detector: SinkDetector, rows: Int[Tensor, "row pos"]
) -> tuple[Float[Tensor, "row attacked"], Float[Tensor, "row attacked"]]:
    """Scores and norms at the positions of a sequence that the rule sees, from the same passes."""
    recorder = _Recorder(sites=detector.sites, levels=detector.levels)
    with recorder.on(trials.setup.target):
        norms = trials.norms(context, rows)
    return detector.scores(torch.cat(recorder.into))[:, max(len(context.lead), 1) :], norms


def peak(scores: Float[Tensor, "row pos"], hits: int, window: int) -> Float[Tensor, " row"]:
    """The largest threshold at which "`hits` of the last `window` positions" holds somewhere in each row."""
    padded = torch.nn.functional.pad(scores, (window - 1, 0), value=-math.inf)
    return padded.unfold(1, window, 1).topk(hits, dim=-1).values[..., -1].max(1).values


def _row(
    what: dict[str, Any], loud: Float[Tensor, " attack"], quiet: Float[Tensor, " piece"], threshold: float
) -> DetectRow:
    """The row of a rule from the scores of attacks and of harmless pieces; `what` are its other fields."""
    cut = cut_at(quiet, FALSE_ALARMS)
    some = len(loud) > 0
    return DetectRow(
        **what,
        attacks=len(loud),
        harmless_pieces=len(quiet),
        auroc=area(loud, quiet) if some else None,
        detected=(loud > cut).float().mean().item() if some else None,
        cut=cut if some and math.isfinite(cut) else None,
        detected_here=wilson(int((loud >= threshold).sum()), len(loud)) if some else None,
        false_alarms=wilson(int((quiet >= threshold).sum()), len(quiet)),
        roc=tuple((loud > cut_at(quiet, rate)).float().mean().item() for rate in FALSE_RATES) if some else (),
    )


def cut_at(quiet: Float[Tensor, " piece"], rate: float) -> float:
    """The lowest score that at most a share `rate` of harmless pieces exceeds; minus infinity if all may."""
    allowed = math.floor(rate * len(quiet) + 1e-9)
    return -math.inf if allowed >= len(quiet) else float(quiet.sort(descending=True).values[allowed])


def area(loud: Float[Tensor, " attack"], quiet: Float[Tensor, " piece"]) -> float:
    """Area under the ROC curve: share of pairs in which the attack scores higher, ties counted half."""
    order = quiet.sort().values
    below, not_above = torch.searchsorted(order, loud), torch.searchsorted(order, loud, right=True)
    return float((below + not_above).double().mean() / 2 / len(quiet))
