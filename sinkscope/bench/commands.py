"""The commands of the benchmarks that run methods and show what they did; importing this file loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from sinkscope._plain import parse_json
from sinkscope.errors import SinkscopeError
from sinkscope.models.names import ORGANISM
from sinkscope.published import SETS
from sinkscope.registry import Count, Hidden, Option, Positive, command

if TYPE_CHECKING:
    from sinkscope.bench.dialogues.form import Dialogue
    from sinkscope.bench.dialogues.tables import Dialogues, Fidelity
    from sinkscope.bench.loopbench.tables import LoopBench
    from sinkscope.bench.methods import Budget
    from sinkscope.bench.needle.run import Needle
    from sinkscope.bench.runner import NamedModel

TEXT = "text"


@command(group="Loops", command="loopbench run")
def loopbench_run(
    *,
    out: Annotated[Path, Option(metavar="DIR", writes=True)],
    model: str | None = None,
    revision: str | None = None,
    backend: Literal["bridge", "hf", "nnsight"] = "hf",
    device: str | None = None,
    dtype: str | None = None,
    bench: Annotated[Sequence[str], Option("--bench")] = ("small",),
    methods: Annotated[Sequence[str], Option("--methods", reads="commas")] = ("full", "streaming", "h2o", "loopguard"),
    max_new_tokens: Positive | None = None,
    budget: str = "1024",
    window: Positive = 256,
    batch_size: Positive = 1,
    temperature: Annotated[Sequence[float], Option("--temperature", min=0)] = (0.0,),
    seed: Count = 0,
    seeds: Positive = 1,
    workers: Positive = 1,
    ray: Annotated[str | None, Option(metavar="ADDRESS")] = None,
    progress: Hidden = None,
) -> LoopBench:
    """Continue every prompt by every method; after a kill the same command goes on where it was.

    Args:
        out: Where the runs are kept. If the folder holds a part of this run, the run continues.
        model: A short name, hub id, folder or .gguf file. By default the model in the package.
        revision: Branch, tag or commit on the hub.
        backend: Load the model as this kind of object.
        device: cpu, cuda, cuda:1 or mps. By default the first CUDA device, else the CPU.
        dtype: float32, bfloat16 or float16. By default the checkpoint's.
        bench: small, stories, honest, organism (with the model of that name), or a file of prompts.
        methods: Names with commas between, each with settings if wanted (snapkv:window=32), or package.module:Class.
            An unknown name lists all.
        max_new_tokens: Longest answer. By default 2500; 1400 for organism, 32 for 2wiki.
        budget: Cached tokens, or a fraction of the prompt such as 0.5.
        window: Tokens W over which signals are taken.
        batch_size: Prompts that run together.
        temperature: Sampling temperature; 0 is greedy.
        seed: Seed of every random choice.
        seeds: Samples of each prompt at each temperature above 0, with this many seeds from --seed on.
        workers: Processes that share the work; more than one run over Ray.
        ray: Address of a Ray cluster, for several machines. By default workers run on this machine.
        progress: Called as `progress(what, done, total)`.

    Example:
        sinkscope loopbench run --methods full,loopguard --out runs
    """
    from sinkscope.bench.loopbench.prompts import honest_texts, load_prompts
    from sinkscope.bench.methods import check_methods, parse_budget

    check_methods(methods)
    share = parse_budget(budget)
    prompts = [p for name in bench for p in (honest_texts() if name == "honest" else load_prompts(name))]
    if ORGANISM in bench:
        if {*bench} != {ORGANISM} or model not in (None, ORGANISM):
            raise SinkscopeError(
                "--bench organism: its prompts are words of the model organism alone; leave --model and other sets out"
            )
        model, max_new_tokens = ORGANISM, max_new_tokens or 1400

    from sinkscope.bench.loopbench.run import check_window, run_loopbench
    from sinkscope.bench.loopbench.tables import tabulate

    if max_new_tokens is not None and any(p.bench != "2wiki" for p in prompts):
        check_window(window, max_new_tokens, "--window", "--max-new-tokens")
    folder = run_loopbench(
        _named(model, backend, revision=revision, device=device, dtype=dtype),
        prompts,
        methods,
        out=out,
        max_new_tokens=max_new_tokens,
        budget=share,
        window=window,
        batch_size=batch_size,
        temperatures=temperature,
        seed=seed,
        seeds=seeds,
        workers=workers,
        ray=ray,
        progress=progress,
    )
    return tabulate([folder])


@command(group="Dialogues", command="dialogues run")
def dialogues_run(
    *,
    out: Annotated[Path, Option(metavar="DIR", writes=True)],
    model: str = "recall",
    revision: str | None = None,
    backend: Literal["bridge", "hf", "nnsight"] = "hf",
    device: str | None = None,
    dtype: str | None = None,
    dialogues: Annotated[str, Option("--dialogues", metavar="FILE|TASK:FILE|recall")] = "recall",
    count: Positive | None = None,
    methods: Annotated[Sequence[str], Option("--methods", reads="commas")] = (),
    settings: Literal["paper", "equal"] | None = None,
    positions: Annotated[Sequence[str], Option("--positions", reads="commas")] = ("begin", "middle", "end"),
    budget: str | None = None,
    history: Literal["gold", "model"] = "gold",
    cache: Literal["fresh", "grow"] = "fresh",
    max_new_tokens: Positive | None = None,
    batch_size: Positive = 1,
    chat: bool = False,
    seed: Count = 0,
    workers: Positive = 1,
    ray: Annotated[str | None, Option(metavar="ADDRESS")] = None,
    progress: Hidden = None,
) -> Dialogues:
    """Answer every turn by every method; after a kill the same command goes on where it was.

    Args:
        out: Where answers are kept. If the folder holds a part of this run, the run continues.
        model: A short name, hub id or folder; recall is the recall model in the package.
        revision: Branch, tag or commit on the hub.
        backend: Load the model as this kind of object.
        device: cpu, cuda, cuda:1 or mps. By default the first CUDA device, else the CPU.
        dtype: float32, bfloat16 or float16. By default the checkpoint's.
        dialogues: A file that `dialogues build` wrote; a benchmark's file after its task, such as
            longeval_topics:5_topics.jsonl; or recall, which are made for the recall model.
        count: Number of dialogues. By default 10 of recall, all of a file.
        methods: Names with commas between, each with settings if wanted (snapkv:window=32:kernel=7), or
            package.module:Class. An unknown name lists all. By default full,streaming,h2o,snapkv,tova; with --settings
            those of the paper.
        settings: paper takes LoopServe's Table 7; equal gives every method the same fraction of the context, --budget.
            By default each method has its own.
        positions: Places of the question, with commas between.
        budget: Cached tokens, or a fraction of the conversation such as 0.125. By default 256; 0.125 with --settings
            equal.
        history: Turns follow right answers (gold), or the method's own (model).
        cache: Every turn reads everything anew (fresh), or one cache grows over the turns (grow).
        max_new_tokens: Longest answer. By default the benchmark's for each task; 64 for recall.
        batch_size: Turns that run together.
        chat: Wrap turns in the tokenizer's chat template.
        seed: Seed of every random choice.
        workers: Processes that share the work; more than one run over Ray.
        ray: Address of a Ray cluster, for several machines. By default workers run on this machine.
        progress: Called as `progress(what, done, total)`.

    Example:
        sinkscope dialogues run --methods full,h2o --budget 128 --out runs
    """
    names, share = _methods_of(methods, settings, budget)
    some = _dialogues_of(dialogues, count, seed)

    from sinkscope.bench.dialogues.run import run_dialogues
    from sinkscope.bench.dialogues.tables import tabulate_dialogues

    folder = run_dialogues(
        _named(model, backend, revision=revision, device=device, dtype=dtype),
        some,
        names,
        out=out,
        positions=positions,
        budget=share,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        chat=chat,
        history=history,
        cache=cache,
        workers=workers,
        ray=ray,
        progress=progress,
    )
    return tabulate_dialogues([folder])


@command(group="Dialogues", command="dialogues fidelity")
def dialogues_fidelity(
    *,
    out: Annotated[Path, Option(metavar="DIR", writes=True)],
    model: str | None = None,
    revision: str | None = None,
    backend: Literal["bridge", "hf", "nnsight"] = "hf",
    device: str | None = None,
    dtype: str | None = None,
    dialogues: Annotated[str, Option("--dialogues", metavar="FILE|TASK:FILE|recall|text")] = "recall",
    count: Positive | None = None,
    along: Literal["full", "gold"] | None = None,
    methods: Annotated[Sequence[str], Option("--methods", reads="commas")] = (),
    settings: Literal["paper", "equal"] | None = None,
    positions: Annotated[Sequence[str], Option("--positions", reads="commas")] = (),
    budget: str | None = None,
    prompt_tokens: Positive | None = None,
    answer_tokens: Positive = 64,
    batch_size: Positive = 1,
    chat: bool = False,
    seed: Count = 0,
    workers: Positive = 1,
    ray: Annotated[str | None, Option(metavar="ADDRESS")] = None,
    progress: Hidden = None,
) -> Fidelity:
    """Compare methods with full attention along the same text: KL, top-1 agreement, and the attention mass kept.

    Args:
        out: Where numbers are kept. If the folder holds a part of this run, the run continues.
        model: A short name, hub id or folder. By default the recall model in the package; for text the bundled model.
        revision: Branch, tag or commit on the hub.
        backend: Load the model as this kind of object.
        device: cpu, cuda, cuda:1 or mps. By default the first CUDA device, else the CPU.
        dtype: float32, bfloat16 or float16. By default the checkpoint's.
        dialogues: A file that `dialogues build` wrote; a benchmark's file after its task, such as
            longeval_topics:5_topics.jsonl; recall; or text, pieces of the text in the package.
        count: Number of dialogues. By default 10 of recall, 8 of text, all of a file.
        along: Answers of the full cache (full) or right ones (gold). By default full; for text gold.
        methods: Names with commas between, each with settings if wanted (snapkv:window=32:kernel=7), or
            package.module:Class. An unknown name lists all. By default full,streaming,h2o,snapkv,tova; with --settings
            those of the paper.
        settings: paper takes LoopServe's Table 7; equal gives every method the same fraction of the context, --budget.
            By default each method has its own.
        positions: Places of the question, with commas between. By default end.
        budget: Cached tokens, or a fraction of the conversation such as 0.125. By default 256; 0.125 with --settings
            equal.
        prompt_tokens: For text, tokens of a prompt; 512 by default.
        answer_tokens: Longer answers are cut there.
        batch_size: Turns that run together.
        chat: Wrap turns in the tokenizer's chat template.
        seed: Seed of every random choice.
        workers: Processes that share the work; more than one run over Ray.
        ray: Address of a Ray cluster, for several machines. By default workers run on this machine.
        progress: Called as `progress(what, done, total)`.

    Example:
        sinkscope dialogues fidelity --dialogues text --out near
    """
    names, share = _methods_of(methods, settings, budget)

    from sinkscope.bench.dialogues.fidelity import run_fidelity, text_dialogues
    from sinkscope.bench.dialogues.recall import TASK
    from sinkscope.bench.dialogues.run import check_positions
    from sinkscope.bench.dialogues.tables import tabulate_fidelity

    places, texts = check_positions(positions or ("end",)), dialogues == TEXT
    if texts and positions:
        raise SinkscopeError(f"--positions {','.join(positions)}: pieces of a text have no question; leave it out")
    if not texts and prompt_tokens is not None:
        raise SinkscopeError(f"--prompt-tokens {prompt_tokens} is of --dialogues text: leave it out for {dialogues}")
    some = () if texts else _dialogues_of(dialogues, count, seed)
    opened: Any = _named(model or (None if texts else TASK), backend, revision=revision, device=device, dtype=dtype)
    if texts:
        opened = opened.open()
        if (tokenizer := opened.tokenizer) is None:
            raise SinkscopeError("--dialogues text needs a model with a tokenizer: give one that carries it")
        some = text_dialogues(tokenizer, count or 8, prompt_tokens=prompt_tokens or 512, answer_tokens=answer_tokens)
    folder = run_fidelity(
        opened,
        some,
        names,
        out=out,
        along=along or ("gold" if texts else "full"),
        positions=places,
        budget=share,
        max_new_tokens=answer_tokens,
        batch_size=batch_size,
        chat=chat,
        workers=workers,
        ray=ray,
        progress=progress,
    )
    return tabulate_fidelity([folder])


@command(group="Dialogues", command="dialogues table")
def dialogues_table(
    folders: Annotated[Sequence[Path], Option(argument=True, metavar="DIR...")],
) -> Dialogues | Fidelity:
    """Show scores by method and position of the question, with intervals and tokens read; or fidelity.

    Args:
        folders: Folders of runs, or of fidelity.

    Example:
        sinkscope dialogues table runs --json table.json
    """
    from sinkscope.bench.dialogues.tables import FIDELITY, tabulate_dialogues, tabulate_fidelity

    try:
        settings = parse_json((folders[0] / "settings.json").read_bytes())
    except (OSError, ValueError):  # what is wrong with it, the reader of the folder says
        settings = None
    fidelity = isinstance(settings, dict) and settings.get("command") == FIDELITY
    return tabulate_fidelity(folders) if fidelity else tabulate_dialogues(folders)


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
    """Measure at which depth and length of a prompt each method still finds what is asked for.

    Args:
        model: A short name, hub id or folder; recall and recall-2hop are the recall models in the package. By default
            the bundled model.
        tokenizer: Where a live model carries none.
        revision: Branch, tag or commit on the hub.
        backend: Load the model as this kind of object.
        device: cpu, cuda, cuda:1 or mps. By default the first CUDA device, else the CPU.
        dtype: float32, bfloat16 or float16. By default the checkpoint's.
        tasks: needle, multi-key, key-value, tracking and chain, with commas between. By default all that the
            form has.
        lengths: Longest prompts in tokens, with commas between.
        depths: Where the first statement that the answer needs stands, from 0 to 1, with commas between.
        samples: Prompts of each task, length and depth.
        methods: Names with commas between, each with settings if wanted (snapkv:window=32:kernel=7), or
            package.module:Class. By default full and ten more; an unknown name lists all.
        budget: Fraction of the context that every method with a size gets.
        form: Words of the prompts: ruler are RULER's in English, recall those of the recall models, facts sentences
            that the bundled model knows. By default what suits the model.
        max_new_tokens: Longest answer. By default RULER's 128, and 8 in the other forms.
        batch_size: Prompts that run together.
        out: Where answers are kept. If the folder holds a part of this run, the run continues.
        seed: Seed of every random choice.
        workers: Processes that share the work; more than one run over Ray.
        ray: Address of a Ray cluster, for several machines. By default workers run on this machine.
        progress: Called as `progress(what, done, total)`.

    Example:
        sinkscope needle --model recall --lengths 640,1024 --out needle
    """
    from sinkscope.bench.needle.run import run_needle

    if model is None or isinstance(model, str):
        model = _named(model, backend, revision=revision, device=device, dtype=dtype)
    return run_needle(
        model,
        out=out,
        tokenizer=tokenizer,
        form=form,
        tasks=tasks,
        lengths=lengths,
        depths=depths,
        samples=samples,
        methods=methods,
        share=budget,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        seed=seed,
        workers=workers,
        ray=ray,
        progress=progress,
    )


def _named(model: Any, backend: str, **options: str | None) -> NamedModel:
    """A model that each process opens for itself."""
    from sinkscope.bench.runner import NamedModel

    return NamedModel(model, {"backend": backend, **{k: v for k, v in options.items() if v is not None}})


def _methods_of(methods: Sequence[str], settings: Any, budget: str | None) -> tuple[Sequence[str], Budget]:
    """Methods as they are written, and the budget of those that have none of their own."""
    from sinkscope.bench.methods import SHARE, at_settings, check_methods, parse_budget

    if settings == "paper" and budget is not None:
        raise SinkscopeError(f"--budget {budget}: --settings paper has budgets of its own; give one of them")
    usual = {None: "256", "paper": "1024", "equal": str(SHARE)}[settings]
    share = parse_budget(budget or usual)
    names = methods or ("full", "streaming", "h2o", "snapkv", "tova")
    check_methods(names, ["cache"])
    if settings is not None:
        names = at_settings(methods, settings, share if settings == "equal" else SHARE)
    return names, share


def _dialogues_of(source: str, count: int | None, seed: int) -> tuple[Dialogue, ...]:
    """The dialogues of a file, or those of the recall model."""
    from sinkscope.bench.dialogues.form import read_dialogues
    from sinkscope.bench.dialogues.recall import TASK, recall_dialogues

    if source == TASK:
        return recall_dialogues(count or 10, seed=seed)
    task, colon, file = source.partition(":")
    if colon and task in SETS:
        from sinkscope.bench.dialogues.published import build_published

        return build_published(task, file, count=count).made
    found = read_dialogues(source)
    if count is not None and count > len(found):
        raise SinkscopeError(f"--count {count}: {Path(source).name} has {len(found)} dialogues")
    return found[:count]
