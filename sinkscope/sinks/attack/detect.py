"""How well sink neurons at later positions tell attacks from text, code and honest repetition."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.interventions.base import Run
from sinkscope.interventions.edits import NeuronGroup
from sinkscope.interventions.positions import Call, Memory
from sinkscope.interventions.sink_detector import SinkDetector
from sinkscope.models.target import Target
from sinkscope.rate import Rate, wilson
from sinkscope.results import Result
from sinkscope.sinks.attack.attack import LENGTHS, SUCCESS, check_attack
from sinkscope.sinks.attack.attempts import Arena, Context, make_arena
from sinkscope.sinks.attack.chunks import Opened
from sinkscope.sinks.attack.clusters import sink_of
from sinkscope.sinks.attack.sequences import draw, repeat
from sinkscope.sinks.first_token.ablation import Neuron
from sinkscope.sinks.first_token.locate import Progress, Setup, setup
from sinkscope.text import text_rows
from sinkscope.text.harmless import honest_repetition, source_code

RULES = ((1, 1), (2, 4), (4, 8), (8, 16))  # (hits, window)
FALSE_ALARMS = 0.01  # the rate at which detection is stated
FALSE_RATES = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


@dataclass(frozen=True)
class DetectRow:
    """One rule against one kind of harmless text.

    Attributes:
        context: "BOS", "no BOS" or "chat".
        length: tokens of every sequence, attacks and harmless ones.
        attack: "cluster" or "repeated".
        harmless: which text; "all" for all of them together.
        hits: how many positions must count,
        window: of how many.
        attacks: sequences that made a sink at some position, which are what is to be detected.
        tried: sequences that were tried.
        harmless_pieces: pieces of harmless text.
        auroc: probability that an attack scores above a harmless piece; None: no attack made a sink.
        detected: attacks detected with at most 1 % false alarms on this text; None: no attack made a sink.
        cut: the score at which that is.
        detected_here: attacks detected at `threshold` of the result.
        false_alarms: harmless pieces that raise the alarm there.
        roc: share detected at each of `false_rates`; empty: no attack made a sink.
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
        sink_layer: None: the model has no sink.
        sites: the neurons that are watched.
        levels: value of each at the first token.
        threshold: score that counts by default, in a first token's.
        false_rates: false alarms at which `roc` is given.
        detections: one for each context, length, attack, harmless text and rule.
    """

    kind: ClassVar[str] = "attack-detection"
    percent: ClassVar[tuple[str, ...]] = ("detected", "detected_here", "false_alarms")

    sink_layer: int | None
    sites: tuple[tuple[int, ...], ...]
    levels: tuple[float, ...]
    threshold: float
    false_rates: tuple[float, ...]
    detections: tuple[DetectRow, ...]

    def detector(self, hits: int = 2, window: int = 4, threshold: float | None = None) -> SinkDetector:
        """The detector that was measured, to be entered on a model.

        Raises:
            SinkscopeError: the model has no sink, so there is nothing to watch.
        """
        if not self.sites:
            raise SinkscopeError(f"{self.model.name} has no sink, so there is no neuron to watch: use another model")
        cut = self.threshold if threshold is None else threshold
        return SinkDetector(sites=self.sites, levels=self.levels, threshold=cut, hits=hits, window=window)

    @property
    def only_harmless(self) -> str | None:
        """Name of the harmless text where there is only one, and so no row "all"."""
        names = {d.harmless for d in self.detections}
        return names.pop() if len(names) == 1 else None

    def rows(self) -> list[dict[str, Any]]:
        """One row per context, length, attack, harmless text and rule."""
        return [
            {
                "context": d.context,
                "length": d.length,
                "attack": d.attack,
                "harmless": d.harmless,
                "rule": f"{d.hits} of {d.window}",
                "attacks": d.attacks,
                "pieces": d.harmless_pieces,
                "auroc": d.auroc,
                "detected": d.detected,
                "cut": d.cut,
                "detected_here": None if d.detected_here is None else d.detected_here.share,
                "false_alarms": d.false_alarms.share,
            }
            for d in self.detections
        ]

    def summary(self) -> str:
        """What is watched, and how well it separates."""
        if self.sink_layer is None:
            return f"{self.model.name} has no sink, so there is nothing to detect"
        names = ", ".join(map(str, self.sites))
        lines = [
            f"{self.model.name}: watching {names}; a position counts from {self.threshold:g} of a first token's value"
        ]
        ours = [d for d in self.detections if d.attack == "cluster" and d.harmless in ("all", self.only_harmless)]
        for place in dict.fromkeys((d.context, d.length) for d in ours):
            here = [d for d in ours if (d.context, d.length) == place and d.detected is not None]
            best = max(here, key=lambda d: (d.detected, d.auroc), default=None)
            said = "no cluster attack made a sink"
            if best is not None:
                said = (
                    f"{best.attacks} of {best.tried} cluster attacks made a sink; {best.hits} of {best.window} detects "
                    f"{best.detected:.1%} of them at {FALSE_ALARMS:.0%} false alarms, AUROC {best.auroc:.4f}"
                )
            lines.append(f"{place[0]}, {place[1]} tokens: {said}")
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class _Recorder(SinkDetector):
    """Keeps the neurons' values instead of watching them."""

    into: list[Tensor] = field(default_factory=list)

    def new_values(
        self, old: Float[Tensor, "batch pos neuron"], call: Call, memory: Memory, group: NeuronGroup, run: Run
    ) -> None:
        self.into.append(old.float().cpu())


