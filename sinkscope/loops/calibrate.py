"""`calibrate` fits the monitor to a vocabulary: thresholds that ordinary text hardly ever crosses, and how often."""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from sinkscope.console import silent
from sinkscope.errors import SinkscopeError
from sinkscope.loops.checker import number, split
from sinkscope.loops.follow import Form, open_bytes, pieces
from sinkscope.loops.monitor import Monitor, MonitorSettings
from sinkscope.results import ModelInfo, Result, provenance

START = 64  # the paper's monitor does not trigger before
BLOCK = 256  # tokens that make one event at most
LEAST = 8192  # tokens of a text
PIECES = 32  # of a single text: every second one is held out
SHORTEST = 16  # tokens that a repetition needs, however clean the text is
LONGEST = 1024  # largest pattern that servers are told to look for
COPIES = {"vllm": 3, "llama_cpp": 4}  # what their users take
UNUSUAL = 0.02  # of the blocks of ordinary text may cross a threshold; a loop crosses two
SIGNALS = ("theta_ttr", "theta_cr", "theta_nov")


@dataclass(frozen=True)
class AlarmRate:
    """False alarms of a rule on the text that was held out.

    Attributes:
        rule: the rule, and where its settings come from.
        alarms: number of alarms; alarms that follow each other count once.
        per_million: alarms per million tokens.
        at_most: 95 % upper limit of the alarms per million tokens (Poisson).
    """

    rule: str
    alarms: int
    per_million: float
    at_most: float


@dataclass(frozen=True, kw_only=True)
class LoopCalibration(Result):
    """Settings for a vocabulary, and their false alarms on text that had no part in them.

    Attributes:
        vocabulary: size of the vocabulary.
        fitted: tokens that the settings were fitted to.
        held_out: tokens that were held out.
        promised: false alarms per million tokens that the settings should not exceed (95 %): the rate that was asked
            for, or a higher one if the text is too short to show it.
        lowest: the lowest value of each signal in the fitted text, by the name of its threshold.
        longest: tokens of the longest repetition in the fitted text, exact or nearly so.
        monitor: the settings, as `--settings` and `MonitorSettings` take them.
        servers: settings of the rules of vLLM and of llama.cpp's server, by their names.
        rates: false alarms on the text that was held out.
    """

    page: ClassVar[str] = "measure/loops"
    kind: ClassVar[str] = "loop-calibration"
    drawing: ClassVar[Any] = "sinkscope.figures.repetition:draw_calibration"

    vocabulary: int
    fitted: int
    held_out: int
    promised: float
    lowest: dict[str, float]
    longest: int
    monitor: dict[str, Any]
    servers: dict[str, dict[str, int]]
    rates: tuple[AlarmRate, ...]

    def conclusion(self) -> str:
        """The rate that was promised, and what was measured."""
        found = self.rates[1]
        return (
            f"For a vocabulary of {self.vocabulary}, these settings should raise at most {self.promised:.3g} false "
            f"alarms per million tokens of such text; on {self.held_out} held-out tokens they raised {found.alarms} "
            f"({found.per_million:.3g} per million), and the default ones {self.rates[0].alarms}."
        )

    def details(self) -> list[str]:
        """The settings, as each program takes them."""
        extremes = ", ".join(f"{name.removeprefix('theta_')} {value:.3g}" for name, value in self.lowest.items())
        return [
            f"Most repetitive in the fitted text: {extremes}, and {self.longest} tokens of repetition.",
            f"Monitor: {json.dumps(self.monitor)}",
            f"vLLM, in a request: {json.dumps({'repetition_detection': self.servers['vllm']})}",
            "llama.cpp with --repetition-detection, in a request: "
            + json.dumps({"repetition_detection": self.servers["llama_cpp"]}),
        ]


