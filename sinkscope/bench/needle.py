"""Needle in a haystack: prompts by task, depth and length of the text; running them; and combining the results.

The tasks are those of RULER (Hsieh et al. 2024, arXiv 2404.06654), sections 3.1 and 3.2:

- needle: one statement in a haystack of noise (niah_single_1).
- multi-key: the same, with three more statements of the same kind (niah_multikey_1, but in noise instead of essays).
- key-value: the haystack itself consists of such statements (niah_multikey_3).
- tracking: variable tracking, a value and a chain of names that refer to it (vt).
- chain: our own task; it asks for the value of the last name of such a chain, in a haystack of other statements.

The form "ruler" uses RULER's wording, without its worked example, for any model that follows English. "recall" writes
facts and a question for the recall models; its chains have two facts, and the fact that is asked about links to the one
with the answer. "facts" writes sentences like those the bundled model was trained on. The depth of a prompt is that of
the first statement that the answer needs, as a share of the haystack; further statements are spread evenly from there
to the end.
"""

from __future__ import annotations

import random
import string
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, cycle, islice, product
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, ClassVar, Literal

from sinkscope.bench.dialogues.recall import ANSWER, ASK, END, FACT, FILLER, KEYS, TAIL, TURNS, VALUES
from sinkscope.bench.dialogues.run import AskedTurn, answer_anew, check_length, encode
from sinkscope.bench.dialogues.tables import Said, written
from sinkscope.bench.files import open_folder
from sinkscope.bench.methods import at_settings, check_methods, order_of
from sinkscope.bench.runner import Asked, Batch, ask, check_can, named_model, run_batches
from sinkscope.bench.scorers import score
from sinkscope.errors import SinkscopeError
from sinkscope.files.jobs import Tally, check_workers
from sinkscope.files.options import Count, Hidden, Option, Positive, command
from sinkscope.files.rate import mean_known, wilson
from sinkscope.files.records import Natural, check_values
from sinkscope.files.result import ModelInfo, Result, provenance
from sinkscope.models.names import BUNDLED, RECALL, TWO_HOPS

TASKS = ("needle", "multi-key", "key-value", "tracking", "chain")
_LINKED, _FULL = TASKS[3:], ("key-value", "chain")  # several statements lead to the answer; other ones are the haystack
_OTHERS = 3  # further statements in multi-key
_HOPS = 4  # hops in RULER's chains
_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_COLOURS = "black blue brown golden gray green orange pink purple red silver white yellow".split()
_THINGS = (
    "apple bag ball bell book boat bowl box brush button cake candle cap car chair coat coin cup doll drum flag flower "
    "hat jar key kite knife lamp leaf letter map mirror nut pen pencil pillow plate ring rope shell ship shoe spoon "
    "star stick stone toy train umbrella"
).split()
_PLACES = (
    "attic barn basement bathroom bedroom cave cellar church city classroom desert field forest garage garden hall "
    "hospital hotel kitchen lake library market meadow museum office park river school shop station tower town valley "
    "village"
).split()


@dataclass(frozen=True)
class NeedlePrompt:
    """A prompt with its correct answers.

    Attributes:
        id: Task, length, depth and number.
        task: One of `TASKS`.
        length: Requested maximum length in tokens.
        depth: Depth of the first statement that the answer needs, 0 to 1.
        text: The prompt.
        answers: Strings, all of which must appear in the answer.
    """

    id: str
    task: str
    length: int
    depth: float
    text: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class _Pieces:
    """What a prompt is made of; `others` are statements that nobody asks about."""

    head: str
    needles: Sequence[str]
    others: Iterator[str]
    filler: Iterator[str]
    tail: str
    answers: Sequence[str]


@dataclass(frozen=True)
class Form:
    """A wording of the tasks.

    Attributes:
        tasks: Tasks that this form supports.
        new_tokens: Maximum length of an answer.
        glue: Text between pieces.
        pieces: Returns the pieces of a task.
    """

    tasks: tuple[str, ...]
    new_tokens: int
    glue: str
    pieces: Callable[[str, random.Random], _Pieces]


