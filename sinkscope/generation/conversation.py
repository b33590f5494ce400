"""A conversation over turns on one cache (Li et al. 2025, LoopServe, algorithm 4).

In the paper, the model reads the previous answer again together with the new input, along lines chosen for all these
queries: `answers="recompute"`. The keys and values that decoding put into the cache are cut off first.
`answers="keep"` leaves them there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from transformers import DynamicCache

from sinkscope.engine.actor import Actor
from sinkscope.engine.run import Event, Run
from sinkscope.engine.step import RowState, Step, TakeBack
from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.files.records import Natural, check_values
from sinkscope.generation.decode import ForcedAnswer, decoding
from sinkscope.generation.write import write
from sinkscope.hooks.edit.base import Intervention, under
from sinkscope.kv.cache import CacheLayer
from sinkscope.kv.keeper import CacheKeeper
from sinkscope.models.call_cache import CACHE_NAMES
from sinkscope.models.checkpoints.config import check_finite
from sinkscope.models.inputs import check_length, end_ids, read_row
from sinkscope.models.text.chat import Chat, chat_ids, uses_template
from sinkscope.opening.live import target_of

Answers = Literal["recompute", "keep"]
_SET_BY_US = (
    "input_ids",
    "inputs",
    "inputs_embeds",
    "attention_mask",
    *CACHE_NAMES,
    "use_cache",
    "cache_implementation",
    "generation_config",
    "max_length",
    "prefill_chunk_size",
    "num_beams",
    "num_return_sequences",
    "assistant_model",
    "assistant_early_exit",
    "prompt_lookup_num_tokens",
)


@dataclass(frozen=True, eq=False)
class Turn:
    """One turn of a conversation.

    Attributes:
        prompt: Token ids of the prompt.
        ids: Token ids of the answer, including the end-of-sequence token if it was generated.
        text: The answer as text, without special tokens and without the token that ended it. None without a tokenizer.
        prompt_tokens: Length of the whole conversation, in tokens, when the answer begins.
        queries: Number of tokens read in one pass before the answer: the part of the previous answer that has to be
            read, and `prompt`.
        read: Tokens that a decoding step attended to, including its own, averaged over steps, layers and kv heads.
            None if the answer is a single token, which follows from the prompt without a decoding step.
        summary: What the edit did, in one line.
        events: What the edit did; `step` counts the turn's forward calls.
        output: What `model.generate` returned.
    """

    text: str | None
    prompt_tokens: int
    queries: int
    read: float | None
    summary: str
    prompt: tuple[int, ...] = field(repr=False)
    ids: tuple[int, ...] = field(repr=False)
    events: tuple[Event, ...] = field(repr=False)
    output: Any = field(repr=False)


@dataclass(eq=False)
class TurnRecorder(Intervention, Actor):
    """Owns the cache of a turn and notes what is known of its rows; it is entered before the conversation's edit.

    Attributes:
        cache: The cache on which the turn runs.
        earlier: Its tokens before the turn; None in the first one.
        after_prompt: The tokens right after the prompt was read, and what edits know about them.
        after_answer: The same at the end of the turn.
    """

    cache: DynamicCache
    earlier: RowState | None
    after_prompt: RowState | None = None
    after_answer: RowState | None = None
    reads_logits: ClassVar[bool] = False

    def enter(self, run: Run, key: int) -> None:
        """Follow the calls."""
        CacheKeeper.of(run)
        if self.earlier is not None:
            run.know_rows(self.cache, self.earlier.copy())
        run.act(self)

    def after(self, step: Step) -> TakeBack | None:
        """Note what is known after a call."""
        if step.cache is self.cache:  # a logits processor may run the model on a cache of its own
            self.after_answer = step.state
            if self.after_prompt is None:  # the first call reads the prompt
                self.after_prompt = step.state.copy()
        return None


class Conversation:
    """A conversation on one cache: each turn reads new tokens along its own lines and decodes from parts of the cache.

    Under "recompute" a turn's queries are the previous answer and the new prompt. Under "keep" they are the last token
    of the previous answer, which has not been through the model yet, and the new prompt. Without an edit, or with an
    edit that hides and evicts nothing, both equal reading the whole text at once, up to rounding. Tokens that a
    policy or a guard evicts stay evicted. Under "recompute" the answer's tokens are restored, because the answer is
    read again; this includes a repetition that a guard had cut, unless `LoopGuard` took it back from the
    answer, and H2O counts the attention of the answer's queries twice.

    A turn that fails or is interrupted leaves the conversation as it was. The edit is entered again for every turn, so
    the model is unedited between turns, a budget given as a fraction is a fraction of the conversation so far, and a
    guard's monitor starts with the turn.

    Args:
        model: Hugging Face, nnsight (dispatched) or `Target`.
        edit: `LoopServe`, any policy, patch or guard, or several joined by `|`. None leaves the model unedited.
        answers: "recompute" reads the previous answer again in the next turn; "keep" leaves it in the cache.
        tokenizer: For models that carry none; only needed for texts.
        chat: Whether prompts and answers are messages in the tokenizer's chat template. "auto": if there is one. A turn
            reads what the template of the whole conversation adds to the text so far, or is refused.

    Attributes:
        turns: The turns so far.

    Raises:
        SinkscopeError: `answers` or `edit` is invalid.

    Example:
        >>> import sinkscope as ss
        >>> chat = ss.Conversation(ss.load("recall"), ss.LoopServe(budget=64))
        >>> chat.ask("turn1 it was fact lotte carpet pipe . so they say ask lotte what was said answer").text
        'carpet pipe'
    """

    def __init__(
        self,
        model: object,
        edit: Intervention | None = None,
        *,
        answers: Answers | str = "recompute",
        tokenizer: Any = None,
        chat: Chat = "auto",
    ) -> None:
        check_values(Answers, answers=answers)
        check_values(Chat, chat=chat)
        if edit is not None and not isinstance(edit, Intervention):
            raise SinkscopeError(f"edit={edit!r}: expected LoopServe(...), a policy, patch or guard, or None")
        self.target = target_of(model, tokenizer)
        self.target.check_head()
        if tokenizer is not None:
            self.target = replace(self.target, tokenizer=tokenizer)
        check_finite(self.target.hf)
        self.turns: list[Turn] = []
        self._edit = edit
        self._answers = answers
        self._chat: Any = chat  # whether it is one is known when the first turn is taken
        self._messages: list[dict[str, str]] = []  # of a chat
        self._layers: list[CacheLayer] = []  # of the cache between two turns; they never change
        self._sequence: RowState | None = None  # its tokens, and what edits know about them

    @property
    def ids(self) -> list[int]:
        """Token ids of all prompts and answers."""
        ids: list[int] = []
        for turn in self.turns:
            ids += [*turn.prompt, *turn.ids]
        return ids

    def ask(self, prompt: str | Sequence[int], *, max_new_tokens: int = 64, **generation: Any) -> Turn:
        """Take one turn, greedily by default; only special tokens of the checkpoint's generation settings are used.

        Args:
            prompt: A text, or token ids, which are used unchanged. Without a chat template, texts of later turns get no
                special tokens (BOS), and nothing is inserted between turns.
            max_new_tokens: Maximum length of the answer in tokens.
            generation: Further arguments of `model.generate`: `do_sample=True`, `streamer=...`, `eos_token_id=...`.

        Raises:
            SinkscopeError: The prompt is empty, there is no tokenizer, token ids are invalid, the turn exceeds the
                context, or `generation` has settings that the conversation sets itself or that need several rows;
                also whatever the edit raises.
        """
        check_values(Natural, max_new_tokens=max_new_tokens)
        return self._take_turn(prompt, max_new_tokens, generation)

    def say(self, prompt: str | Sequence[int], answer: str | Sequence[int]) -> Turn:
        """Take a turn with a given answer, so that histories are the same for every model and edit.

        The given answer is decoded token by token while the edit acts, as if the model had written it.

        Raises:
            SinkscopeError: As for `ask`, or the answer is empty.
        """
        gold = self._encode(answer, "answer", special=False)
        turn = self._take_turn(prompt, len(gold), {}, gold)
        if isinstance(prompt, str) and isinstance(answer, str):  # as it is, and not as its tokens are read back
            self._messages[-1]["content"] = answer
        return turn

    def branch(self) -> Conversation:
        """Start another conversation from here, for instance to ask several questions about one document.

        Both share the keys and values so far, which later turns never change; each adds its own.
        """
        other = copy(self)
        other.turns = [*self.turns]
        other._messages = [*self._messages]
        return other

    def _take_turn(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int,
        generation: dict[str, Any],
        gold: list[int] | None = None,
    ) -> Turn:
        """Read the prompt, generate an answer (`gold`, if given), and keep the cache for the next turn."""
        target = self.target
        tokenizer = target.available_tokenizer
        new = self._new_ids(prompt)
        whole = [*self.ids, *new]
        turn_name = f"turn {len(self.turns) + 1}, with the {len(self.ids)} tokens before it,"
        check_length(target, turn_name, len(whole), max_new_tokens, "ask something shorter")
        _check_generation(generation)
        cache: Any = DynamicCache()
        if self._layers:
            cache.layers = [layer.copy() for layer in self._layers]
            cache.layer_class_to_replicate = None
        seen = cache.get_seq_length()
        recorder = TurnRecorder(cache, self._sequence)
        edit = recorder if self._edit is None else recorder | self._edit
        ends = generation.get("eos_token_id", end_ids(target))
        settings = {"do_sample": False, "pad_token_id": min(end_ids(target), default=0), **generation}
        if gold is not None:
            settings["logits_processor"] = [ForcedAnswer([gold], len(whole))]
        # The prompt is read in one pass, on this cache.
        settings |= {"use_cache": True, "cache_implementation": None, "prefill_chunk_size": None}
        settings = decoding(target, **settings)
        ids = torch.tensor([whole], device=target.device)
        told = {"attention_mask": torch.ones_like(ids), "max_new_tokens": max_new_tokens, "cache": cache}
        with under(edit, target) as run, torch.no_grad():
            output = write(run, target.hf, ids, **told, fixed=gold is not None, **settings)
        sequences: Tensor = getattr(output, "sequences", output)
        answer = gold or sequences[0, len(whole) :].tolist()
        text = None
        if tokenizer is not None:  # not every tokenizer knows that the token that ends a text is special
            is_ended = answer[-1] in torch.as_tensor([] if ends is None else ends)
            text = str(tokenizer.decode(answer[:-1] if is_ended else answer, skip_special_tokens=True))
        read = run.usage[0].mean_read  # the turn's own cache is the first
        self._keep(cache, len(whole), recorder)
        turn = Turn(
            prompt=tuple(new),
            ids=tuple(answer),
            text=text,
            prompt_tokens=len(whole),
            queries=len(whole) - seen,
            read=read[0] if read else None,
            summary=run.summary(),
            events=tuple(run.events),
            output=output,
        )
        self.turns = [*self.turns, turn]
        if isinstance(prompt, str):
            asked = {"role": "user", "content": prompt}
            self._messages = [*self._messages, asked, {"role": "assistant", "content": text or ""}]
        return turn

    def _keep(self, cache: Any, prompt_tokens: int, recorder: TurnRecorder) -> None:
        """Keep the cache after a turn: with the answer's keys and values, or cut back to `prompt_tokens`."""
        for layer in cache.layers:
            if type(layer) is not CacheLayer:
                raise UnsupportedError(
                    f"a conversation takes tokens back, and a {type(layer).__name__} of this model's cache keeps a "
                    "state that cannot go back: use another model"
                )
            layer.settle()
            if self._answers == "recompute":
                layer.crop(prompt_tokens - layer.seen)
        # What `generate` returned may hold the cache itself, and others may go on with it.
        self._layers = [layer.copy() for layer in cache.layers]
        self._sequence = recorder.after_prompt if self._answers == "recompute" else recorder.after_answer

    def _new_ids(self, prompt: str | Sequence[int]) -> list[int]:
        """What a turn reads: the prompt, or what the chat template adds to the conversation with it."""
        target = self.target
        tokenizer = target.available_tokenizer
        ids = self._encode(prompt, "prompt", special=not self.turns)
        if isinstance(prompt, str):
            if not self.turns:
                self._chat = uses_template(tokenizer, prompt, self._chat, target.name)
            if self._chat:
                messages = [*self._messages, {"role": "user", "content": prompt}]
                return chat_ids(tokenizer, messages, target.name, self.ids)
        return ids

    def _encode(self, text: str | Sequence[int], what: str, *, special: bool) -> list[int]:
        return read_row(self.target, text, f"turn {len(self.turns) + 1}, the {what}", special=special)


def _check_generation(generation: Mapping[str, Any]) -> None:
    """Refuse settings of `generate` that a conversation has to choose itself."""
    for name, value in generation.items():
        if name in _SET_BY_US and value is not None and not (isinstance(value, int) and value == 1):
            raise SinkscopeError(
                f"{name}={value!r}: a conversation has a cache of its own, and writes one row of text token by "
                f"token; leave it out, or give {name}=None"
            )
