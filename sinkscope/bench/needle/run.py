"""Retrieval by task, length, depth and method: run, kept, and put together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, ClassVar

from sinkscope.bench.dialogues.run import answer_anew, batch_of, encode
from sinkscope.bench.dialogues.tables import mean_known, written
from sinkscope.bench.files import Finished, open_folder
from sinkscope.bench.methods import SHARE, Method, at_settings, check_methods, check_whole, order_of
from sinkscope.bench.needle.prompts import FORMS, TASKS, NeedlePrompt, form_of, needle_prompt
from sinkscope.bench.runner import Asked, ask, check_can, run_batches
from sinkscope.bench.scorers import score
from sinkscope.console import Progress
from sinkscope.errors import SinkscopeError
from sinkscope.parallel import Tally, check_workers
from sinkscope.rate import wilson
from sinkscope.results import ModelInfo, Result, provenance

METHODS = "full streaming h2o snapkv adakv tova loopserve loopserve-p loopserve-d a-shape minference".split()
"""What is compared by default."""
FULL = "full"
VERSION = 1  # of the records and prompts; a change of what they hold is another setting


@dataclass(frozen=True)
class Retrieved(Finished):
    """What one method said to one prompt.

    Attributes:
        prompt_tokens: of it, BOS included.
        tokens: ids of the answer, up to and with the end of sequence if it came.
        text: the same decoded.
        ended: by the end of sequence ("eos"), or at the cap of new tokens ("cap").
        read: cached tokens that a decoding step attends to, mean; None: the answer is one token.
        cells: share of the prompt's causal cells that attention covered; None: the method leaves prompts to the model.
        seconds: wall clock of the batch it ran in.
    """

    prompt_tokens: int
    tokens: tuple[int, ...]
    text: str
    ended: str
    read: float | None
    cells: float | None
    seconds: float


@dataclass(frozen=True)
class _Row:
    """A prompt as tokens."""

    name: str
    ids: list[int]

    def heads(self, to: Asked, method: Method) -> dict[str, Any]:
        """What a record of it says first."""
        return {
            "model": to.fingerprint,
            "method": method.spec,
            "prompt": self.name,
            "prompt_tokens": len(self.ids),
        }


@dataclass(frozen=True)
class NeedleScore:
    """The prompts of one task by one method.

    Attributes:
        method: its name, with the settings that were given.
        task: what had to be found.
        score: share of the strings of an answer that were said, mean over prompts (RULER's `string_match_all`).
        low: lower end of its 95 % interval (Wilson), as if prompts were independent.
        high: its upper end.
        prompts: how many.
        read: share of the prompt that a decoding step attends to, mean over prompts; None: answers were one token.
        cells: share of a prompt's causal cells that attention covers; None: the method leaves prompts to the model.
    """

    method: str
    task: str
    score: float
    low: float
    high: float
    prompts: int
    read: float | None
    cells: float | None


@dataclass(frozen=True)
class NeedleCell:
    """The prompts of one task, length and depth by one method: a cell of the map, with the mean score."""

    method: str
    task: str
    length: int
    depth: float
    score: float
    prompts: int


@dataclass(frozen=True, kw_only=True)
class Needle(Result):
    """What methods find at which depth of prompts of which length.

    Attributes:
        form: of the prompts, see `sinkscope.bench.needle.prompts`.
        chance: mean score of the answers of the full cache against right answers of other prompts of the same task,
            length and depth or the next; None: the full cache was not run.
        groups: by task and method.
        cells: by task, method, length and depth.
    """

    kind: ClassVar[str] = "needle"
    drawing: ClassVar[Any] = "sinkscope.bench.drawing:draw_needle"
    percent: ClassVar[tuple[str, ...]] = ("score", "low", "high", "read", "cells")

    form: str
    chance: float | None
    groups: tuple[NeedleScore, ...]
    cells: tuple[NeedleCell, ...]

    def mean(self, method: str) -> float:
        """Mean score of a method over all its prompts."""
        mine = [g for g in self.groups if g.method == method]
        return sum(g.score * g.prompts for g in mine) / sum(g.prompts for g in mine)

    def methods(self) -> list[str]:
        """In the order of tables."""
        return list(dict.fromkeys(g.method for g in self.groups))

    def conclusion(self) -> str:
        """Who keeps what the full cache finds, and who loses most, beside the full cache and chance."""
        means = {name: self.mean(name) for name in self.methods()}
        best = means.pop(FULL, None)
        told = "the full cache was not run" if best is None else f"the full cache finds {best:.0%} of the answers"
        told += "" if self.chance is None else f" (chance {self.chance:.0%})"
        if not means:
            return f"On {self.model.name} {told}."
        worst = min(means, key=lambda name: means[name])
        kept = [] if best is None else [name for name in means if means[name] >= 0.95 * best]
        who = f"{', '.join(kept)} keep" if len(kept) > 1 else f"{kept[0] if kept else 'no other method'} keeps"
        return f"On {self.model.name} {told}, {who} at least 95 % of that, and {worst} finds least, {means[worst]:.0%}."

    def details(self) -> list[str]:
        """Where each method loses most."""
        lines = [f"{'method':<24} {'all':>5}  weakest depth, weakest task"]
        for name in self.methods():
            mine = [c for c in self.cells if c.method == name]
            at = _least(mine, lambda c: c.depth)
            what = _least(mine, lambda c: c.task)
            lines.append(f"{name:<24} {self.mean(name):>5.0%}  {at[0]:.0%} ({at[1]:.0%}), {what[0]} ({what[1]:.0%})")
        return lines


def _least(cells: Sequence[NeedleCell], by: Callable[[NeedleCell], Any]) -> tuple[Any, float]:
    """The depth or task with the lowest mean score, and that score."""
    means = {key: fmean(c.score for c in cells if by(c) == key) for key in dict.fromkeys(map(by, cells))}
    return min(means.items(), key=lambda item: item[1])


def run_needle(
    model: object,
    *,
    out: str | os.PathLike[str] | None = None,
    tokenizer: Any = None,
    form: str | None = None,
    tasks: Sequence[str] = (),
    lengths: Sequence[int] = (640, 1024, 1536, 2048),
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    samples: int = 1,
    methods: Sequence[str] = (),
    share: float = SHARE,
    max_new_tokens: int | None = None,
    batch_size: int = 1,
    seed: int = 0,
    workers: int = 1,
    ray: str | None = None,
    progress: Progress | None = None,
) -> Needle:
    """Ask every prompt by every method; what is in `out` already is not done again.

    Args:
        model: Hugging Face, TransformerBridge, nnsight (dispatched) or `Target`, whole in memory; or `NamedModel`.
        out: folder of settings, prompts and records; None: nothing is kept. It may be given again with more methods,
            and the result is of all that it holds.
        tokenizer: where the model carries none.
        form: a name in `FORMS`; None: `form_of` the model's name.
        tasks: some of the form's; none: all of them.
        lengths: most tokens of a prompt.
        depths: 0 to 1.
        samples: prompts of each task, length and depth.
        methods: as for `check_methods`; none: `METHODS`.
        share: of the context, the budget of every method that has a size and was given none.
        max_new_tokens: longest answer; None: the form's.
        batch_size: prompts that run together, of one length.
        seed: of everything that is drawn.
        workers: processes; more than one run over Ray.
        ray: address of a Ray cluster; None: this machine, or what `RAY_ADDRESS` names.
        progress: called as `progress("needles", done, total)`.

    Raises:
        SinkscopeError: an unknown form, task or method, a length that is too small or exceeds the context, a depth
            outside 0 to 1, or a folder that was begun with other settings or is being written.
    """
    started = time.perf_counter()
    chosen = check_methods(at_settings(methods or METHODS, "equal", share), ["cache"])
    check_whole(samples=samples, batch_size=batch_size, **({} if max_new_tokens is None else {"new": max_new_tokens}))
    check_workers(workers, ray)
    wrong = [depth for depth in depths if not 0 <= depth <= 1]
    if wrong or not depths or not lengths:
        raise SinkscopeError(f"depths {list(depths)}, lengths {list(lengths)}: expected some, depths from 0.0 to 1.0")
    to = ask(model, tokenizer, 1, share)
    form = form or form_of(to.target.name)
    if form not in FORMS:
        raise SinkscopeError(f"form {form!r} is unknown: expected one of {', '.join(FORMS)}")
    if unknown := [task for task in tasks if task not in FORMS[form].tasks]:
        raise SinkscopeError(f"task {unknown[0]!r}: the form {form} has {', '.join(FORMS[form].tasks)}")
    to = ask(to.target, tokenizer, max_new_tokens or FORMS[form].new_tokens, share)
    prompts = [
        needle_prompt(to.target.tokenizer, form, task, length, depth, seed, number)
        for length in sorted(set(lengths))
        for task in tasks or FORMS[form].tasks
        for depth in sorted(set(depths))
        for number in range(samples)
    ]
    rows = [(_Row(prompt.id, encode(to, [prompt.text], False)), prompt) for prompt in prompts]
    limit, longest = to.target.max_positions, max(len(row.ids) for row, _ in rows)
    if limit is not None and longest + to.new > limit:
        raise SinkscopeError(
            f"a prompt of {longest} tokens and {to.new} new ones exceed the context of {to.target.name}, {limit}: give "
            "shorter lengths, or fewer new tokens"
        )
    check_can(to, chosen, {len(row.ids) for row, _ in rows})
    settings = {"version": VERSION, "command": "needle", **to.settings(), "form": form, "seed": seed}
    tally = Tally("needles", len(chosen) * len(prompts), progress)
    parts = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    batches = [batch_of(to, [method], part) for part in parts for method in chosen]
    answer = partial(answer_anew, kind=Retrieved)
    with open_folder(out, settings, prompts, Retrieved) as kept:
        run_batches(to, [batches], answer, kept, tally, model=model, workers=workers, ray=ray)
        records = list(kept.records.values())
    about = provenance(
        started=started,
        device=to.target.device,
        dtype=to.target.dtype,
        attention=str(settings["attention"]),
        bos=None,
        seed=seed,
    )
    return Needle(
        model=ModelInfo(**settings["model"]),
        settings={k: v for k, v in settings.items() if k != "model"} | {"samples": samples},
        provenance=about,
        form=form,
        **tabulate(records, {prompt.id: prompt for prompt in prompts}, share),
    )


def tabulate(records: Iterable[Retrieved], prompts: dict[str, NeedlePrompt], share: float) -> dict[str, Any]:
    """Scores of records by method and task, and by length and depth; and the chance."""
    found: dict[tuple[str, str], list[tuple[NeedlePrompt, Retrieved, float]]] = {}
    for record in sorted(records, key=lambda r: (order_of(r.method), r.prompt)):
        prompt = prompts[record.prompt]
        found.setdefault((record.method, prompt.task), []).append((prompt, record, _score(record, prompt)))
    groups, cells = list[NeedleScore](), list[NeedleCell]()
    for (method, task), mine in sorted(found.items(), key=lambda f: (order_of(f[0][0]), TASKS.index(f[0][1]))):
        name = _label(method, share)
        rate = wilson(sum(s for *_, s in mine), len(mine))
        read = mean_known(None if r.read is None else r.read / (r.prompt_tokens + len(r.tokens)) for _, r, _ in mine)
        spared = mean_known(r.cells for _, r, _ in mine)
        groups.append(NeedleScore(name, task, rate.share, rate.low, rate.high, len(mine), read, spared))
        places: dict[tuple[int, float], list[float]] = {}
        for prompt, _, each in mine:
            places.setdefault((prompt.length, prompt.depth), []).append(each)
        cells += [NeedleCell(name, task, *at, fmean(each), len(each)) for at, each in sorted(places.items())]
    return {"chance": _chance(found), "groups": tuple(groups), "cells": tuple(cells)}


def _score(record: Retrieved, prompt: NeedlePrompt) -> float:
    return score("all", record.text, [", ".join(prompt.answers)])


def _chance(found: dict[tuple[str, str], list[tuple[NeedlePrompt, Retrieved, float]]]) -> float | None:
    """Answers of the full cache against what is right for the next prompt of the task."""
    scores: list[float] = []
    for (method, _), mine in found.items():
        if method == FULL and len(mine) > 1:
            scores += [_score(record, mine[i - 1][0]) for i, (_, record, _) in enumerate(mine)]
    return fmean(scores) if scores else None


def _label(method: str, share: float) -> str:
    """The method as it was asked for: the settings that all have at an equal share are not repeated."""
    text, budget = written(method, share)
    text = text.replace(":shortest=0", "")
    return text if budget in (share, 1.0) else f"{text} {budget}"
