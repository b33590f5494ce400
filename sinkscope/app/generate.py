"""The command `sinkscope generate`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from sinkscope.errors import SinkscopeError
from sinkscope.files.arguments import checks_arguments
from sinkscope.files.plain import visible
from sinkscope.files.progress import silent
from sinkscope.files.records import Natural, Whole
from sinkscope.generation.edit_options import edit_from_options
from sinkscope.generation.generate import generate
from sinkscope.opening.load import load
from sinkscope.results.console import end_bar, note


@checks_arguments
def print_generated(
    prompt: str | None = None,
    *,
    prompt_file: str | None = None,
    model: str | None = None,
    revision: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    chat: bool | None = None,
    patch: str | None = None,
    policy: str | None = None,
    guard: bool = False,
    max_new_tokens: Natural = 100,
    temperature: Annotated[float, Field(ge=0)] = 0.0,
    seed: Whole = 0,
    progress: Any = None,
) -> None:
    """Continue a prompt, under a patch, a cache policy or a guard if asked: text on stdout, what they did on stderr.

    Args:
        prompt: The prompt.
        prompt_file: File with the prompt; - is standard input.
        model: A short name, hub id, folder or .gguf file. By default the model in the package.
        revision: Branch, tag or commit on the hub.
        device: cpu, cuda, cuda:1 or mps. By default the first CUDA device, else the CPU.
        dtype: float32, bfloat16 or float16. By default the checkpoint's.
        chat: Whether the prompt is a message in the tokenizer's chat template. By default it is if there is one.
        patch: The patch.json to run under.
        policy: What the KV cache keeps, such as streaming:512, snapkv:0.25:window=64 or package.module:Class:512.
        guard: Break repetition loops with LoopGuard, and remove them from the text. The guard as published is --policy
            loopguard:paper.
        max_new_tokens: Longest answer.
        temperature: 0 takes the likeliest token.
        seed: Seed of the sampling.
        progress: Called as `progress(what, done, total)`.
    """
    if (prompt is None) == (prompt_file is None):
        raise SinkscopeError("give a prompt as an argument, or --prompt-file FILE: one of the two")
    if prompt is None:
        prompt = prompt_file
    if seed and not temperature and not guard:
        raise SinkscopeError("--seed has no effect on greedy answers: give --temperature or --guard, or leave it out")
    edit = edit_from_options(patch=patch, policy=policy, guard=guard)
    loaded = load(model, revision=revision, device=device, dtype=dtype)
    progress = progress or silent
    progress("writing", 0, 0)

    (answer,) = generate(
        loaded,
        prompt,
        interventions=edit,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        chat="auto" if chat is None else chat,
    )
    end_bar(progress)
    print(visible(answer.text))
    if edit is not None:
        note(answer.summary)
