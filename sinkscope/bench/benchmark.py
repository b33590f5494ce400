"""`sinkscope bench` and `ss.bench.run`: several methods answer the prompts of a task, in batches, resumable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from hashlib import sha256
from typing import Annotated, Any

from pydantic import Field

from sinkscope.bench.answer import Batch, answer_rows, conversation_ids
from sinkscope.bench.methods import SAMPLING, make_method, read_methods
from sinkscope.bench.record import COMMAND, VERSION, BenchRecord, BenchRun, Prompt
from sinkscope.bench.table import BenchTable, bench_table, check_beside, tabulate_records
from sinkscope.bench.task import Task, read_task
from sinkscope.errors import SinkscopeError
from sinkscope.files.arguments import checks_arguments
from sinkscope.files.output import PathName
from sinkscope.files.progress import Progress, silent
from sinkscope.files.records import Natural, Whole
from sinkscope.files.store import Kept, check_folder, json_lines, kept_in
from sinkscope.generation.generate import Temperature
from sinkscope.hooks.edit.base import Intervention
from sinkscope.measure.setup import model_info
from sinkscope.models.checkpoints.config import plain_by_default
from sinkscope.models.inputs import check_length, end_ids
from sinkscope.models.target import Target
from sinkscope.opening.load import load, target_of


@checks_arguments
@plain_by_default()
def run(
    model: Any,
    task: Task | str,
    methods: Sequence[str],
    *,
    out: PathName | None = None,
    tokenizer: Any = None,
    max_new_tokens: Natural | None = None,
    batch_size: Natural = 1,
    temperature: Temperature = 0.0,
    seed: Whole = 0,
    progress: Any = None,
) -> BenchRun:
    """Answer the prompts of a task with every method; records already in `out` are not computed again.

    Prompts are grouped into batches in their order and padded on the left. An unfinished batch is rerun as a whole, so
    the records do not depend on interruptions. Other batch sizes give the same records up to rounding: matrices of
    another shape are summed in another order, which may break a tie between two tokens differently.

    Args:
        model: Hugging Face, TransformerBridge, nnsight (dispatched) or `Target`, whole in memory; or a
            `functools.partial` that opens one.
        task: A task, or its text as on the command line.
        methods: Names separated by commas, each with a budget or settings (h2o:0.25, loopguard:paper,
            snapkv:window=32), or package.module:name of a policy class or of a function of the budget that
            makes one. A budget of 0.25 keeps a quarter of the prompt, which kvpress
            calls compression_ratio 0.75. An unknown name lists all.
        out: Folder for the records. If it holds part of this run, the run continues.
        tokenizer: For a model that carries none.
        max_new_tokens: Maximum length of an answer. By default the task's.
        batch_size: Number of prompts that run together.
        temperature: Sampling temperature; 0 is greedy.
        seed: Seed of the sampling. A folder may hold answers of several seeds, one command after another.
        progress: Called as `progress(what, done, total)`.

    Returns:
        The records of these methods and prompts, in the order of methods and prompts, and the settings.

    Raises:
        SinkscopeError: A method or setting is unknown, a prompt does not fit, a number is invalid, or the folder was
            begun with other settings or is being written; or nothing is drawn at a temperature.
    """
    if isinstance(task, str):
        task = read_task(task)
    chosen = read_methods(methods, task.budget)
    if task.together and (temperature or SAMPLING in chosen):
        raise SinkscopeError(
            f"--task {task.name} feeds the same text to every method: leave out --temperature and sampling"
        )
    edits = [make_method(method) for method in chosen]  # impossible settings are refused before the run
    of_file = task.prompts_of_file()
    if of_file is not None:
        task.check(of_file)
    if out is not None:
        check_folder(out)
    if isinstance(model, partial):
        model = model()
    target = target_of(model, tokenizer)
    target.shards.check_alone("bench")
    new = max_new_tokens or task.new_tokens(target)
    prompts = _prompts(task, target, edits, new)
    batches: list[Batch] = []
    for group in [chosen] if task.together else [(method,) for method in chosen]:
        for start in range(0, len(prompts), batch_size):
            part = tuple(prompts[start : start + batch_size])
            batches.append(Batch(group, part, new, temperature, seed))
    settings = settings_of(target, task, prompts, max_new_tokens=new, temperature=temperature)
    with kept_in(out, {"command": COMMAND, **settings}, BenchRecord) as folder:
        answer_batches(target, task, batches, folder, progress or silent)
        return BenchRun((folder.records[key] for batch in batches for key in batch.keys), settings)


def settings_of(
    target: Target, task: Task, prompts: Sequence[Prompt], *, max_new_tokens: int, temperature: float
) -> dict[str, Any]:
    """Return what determines answers beside methods and seeds; records with other settings are of another run."""
    return {
        "version": VERSION,
        "model": asdict(model_info(target)),
        "kind": target.kind,
        "device": target.device.type,
        "dtype": str(target.dtype).removeprefix("torch."),
        "attention": str(getattr(target.config, "_attn_implementation", "unknown")),
        "decoding": {"do_sample": False, "eos_token_id": end_ids(target)},
        "task": task.name,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "chat": task.chat,
        "prompts": sha256(json_lines(prompts).encode()).hexdigest()[:16],
    }


def answer_batches(
    target: Target, task: Task, batches: Sequence[Batch], folder: Kept[BenchRecord], progress: Progress
) -> None:
    """Answer the batches whose records are not all in a folder.

    Args:
        target: The model.
        task: The task.
        batches: The batches.
        folder: Where records are kept.
        progress: Called after each batch.
    """
    warm: set[str] = set()
    progress("batches", 0, len(batches))
    for done, batch in enumerate(batches, 1):
        if not all(key in folder.records for key in batch.keys):
            for method in batch.methods:
                if method not in warm:  # what is made at first use is not of the time of an answer
                    first = conversation_ids(target, batch.prompts[0], 0, task.chat)
                    answer_rows(target, [first], 2, make_method(method))
                    warm.add(method)
            folder.append(task.answers(target, batch))
        progress("batches", done, len(batches))


@partial(checks_arguments, settings_of=run)
def bench(
    folders: Sequence[PathName] = (),
    *,
    task: str | None = None,
    model: str | None = None,
    revision: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    temperature: Annotated[float, Field(ge=0)] = 0.0,
    beside: str | None = None,
    **settings: Any,
) -> BenchTable:
    """Answer the prompts of a task with every method, and show scores beside costs. The same command resumes.

    With folders of earlier runs, finished or not, it only shows their table.

    Args:
        folders: Folders of earlier runs, whose table is shown.
        task: loops, recall, text, or a file of JSON lines or of one JSON array with "prompt" and "answers"; settings
            follow after colons, such as recall:lengths=640,1024:samples=2. An unknown setting lists all.
        model: A short name, hub id, folder or .gguf file. By default the bundled model; the recall model for recall.
        revision: Branch, tag or commit on the hub.
        device: cpu, cuda, cuda:1 or mps. By default the first CUDA device, else the CPU.
        dtype: float32, bfloat16 or float16. By default the checkpoint's.
        temperature: Sampling temperature; 0 is greedy.
        beside: The method with which all others are compared, prompt by prompt. By default the best one of each set.
        settings: As for `run`.

    Raises:
        SinkscopeError: Neither folders nor a task and methods are given, or both; or as for `run`.
    """
    if folders:
        options: dict[str, Any] = {"task": task, "model": model, "revision": revision, "device": device, "dtype": dtype}
        options |= {"temperature": temperature or None, **settings, "progress": None}
        for name, value in options.items():
            if value is not None:
                flag = f"--{name.replace('_', '-')}"
                raise SinkscopeError(f"{flag} has no effect on {folders[0]}, earlier answers: leave one of both out")
        return bench_table(folders, beside=beside)
    if task is None or not settings.get("methods"):
        raise SinkscopeError("give --task and --methods for a run, or folders of earlier runs, to show their table")
    chosen = read_task(task)
    check_beside(beside, read_methods(settings["methods"], chosen.budget))
    name = chosen.model if model is None else model
    opener = partial(load, name, revision=revision, device=device, dtype=dtype)
    answers = run(opener, chosen, temperature=temperature, **settings)
    return tabulate_records([answers], beside=beside)


def _prompts(task: Task, target: Target, edits: Sequence[Intervention | None], new: int) -> Sequence[Prompt]:
    """The prompts of a task, each with an id of its own, which fit the model and every method."""
    prompts = task.prompts(target)
    task.check(prompts)
    for prompt in prompts:
        for turn in prompt.scored_turns:
            tokens = len(conversation_ids(target, prompt, turn, task.chat))
            check_length(target, f"prompt {prompt.id!r}", tokens, new, "give shorter prompts or fewer turns")
            for edit in filter(None, edits):
                edit.check_prompt(tokens)
    return prompts
