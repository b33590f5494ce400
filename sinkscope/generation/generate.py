"""Generate text from prompts, with interventions: the quickest way to see what a patch changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from sinkscope.engine.run import Event
from sinkscope.files.arguments import checks_arguments
from sinkscope.files.records import Natural, Whole
from sinkscope.generation.decode import decode, row_sampler
from sinkscope.generation.edit_options import edit_from_options
from sinkscope.generation.options import check_generation_options, check_not_drawing
from sinkscope.models.inputs import check_length, read_inputs
from sinkscope.models.target import tokenizer_of
from sinkscope.models.text.chat import Chat, chat_ids, uses_template
from sinkscope.opening.load import target_of

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
    tokenizer: Any = None,
    max_new_tokens: Natural = 100,
    temperature: Temperature = 0.0,
    seed: Whole = 0,
    chat: Chat = "auto",
    patch: Any = None,
    policy: Any = None,
    guard: Any = False,
    interventions: Any = None,
    **generation: Any,
) -> list[Generated]:
    """Generate after each prompt by itself, greedily or at a temperature.

    Only the special tokens of the checkpoint's generation settings are used (see `sinkscope.generation.decode`).
    `model.generate` itself takes batches within `with edits.on(model):`.

    Args:
        model: Hugging Face, TransformerBridge, nnsight (dispatched) or `Target`.
        prompts: A text or a list of texts; token ids as a list, a list of lists or a tensor; or a tokenizer's output.
            Ids are used unchanged.
        tokenizer: Needed if the model carries no tokenizer.
        max_new_tokens: Maximum number of new tokens per prompt.
        temperature: Sampling temperature; 0 decodes greedily.
        seed: Seed for sampling, which depends on no random numbers of the caller's.
        chat: Whether each text becomes a message in the tokenizer's chat template. "auto" does so if there is a
            template and the text does not begin with a special token, and says so once.
        patch: As all measurements take it (`sinkscope.generation.edit_options.edit_from_options`), like the next three.
        policy: A cache policy, or its name.
        guard: A guard. True removes loops from the text as well; with a streamer, or a processor that keeps a state
            between tokens, only from the cache.
        interventions: Any other interventions.
        generation: Further arguments of `model.generate`, for each prompt: `logits_processor=[...]`,
            `stopping_criteria=[...]`, `prefix_allowed_tokens_fn=`, `streamer=`, `repetition_penalty=` ...

    Returns:
        One `Generated` per prompt, in order.

    Raises:
        SinkscopeError: A prompt is empty, prompt and new tokens exceed the context, there is no tokenizer, a number is
            invalid, the policy does not exist, its budget is too small for a prompt, or `generation` has an option that
            is unknown or that `generate` sets itself.
    """
    target = target_of(model, tokenizer)
    target.check_head()
    check_generation_options(target, generation)
    check_not_drawing(generation)
    tok = tokenizer_of(target)  # a model without one is refused
    rows = read_inputs(target, prompts).rows
    for number, text in enumerate(prompts if isinstance(prompts, list | tuple) else [prompts]):
        if isinstance(text, str) and uses_template(tok, text, chat, target.name):
            rows[number] = chat_ids(tok, [{"role": "user", "content": text}], target.name)
    edit = edit_from_options(patch=patch, policy=policy, guard=guard, interventions=interventions)
    target.shards.agree("prompt, temperature or seed", rows, max_new_tokens, temperature, seed)
    for number, row in enumerate(rows, 1):
        check_length(target, f"prompt {number}", len(row), max_new_tokens, "shorten the prompt")
    results: list[Generated] = []
    for number, row in enumerate(rows):
        sampler = None
        if temperature > 0:
            sampler = row_sampler(temperature, seed, [f"prompt {number}"])
        (answer,), run = decode(target, [row], max_new_tokens, edit, sampler=sampler, may_keep_state=True, **generation)
        text = tok.decode(answer, skip_special_tokens=True)
        done = ([], "") if run is None else (run.events, run.summary())
        results.append(Generated(text, answer, len(row), *done))
    return results
