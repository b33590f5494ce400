"""A conversation over turns on one cache (Li et al. 2025, LoopServe, algorithm 4).

In the paper, the model reads the previous answer again together with the new input, along lines chosen for all these
queries: `answers="recompute"`. The keys and values that decoding put into the cache are cut off first.
`answers="keep"` leaves them there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import DynamicCache

from sinkscope.engine.run import Event, Run
from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.files.arguments import checks_arguments
from sinkscope.files.records import Natural
from sinkscope.generation.decode import decode, stops_of
from sinkscope.generation.edit_options import edit_from_options
from sinkscope.hooks.edit.base import Intervention
from sinkscope.kv.cache import CacheLayer
from sinkscope.kv.keeper import CacheKeeper
from sinkscope.models.call_cache import CACHE_NAMES
from sinkscope.models.inputs import check_length, read_row
from sinkscope.models.text.chat import Chat, chat_ids, uses_template
from sinkscope.opening.live import target_of

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
    "return_dict_in_generate",
    "num_beams",
    "num_return_sequences",
    "assistant_model",
    "assistant_early_exit",
    "prompt_lookup_num_tokens",
)
"""Options of `generate` that a conversation has to choose itself."""


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

    Under "recompute" a turn's queries are the previous answer and the new prompt. Under "keep" they are the last token
    of the previous answer, which has not been through the model yet, and the new prompt. Without an edit, or with an
    edit that hides and evicts nothing, both equal reading the whole text at once, up to rounding. Tokens that a
    policy or a guard evicts stay evicted. Under "recompute" the answer's tokens are restored, because the answer is
    read again; this includes a repetition that a guard had cut, unless `LoopGuard` took it back from the
    answer, and H2O counts the attention of the answer's queries twice.

    A turn that fails or is interrupted leaves the conversation as it was. The edit is entered again for every turn, so
    the model is unedited between turns, a budget given as a fraction is a fraction of the conversation so far, a
    guard's monitor starts with the turn, and a patch needs calibrated values from the second turn on.

    `copy.copy` starts another conversation from here, for instance to ask several questions about one document. Both
    share the keys and values so far, which later turns never change; each adds its own.

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

    @checks_arguments
    def __init__(
        self,
        model: object,
        edit: Any = None,
        *,
        answers: Literal["recompute", "keep"] = "recompute",
        tokenizer: Any = None,
        chat: Chat = "auto",
    ) -> None:
        self.target = target_of(model, tokenizer)
        self.target.check_head()
        self.turns: list[Turn] = []
        self._edit = edit_from_options(interventions=edit)
        self._answers = answers
        self._chat: Any = chat  # whether it is one is known when the first turn is taken
        self._messages: list[dict[str, str]] = []  # of a chat
        self._layers: list[CacheLayer] = []  # of the cache between two turns; they never change

    @property
    def ids(self) -> list[int]:
        """Token ids of all prompts and answers."""
        ids: list[int] = []
        for turn in self.turns:
            ids += [*turn.prompt, *turn.ids]
        return ids

    @checks_arguments
    def ask(
        self,
        prompt: Any,
        *,
        answer: Any = None,
        max_new_tokens: Natural = 64,
        **generation: Any,
    ) -> Turn:
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
                exceeds the context, or `generation` has settings that the conversation sets itself or that need several
                rows; also whatever the edit raises.
        """
        target, tokenizer = self.target, self.target.available_tokenizer
        new = self._new_ids(prompt)
        whole = [*self.ids, *new]
        for name, value in generation.items():
            if name in _SET_BY_US and value is not None and not (isinstance(value, int) and value == 1):
                raise SinkscopeError(
                    f"{name}={value!r}: a conversation has a cache of its own, and writes one row of text token by "
                    f"token; leave it out, or give {name}=None"
                )
        forced: list[list[int]] | None = None
        if answer is not None:
            forced = [self._encode(answer, "answer", special=False)]
            max_new_tokens = len(forced[0])
        turn_name = f"turn {len(self.turns) + 1}, with the {len(self.ids)} tokens before it,"
        check_length(target, turn_name, len(whole), max_new_tokens, "ask something shorter")
        cache: Any = DynamicCache()
        cache.layers = [layer.copy() for layer in self._layers]
        cache.layer_class_to_replicate = None
        seen = cache.get_seq_length()
        edit = _OwnCache() if self._edit is None else _OwnCache() | self._edit
        options = {name: value for name, value in generation.items() if name not in _SET_BY_US}
        (written,), run = decode(target, [whole], max_new_tokens, edit, forced, cache=cache, **options)
        assert run is not None
        text = None
        if tokenizer is not None:  # not every tokenizer knows that the token that ends a text is special
            is_ended = written[-1] in stops_of(target, generation)
            text = str(tokenizer.decode(written[:-1] if is_ended else written, skip_special_tokens=True))
        for layer in cache.layers:
            if type(layer) is not CacheLayer:
                raise UnsupportedError(
                    f"a conversation takes tokens back, and a {type(layer).__name__} of this model's cache keeps a "
                    "state that cannot go back: use another model"
                )
            if self._answers == "recompute":
                layer.crop(len(whole) - layer.seen)
        read = run.usage[0].mean_read  # the turn's own cache is the first
        turn = Turn(
            prompt=tuple(new),
            ids=tuple(written),
            text=text,
            prompt_tokens=len(whole),
            queries=len(whole) - seen,
            read=read[0] if read else None,
            summary=run.summary(),
            events=tuple(run.events),
        )
        self._layers = cache.layers
        self.turns = [*self.turns, turn]
        if isinstance(prompt, str):
            said = answer if isinstance(answer, str) else text or ""  # as it is, and not as its tokens are read back
            asked = {"role": "user", "content": prompt}
            self._messages = [*self._messages, asked, {"role": "assistant", "content": said}]
        return turn

    def _new_ids(self, prompt: Any) -> list[int]:
        """What a turn reads: the prompt, or what the chat template adds to the conversation with it."""
        tokenizer, name = self.target.available_tokenizer, self.target.name
        ids = self._encode(prompt, "prompt", special=not self.turns)
        if isinstance(prompt, str):
            if not self.turns:
                self._chat = uses_template(tokenizer, prompt, self._chat, name)
            if self._chat:
                return chat_ids(tokenizer, [*self._messages, {"role": "user", "content": prompt}], name, self.ids)
        return ids

    def _encode(self, text: Any, what: str, *, special: bool) -> list[int]:
        return read_row(self.target, text, f"turn {len(self.turns) + 1}, the {what}", special=special)
