"""Generate text from prompts, with interventions: the quickest way to see what a patch changes."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Annotated, Any, Literal

from pydantic import Field

from sinkscope.engine.run import Event
from sinkscope.errors import SinkscopeError
from sinkscope.files.arguments import checks_arguments
from sinkscope.files.records import Natural, Whole
from sinkscope.generation.decode import RowSampler, decode
from sinkscope.generation.edit_options import edit_from_options
from sinkscope.hooks.edit.base import Intervention
from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.kv import Policy
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
        events: What the interventions did.
        summary: The same, in one line.
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
    seed: Whole = 0,
    bos: bool | None = None,
    chat: Chat = "auto",
) -> list[Generated]:
    """Generate after each prompt by itself, greedily or at a temperature.

    Only the special tokens of the checkpoint's generation settings are used (see `sinkscope.generation.decode`).
    Streamers, logits processors and other options of `model.generate` are for `Conversation.ask`, or for
    `model.generate` itself within `with edits.on(model):`, which takes batches as well.

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
        seed: Seed for sampling, which depends on no random numbers of the caller's.
        bos: Whether prompts begin with the BOS token. By default the tokenizer, or the chat template, decides.
        chat: Whether each text becomes a message in the tokenizer's chat template. "auto" does so if there is a
            template, `bos` is not given, and the text does not begin with a special token, and says so once.

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
    target.shards.agree("prompt, temperature or seed", rows, max_new_tokens, temperature, seed)
    results: list[Generated] = []
    for number, row in enumerate(rows):
        sampler = RowSampler(temperature, seed, [f"prompt {number}"]) if temperature > 0 else None
        (answer,), run = decode(target, [row], max_new_tokens, edit, sampler=sampler)
        text = tok.decode(answer, skip_special_tokens=True)
        done = ([], "") if run is None else (run.events, run.summary())
        results.append(Generated(text, answer, len(row), *done))
    return results


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
