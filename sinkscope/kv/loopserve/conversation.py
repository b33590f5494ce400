"""A conversation over turns on one cache (Li et al. 2025, LoopServe, algorithm 4), which can be saved and continued.

The paper feeds the previous answer again, together with the new input, along the lines of all these queries:
`answers="recompute"`. The keys and values that decoding put into the cache are cut off first. `answers="keep"` leaves
them there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from sinkscope.errors import SinkscopeError
from sinkscope.interventions import positions
from sinkscope.interventions.base import Intervention, Run
from sinkscope.interventions.decode import Told, decoding
from sinkscope.kv.cache import CacheLayer
from sinkscope.kv.loopguard.steer import generate_in_pieces
from sinkscope.kv.loopserve import saved
from sinkscope.kv.loopserve.saved import Answers, Held, Turn, check_ids
from sinkscope.kv.loopserve.serve import follow_lines
from sinkscope.kv.session import Moment, Session
from sinkscope.lines.choice import HeadLines
from sinkscope.models.target import Target
from sinkscope.text.chat import chat_text

_OURS = (
    "input_ids",
    "inputs",
    "inputs_embeds",
    "attention_mask",
    "past_key_values",
    "use_cache",
    "cache_implementation",
    "generation_config",
    "max_length",
    "prefill_chunk_size",
)
_SINGLE = ("num_beams", "num_return_sequences")
_DRAFTING = ("assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens")
_MARK = "ANSWER-0f3b71"


@dataclass(eq=False)
class Noting(Intervention):
    """Owns the cache of a turn and notes what happens; it is entered before the conversation's edit.

    Attributes:
        before: the cache before the turn.
        cache: the cache on which the turn runs.
        lines: chosen lines by layer.
        reads: tokens that each decoding step attended to.
        prompted: what edits knew when the prompt had been read.
        answered: what they knew at the end of the turn.
    """

    before: Held
    cache: Any
    lines: dict[int, HeadLines] = field(default_factory=dict)
    reads: list[float] = field(default_factory=list)
    prompted: positions.Sequence | None = None
    answered: positions.Sequence | None = None

    def enter(self, run: Run, key: int) -> None:
        """Follow the calls."""
        session = Session.of(run)
        session.own_cache()
        if self.before.sequence is not None:
            columns = torch.zeros(1, self.before.seen, dtype=torch.int64)
            call = positions.Call(
                0, self.before.seen, columns[:, :0], columns, columns.sum(1), self.before.sequence.copy()
            )
            run.tracker.bind(call, self.cache)
        follow_lines(run, self._follow)
        session.after_call(self._note)

    def _follow(self, layer: int, row: int, lines: HeadLines) -> None:
        # Kept for every turn, and only looked at.
        self.lines[layer] = HeadLines(lines.vertical.cpu(), lines.slash.cpu(), lines.queries)

    def _note(self, moment: Moment) -> None:
        if moment.layers is not self.cache.layers:  # a logits processor runs the model on a cache of its own
            return
        self.answered = moment.call.sequence
        if self.prompted is None:  # the first call reads the prompt
            self.prompted = moment.call.sequence.copy()
        else:
            self.reads.append(sum(map(_shown, moment.layers)) / len(moment.layers))

    def held(self, prompt: int, keep: bool) -> Held:
        """The cache after the turn: with the answer's keys and values, or cut back to `prompt` tokens."""
        layers: list[CacheLayer] = self.cache.layers
        for layer in layers:
            layer.crop(0 if keep else prompt - layer.seen)  # also puts everything back that was aside
        # The cache may be in what `generate` returns, for others to go on with.
        return Held(tuple(layer.copy() for layer in layers), self.answered if keep else self.prompted)


def _shown(kv: CacheLayer) -> float:
    """Tokens that a single row attends to, mean over kv heads."""
    if kv.hidden is None and not kv.ragged:
        return float(kv.slots)
    return float(kv.readable.sum(-1).float().mean())