def _recall(task: str, rng: random.Random) -> _Pieces:
    keys = rng.sample(KEYS, len(KEYS))
    asked, other = keys.pop(), keys.pop()
    gap = 3  # words between facts, for heads that look a few places back

    def words(number: int) -> str:
        return " ".join(rng.choice(FILLER) for _ in range(number))

    def fact(key: str, values: Sequence[str], link: str) -> str:
        return " ".join([FACT, key, *values, link, words(gap)])

    right = rng.sample(VALUES, 2)
    needles = [fact(asked, right, END)]
    if task in _LINKED:
        needles = [fact(other, right, END), fact(asked, rng.sample(VALUES, 2), other)]
    others = (fact(key, rng.sample(VALUES, 2), rng.choice([*KEYS, END])) for key in keys)
    tail = " ".join([ASK, asked, *TAIL, ANSWER])
    return _Pieces(f"{TURNS[0]} {words(gap)}", needles, others, (words(1) for _ in count()), tail, [" ".join(right)])


def _facts(task: str, rng: random.Random) -> _Pieces:
    things = [f"{rng.choice(_COLOURS)} {thing}" for thing in rng.sample(_THINGS, len(_THINGS))]
    places = rng.sample(_PLACES, len(_PLACES))
    found = [f"The {thing} was in the {place}." for thing, place in zip(things, places, strict=False)]
    tail = f"\nWhere was the {things[0]}? The {things[0]}"  # and not "was in the", so that decoding finds the place
    return _Pieces("", found[:1], iter(found[1:]), cycle([_NOISE]), tail, places[:1])


def _ruler(task: str, rng: random.Random) -> _Pieces:
    if task in _LINKED:
        return _variables(task, rng)
    kind = "uuid" if task == "key-value" else "number"

    def one(key: bool) -> str:
        if kind == "uuid":
            return str(uuid.UUID(int=rng.getrandbits(128), version=4))
        return f"{rng.choice(_COLOURS)}-{rng.choice(_THINGS)}" if key else str(rng.randrange(10**6, 10**7))

    def statement(key: str, value: str) -> str:
        return f"One of the special magic {kind}s for {key} is: {value}."

    key, value = one(True), one(False)
    head = (
        f"A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about "
        f"the {kind} afterwards."
    )
    what = f"he special magic {kind} for {key} mentioned in the provided text"
    others = (statement(other, one(False)) for other in iter(lambda: one(True), "") if other != key)
    return _Pieces(head, [statement(key, value)], others, cycle([_NOISE]), f"What is t{what}? T{what} is", [value])


def _variables(task: str, rng: random.Random) -> _Pieces:
    def some(letters: str) -> str:
        return "".join(rng.choices(letters, k=5))

    value, names = some(string.digits), [some(string.ascii_uppercase) for _ in range(_HOPS + 1)]
    needles = [f"VAR {name} = {said}" for name, said in zip(names, [value, *(f"VAR {n}" for n in names)], strict=False)]
    others = (f"VAR {some(string.ascii_uppercase)} = {some(string.digits)}" for _ in count())
    head = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n"
    tail = (
        f"Question: Find all variables that are assigned the value {value} in the text above. Answer: According to "
        f"the chain(s) of variable assignment in the text above, {len(names)} variables are assgined the value "
        f"{value}, they are: "
    )
    if task == "chain":
        tail = f"Question: What is the value of VAR {names[-1]} in the text above? Answer: VAR {names[-1]} ="
    return _Pieces(head, needles, others, cycle([_NOISE]), tail, [value] if task == "chain" else names)


FORMS = {
    "recall": Form(TASKS, 8, " ", _recall),
    "facts": Form(TASKS[:3], 8, " ", _facts),
    "ruler": Form(TASKS, 128, "\n", _ruler),
}
"""By name; `form_of` says which model has which."""


def form_of(model: str) -> str:
    """The form that a model of this package understands; RULER's form for all other models."""
    return {RECALL: "recall", TWO_HOPS: "recall", BUNDLED: "facts"}.get(model, "ruler")