def calibrate(
    outputs: Sequence[Sequence[int]],
    *,
    vocabulary: int,
    rate: float = 10.0,
    settings: MonitorSettings | None = None,
    name: str = "input",
    progress: Callable[[str, int, int], None] = silent,
) -> LoopCalibration:
    """Fit the monitor's thresholds to ordinary text.

    All thresholds come from one rank: at rank j, each lies where the j most repetitive blocks of the text, by that
    signal, are below it. j is the largest at which the monitor, at 95 % confidence, raises at most `rate` alarms per
    million tokens. This is a tolerance limit (Wilks 1941): it needs no assumption on how the signals are distributed.
    The model is taken to be sure of every token, which is the worst case, and both gates to open at once.

    Args:
        outputs: token ids of texts without loops. Every second one is held out; a single one is cut into pieces.
        vocabulary: size of the vocabulary.
        rate: false alarms per million tokens that are accepted.
        settings: of the monitor (rule "repeats"), for all but the thresholds.
        name: what the result calls the text.
        progress: called with a stage, what is done, and how much there is.

    Raises:
        SinkscopeError: the text is too short, or `rate` is not positive.
    """
    import numpy as np
    from scipy.special import gammaincinv

    started, base = time.perf_counter(), settings or MonitorSettings()
    if not rate > 0:
        raise SinkscopeError(f"rate is {rate}: expected false alarms per million tokens, more than 0")
    if len(outputs) == 1:
        piece = -(-len(outputs[0]) // PIECES) or 1
        outputs = [outputs[0][i : i + piece] for i in range(0, len(outputs[0]), piece)]
    size, rest = (sum(map(len, part)) for part in (outputs[::2], outputs[1::2]))
    if min(size, rest) < LEAST // 2:
        raise SinkscopeError(f"{name} has {size + rest} tokens: expected at least {LEAST}; a million are better")
    table, starts = _signals(outputs[::2], base, progress)
    lows = np.sort(np.minimum.reduceat(table, starts), axis=0)
    limit: list[float] = (1e6 * gammaincinv(range(1, len(lows) + rest), 0.95)).tolist()  # of the mean of 0, 1, ...
    events = sum(most <= rate * size for most in limit[1 : len(lows)])  # that the text may have
    ttr, cr, nov, tail = (np.searchsorted(low, values, "right") for low, values in zip(lows.T, table.T, strict=True))
    ranks = np.maximum(np.minimum(ttr, cr), np.minimum(nov, tail))  # from which on a step triggers
    rank = min(int(np.sort(np.minimum.reduceat(ranks, starts))[events]) - 1, int(len(lows) * UNUSUAL))
    thetas = np.floor(lows[rank] * 1000) / 1000
    changed: dict[str, Any] = {"window": base.window, **dict(zip(SIGNALS, thetas.tolist(), strict=False))}
    changed["tail_shortest"] = max(SHORTEST, 1 - int(lows[events, 3]))  # holds also where nothing else must be met
    paper = MonitorSettings.paper(window=base.window)
    rules = {
        "monitor, default": base,
        "monitor, recommended": base.with_(**changed),
        "paper's monitor, default": paper,
        "paper's monitor, recommended": paper.with_(**changed),
    }
    servers: dict[str, dict[str, int]] = {}
    for server, copies in COPIES.items():
        size_ = min(LONGEST, -(-changed["tail_shortest"] // copies))
        servers[server] = {"max_pattern_size": LONGEST, "min_pattern_size": size_, "min_count": copies}
        same = {"tail_repeats": copies, "tail_shortest": size_ * copies, "tail_longest": LONGEST}
        rules[f"{server}, recommended"] = MonitorSettings().with_(tail_noise=0.0, **same)
    rates: list[AlarmRate] = []
    for rule, used in rules.items():
        progress("counting", len(rates), len(rules))
        alarms = sum(_alarms(ids, used) for ids in outputs[1::2])
        rates.append(AlarmRate(rule, alarms, alarms * 1e6 / rest, limit[alarms] / rest))
    digest = hashlib.sha256(b"".join(array("I", ids).tobytes() + b"|" for ids in outputs)).hexdigest()[:16]
    return LoopCalibration(
        vocabulary=vocabulary,
        fitted=size,
        held_out=rest,
        promised=max(rate, limit[0] / size),
        lowest=dict(zip(SIGNALS, lows[0].tolist(), strict=False)),
        longest=-int(lows[0, 3]),
        monitor=changed,
        servers=servers,
        rates=tuple(rates),
        model=ModelInfo(name=name, family="text", n_layers=0, d_model=0, d_mlp=0, fingerprint=digest),
        settings={**vars(base), "rate": rate},
        provenance=provenance(started=started, device="cpu", dtype="int", attention="none", bos=None, seed=0),
    )


def _signals(
    outputs: Sequence[Sequence[int]], base: MonitorSettings, progress: Callable[[str, int, int], None]
) -> tuple[Any, list[int]]:
    """Signals of every step, less is more repetitive: ttr, cr, novelty, minus the tail's tokens; starts of blocks."""
    import numpy as np

    values, starts = array("d"), list[int]()
    for done, ids in enumerate(outputs):
        progress("reading", done, len(outputs))
        watched = Monitor(MonitorSettings.paper(rule="never", window=base.window))
        repeats = Monitor(base.with_(rule="repeats", tail_shortest=12))
        for i, token in enumerate(ids):
            starts += [len(values) // 4] if i % BLOCK == 0 else []
            step, tail = watched.update(token), repeats.update(token).tail
            known = (step.ttr, step.cr, step.novelty) if i >= START else (1.0, 1.0, 1.0)
            values.extend((*known, tail.start - i - 1 if tail else 0))
    return np.array(values).reshape(-1, 4), starts


def _alarms(ids: Sequence[int], settings: MonitorSettings) -> int:
    """Alarms where the model is sure of every token; those that follow each other count once."""
    monitor = Monitor(settings)
    return sum(step.trigger and not step.level for step in (monitor.update(token, 1.0) for token in ids))


def read_outputs(file: str, form: Form, tokenizer: Any = None) -> tuple[list[list[int]], int]:
    """Token ids of the outputs in a file, and the size of their vocabulary.

    Args:
        file: a text, JSON lines or server-sent events, as for `loops --follow`.
        form: which of these.
        tokenizer: of the model that the outputs are for; None: ids are taken as they are, text is split into words.

    Raises:
        SinkscopeError: the file cannot be read.
    """
    texts: dict[str, str] = {}
    tokens: dict[str, list[object]] = {}
    for piece in pieces(open_bytes(file), form, file):
        texts[piece.stream] = texts.get(piece.stream, "") + piece.text
        if piece.key is not None:
            tokens.setdefault(piece.stream, []).append(piece.key)
    if tokenizer is None:
        outputs = [number(tokens.get(name) or split(text)) for name, text in texts.items()]
        return outputs, len({id for ids in outputs for id in ids})
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts.values()], len(tokenizer)
