"""What ends loops, and what each remedy costs: samplers, stopping at the alarm, and LoopGuard, on the same openings.

    python -m experiments.loopguard.remedies WORK [--model M] [--new 400] [--temperature 0] [--only NAME ...]
    python -m experiments.loopguard.remedies WORK --draw [--out figures]

It lets a model continue openings of six families under each remedy, and appends the outputs to WORK/runs.jsonl; run it
again to go on after an interruption. LoopGuard's answer to a loop was chosen on the families `CHOOSING` and is reported
on the others. `--draw` makes the figure, and the tables and examples of the page (`experiments.loopguard.outcome` says
what the columns are).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import LogitsProcessor, NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from experiments.loopguard import outcome
from experiments.loopguard.openings import CHOOSING, FORMS, openings
from experiments.loopguard.rules import Dry, Ends, Ladder, Longest, guard
from experiments.record import Row, value_of_each
from experiments.script import run
from sinkscope.bench.tasks.loops import first_alarm
from sinkscope.loops.generate import generate, padded
from sinkscope.loops.guard import LoopGuard, LoopReporter
from sinkscope.opening.load import load

UNALARMED = 48
"""Where the surprise of an output without an alarm is measured from: no alarm comes earlier."""


class DryProcessor(LogitsProcessor):
    """DRY (p-e-w 2024): a token that prolongs a repetition of n tokens loses `strength * base ** (n - allowed)`."""

    def __init__(self, strength: float = 0.8, base: float = 1.75, allowed: int = 2, longest: int = 64) -> None:
        self._strength = strength
        self._base = base
        self._allowed = allowed
        self._longest = longest

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Scores with the penalties."""
        scores = scores.clone()
        for row, ids in enumerate(input_ids.tolist()):
            lengths: dict[int, int] = {}
            for end in range(len(ids) - 1):
                if ids[end] != ids[-1]:
                    continue
                length = 1
                while length < min(end + 1, self._longest) and ids[end - length] == ids[-1 - length]:
                    length += 1
                lengths[ids[end + 1]] = max(length, lengths.get(ids[end + 1], 0))
            for token, length in lengths.items():
                if length >= self._allowed:
                    scores[row, token] -= self._strength * self._base ** (length - self._allowed)
        return scores


GUARDS: dict[str, Callable[..., LoopGuard]] = {
    "LoopGuard": LoopGuard,
    "ladder": lambda **way: guard(Ladder, **way),
    "DRY after an alarm": lambda **way: guard(Dry, **way),
    "longest copy": lambda **way: guard(Longest, penalty=0.5, **way),
    "longest copy, ends may gain": lambda **way: guard(Ends, penalty=0.5, **way),
    "penalty 0.5": lambda **way: LoopGuard(penalty=0.5, **way),
}
"""Answers to a loop."""
PLAIN = ", plain generate"
"""What follows the name of a guard that takes nothing back."""
figure = outcome.figure  # the gallery draws a picture again with the module that made it
SAMPLERS: dict[str, Callable[[], Any]] = {
    "temperature 0.7": lambda: {"do_sample": True, "temperature": 0.7, "top_k": 0},
    "repetition penalty 1.1": lambda: {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.1)]},
    "no-repeat-4": lambda: {"logits_processor": [NoRepeatNGramLogitsProcessor(4)]},
    "no-repeat-6": lambda: {"logits_processor": [NoRepeatNGramLogitsProcessor(6)]},
    "DRY": lambda: {"logits_processor": [DryProcessor()]},
    "stop": dict,
}
METHODS: tuple[str, ...] = ("full", *SAMPLERS, "LoopGuard.paper", *GUARDS, *(name + PLAIN for name in GUARDS))


def guard_of(method: str) -> LoopGuard | bool:
    """The guard of a method; False for the whole cache."""
    if method == "LoopGuard.paper":
        return LoopGuard.paper()
    if method == "full":
        return False
    name, plain, _ = method.partition(PLAIN)
    if plain:
        return GUARDS[name](rewind=False)
    return GUARDS[name]()


