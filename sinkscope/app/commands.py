"""Commands beside the measurements: names of models, generated text, and repetition loops in files; loads no torch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

from sinkscope.files.console import emit, note
from sinkscope.files.registry import Count, Option, Positive, command
from sinkscope.files.tables import Grid

if TYPE_CHECKING:
    pass


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
