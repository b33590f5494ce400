"""What ends loops, and what each remedy costs: samplers, stopping at the alarm, and LoopGuard, on the same openings.

    python -m experiments.loopguard.remedies WORK [--model M] [--new 400] [--temperature 0] [--only NAME ...]
    python -m experiments.loopguard.outcome WORK     # the figures

It lets a model continue openings under each remedy, and appends the outputs to WORK/runs.jsonl; run it again to go on
after an interruption.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from experiments.loopguard.openings import FORMS, openings
from experiments.record import Row, read_rows, value_of_each
from experiments.script import run
from sinkscope.bench.tasks.loops import first_alarm
from sinkscope.loops.dry import DRY
from sinkscope.loops.generate import generate, padded
from sinkscope.loops.guard import LoopGuard, LoopReporter, Retention
from sinkscope.opening.load import load

UNALARMED = 48
"""Where the surprise of an output without an alarm is measured from: no alarm comes earlier."""
READ, CONFIDENT = 400, 0.9
BUDGET = 256
"""Of the printed guard: it is as far below the length of these outputs as the paper's is below that of its own."""


class WideGuard(LoopGuard):
    """A guard whose recent window R reaches back to the first token."""

    def retention(self, prompt: int, first: int = 0) -> Retention:
        """The printed budgets."""
        return replace(super().retention(prompt, first), recent=1 << 20)


@dataclass(frozen=True)
class NoHistory(Retention):
    """Anchors and recent tokens alone."""

    @property
    def sparse_tokens(self) -> int:
        """None."""
        return 0


class BareGuard(LoopGuard):
    """A guard that keeps no history, so none with copies."""

    def retention(self, prompt: int, first: int = 0) -> Retention:
        """The printed budgets, but no history."""
        return NoHistory(**vars(super().retention(prompt, first)))


PRINTED = "as printed"
P1 = "p1 alone"
CHOICES: dict[str, Callable[[], LoopGuard]] = {
    PRINTED: lambda: LoopGuard.paper(BUDGET),
    "R: all tokens": lambda: WideGuard.paper(BUDGET),
    "no history": lambda: BareGuard.paper(BUDGET),
    "no copies at all": lambda: LoopGuard.paper(BUDGET, recent_window=False),
    "exact copies alarm": lambda: LoopGuard.paper(BUDGET, variant="repeats"),
    "penalty": lambda: LoopGuard.paper(BUDGET, penalty=LoopGuard().penalty),
    "copies alarm, penalty": lambda: LoopGuard.paper(BUDGET, variant="repeats", penalty=LoopGuard().penalty),
    P1: lambda: LoopGuard.paper(BUDGET, variant="p1"),
    "p1 above 0.5": lambda: LoopGuard.paper(BUDGET, variant="p1", monitor={"theta_conf": 0.5}),
    "always on": lambda: LoopGuard.paper(BUDGET, variant="always"),
}
"""The printed guard with one choice changed (or two, where a comma is), and pruning without a signal as the control."""
FULL, GUARD, PLAIN = "full", "LoopGuard", "LoopGuard, plain generate"
GUARDS: dict[str, Callable[[], LoopGuard | bool]] = {
    FULL: lambda: False,
    PLAIN: lambda: LoopGuard(act="cut"),
    GUARD: LoopGuard,
    **CHOICES,
}
SAMPLERS: dict[str, Callable[[], Any]] = {
    "temperature 0.7": lambda: {"do_sample": True, "temperature": 0.7, "top_k": 0},
    "repetition penalty 1.1": lambda: {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.1)]},
    "no-repeat-6": lambda: {"logits_processor": [NoRepeatNGramLogitsProcessor(6)]},
    "DRY": lambda: {"logits_processor": [DRY()]},
    "stop": dict,
}


@torch.no_grad()
def surprise(model: Any, ids: list[int], tokens: list[int], after: int) -> Row:
    """How the model itself reads at most 400 tokens after a step, with a clean cache.

    Returns:
        nll: the sum of their surprise. counted: their number. streak: the longest run of tokens of a probability above
        0.9 for the most likely one, which is what the paper's p1 counts.
    """
    text = tokens[: after + READ]
    if after >= len(text):
        return {"nll": 0.0, "counted": 0, "streak": 0}
    logits = model(torch.tensor([[*ids, *text]]), use_cache=False).logits[0, len(ids) + after - 1 : -1].float()
    nll = torch.nn.functional.cross_entropy(logits, torch.tensor(text[after:]), reduction="sum")
    streak = longest = 0
    for sure in (logits.softmax(-1).amax(-1) > CONFIDENT).tolist():
        streak = (streak + 1) * sure
        longest = max(longest, streak)
    return {"nll": float(nll), "counted": len(text) - after, "streak": longest}