@torch.no_grad()
def neuron_values(
    target: Target, sites: Sequence[tuple[int, ...]], ids: Int[Tensor, "row pos"], batch: int
) -> Float[Tensor, "row pos neuron"]:
    """`hook_post` of the neurons, from passes that end at their layer (of an expert: also where it was not asked)."""
    recorder = _Recorder(sites=sites, levels=[1.0] * len(sites))
    layer = target.layers[sites[0][0]]
    with recorder.on(target), target.hooks((layer, "post", lambda *_: target.stop())):
        for part in ids.split(batch):
            target.forward(part)
    return torch.cat(recorder.into)


def make_detector(made: Setup, neurons: Sequence[Neuron], threshold: float = 0.5) -> SinkDetector:
    """A detector for sink neurons, calibrated on the first tokens of the typical text.

    Neurons of one expert only: those of the one that writes most.
    """
    sites = [n.site for n in neurons if n.expert == neurons[0].expert]
    levels = neuron_values(made.target, sites, made.ids[:, :1], len(made.ids))[:, 0].median(0).values
    return SinkDetector(sites=sites, levels=levels.tolist(), threshold=threshold)


def detect_attack(
    model: object = None,
    *,
    tokenizer: Any = None,
    clusters: Mapping[int, Sequence[int]] | None = None,
    lengths: Sequence[int] = LENGTHS,
    sequences: int = 1000,
    harmless: Mapping[str, str] | None = None,
    rules: Sequence[tuple[int, int]] = RULES,
    threshold: float = 0.5,
    bos: bool | None = None,
    prefix: str | None = None,
    text: str | Path | None = None,
    seed: int = 0,
    batch: int = 64,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> AttackDetection:
    """Measure `SinkDetector`: cluster attacks and repeated tokens against text, code and honest repetition.

    What a rule says of a sequence is the largest score at which it would raise the alarm somewhere, so one pass gives
    the whole curve. Positives are the attacks that made a sink at some position (norm >= half of BOS's); negatives are
    pieces of the same length in the same context.

    Args:
        model: as in `find_sinks`.
        tokenizer: for live models that carry none.
        clusters: head -> token ids; None: `token_clusters` finds them.
        lengths: tokens of a sequence.
        sequences: attacks of each kind, and at most as many pieces of each harmless text.
        harmless: name -> text; None: the typical text, source code of Python's library, tables and songs.
        rules: (hits, window) of the running rule.
        threshold: score that counts by default.
        bos: True: only with BOS, False: only without, None: both.
        prefix: as in `cluster_attack`.
        text: file of typical text; None: the neutral text that ships.
        seed: of the draws.
        batch: sequences of one pass.
        revision: of a hub id.
        dtype: as in `find_sinks`.
        device: as in `find_sinks`.
        trust_remote_code: run code that comes with the checkpoint.
        progress: called as `progress(what, done, total)`.

    A model without a sink is an answer: `sink_layer` is None.

    Raises:
        SinkscopeError: bad input; the message is one line and says what to do.
    """
    check_attack(lengths, sequences, batch, seed)
    if not rules:
        raise SinkscopeError("rules: none is given; give pairs of hits and window, such as (2, 4)")
    options: dict[str, Any] = {
        "tokenizer": tokenizer,
        "revision": revision,
        "dtype": dtype,
        "device": device,
        "trust_remote_code": trust_remote_code,
    }
    made, layer, neurons = sink_of(setup(model, bos=bos or None, text=text, seed=seed, **options))
    detector, found = None, list[DetectRow]()
    lengths = sorted(set(lengths))
    if layer is not None and neurons:
        detector = make_detector(made, neurons, threshold)
        for hits, window in rules:
            replace(detector, hits=hits, window=window)  # refuses what is no rule
        arena = make_arena(
            made,
            Opened(model, made.target, options),
            (layer, neurons),
            bos=bos,
            prefix=prefix,
            clusters=clusters,
            lengths=lengths,
            batch=batch,
            progress=progress,
        )
        if harmless is None:
            harmless = {"text": made.text, "code": source_code(), "repetition": honest_repetition(seed=seed)}
        done, total = 0, len(lengths) * len(arena.contexts)
        for length in lengths:
            pieces = _pieces(made, harmless, length, sequences)
            drawn, _ = draw(arena.pools, length, sequences, seed)
            for context in arena.contexts:
                if len(drawn):
                    found += _compare(arena, context, detector, drawn, pieces, rules)
                done += 1
                if progress is not None:
                    progress("detection", done, total)
    return AttackDetection(
        model=made.info(),
        settings={
            "lengths": list(lengths),
            "sequences": sequences,
            "rules": [list(r) for r in rules],
            "bos": bos,
            "harmless": None if harmless is None else list(harmless),
            "prefix": prefix,
            "seed": seed,
            "batch": batch,
            "text": None if text is None else Path(text).name,
            "revision": revision,
            "clusters": "given" if clusters is not None else "token_clusters",
        },
        provenance=made.provenance(),
        sink_layer=layer,
        sites=() if detector is None else tuple(tuple(n for n in s if n is not None) for s in detector_sites(detector)),
        levels=() if detector is None else tuple(detector.levels),
        threshold=threshold,
        false_rates=FALSE_RATES,
        detections=tuple(found),
    )


def detector_sites(detector: SinkDetector) -> list[tuple[int, ...]]:
    """Sites as interventions take them."""
    sites = detector.checked_sites
    return [(s.layer, s.neuron) if s.expert is None else (s.layer, s.expert, s.neuron) for s in sites]


def _pieces(made: Setup, harmless: Mapping[str, str], length: int, count: int) -> dict[str, Tensor]:
    return {name: text_rows(made.target.tokenizer, text, count, length, None) for name, text in harmless.items()}


def _compare(
    arena: Arena,
    context: Context,
    detector: SinkDetector,
    drawn: Int[Tensor, "row pos"],
    pieces: Mapping[str, Tensor],
    rules: Sequence[tuple[int, int]],
) -> list[DetectRow]:
    quiet = {name: _measure(arena, context, detector, rows)[0] for name, rows in pieces.items()}
    if len(quiet) > 1:
        quiet["all"] = torch.cat(list(quiet.values()))
    found = []
    for attack, rows in (("cluster", drawn), ("repeated", repeat(drawn))):
        scores, norms = _measure(arena, context, detector, rows)
        made_a_sink = (norms >= SUCCESS).any(1)
        for name, of_text in quiet.items():
            for hits, window in rules:
                if hits > scores.shape[1]:
                    continue
                loud, low = peak(scores, hits, window)[made_a_sink], peak(of_text, hits, window)
                found.append(
                    _row(
                        context.name,
                        drawn.shape[1],
                        attack,
                        name,
                        (hits, window),
                        len(rows),
                        loud,
                        low,
                        detector.threshold,
                    )
                )
    return found


def _measure(
    arena: Arena, context: Context, detector: SinkDetector, rows: Int[Tensor, "row pos"]
) -> tuple[Float[Tensor, "row attacked"], Float[Tensor, "row attacked"]]:
    """Scores and norms at the positions of a sequence that the rule sees, from the same passes."""
    recorder = _Recorder(sites=detector.sites, levels=detector.levels)
    with recorder.on(arena.made.target):
        norms = arena.norms(context, rows)
    return detector.scores(torch.cat(recorder.into))[:, max(len(context.lead), 1) :], norms


def peak(scores: Float[Tensor, "row pos"], hits: int, window: int) -> Float[Tensor, " row"]:
    """The largest threshold at which "`hits` of the last `window` positions" holds somewhere in each row."""
    padded = torch.nn.functional.pad(scores, (window - 1, 0), value=-math.inf)
    return padded.unfold(1, window, 1).topk(hits, dim=-1).values[..., -1].max(1).values


def _row(
    context: str,
    length: int,
    attack: str,
    harmless: str,
    rule: tuple[int, int],
    tried: int,
    loud: Float[Tensor, " attack"],
    quiet: Float[Tensor, " piece"],
    threshold: float,
) -> DetectRow:
    auroc = detected = cut = here = None
    roc: tuple[float, ...] = ()
    if len(loud):
        auroc = area(loud, quiet)
        cut = cut_at(quiet, FALSE_ALARMS)
        detected = (loud > cut).float().mean().item()
        here = wilson(int((loud >= threshold).sum()), len(loud))
        roc = tuple((loud > cut_at(quiet, rate)).float().mean().item() for rate in FALSE_RATES)
    alarms = wilson(int((quiet >= threshold).sum()), len(quiet))
    finite = None if cut is None or not math.isfinite(cut) else cut
    return DetectRow(
        context,
        length,
        attack,
        harmless,
        *rule,
        len(loud),
        tried,
        len(quiet),
        auroc,
        detected,
        finite,
        here,
        alarms,
        roc,
    )


def cut_at(quiet: Float[Tensor, " piece"], rate: float) -> float:
    """The lowest score that at most a share `rate` of harmless pieces exceeds; minus infinity where all may."""
    allowed = math.floor(rate * len(quiet) + 1e-9)
    return -math.inf if allowed >= len(quiet) else float(quiet.sort(descending=True).values[allowed])


def area(loud: Float[Tensor, " attack"], quiet: Float[Tensor, " piece"]) -> float:
    """Area under the ROC curve: share of pairs in which the attack scores higher, ties counted half."""
    order = quiet.sort().values
    below, not_above = torch.searchsorted(order, loud), torch.searchsorted(order, loud, right=True)
    return float((below + not_above).double().mean() / 2 / len(quiet))