class Conversation:
    """Turns on one cache: each reads the new tokens along its own lines, and decodes from parts of the whole cache.

    Under "recompute" a turn's queries are the previous answer and the new prompt. Under "keep" they are the last token
    of the previous answer, which has not been through the model yet, and the new prompt. Without an edit, and with
    every edit that hides and evicts nothing, both equal reading the whole text at once, up to rounding. Tokens that a
    policy or a guard evicts stay evicted. Under "recompute" the answer's tokens are restored, because the answer is
    read again; this includes a repetition that a guard had cut, unless `LoopGuard(rewind=True)` took it back from the
    answer, and H2O counts the attention of the answer's queries twice.

    A turn that fails or is interrupted leaves the conversation as it was. Every turn enters the edit anew: the model is
    free between turns, a budget given as a fraction is a fraction of the conversation so far, and a guard's monitor
    begins with the turn.

    Args:
        model: Hugging Face, nnsight (dispatched), TransformerBridge (with `LoopServe(prefill=False)`), or `Target`.
        edit: `LoopServe`, any policy, patch or guard, or several with `|`; None: the model as it is.
        answers: whether the next turn reads the previous answer again ("recompute") or it stays in the cache ("keep").
        tokenizer: for models that carry none; it is only needed for texts.
        chat: put texts into the tokenizer's chat template, turn by turn. Earlier turns stay as the model read them,
            even if the template would now write them differently.

    Attributes:
        turns: so far.

    Raises:
        SinkscopeError: no such `answers`, an edit that is none, or no chat template.

    Example:
        >>> import sinkscope as ss
        >>> chat = ss.Conversation(ss.load("recall", backend="hf"), ss.LoopServe(budget=64))
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
        chat: bool = False,
    ) -> None:
        if answers not in get_args(Answers):
            raise SinkscopeError(f'answers={answers!r}: expected "recompute" or "keep"')
        if edit is not None and not isinstance(edit, Intervention):
            raise SinkscopeError(f"edit={edit!r}: expected LoopServe(...), a policy, patch or guard, or None")
        self.target, self._edit, self.chat = Target.of(model, tokenizer), edit, chat
        self.answers: Answers = "keep" if answers == "keep" else "recompute"
        self.tokenizer = self.target.found_tokenizer if tokenizer is None else tokenizer
        if chat and not getattr(self.tokenizer, "chat_template", None):
            raise SinkscopeError(f"the tokenizer of {self.target.name} has no chat template: leave out chat")
        self.turns: list[Turn] = []
        self._held = Held()

    @property
    def ids(self) -> list[int]:
        """Token ids of all prompts and answers."""
        return [token for turn in self.turns for token in (*turn.prompt, *turn.ids)]

    def ask(self, prompt: str | Sequence[int], *, max_new_tokens: int = 64, **generation: Any) -> Turn:
        """One turn, greedy unless told otherwise; of the checkpoint's generation settings only special tokens count.

        Args:
            prompt: a text, or token ids, which are taken as they are. Without `chat`, texts of later turns get no
                special tokens (BOS), and nothing is put between turns.
            max_new_tokens: the answer stops there at the latest.
            generation: passed on to `model.generate`: `do_sample=True`, `streamer=...`, `eos_token_id=...`.

        Raises:
            SinkscopeError: an empty prompt, no tokenizer, invalid token ids, a turn that exceeds the context, settings
                of generation that the conversation sets itself or that need several rows; and whatever the edit raises.
        """
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise SinkscopeError(f"max_new_tokens={max_new_tokens!r}: expected a whole number from 1")
        return self._turn(self._prompt(prompt), max_new_tokens, generation)

    def say(self, prompt: str | Sequence[int], answer: str | Sequence[int]) -> Turn:
        """A turn with a given answer, so that histories are the same for every model and edit.

        The conversation is then as if the model had given this answer: it is decoded token by token, and the edit acts.

        Raises:
            SinkscopeError: as for `ask`, and for an empty answer.
        """
        new, gold = self._prompt(prompt), self._encode(answer, "answer", special=False)
        force = LogitsProcessorList([Told([gold], len(self.ids) + len(new))])
        return self._turn(new, len(gold), {"logits_processor": force}, gold)

    def branch(self) -> Conversation:
        """Another conversation that goes on from here, such as one more question about a document that was read once.

        Both share the keys and values so far, which no later turn changes; each adds its own.
        """
        other = copy(self)
        other.turns = [*self.turns]
        return other

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the conversation to a folder: conversation.json, and a safetensors file that it names.

        The JSON is replaced last, in one step; until then an earlier save in that folder stays valid.

        Raises:
            SinkscopeError: nothing was said yet, or the folder cannot be written.
        """
        saved.write(path, self.target, self._edit, self.answers, self.chat, self.turns, self._held)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], model: object, edit: Intervention | None = None, *, tokenizer: Any = None
    ) -> Conversation:
        """Continue what `save` wrote, as if it had never been interrupted.

        Args:
            path: the folder.
            model: the one it was held with.
            edit: the edit that acts from now on. The file holds no code, so the edit it was saved with has to be given
                again. Another one works as well (`Full()` for none); it knows nothing of earlier tokens.
            tokenizer: as for a new conversation.

        Raises:
            SinkscopeError: the model is another one, the conversation was held under an edit and none is given, or the
                files are damaged, foreign, or of another version.
        """
        answers, in_template, turns, held = saved.read(path, Target.of(model, tokenizer), edit)
        chat = cls(model, edit, answers=answers, tokenizer=tokenizer, chat=in_template)
        chat.turns, chat._held = turns, held
        return chat

    def _turn(
        self, new: list[int], max_new_tokens: int, generation: dict[str, Any], gold: list[int] | None = None
    ) -> Turn:
        target, whole, before = self.target, [*self.ids, *new], self._held
        self._check_length(len(new), max_new_tokens)
        self._check_generation(generation)
        cache = before.cache()
        noting = Noting(before, cache)
        ids = torch.tensor([whole], device=target.device)
        # The prompt is read in one pass, on this cache.
        ours: dict[str, Any] = {"use_cache": True, "cache_implementation": None, "prefill_chunk_size": None}
        settings = decoding(target, **{"do_sample": False, "pad_token_id": self._pad(), **generation, **ours})
        with (noting if self._edit is None else noting | self._edit).on(target) as run, torch.no_grad():
            output = generate_in_pieces(
                run,
                target.hf,
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=cache,
                max_new_tokens=max_new_tokens,
                fixed=gold is not None,
                **settings,
            )
        sequences: Tensor = getattr(output, "sequences", output)
        answer = sequences[0, len(whole) :].tolist() if gold is None else gold
        turn = Turn(
            prompt=tuple(new),
            ids=tuple(answer),
            text=None if self.tokenizer is None else str(self.tokenizer.decode(answer, skip_special_tokens=True)),
            prompt_tokens=len(whole),
            queries=len(whole) - before.seen,
            events=tuple(run.events),
            read=sum(noting.reads) / len(noting.reads) if noting.reads else None,
            lines=tuple(noting.lines.get(layer) for layer in range(target.n_layers)),
            output=output,
        )
        held = noting.held(len(whole), self.answers == "keep")
        self.turns, self._held = [*self.turns, turn], held
        return turn

    def _check_generation(self, given: dict[str, Any]) -> None:
        for name in given:
            if name in _OURS:
                raise SinkscopeError(f"{name} is made by the conversation: leave it out, give other settings by name")
        for name in (*_SINGLE, *_DRAFTING):
            value = given.get(name)
            if name in _DRAFTING and value is not None:
                raise SinkscopeError(
                    f"{name} is set: an assistant drafts several tokens at a time, and a conversation takes them one "
                    f"by one; give {name}=None"
                )
            if name in _SINGLE and value not in (None, 1):
                raise SinkscopeError(f"{name}={value!r}: a conversation is one row of text; give {name}=1")

    def _check_length(self, new: int, more: int) -> None:
        before, limit = len(self.ids), self.target.max_positions
        if limit is None or before + new + more <= limit:
            return
        left = limit - before - new
        remedy = f"ask for at most {left} new tokens" if left > 0 else "ask something shorter"
        raise SinkscopeError(
            f"turn {len(self.turns) + 1}: {before} tokens before it, {new} of its own and {more} of the answer exceed "
            f"the context of {self.target.name}, {limit}: {remedy}; the conversation is as it was"
        )

    def _prompt(self, prompt: str | Sequence[int]) -> list[int]:
        if not self.chat or not isinstance(prompt, str):
            return self._encode(prompt, "prompt", special=not self.turns)
        if not prompt.strip():
            raise SinkscopeError(f"turn {len(self.turns) + 1}: the prompt is empty")
        messages = [{"role": "user", "content": prompt}]
        if self.turns:
            messages = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _MARK}, *messages]
        text = chat_text(self.tokenizer, messages, self.target.name)
        if not self.turns:
            return self._encode(text, "prompt", special=False)
        _, mark, rest = text.partition(_MARK)
        if not mark:
            raise SinkscopeError(
                f"the chat template of {self.target.name} does not show earlier answers: leave out chat, and put what "
                "stands between turns into the prompts"
            )
        new = self._encode(rest, "prompt", special=False)
        # What ends an answer is in the template, and may have been generated too.
        ended = self.turns[-1].ids[-1] == new[0] and new[0] in self.tokenizer.all_special_ids
        return new[1:] if ended else new

    def _encode(self, given: str | Sequence[int], what: str, *, special: bool) -> list[int]:
        turn, name = len(self.turns) + 1, self.target.name
        ids: list[Any]
        if isinstance(given, str):
            if self.tokenizer is None:
                raise SinkscopeError(
                    f"{name} carries no tokenizer: give tokenizer=..., or token ids instead of text",
                    page="no-tokenizer",
                )
            blank = not given.strip()
            ids = [] if blank else self.tokenizer(given, add_special_tokens=special, verbose=False)["input_ids"]
        else:
            try:
                ids = list(given)
            except TypeError:
                raise SinkscopeError(f"turn {turn}: the {what} is {given!r}: expected a text, or token ids") from None
        if not ids:
            raise SinkscopeError(f"turn {turn}: the {what} is empty: write at least one word")
        check_ids(ids, self.target, f"turn {turn}")
        return ids

    def _pad(self) -> int:
        """A padding token; nothing is padded, but `generate` warns if it has to choose one itself."""
        known = [getattr(self.tokenizer, "pad_token_id", None), *self.target.end_ids]
        return next((int(token) for token in known if token is not None), 0)
