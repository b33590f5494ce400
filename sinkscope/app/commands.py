"""Commands beside the measurements: names of models, generated text, and repetition loops in files; loads no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from sinkscope.errors import SinkscopeError
from sinkscope.files.console import emit, note, silent
from sinkscope.files.output import read_text
from sinkscope.files.registry import Count, Hidden, Option, Positive, command
from sinkscope.files.tables import Grid

if TYPE_CHECKING:
    from sinkscope.loops import LoopCalibration, LoopCheck


@command(group="Look", command="models")
def print_models(
    *, json_file: Annotated[str | None, Option("--json", metavar="FILE|-", writes=True)] = None, wide: bool = False
) -> None:
    """List the short names of public models, and the layers in which papers found their sinks.

    Args:
        json_file: Write the list as JSON; - is standard output.
        wide: Show the published neurons, the residual dimensions and the source as well.

    Example:
        sinkscope models
    """
    from sinkscope.files.plain import plain
    from sinkscope.models.names import models

    if json_file is not None:
        emit(json_file, json.dumps({"schema": 1, "kind": "models", "result": plain(models())}, indent=1) + "\n")
    if json_file != "-":
        found = [(e, e.published) for e in models()]
        known = sum(sink is not None for _, sink in found)
        print(f"Conclusion: papers report a sink or massive activation for {known} of these {len(found)} models.\n")
        if wide:
            rows = [(e.name, e.hub_id, *(sink.shown() if sink else ("-", "-"))) for e, sink in found]
            print(Grid(("name", "hub id", "published sink", "source"), rows).text())
        else:
            rows = [(e.name, e.hub_id, ", ".join(map(str, sink.layers)) if sink else "-") for e, sink in found]
            print(Grid(("name", "hub id", "sink layer"), rows).text())


@command(group="Look", command="generate")
def print_generated(
    prompt: Annotated[str, Option("--prompt-file", metavar="FILE|-", reads="text")],
    *,
    model: str | None = None,
    revision: str | None = None,
    backend: Literal["bridge", "hf", "nnsight"] = "hf",
    device: str | None = None,
    dtype: str | None = None,
    bos: bool | None = None,
    patch: Annotated[str | None, Option(metavar="FILE")] = None,
    policy: Annotated[str | None, Option(metavar="NAME[:BUDGET]")] = None,
    guard: bool = False,
    max_new_tokens: Positive = 100,
    temperature: Annotated[float, Option(min=0)] = 0.0,
    seed: Count = 0,
) -> None:
    """Continue a prompt, under a patch, a cache policy or a guard if asked: text on stdout, events on stderr.

    Args:
        prompt: The prompt; - is standard input.
        model: A short name, hub id, folder or .gguf file. By default the model in the package.
        revision: Branch, tag or commit on the hub.
        backend: Load the model as this kind of object.
        device: cpu, cuda, cuda:1 or mps. By default the first CUDA device, else the CPU.
        dtype: float32, bfloat16 or float16. By default the checkpoint's.
        bos: Whether the prompt begins with BOS. By default the tokenizer decides.
        patch: The patch.json to run under.
        policy: What the KV cache keeps, such as streaming:512, h2o:0.25 or package.module:Class:512.
        guard: Break repetition loops with LoopGuard.
        max_new_tokens: Longest answer.
        temperature: 0 takes the likeliest token.
        seed: Seed of the sampling.

    Example:
        sinkscope generate --prompt-file prompt.txt --policy h2o:0.25 --guard
    """
    import sinkscope.models.load as loading
    import sinkscope.serving.generate as generation
    from sinkscope.kv.edit_of import edit_of

    edit = edit_of(patch=patch, policy=policy, guard=guard)
    options = {"revision": revision, "device": device, "dtype": dtype}
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    made = generation.generate(
        loading.load(model, backend=backend, **given),
        prompt,
        interventions=edit,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        bos=bos,
        on_text=lambda _, piece: print(piece, end="", flush=True),  # it stays on the screen, also after Ctrl-C
    )[0]
    print()
    from sinkscope.kv.loopguard.guard import in_words

    if policy is not None and made.held is not None:
        whole, read = made.prompt_tokens + (len(made.tokens) - 1) / 2, made.held if made.read is None else made.read
        note(
            f"Under {policy} the cache held {made.held:.0f} tokens on average, and a step read {read:.0f}; the full "
            f"cache would have held {whole:.0f}."
        )
    if cuts := sum(event.kind == "guard" for event in made.events):
        note(f"The guard stepped in {'once' if cuts == 1 else f'{cuts} times'}:")
    elif guard:
        note(f"The guard found no loop in {len(made.tokens)} new tokens.")
    for event in made.events:
        note(in_words(event) if event.kind == "guard" else _line(event))


def _line(event: Any) -> str:
    """An event in one line."""
    data: dict[str, Any] = {} if event.layer is None else {"layer": event.layer}
    data |= event.data
    told = [f"{name} {f'{value:.3g}' if isinstance(value, float) else value}" for name, value in data.items()]
    return ", ".join([f"{event.kind}: step {event.step}", f"position {event.position}", *told])


@command(group="Loops", command="loops")
def check_loops(
    file: Annotated[str | None, Option(argument=True, metavar="FILE|-")] = None,
    *,
    form: Annotated[Literal["auto", "text", "jsonl", "sse"], Option("--format")] = "auto",
    settings: Annotated[str | None, Option(metavar="FILE")] = None,
    window: int | None = None,
    theta_ttr: float | None = None,
    theta_cr: float | None = None,
    warmup: int | None = None,
    max_new: int | None = None,
    variant: str = "repeats",
    progress: Hidden = None,
) -> LoopCheck:
    """Check whether outputs repeat themselves: diversity, redundancy, period and onset of each record. Loads no model.

    Args:
        file: Text, or JSON lines with text, output or tokens; - is standard input.
        form: What the file is. By default .jsonl and .ndjson are JSON lines, anything else is one text; with --follow
            the first line decides, and it may also be server-sent events (sse).
        settings: Settings of the monitor, as --calibrate writes them with --json.
        window: Tokens that the signals look at; 256 by default.
        theta_ttr: Type-token ratio below which a window is repetitive; 0.2 by default.
        theta_cr: Compression ratio below which a window is repetitive; 0.12 by default.
        warmup: First token at which a loop may be found; 64 by default in the paper's monitor, else none.
        max_new: Tokens that were allowed: adds the loop rule with length.
        variant: Which monitor decides. "repeats" finds three copies of anything, "full" is the paper's.
        progress: Called as `progress(what, done, total)`.

    Example:
        sinkscope loops answers.jsonl --max-new 2500
    """
    from sinkscope.loops.checker import check, parse
    from sinkscope.loops.follow import monitor_settings

    if file is None or form == "sse":
        raise SinkscopeError("give the file to check, or - for standard input; --format sse is for --follow")
    used = monitor_settings(settings, variant, window=window, theta_ttr=theta_ttr, theta_cr=theta_cr, warmup=warmup)
    name = "standard input" if file == "-" else Path(file).name
    records = parse(read_text(file), name, form)
    return check(records, settings=used, max_new=max_new, name=name, progress=progress)


@command(group="Loops", command="loops", flag="calibrate")
def calibrate_loops(
    file: Annotated[str | None, Option(argument=True, metavar="FILE|-")] = None,
    *,
    form: Annotated[Literal["auto", "text", "jsonl", "sse"], Option("--format")] = "auto",
    tokenizer: Annotated[str | None, Option(metavar="NAME")] = None,
    rate: float = 10.0,
    window: int | None = None,
    progress: Hidden = None,
) -> LoopCalibration:
    """Fit the monitor to a vocabulary: settings with few false alarms on ordinary text, also for vLLM and llama.cpp.

    Args:
        file: Ordinary text, or outputs without loops.
        form: Text, JSON lines or server-sent events. By default the first line decides.
        tokenizer: With --calibrate: the model whose vocabulary it is. By default text is split into words.
        rate: With --calibrate: false alarms per million tokens that are accepted.
        window: Tokens that the signals look at.
        progress: Called as `progress(what, done, total)`.

    Example:
        sinkscope loops ordinary.txt --calibrate --json settings.json
    """
    from sinkscope.loops import MonitorSettings, calibrate
    from sinkscope.loops.follow import read_outputs

    encode = None
    if tokenizer is not None:
        from sinkscope.models.load import open_tokenizer

        encode = open_tokenizer(tokenizer)[0]
    used = MonitorSettings() if window is None else MonitorSettings(window=window)
    outputs, vocabulary = read_outputs(file or "-", form, encode)
    name = "standard input" if file in (None, "-") else Path(file).name
    return calibrate(outputs, vocabulary=vocabulary, rate=rate, settings=used, name=name, progress=progress or silent)
