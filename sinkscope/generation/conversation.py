"""A conversation over turns on one cache (Li et al. 2025, LoopServe, algorithm 4).

The model reads the previous answer again together with the new input, along lines chosen for all these queries. The
keys and values that decoding put into the cache are cut off first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import DynamicCache

from sinkscope.engine.run import Event, Run
from sinkscope.errors import UnsupportedError
from sinkscope.files.arguments import checks_arguments
from sinkscope.files.records import Natural
from sinkscope.generation.decode import decode
from sinkscope.generation.edit_options import edit_from_options
from sinkscope.generation.options import check_generation_options, check_not_choosing
from sinkscope.hooks.edit.base import Intervention
from sinkscope.kv.cache import CacheLayer
from sinkscope.kv.keeper import CacheKeeper, check_servable
from sinkscope.models.inputs import check_length, end_ids, read_row
from sinkscope.models.layers import layers_with_states
from sinkscope.models.text.chat import Chat, chat_ids, uses_template
from sinkscope.opening.load import target_of
from sinkscope.results.notation import count_of


@dataclass(frozen=True, eq=False)
class Turn:
    """One turn of a conversation.

    Attributes:
        prompt: Token ids of the prompt.
        ids: Token ids of the answer, including the end-of-sequence token if it was generated.
        text: The answer as text, without special tokens and the model's end tokens. None without a tokenizer.
        prompt_tokens: Length of the whole conversation, in tokens, when the answer begins.
        queries: Number of tokens read in one pass before the answer: the part of the previous answer that has to be
            read, and `prompt`.
        read: Tokens that a decoding step attended to, including its own, averaged over steps, layers and kv heads.
            None if the answer is a single token, which follows from the prompt without a decoding step.
        summary: What the edit did, in one line.
        events: What the edit did; `step` counts the turn's forward calls.
    """

    text: str | None
    prompt_tokens: int
    queries: int
    read: float | None
    summary: str
    prompt: tuple[int, ...] = field(repr=False)
    ids: tuple[int, ...] = field(repr=False)
    events: tuple[Event, ...] = field(repr=False)


class _OwnCache(Intervention):
    """Owns the cache of a turn, also where no policy does."""

    def enter(self, run: Run, key: int) -> None:
        """Follow the cache."""
        CacheKeeper.of(run)


class Conversation:
    """A conversation on one cache: each turn reads new tokens along its own lines and decodes from parts of the cache.

    A turn's queries are the previous answer and the new prompt. Without an edit, or with an edit that hides and evicts
    nothing, this equals reading the whole text at once, up to rounding. Tokens of prompts that a policy or a guard
    evicts stay evicted. The answer's tokens are restored, because the answer is read again; this includes a repetition
    that a guard had cut, unless `LoopGuard` took it back from the answer, and H2O counts the attention of the answer's
    queries twice.

    A turn that fails or is interrupted leaves the conversation as it was. The edit is entered again for every turn, so
    the model is unedited between turns, a budget given as a fraction is a fraction of the conversation so far, a
    guard's monitor starts with the turn, and a patch needs calibrated values from the second turn on.

    `copy.copy` starts another conversation from here, for instance to ask several questions about one document. Both
    share the keys and values so far, which later turns never change; each adds its own.

    Args:
        model: Hugging Face, nnsight (dispatched) or `Target`.
        edit: `LoopServe`, any policy, patch or guard, or several joined by `|`. None leaves the model unedited.
        tokenizer: For models that carry none; only needed for texts.
        chat: Whether prompts and answers are messages in the tokenizer's chat template. "auto": if there is one. A turn
            reads what the template of the whole conversation adds to the text so far, or is refused.

    Attributes:
        turns: The turns so far.

    Raises:
        SinkscopeError: `edit` is invalid.
        UnsupportedError: The model has no language head, or keeps a state that cannot go back.

    Example:
        >>> import sinkscope as ss
        >>> chat = ss.Conversation(ss.load("recall"), ss.LoopServe(budget=64))
        >>> chat.ask("turn1 it was fact lotte carpet pipe . so they say ask lotte what was said answer").text
        'carpet pipe'
    """

    @checks_arguments
    def __init__(
        self,
        model: object,
        edit: Any = None,
        *,
        tokenizer: Any = None,
        chat: Chat = "auto",
    ) -> None:
        self.target = target_of(model, tokenizer)
        check_servable(self.target)
        states = layers_with_states(self.target)
        if states:
            raise UnsupportedError(
                f"a conversation takes tokens back, and layer {states[0]} of {self.target.name} keeps a state that "
                "cannot go back: use another model"
            )
        self.turns: list[Turn] = []
        edit = edit_from_options(interventions=edit)
        self._edit = _OwnCache() if edit is None else _OwnCache() | edit
        self._chat: Chat = chat
        self._messages: list[dict[str, Any]] = []  # of a chat
        self._layers: list[CacheLayer] = []  # of the cache between two turns; they never change

    def __repr__(self) -> str:
        turns = count_of(len(self.turns), "turn")
        edits = " | ".join(map(repr, self._edit.parts[1:])) or "no edit"
        return f"Conversation with {self.target.name}: {turns}, {count_of(len(self.ids), 'token')}, {edits}"

    @property
    def ids(self) -> list[int]:
        """Token ids of all prompts and answers."""
        return [token for turn in self.turns for token in (*turn.prompt, *turn.ids)]

    @checks_arguments
    def ask(self, prompt: Any, *, answer: Any = None, max_new_tokens: Natural = 64, **generation: Any) -> Turn:
        """Take one turn, greedily by default; only special tokens of the checkpoint's generation settings are used.

        Args:
            prompt: A text, or token ids, which are used unchanged. Without a chat template, texts of later turns get no
                special tokens (BOS), and nothing is inserted between turns.
            answer: The answer, if it is given, so that histories are the same for every model and edit. It is decoded
                token by token while the edit acts, as if the model had written it.
            max_new_tokens: Maximum length of the answer in tokens.
            generation: Further arguments of `model.generate`: `do_sample=True`, `streamer=...`, `eos_token_id=...`.

        Raises:
            SinkscopeError: The prompt or the answer is empty, there is no tokenizer, token ids are invalid, the turn
                exceeds the context, or `generation` has an option that is unknown, that the conversation sets itself,
                or that chooses tokens although the answer is given; also whatever the edit raises.
        """
        check_generation_options(self.target, generation)
        if answer is not None:
            check_not_choosing(generation)
        target = self.target
        new = self._read(prompt)
        text_ids = [*self.ids, *new]
        forced: list[list[int]] | None = None
        if answer is not None:
            forced = [read_row(target, answer, "the answer", special=False)]
            max_new_tokens = len(forced[0])
        check_length(target, "the conversation", len(text_ids), max_new_tokens, "ask something shorter")
        cache: Any = DynamicCache()
        cache.layers = [layer.copy() for layer in self._layers]
        cache.layer_class_to_replicate = None
        n_cached = cache.get_seq_length()
        (written,), run = decode(
            target, [text_ids], max_new_tokens, self._edit, forced, may_keep_state=True, cache=cache, **generation
        )
        assert run is not None
        for layer in cache.layers:
            layer.crop(len(text_ids) - layer.seen)
        mean_read = run.usage[0].mean_read  # the turn's own cache is the first
        turn = Turn(
            prompt=tuple(new),
            ids=tuple(written),
            text=self._text_of(written),
            prompt_tokens=len(text_ids),
            queries=len(text_ids) - n_cached,
            read=mean_read[0] if mean_read else None,
            summary=run.summary(),
            events=tuple(run.events),
        )
        self._layers = cache.layers
        self.turns = [*self.turns, turn]
        if isinstance(prompt, str):
            content = answer if isinstance(answer, str) else turn.text  # as it is, not as its tokens are read back
            self._messages = [*self._messages, _message("user", prompt), _message("assistant", content)]
        return turn

    def _text_of(self, written: list[int]) -> str | None:
        """The text of an answer without its end; None: there is no tokenizer."""
        tokenizer = self.target.available_tokenizer
        if tokenizer is None:
            return None
        ends = end_ids(self.target)  # not every tokenizer knows that the token that ends a text is special
        return str(tokenizer.decode([token for token in written if token not in ends], skip_special_tokens=True))

    def _read(self, prompt: Any) -> list[int]:
        """What a turn reads: the prompt, or what the chat template adds to the conversation with it."""
        ids = read_row(self.target, prompt, "the prompt", special=not self.turns)
        tokenizer, name = self.target.available_tokenizer, self.target.name
        if isinstance(prompt, str) and uses_template(tokenizer, prompt, self._chat, name):
            return chat_ids(tokenizer, [*self._messages, _message("user", prompt)], name, self.ids)
        return ids


def _message(role: str, content: str | None) -> dict[str, Any]:
    return {"role": role, "content": content}