def needle_prompt(
    tokenizer: Any, form: str, task: str, length: int, depth: float, seed: int = 0, number: int = 0
) -> NeedlePrompt:
    """Build a prompt; the same arguments always give the same prompt.

    Args:
        tokenizer: Counts tokens.
        form: A name in `FORMS`.
        task: One of the form's tasks.
        length: Maximum tokens; the haystack fills them, leaving less than one of its pieces.
        depth: Depth of the first statement that the answer needs, 0 to 1.
        seed: Seed of every random choice.
        number: Number of the prompt among those with the same task, length and depth.

    Raises:
        SinkscopeError: The length is too small for the required statements.
    """
    made = FORMS[form]
    name = f"{task} {length} {depth:g} {number}"
    rng = random.Random(f"{form} {name} {seed}")
    parts = made.pieces(task, rng)
    sizes: dict[str, int] = {}

    def size(text: str) -> int:
        return sizes.setdefault(text, len(tokenizer(made.glue + text, add_special_tokens=False)["input_ids"]))

    few = [] if task in _FULL else list(islice(parts.others, _OTHERS if task == "multi-key" else 0))
    room = length - 1 - sum(map(size, [parts.head, parts.tail, *parts.needles, *few]))
    if room < 0:
        raise SinkscopeError(f"length {length}: {task} needs {length - room} tokens at least; give longer prompts")
    hay: list[str] = []
    for piece in chain(parts.others if task in _FULL else (), parts.filler):
        room -= size(piece)
        if room < 0:
            break
        hay.append(piece)
    if task in _FULL:
        rng.shuffle(hay)  # statements may be fewer than there is room for
    for other in few:
        hay.insert(rng.randint(0, len(hay)), other)
    steps = len(parts.needles)
    places = [round(len(hay) * (depth + (1 - depth) * i / steps)) for i in range(steps)]
    for place, needle in reversed([*zip(places, parts.needles, strict=True)]):
        hay.insert(place, needle)
    text = made.glue.join([*([parts.head] if parts.head else []), *hay, parts.tail])
    return NeedlePrompt(name, task, length, depth, text, tuple(parts.answers))


METHODS = "full streaming h2o snapkv adakv tova loopserve loopserve-p loopserve-d a-shape minference".split()
"""What is compared by default."""
FULL = "full"
VERSION = 1  # of the records and prompts; a change of what they hold is another setting


@dataclass(frozen=True)
class NeedleScore:
    """All prompts of one task, answered by one method.

    Attributes:
        method: Name of the method, with the settings that were given.
        task: Name of the task.
        score: Share of the expected strings found in an answer, mean over prompts (RULER's `string_match_all`).
        low: Lower end of its 95 % interval (Wilson), treating prompts as independent.
        high: Upper end of that interval.
        prompts: Number of prompts.
        read: Share of the prompt that a decoding step attends to, mean over prompts; None if answers were one token.
        cells: Share of a prompt's causal cells that attention covers; None if the method does not change prompts.
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
    """The prompts of one task, length and depth, answered by one method: a cell of the map, with the mean score."""

    method: str
    task: str
    length: int
    depth: float
    score: float
    prompts: int


@dataclass(frozen=True, kw_only=True)
class Needle(Result):
    """Retrieval accuracy of each method by depth and length of the prompt.

    Attributes:
        form: Form of the prompts, see `sinkscope.bench.needle`.
        chance: Mean score of the full cache's answers against the correct answers of other prompts of the same task.
            None if the full cache was not run, or was run on only one prompt.
        groups: Results by task and method.
        cells: Results by task, method, length and depth.
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
        """The methods in the order of the tables."""
        return list(dict.fromkeys(g.method for g in self.groups))

    def mean(self, method: str) -> float:
        """Mean score of a method over all its prompts."""
        mine = [g for g in self.groups if g.method == method]
        return sum(g.score * g.prompts for g in mine) / sum(g.prompts for g in mine)

    def rows(self) -> list[dict[str, Any]]:
        """One row per method: its mean score, the score of each task, and what it read."""
        found: list[dict[str, Any]] = []
        for name in self.methods():
            mine = [g for g in self.groups if g.method == name]
            tasks = {g.task: g.score for g in mine}
            read = {"cells": mean_known(g.cells for g in mine), "read": mean_known(g.read for g in mine)}
            found.append({"method": name, "score": self.mean(name), **tasks, **read})
        return found

    def conclusion(self) -> str:
        """Which methods match the full cache and which lose most, compared with the full cache and chance."""
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


