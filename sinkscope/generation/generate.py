"""Generate text from prompts, with interventions: the quickest way to see what a patch changes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from sinkscope.engine.run import Event
from sinkscope.errors import SinkscopeError
from sinkscope.files.arguments import checks_arguments
from sinkscope.files.records import Natural
from sinkscope.generation.decode import decode
from sinkscope.generation.edit_options import edit_from_options
from sinkscope.hooks.edit.base import Intervention
from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.kv import Policy
from sinkscope.models.checkpoints.config import check_finite
from sinkscope.models.draws import seed_of
from sinkscope.models.inputs import check_length, read_inputs, tokenizer_of
from sinkscope.models.target import Target
from sinkscope.models.text.chat import Chat, chat_ids, uses_template
from sinkscope.opening.live import target_of

Temperature = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Generated:
    """What a model wrote after one prompt.

    Attributes:
        text: The new text, without the prompt.
        tokens: Ids of the new tokens, including the end-of-sequence token if the model produced it.
        prompt_tokens: Length of the prompt, BOS included.
        events: What the interventions did in this row (`row` is the index of the prompt).
        summary: One line on what the interventions did in all rows of the batch.
    """

    text: str
    tokens: list[int]
    prompt_tokens: int
    events: list[Event]
    summary: str = ""


@checks_arguments
def generate(
    model: object,
    prompts: Any,
    *,
    patch: SinkPatch | str | PathLike[str] | None = None,
    interventions: Any = None,
    policy: Policy | str | None = None,
    guard: Intervention | bool | Literal["paper"] = False,
    tokenizer: Any = None,
    max_new_tokens: Natural = 100,
    temperature: Temperature = 0.0,
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0,
    bos: bool | None = None,
    chat: Chat = "auto",
    batch_size: Natural = 1,
) -> list[Generated]:
    """Generate after each prompt, greedily or at a temperature.

    Only the special tokens of the checkpoint's generation settings are used (see `sinkscope.generation.decode`).
    Streamers, logits processors and other options of `model.generate` are for `Conversation.ask`, or for
    `model.generate` itself within `with edits.on(model):`.

    Args:
        model: Hugging Face, TransformerBridge, nnsight (dispatched) or `Target`.
        prompts: A text or a list of texts; token ids as a list, a list of lists or a tensor; or a tokenizer's output.
            Ids are used unchanged.
        patch: A `SinkPatch`, or the path of a patch.json.
        interventions: Further edits: an intervention, several joined by |, or a list of these. They act after the
            patch.
        policy: What the KV cache keeps: a policy, or a name that `policy_named` accepts, such as "h2o:512".
        guard: Watch for repetition loops and cut the cache of rows that loop. True means `LoopGuard()`, which also
            removes loops from the text; "paper" means `LoopGuard.paper()`, which does not.
        tokenizer: Needed if the model carries no tokenizer.
        max_new_tokens: Maximum number of new tokens per prompt.
        temperature: Sampling temperature; 0 decodes greedily.
        seed: Seed for sampling. The caller's random state is restored afterwards.
        bos: Whether prompts begin with the BOS token. By default the tokenizer, or the chat template, decides.
        chat: Whether each text becomes a message in the tokenizer's chat template. "auto" does so if there is a
            template, `bos` is not given, and the text does not begin with a special token, and says so once.
        batch_size: Number of prompts that run together, padded on the left; 1 under a guard that takes tokens back.

    Returns:
        One `Generated` per prompt, in order.

    Raises:
        SinkscopeError: A prompt is empty, prompt and new tokens exceed the context, there is no tokenizer, a number is
            invalid, the policy does not exist, or its budget is too small for a prompt.
    """
    target = target_of(model, tokenizer)
    target.check_head()
    tok = tokenizer_of(target)  # a model without one is refused
    rows = _rows(target, prompts, bos, chat)
    edit = edit_from_options(patch=patch, policy=policy, guard=guard, interventions=interventions)
    for number, length in enumerate(map(len, rows), 1):
        check_length(target, f"prompt {number}", length, max_new_tokens, "shorten the prompt")
        for part in () if edit is None else edit.parts:
            part.check_prompt(length)
    if edit is not None and any(part.takes_back for part in edit.parts):
        batch_size = 1
    options: dict[str, Any] = {"logits_processor": [partial(_finite, target)]}
    if temperature > 0:
        options |= {"do_sample": True, "temperature": float(temperature)}
    target.shards.agree("prompt, temperature or seed", rows, max_new_tokens, temperature, seed)
    results: list[Generated] = []
    with _drawing(target) if temperature > 0 else nullcontext():
        for start in range(0, len(rows), batch_size):
            if temperature > 0:
                torch.manual_seed(seed_of(seed, f"prompts from {start}"))
            batch = rows[start : start + batch_size]
            answers, run = decode(target, batch, max_new_tokens, edit, **options)
            summary = "" if run is None else run.summary()
            for prompt, answer in zip(batch, answers, strict=True):
                text = tok.decode(answer, skip_special_tokens=True)
                results.append(Generated(text, answer, len(prompt), [], summary))
            for event in () if run is None else run.events:
                results[start + event.row].events.append(replace(event, row=start + event.row))
    return results


_DRAWING = threading.RLock()


@contextmanager
def _drawing(target: Target) -> Iterator[None]:
    """Context manager in which torch's own random numbers may be set; threads that draw them wait for each other."""
    devices = [target.device] if target.device.type == "cuda" else []
    with _DRAWING, torch.random.fork_rng(devices=devices):
        yield


def _rows(target: Target, prompts: Any, bos: bool | None, chat: Chat) -> list[list[int]]:
    """The ids of each prompt: as they are given, as a text is read, or in the chat template."""
    rows, name = read_inputs(target, prompts, bos=bos).rows(), target.name
    texts = [prompts] if isinstance(prompts, str) else prompts
    if not isinstance(texts, list | tuple) or not isinstance(texts[0], str) or (bos is not None and chat == "auto"):
        return rows
    if bos is not None and chat:
        raise SinkscopeError(f"bos={bos} with chat=True: the template says what stands first; leave one of them out")
    for number, text in enumerate(texts):
        if uses_template(target.tokenizer, text, chat, name):
            rows[number] = chat_ids(target.tokenizer, [{"role": "user", "content": text}], name)
    return rows


def _finite(target: Target, ids: Tensor, scores: Tensor) -> Tensor:
    """The logits as they are, a processor of `generate`; NaN, where every token would be token 0, is refused."""
    if scores.isnan().any() or scores.isposinf().any():
        check_finite(target.hf)  # names the tensor if the weights are the reason
        if scores.isnan().any():
            raise SinkscopeError(
                f"the logits of {target.name} are NaN after {ids.shape[1]} tokens, and its weights are finite: load it "
                "with dtype=float32, or leave out what edits it"
            )
    return scores