@torch.no_grad()
def sampled(model: Any, rows: list[list[int]], method: str, new: int, ends: Sequence[int]) -> list[list[int]]:
    """New tokens of each row under a sampler, or up to the alarm of a reporter that stops rows."""
    options = SAMPLERS[method]()
    reporter = LoopReporter(eos_token_id=[*ends, 0], stop=True)
    if method == "stop":
        options = {"logits_processor": [reporter]}
    torch.manual_seed(0)
    ids, mask = padded(rows, 0, model.device)
    settings = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, **options}
    output = model.generate(ids, attention_mask=mask, **settings)[:, ids.shape[1] :].tolist()
    stops: dict[int, int] = {}
    for event in reporter.events:
        stops[event.row] = event.step
    written: list[list[int]] = []
    for number, row in enumerate(output):
        places = []
        for place, token in enumerate(row):
            if token in ends:
                places.append(place + 1)
        written.append(row[: stops.get(number, min(places, default=len(row)))])
    return written


def continued(
    model: Any, setting: Row, method: str, places: Sequence[tuple[str, int]], full: dict[Any, Row]
) -> list[Row]:
    """The outputs of a method after openings, by family and number; `full` are those of the whole cache."""
    rows: list[list[int]] = []
    for family, number in places:
        rows.append(model.tokenizer(openings(family, number + 1)[number], verbose=False)["input_ids"])
    ends = model.generation_config.eos_token_id
    new = setting["new"]
    events: list[Sequence[Any]] = [()] * len(rows)
    if method in SAMPLERS:
        written = sampled(model, rows, method, new, ends)
    else:
        options: Row = {"max_new_tokens": new, "temperature": setting["temperature"], "batch_size": len(rows)}
        told = generate(model, rows, guard=GUARDS[method](), **options)
        written = [one.tokens for one in told]
        events = [one.events for one in told]
    outputs: list[Row] = []
    for place, ids, tokens, acted in zip(places, rows, written, events, strict=True):
        acts = []
        for event in acted:
            acts.append([event.data["generated"] - event.data["taken_back"], event.data["taken_back"]])
        alarm = first_alarm(tokens, [0.0] * len(tokens))
        after = alarm or UNALARMED
        if acts:
            after = acts[0][0]
        elif place in full:
            after = full[place]["alarm"] or UNALARMED
        output = {"method": method, "family": place[0], "number": place[1], "tokens": tokens, "acts": acts}
        ended = bool(tokens) and tokens[-1] in ends
        outputs.append({**setting, **output, "ended": ended, "alarm": alarm, **surprise(model, ids, tokens, after)})
    return outputs


def read(work: Path) -> list[Row]:
    """The outputs in a folder."""
    file = work / "runs.jsonl"
    if not file.exists():
        return []
    return read_rows(file)


def main(
    work: Path,
    *,
    model: str | None = None,
    new: int = 400,
    temperature: float = 0.0,
    count: int = 12,
    only: Sequence[Literal[*GUARDS, *SAMPLERS]] = (FULL, GUARD, PLAIN),
) -> None:
    """Make what the module describes.

    Args:
        work: Folder of the outputs.
        model: A name, hub id or folder; by default the model in the package.
        new: Number of new tokens.
        temperature: 0 decodes greedily.
        count: Number of openings of each family.
        only: Remedies, the whole cache first.
    """
    live: Any = load(model)
    name = "model in the package"
    if model:
        name = Path(model).name
    ends = {live.generation_config.eos_token_id, live.tokenizer.bos_token_id}
    live.generation_config.eos_token_id = sorted(ends)  # a story ends at BOS where stories in a row were learned
    setting = {"model": name, "new": new, "temperature": temperature}
    work.mkdir(parents=True, exist_ok=True)
    for method in only:
        known: dict[str, dict[Any, Row]] = {FULL: {}, method: {}}
        for output in read(work):
            if output["method"] in known and all(output[key] == value for key, value in setting.items()):
                known[output["method"]][output["family"], output["number"]] = output
        missing: list[tuple[str, int]] = []
        for family in FORMS:
            for number in range(count):
                if (family, number) not in known[method]:
                    missing.append((family, number))
        if not missing:
            continue
        outputs = continued(live, setting, method, missing, known[FULL])
        with (work / "runs.jsonl").open("a") as file:
            for output in outputs:
                file.write(json.dumps(output) + "\n")
        print(json.dumps({"method": method, "acts": sum(map(len, value_of_each(outputs, "acts")))}), flush=True)


if __name__ == "__main__":
    run(main)