@torch.no_grad()
def surprise(model: Any, ids: list[int], tokens: list[int], after: int) -> tuple[float, int]:
    """Sum of the surprise of at most 400 tokens after a step, for the model with a clean cache, and their number."""
    text = tokens[: after + 400]
    if after >= len(text):
        return 0.0, 0
    logits = model(torch.tensor([[*ids, *text]]), use_cache=False).logits[0, len(ids) + after - 1 : -1].float()
    nll = torch.nn.functional.cross_entropy(logits, torch.tensor(text[after:]), reduction="sum")
    return float(nll), len(text) - after


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


def continued(model: Any, setting: Row, method: str, numbers: dict[str, range], full: dict[Any, Row]) -> list[Row]:
    """The outputs of a method after openings, by number in their family; `full` are those of the whole cache."""
    places: list[tuple[str, int]] = []
    rows: list[list[int]] = []
    for family, chosen in numbers.items():
        texts = openings(family, max(chosen) + 1)
        for number in chosen:
            places.append((family, number))
            rows.append(model.tokenizer(texts[number], verbose=False)["input_ids"])
    ends = model.generation_config.eos_token_id
    new = setting["new"]
    events: list[Sequence[Any]] = [()] * len(rows)
    if method in SAMPLERS:
        written = sampled(model, rows, method, new, ends)
    else:
        options: Row = {"max_new_tokens": new, "temperature": setting["temperature"], "batch_size": len(rows)}
        told = generate(model, rows, guard=guard_of(method), **options)
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
        nll, counted = surprise(model, ids, tokens, after)
        output = {"method": method, "family": place[0], "number": place[1], "tokens": tokens, "acts": acts}
        ended = bool(tokens) and tokens[-1] in ends
        outputs.append({**setting, **output, "ended": ended, "alarm": alarm, "nll": nll, "counted": counted})
    return outputs


def main(
    work: Path,
    *,
    draw: bool = False,
    model: str | None = None,
    new: int = 400,
    temperature: float = 0.0,
    count: int = 12,
    part: Literal["all", "chosen", "reported"] = "all",
    only: Sequence[Literal[*METHODS]] = ("full", "LoopGuard", "LoopGuard" + PLAIN),
    out: Path = Path("figures"),
    page: Path = Path("docs/what_to_try.md"),
) -> None:
    """Make what the module describes.

    Args:
        work: Folder of the outputs.
        draw: Make the figure and the tables instead of continuing openings.
        model: A name, hub id or folder; by default the model in the package.
        new: Number of new tokens.
        temperature: 0 decodes greedily.
        count: Number of openings of each family.
        part: The families that served to choose, the others, or all.
        only: Remedies, the whole cache first.
        out: Folder of the figure.
        page: The page with the tables.
    """
    if draw:
        outcome.draw(outcome.read(work), out, page)
        return
    live: Any = load(model, backend="hf")
    name = "model in the package"
    if model:
        name = Path(model).name
    ends = {live.generation_config.eos_token_id, live.tokenizer.bos_token_id}
    live.generation_config.eos_token_id = sorted(ends)  # a story ends at BOS where stories in a row were learned
    setting = {"model": name, "new": new, "temperature": temperature}
    work.mkdir(parents=True, exist_ok=True)
    for method in only:
        known: dict[str, dict[Any, Row]] = {}
        for output in outcome.read(work):
            if all(output[key] == value for key, value in setting.items()):
                known.setdefault(output["method"], {})[output["family"], output["number"]] = output
        missing: dict[str, range] = {}
        for family in FORMS:
            mine = part == "all" or (family in CHOOSING) == (part == "chosen")
            if mine and (family, 0) not in known.get(method, {}):
                missing[family] = range(count)
        if not missing:
            continue
        outputs = continued(live, setting, method, missing, known.get("full", {}))
        with (work / "runs.jsonl").open("a") as file:
            for output in outputs:
                file.write(json.dumps(output) + "\n")
        print(json.dumps({"method": method, "acts": sum(map(len, value_of_each(outputs, "acts")))}), flush=True)


if __name__ == "__main__":
    run(main)
