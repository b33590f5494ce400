"""Generate text from prompts, with interventions: the quickest way to see what a patch changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from os import PathLike
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Int
from pydantic import Field
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessor, LogitsProcessorList, TextStreamer

from sinkscope.engine.run import Event
from sinkscope.errors import SinkscopeError
from sinkscope.files.arguments import checks_arguments
from sinkscope.files.records import Natural
from sinkscope.generation.decode import decoding, to_end
from sinkscope.generation.edit_options import edit_from_options
from sinkscope.generation.write import write
from sinkscope.hooks.edit.base import Intervention, under
from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.kv import Policy
from sinkscope.models.checkpoints.config import check_finite
from sinkscope.models.draws import seed_of
from sinkscope.models.inputs import check_length, end_ids, read_inputs, tokenizer_of
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
    on_text: Callable[[int, str], None] | None = None,
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
        batch_size: Number of prompts that run together, padded on the left.
        on_text: Called with (index of the prompt, piece of text) during generation; needs batch_size 1. Under a guard
            that rewinds it is called once with the whole text, because pieces may be removed again.

    Returns:
        One `Generated` per prompt, in order.

    Raises:
        SinkscopeError: A prompt is empty, prompt and new tokens exceed the context, there is no tokenizer, a number is
            invalid, the policy does not exist, or its budget is too small for a prompt.
    """
    target = target_of(model, tokenizer)
    target.check_head()
    tokenizer_of(target)  # a model without one is refused
    if on_text is not None and batch_size != 1:
        raise SinkscopeError(
            f"on_text with batch_size={batch_size}: text can be passed on while it comes only with batch_size=1"
        )
    rows = _rows(target, prompts, bos, chat)
    edit = edit_from_options(patch=patch, policy=policy, guard=guard, interventions=interventions)
    _check_lengths(target, rows, max_new_tokens, edit)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": float(temperature)}
    options = decoding(target, max_new_tokens=max_new_tokens, **sampling)
    options["logits_processor"] = LogitsProcessorList([_FiniteLogits(target)])
    target.shards.agree("prompt, temperature or seed", rows, max_new_tokens, temperature, seed)
    results: list[Generated] = []
    with _drawing(target) if temperature > 0 else nullcontext():
        for start in range(0, len(rows), batch_size):
            if temperature > 0:
                torch.manual_seed(seed_of(seed, f"prompts from {start}"))
            results += _answers(target, rows[start : start + batch_size], start, edit, options, on_text)
    return results


def _answers(
    target: Target,
    batch: list[list[int]],
    start: int,
    edit: Intervention | None,
    options: dict[str, Any],
    on_text: Callable[[int, str], None] | None,
) -> list[Generated]:
    """What is written after the prompts of a batch, the first of which is number `start`."""
    tok = tokenizer_of(target)
    ends = end_ids(target)
    pad = max(0, min(ends, default=0))
    ids, mask = padded(batch, pad, target.device)
    with under(edit, target) as run, torch.no_grad():
        rewinds = run is not None and run.takes_back
        streamer = None
        if on_text is not None and not rewinds:
            streamer = _Streamer(tok, start, on_text)
        output = write(run, target.hf, ids, attention_mask=mask, pad_token_id=pad, streamer=streamer, **options)
    answers: list[Generated] = []
    events: list[Event] = []
    summary = ""
    if run is not None:
        events = run.events
        summary = run.summary()
    for row, written in enumerate(output[:, ids.shape[1] :].tolist()):
        tokens = to_end(written, ends)
        text = tok.decode(tokens, skip_special_tokens=True)
        if on_text is not None and rewinds:
            on_text(start + row, text)
        answers.append(Generated(text, tokens, len(batch[row]), [], summary))
    for event in events:  # a row that has ended continues as padding until the last row ends
        answer = answers[event.row]
        last = answer.prompt_tokens + len(answer.tokens) - 1
        if event.kind == "guard" or event.position <= last:
            answer.events.append(replace(event, row=start + event.row))
    return answers


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


def _check_lengths(target: Target, rows: list[list[int]], new: int, edit: Intervention | None) -> None:
    """Refuse a prompt that, with its new tokens, does not fit the model or what acts on it."""
    for number, length in enumerate(map(len, rows), 1):
        check_length(target, f"prompt {number}", length, new, "shorten the prompt")
        if edit is not None:
            for part in edit.parts:
                part.check_prompt(length)


def padded(
    rows: Sequence[list[int]], pad: int, device: torch.device
) -> tuple[Int[Tensor, "row pos"], Int[Tensor, "row pos"]]:
    """Return rows of ids that are filled up on the left, and which of them are real, as attention masks say it."""
    ids = [torch.tensor(row, device=device) for row in rows]
    real = [torch.ones_like(row) for row in ids]
    return (
        pad_sequence(ids, batch_first=True, padding_value=pad, padding_side="left"),
        pad_sequence(real, batch_first=True, padding_side="left"),
    )


class _FiniteLogits(LogitsProcessor):
    """Ends a generation whose logits are NaN, where every token would be token 0, or infinite by the weights' fault."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._is_checked = False  # whether the weights are known to be finite

    def __call__(self, input_ids: Any, scores: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not self._is_checked and not scores.isfinite().all():  # a token that is forbidden is -inf, too
            check_finite(self._target.hf)  # names the tensor if the weights are the reason
            self._is_checked = True
        if scores.isnan().any():
            remedy = "its weights are finite, so what edits it, or the model, is at fault"
            if self._target.dtype.itemsize == 2:
                remedy = "load it with dtype=bfloat16 or dtype=float32"
            raise SinkscopeError(
                f"the logits of {self._target.name} are NaN after {input_ids.shape[1]} tokens: {remedy}"
            )
        return scores


class _Streamer(TextStreamer):
    def __init__(self, tokenizer: Any, number: int, on_text: Callable[[int, str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._number, self._on_text = number, on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._on_text(self._number, text)