@command(group="Dialogues", command="needle")
def needle(
    model: Annotated[object, Option("--model", metavar="NAME")] = None,
    *,
    tokenizer: Hidden = None,
    revision: str | None = None,
    backend: Literal["bridge", "hf", "nnsight"] = "hf",
    device: str | None = None,
    dtype: str | None = None,
    tasks: Annotated[Sequence[str], Option("--tasks", reads="commas")] = (),
    lengths: Annotated[Sequence[int], Option("--lengths", reads="commas")] = (640, 1024, 1536, 2048),
    depths: Annotated[Sequence[float], Option("--depths", reads="commas")] = (0.0, 0.25, 0.5, 0.75, 1.0),
    samples: Positive = 1,
    methods: Annotated[Sequence[str], Option("--methods", reads="commas")] = (),
    budget: float = 0.125,
    form: Literal["recall", "facts", "ruler"] | None = None,
    max_new_tokens: Positive | None = None,
    batch_size: Positive = 1,
    out: Annotated[Path | None, Option(metavar="DIR", writes=True)] = None,
    seed: Count = 0,
    workers: Positive = 1,
    ray: Annotated[str | None, Option(metavar="ADDRESS")] = None,
    progress: Hidden = None,
) -> Needle:
    """Measure at which depths and prompt lengths each method still finds the requested information.

    model: A short name, hub id or folder; recall and recall-2hop are the bundled recall models. By default the bundled
    model.
            the bundled model.
        tokenizer: Tokenizer for a live model that carries none.
        revision: Branch, tag or commit on the hub.
        backend: Load the model as this kind of object.
        device: cpu, cuda, cuda:1 or mps. By default the first CUDA device, else the CPU.
        dtype: float32, bfloat16 or float16. By default the checkpoint's.
        tasks: needle, multi-key, key-value, tracking and chain, separated by commas. By default all tasks of the form.
        lengths: Maximum prompt lengths in tokens, separated by commas.
        depths: Positions of the first statement that the answer needs, from 0 to 1, separated by commas.
        samples: Number of prompts per task, length and depth.
        methods: Names separated by commas, each with optional settings (snapkv:window=32:kernel=7), or
            package.module:Class. By default full and ten more; an unknown name lists all.
        budget: Fraction of the context that every method with a size gets.
        form: Wording of the prompts: ruler uses RULER's English, recall suits the recall models, and facts uses
            sentences that the bundled model knows. By default the form that suits the model.
        max_new_tokens: Maximum length of an answer. By default RULER's 128, and 8 in the other forms.
        batch_size: Number of prompts that run together.
        out: Folder for the answers. If it holds part of this run, the run continues, also with additional methods.
        seed: Seed of every random choice.
        workers: Number of processes that share the work; more than one run over Ray.
        ray: Address of a Ray cluster, for several machines. By default workers run on this machine.
        progress: Called as `progress(what, done, total)`.

    Raises:
        SinkscopeError: A form, task or method is unknown, a length is too small or exceeds the context, a depth is
            outside 0 to 1, or the folder was begun with other settings or is being written.

    Example:
        sinkscope needle --model recall --lengths 640,1024 --out needle
    """
    started = time.perf_counter()
    if model is None or isinstance(model, str):
        model = named_model(model, backend, revision=revision, device=device, dtype=dtype)
    chosen = check_methods(at_settings(methods or METHODS, "equal", budget), ["cache"])
    check_values(Natural | None, samples=samples, batch_size=batch_size, new=max_new_tokens)
    check_workers(workers, ray)
    to = ask(model, tokenizer, 1, budget)
    words = form or form_of(to.target.name)
    if words not in FORMS:
        raise SinkscopeError(f"form {words!r} is unknown: expected one of {', '.join(FORMS)}")
    to = replace(to, new=max_new_tokens or FORMS[words].new_tokens)
    rows = _rows(to, words, tasks or FORMS[words].tasks, lengths, depths, samples, seed)
    prompts = [prompt for _, prompt in rows]
    check_can(to, chosen, {len(row.ids) for row, _ in rows})
    settings: dict[str, Any] = {"version": VERSION, "command": "needle", **to.settings(), "form": words, "seed": seed}
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
        form=words,
        **tabulate(records, {prompt.id: prompt for prompt in prompts}, budget),
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
    """Scores by method and task, and by length and depth; also the score expected by chance."""
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
