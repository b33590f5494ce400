"""Retrieval by task, length, depth and method: run, kept, and put together."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean
from typing import Any, ClassVar

from sinkscope.bench.dialogues.run import AskedTurn, answer_anew, check_length, encode
from sinkscope.bench.dialogues.tables import Said, written
from sinkscope.bench.files import open_folder
from sinkscope.bench.methods import SHARE, at_settings, check_methods, check_whole, order_of
from sinkscope.bench.needle.prompts import FORMS, TASKS, NeedlePrompt, form_of, needle_prompt
from sinkscope.bench.runner import Asked, Batch, ask, check_can, run_batches
from sinkscope.bench.scorers import score
from sinkscope.console import Progress
from sinkscope.errors import SinkscopeError
from sinkscope.parallel import Tally, check_workers
from sinkscope.rate import mean_known, wilson
from sinkscope.results import ModelInfo, Result, provenance

METHODS = "full streaming h2o snapkv adakv tova loopserve loopserve-p loopserve-d a-shape minference".split()
"""What is compared by default."""
FULL = "full"
VERSION = 1  # of the records and prompts; a change of what they hold is another setting


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
        chance: mean score of the answers of the full cache against the right answers of other prompts of the same
            task; None: the full cache was not run, or on one prompt alone.
        groups: by task and method.
        cells: by task, method, length and depth.
    """

    kind: ClassVar[str] = "needle"
    drawing: ClassVar[Any] = "sinkscope.bench.drawing:draw_needle"
    percent: ClassVar[tuple[str, ...]] = ("score", "read", "cells", *TASKS)
    columns: ClassVar[tuple[str, ...]] = ("method", "score", *TASKS, "cells", "read")
    glossary: ClassVar[dict[str, str]] = {
        **{task: f"score of the task {task}" for task in TASKS},
        "cells": "share of a prompt's causal cells that attention covers; -: the method leaves prompts to the model",
    }

    form: str
    chance: float | None
    groups: tuple[NeedleScore, ...]
    cells: tuple[NeedleCell, ...]

    def methods(self) -> list[str]:
        """In the order of tables."""
        return list(dict.fromkeys(g.method for g in self.groups))

    def mean(self, method: str) -> float:
        """Mean score of a method over all its prompts."""
        mine = [g for g in self.groups if g.method == method]
        return sum(g.score * g.prompts for g in mine) / sum(g.prompts for g in mine)

    def rows(self) -> list[dict[str, Any]]:
        """A row per method: its mean score, that of each task, and what it read."""
        found: list[dict[str, Any]] = []
        for name in self.methods():
            mine = [g for g in self.groups if g.method == name]
            tasks = {g.task: g.score for g in mine}
            read = {"cells": mean_known(g.cells for g in mine), "read": mean_known(g.read for g in mine)}
            found.append({"method": name, "score": self.mean(name), **tasks, **read})
        return found

    def conclusion(self) -> str:
        """Who keeps what the full cache finds, and who loses most, beside the full cache and chance."""
        means = {name: self.mean(name) for name in self.methods()}
        best = means.pop(FULL, None)
        told = f"On {self.model.name} "
        told += "the full cache was not run" if best is None else f"the full cache finds {best:.0%} of the answers"
        told += "" if self.chance is None else f" (chance {self.chance:.0%})"
        if not means:
            return f"{told}."
        kept = [] if best is None else [name for name in means if means[name] >= 0.95 * best]
        if kept:
            told += f"; {', '.join(kept)} keep{'s' * (len(kept) == 1)} at least 95 % of that"
        worst = min(means, key=lambda name: means[name])
        depths = {
            c.depth: fmean(d.score for d in self.cells if (d.method, d.depth) == (worst, c.depth)) for c in self.cells
        }
        low = min(depths, key=lambda depth: depths[depth])
        return f"{told}; {worst} finds least, {means[worst]:.0%}, and {depths[low]:.0%} at depth {low:.0%}."


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
    to = ask(model, tokenizer, 1, share)
    form = form or form_of(to.target.name)
    if form not in FORMS:
        raise SinkscopeError(f"form {form!r} is unknown: expected one of {', '.join(FORMS)}")
    to = replace(to, new=max_new_tokens or FORMS[form].new_tokens)
    rows = _rows(to, form, tasks or FORMS[form].tasks, lengths, depths, samples, seed)
    prompts = [prompt for _, prompt in rows]
    check_can(to, chosen, {len(row.ids) for row, _ in rows})
    settings: dict[str, Any] = {"version": VERSION, "command": "needle", **to.settings(), "form": form, "seed": seed}
    tally = Tally("needles", len(chosen) * len(prompts), progress)
    parts = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    batches = [Batch(to.fingerprint, (method,), tuple(part)) for part in parts for method in chosen]
    with open_folder(out, settings, prompts, Said) as kept:
        run_batches(to, [batches], answer_anew, kept, tally, model=model, workers=workers, ray=ray)
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


def _rows(
    to: Asked, form: str, tasks: Sequence[str], lengths: Sequence[int], depths: Sequence[float], samples: int, seed: int
) -> list[tuple[AskedTurn, NeedlePrompt]]:
    """All prompts, and each as tokens."""
    if unknown := [task for task in tasks if task not in FORMS[form].tasks]:
        raise SinkscopeError(f"task {unknown[0]!r}: the form {form} has {', '.join(FORMS[form].tasks)}")
    if not depths or not lengths or not all(0 <= depth <= 1 for depth in depths):
        raise SinkscopeError(f"depths {list(depths)}, lengths {list(lengths)}: expected some, depths from 0.0 to 1.0")
    rows: list[tuple[AskedTurn, NeedlePrompt]] = []
    for length, task, depth, number in product(sorted(set(lengths)), tasks, sorted(set(depths)), range(samples)):
        prompt = needle_prompt(to.target.tokenizer, form, task, length, depth, seed, number)
        rows.append((AskedTurn(prompt.id, "end", 0, encode(to, [prompt.text], False)), prompt))
        check_length(to, rows[-1][0], len(rows[-1][0].ids))
    return rows


def tabulate(records: Iterable[Said], prompts: dict[str, NeedlePrompt], share: float) -> dict[str, Any]:
    """Scores of records by method and task, and by length and depth; and the chance."""
    found: dict[tuple[str, str], list[tuple[NeedlePrompt, Said, float]]] = {}
    for record in sorted(records, key=lambda r: (order_of(r.method), r.prompt)):
        prompt = prompts[record.dialogue]
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


def _score(record: Said, prompt: NeedlePrompt) -> float:
    return score("all", record.text, [", ".join(prompt.answers)])


def _chance(found: dict[tuple[str, str], list[tuple[NeedlePrompt, Said, float]]]) -> float | None:
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
