"""A conversation over turns on one cache (Li et al. 2025, LoopServe, algorithm 4), which can be saved and continued.

In the paper, the model reads the previous answer again together with the new input, along lines chosen for all these
queries: `answers="recompute"`. The keys and values that decoding put into the cache are cut off first.
`answers="keep"` leaves them there.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from sinkscope.errors import SinkscopeError
from sinkscope.interventions import positions
from sinkscope.interventions.base import Intervention, Run
from sinkscope.interventions.decode import ForcedAnswer, decoding
from sinkscope.kv.cache import CacheLayer
from sinkscope.kv.loopguard import LoopGuard
from sinkscope.kv.loopguard.steer import generate_in_pieces
from sinkscope.kv.loopserve import rows, saved
from sinkscope.kv.loopserve.saved import Answers, Held, Stock, Turn
from sinkscope.kv.loopserve.serve import LoopServe, follow_lines
from sinkscope.kv.policy import Policy
from sinkscope.kv.session import Session, layer_window
from sinkscope.lines.choice import HeadLines
from sinkscope.models.inputs import read_row
from sinkscope.models.target import Target
from sinkscope.models.text.chat import chat_text

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
_ONE_ROW = ("stopping_criteria", "stop_strings", "streamer")
_MARK = "ANSWER-0f3b71"


@dataclass(eq=False)
class Noting(Intervention):
    """Owns the cache of a turn and records what happens; it is entered before the conversation's edit.

    Attributes:
        before: The cache before the turn.
        cache: The cache on which the turn runs.
        gaps: Close the gaps of padding before the new tokens, because a policy looks at neighbouring slots.
        lines: Chosen lines by layer and row.
        reads: Tokens that each decoding step attended to, row by row.
        steps: Number of the latest forward call.
        read: Layers of a transformers cache right after the prompt was read.
        prompted: State of the edits right after the prompt was read.
        answered: State of the edits at the end of the turn.
        over: Rows of a batch whose answers have ended: their cache, state of the edits, and latest call.
    """

    before: Held
    cache: Any
    gaps: bool = False
    lines: dict[tuple[int, int], HeadLines] = field(default_factory=dict)
    reads: list[list[float]] = field(default_factory=list)
    steps: int = 0
    read: tuple[Any, ...] = ()
    prompted: positions.Sequence | None = None
    answered: positions.Sequence | None = None
    over: dict[int, tuple[list[rows.State], Held, int]] = field(default_factory=dict)

    def enter(self, run: Run, key: int) -> None:
        """Follow the calls."""
        session = Session.of(run)
        if self.before.kind is None:
            session.own_cache()
        if (known := self.before.sequence) is not None:
            call = positions.Call(0, self.before.seen, known.columns[:, :0], known.columns, known.length, known.copy())
            run.tracker.bind(call, self.cache)
        follow_lines(run, self._follow)
        session.follow(self._note)

    def _follow(self, layer: int, row: int, lines: HeadLines) -> None:
        # Kept for every turn, and only looked at.
        self.lines[layer, row] = HeadLines(lines.vertical.cpu(), lines.slash.cpu(), lines.queries)

    def _note(self, call: positions.Call, layers: list[Any]) -> None:
        if layers is not self.cache.layers:  # a logits processor runs the model on a cache of its own
            return
        self.answered, self.steps = call.sequence, call.step
        if self.prompted is None:  # the first call reads the prompt
            self.prompted = call.sequence.copy()
            for layer in layers if self.gaps else ():
                layer.evict(layer.pos >= 0)
            self.read = tuple(copy(layer) for layer in layers) if self.before.kind else ()
        else:
            shown = zip(*map(_shown, layers), strict=True)
            self.reads.append([sum(each) / len(each) for each in shown])

    def take(self, row: int) -> None:
        """Save a row of a batch as it is now; the row continues as padding."""
        assert self.answered is not None
        self.over[row] = (*rows.row_of(self.cache.layers, self.answered, row), self.steps)

    def held(self, prompt: int, keep: bool) -> Held:
        """The cache after the turn: with the answer's keys and values, or cut back to `prompt` tokens."""
        if kind := self.before.kind:
            if not keep:  # not every cache of transformers can be cut back
                return Held(self.read, self.prompted, kind)
            return Held(tuple(copy(layer) for layer in self.cache.layers), self.answered, kind)
        layers: list[CacheLayer] = self.cache.layers
        for layer in layers:
            layer.crop(0 if keep else prompt - layer.seen)  # also puts everything back that was aside
        # The cache may be in what `generate` returns, for others to go on with.
        return Held(tuple(layer.copy() for layer in layers), self.answered if keep else self.prompted)

    def held_by(self, row: int, prompt: int, keep: bool) -> Held:
        """Like `held`, for one row of a batch."""
        assert self.prompted is not None
        if row not in self.over:
            self.take(row)
        states, known, _ = self.over[row]
        # What a decoding step left aside is readable in the next turn; that of the whole run says so.
        layers = rows.alone(states, any(layer.hidden is not None for layer in self.cache.layers))
        for layer in layers:
            layer.crop(0 if keep else prompt - layer.seen)
        known = known if keep else rows.row_of((), self.prompted, row)[1]
        return replace(known, layers=layers)


def _shown(kv: Any) -> list[float]:
    """Tokens to which the last query of each row attends, averaged over kv heads."""
    if not isinstance(kv, CacheLayer):
        return [float(kv.get_seq_length())]
    if kv.hidden is None and not kv.ragged and len(kv.keys) == 1:
        return [float(kv.slots)]
    return kv.readable.sum(-1).float().mean(1).tolist()


class Conversation:
    """A conversation on one cache: each turn reads new tokens along its own lines and decodes from parts of the cache.

    Under "recompute" a turn's queries are the previous answer and the new prompt. Under "keep" they are the last token
    of the previous answer, which has not been through the model yet, and the new prompt. Without an edit, or with an
    edit that hides and evicts nothing, both equal reading the whole text at once, up to rounding. Tokens that a
    policy or a guard evicts stay evicted. Under "recompute" the answer's tokens are restored, because the answer is
    read again; this includes a repetition that a guard had cut, unless `LoopGuard(rewind=True)` took it back from the
    answer, and H2O counts the attention of the answer's queries twice.

    A turn that fails or is interrupted leaves the conversation as it was. The edit is entered again for every turn, so
    the model is unedited between turns, a budget given as a fraction is a fraction of the conversation so far, and a
    guard's monitor starts with the turn.

    Args:
        model: Hugging Face, nnsight (dispatched), TransformerBridge (with `LoopServe(prefill=False)`), or `Target`.
        edit: `LoopServe`, any policy, patch or guard, or several joined by `|`. None leaves the model unedited.
        answers: "recompute" reads the previous answer again in the next turn; "keep" leaves it in the cache.
        tokenizer: For models that carry none; only needed for texts.
        chat: Format texts with the tokenizer's chat template, turn by turn. Earlier turns stay as the model read them,
            even if the template would now format them differently.
        cache: A transformers cache, for contexts whose keys and values do not fit in memory: "offloaded" keeps them in
            CPU memory, "quantized" in 4 bits (optimum-quanto or hqq), "fp8" in 8 bits. None of them can hide or evict
            tokens.

    Attributes:
        turns: The turns so far.

    Raises:
        SinkscopeError: `answers`, `cache` or `edit` is invalid, there is no chat template, or a policy or guard is
            combined with `cache`.

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
        cache: Stock | str | None = None,
    ) -> None:
        if answers not in get_args(Answers):
            raise SinkscopeError(f'answers={answers!r}: expected "recompute" or "keep"')
        if edit is not None and not isinstance(edit, Intervention):
            raise SinkscopeError(f"edit={edit!r}: expected LoopServe(...), a policy, patch or guard, or None")
        self.target, self._edit, self.chat = Target.of(model, tokenizer), edit, chat
        self.answers: Answers = "keep" if answers == "keep" else "recompute"
        self.tokenizer = self.target.available_tokenizer if tokenizer is None else tokenizer
        if chat and not getattr(self.tokenizer, "chat_template", None):
            raise SinkscopeError(f"the tokenizer of {self.target.name} has no chat template: leave out chat")
        self.turns: list[Turn] = []
        self._held = Held(kind=_kind(cache, edit))

    @property
    def ids(self) -> list[int]:
        """Token ids of all prompts and answers."""
        return [token for turn in self.turns for token in (*turn.prompt, *turn.ids)]

    def ask(self, prompt: str | Sequence[int], *, max_new_tokens: int = 64, **generation: Any) -> Turn:
        """Take one turn, greedily by default; only special tokens of the checkpoint's generation settings are used.

        Args:
            prompt: A text, or token ids, which are used unchanged. Without `chat`, texts of later turns get no special
                tokens (BOS), and nothing is inserted between turns.
            max_new_tokens: Maximum length of the answer in tokens.
            generation: Further arguments of `model.generate`: `do_sample=True`, `streamer=...`, `eos_token_id=...`.

        Raises:
            SinkscopeError: The prompt is empty, there is no tokenizer, token ids are invalid, the turn exceeds the
                context, or `generation` has settings that the conversation sets itself or that need several rows;
                also whatever the edit raises.
        """
        return self.ask_all([self], [prompt], max_new_tokens=max_new_tokens, **generation)[0]

    @staticmethod
    def ask_all(
        chats: Sequence[Conversation],
        prompts: Sequence[str | Sequence[int]],
        *,
        max_new_tokens: int = 64,
        **generation: Any,
    ) -> list[Turn]:
        """Take one turn of each of several conversations at once, as the rows of one batch.

        The results equal those of asking each conversation alone, up to rounding; sampled tokens (`do_sample=True`)
        differ. The conversations stay separate: each can branch, be saved, and continue in another batch or alone.

        Args:
            chats: Conversations of any lengths, with the same model and equal edits.
            prompts: One prompt per conversation, as for `ask`.
            max_new_tokens: Maximum length of each answer in tokens.
            generation: As for `ask`.

        Returns:
            One turn per conversation. `output` is that of the batch, whose prompts are padded on the left.

        Raises:
            SinkscopeError: As for `ask`; also if conversations differ in more than their turns, one is given twice, one
                uses a transformers cache, or a setting needs a single row. The conversations are then unchanged.
        """
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise SinkscopeError(f"max_new_tokens={max_new_tokens!r}: expected a whole number from 1")
        Conversation._check_batch(chats, prompts)
        new = [chat._prompt(prompt) for chat, prompt in zip(chats, prompts, strict=True)]
        return Conversation._turns(chats, new, max_new_tokens, generation)

    def say(self, prompt: str | Sequence[int], answer: str | Sequence[int]) -> Turn:
        """Take a turn with a given answer, so that histories are the same for every model and edit.

        The given answer is decoded token by token while the edit acts, as if the model had written it.

        Raises:
            SinkscopeError: As for `ask`, or the answer is empty.
        """
        new, gold = self._prompt(prompt), self._encode(answer, "answer", special=False)
        force = LogitsProcessorList([ForcedAnswer([gold], len(self.ids) + len(new))])
        return Conversation._turns([self], [new], len(gold), {"logits_processor": force}, gold)[0]

    def branch(self) -> Conversation:
        """Start another conversation from here, for instance to ask several questions about one document.

        Both share the keys and values so far, which later turns never change; each adds its own.
        """
        other = copy(self)
        other.turns = [*self.turns]
        return other

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the conversation to a folder: conversation.json, and a safetensors file that it names.

        The JSON is replaced last, in one step; until then, an earlier save in that folder stays valid.

        Raises:
            SinkscopeError: The conversation has no turns yet, or the folder cannot be written.
        """
        saved.write(path, self.target, self._edit, self.answers, self.chat, self.turns, self._held)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: object,
        edit: Intervention | None = None,
        *,
        tokenizer: Any = None,
        cache: Stock | str | None = None,
    ) -> Conversation:
        """Load a conversation that `save` wrote, and continue it as if it had never been interrupted.

        Args:
            path: The folder.
            model: The model it was held with.
            edit: The edit that acts from now on. The file holds no code, so the edit it was saved with must be given
                again. Another one also works (`Full()` for none), but it knows nothing of earlier tokens.
            tokenizer: As for a new conversation.
            cache: As for a new conversation.

        Raises:
            SinkscopeError: The model is a different one, the conversation was held under an edit and none is given, or
                the files are damaged, not a conversation, or of another version.
        """
        answers, in_template, turns, held = saved.read(path, Target.of(model, tokenizer), edit)
        chat = cls(model, edit, answers=answers, tokenizer=tokenizer, chat=in_template, cache=cache)
        chat.turns, chat._held = turns, held.to(chat._held.kind, chat.target)
        return chat

    def _check_generation(self, given: dict[str, Any], rows: int) -> None:
        for name in given:
            if name in _ONE_ROW and rows > 1:
                raise SinkscopeError(f"{name} is for one row of text, and here are {rows}: ask them one by one")
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

    def _prompt(self, prompt: str | Sequence[int]) -> list[int]:
        if not self.chat or not isinstance(prompt, str):
            return self._encode(prompt, "prompt", special=not self.turns)
        if not prompt.strip():
            raise SinkscopeError(f"turn {len(self.turns) + 1}, the prompt is empty: write at least one word")
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
        target = replace(self.target, tokenizer=self.tokenizer)  # also a tokenizer that was set later
        return read_row(target, given, f"turn {len(self.turns) + 1}, the {what}", special=special)

    def _pad(self) -> int:
        """A padding token. Nothing is padded with it, but `generate` warns if it has to choose one itself."""
        known = [getattr(self.tokenizer, "pad_token_id", None), *self.target.end_ids]
        return next((int(token) for token in known if token is not None), 0)

    @staticmethod
    def _check_batch(chats: Sequence[Conversation], prompts: Sequence[Any]) -> None:
        """Refuse conversations that cannot be rows of one batch.

        Raises:
            SinkscopeError: They cannot; the message says why.
        """
        if not chats or isinstance(prompts, str) or len(chats) != len(prompts):
            raise SinkscopeError(f"{len(chats)} conversations and {len(prompts)} prompts: give one prompt for each")
        if len(chats) == 1:
            return
        if len({id(chat) for chat in chats}) < len(chats):
            raise SinkscopeError("a conversation is given twice: ask its branch() for the second prompt")
        first = chats[0]
        for i, chat in enumerate(chats):
            for name, same in (
                ("model", chat.target.hf is first.target.hf),
                ("edit", chat._edit == first._edit),
                ("answers", chat.answers == first.answers),
            ):
                if not same:
                    raise SinkscopeError(f"conversation {i + 1} has another {name} than the first: ask them one by one")
            if (kind := chat._held.kind) is not None:
                raise SinkscopeError(
                    f"conversation {i + 1} has cache={kind!r}, which takes no other rows: ask it alone"
                )

    def _said(self, new: list[int], answer: list[int], seen: int, row: int | None, noting: Noting, run: Run) -> Turn:
        """The turn of this conversation, from what was recorded of a row; None if it ran alone."""
        i = row or 0
        last = math.inf if row is None else noting.over[i][2]
        reads = [each[i] for each in noting.reads[: None if row is None else len(answer) - 1]]
        length = len(self.ids) + len(new)
        return Turn(
            prompt=tuple(new),
            ids=tuple(answer),
            text=None if self.tokenizer is None else str(self.tokenizer.decode(answer, skip_special_tokens=True)),
            prompt_tokens=length,
            queries=length - seen,
            events=tuple(replace(event, row=0) for event in run.events if event.row == i and event.step <= last),
            read=sum(reads) / len(reads) if reads else None,
            lines=tuple(noting.lines.get((layer, i)) for layer in range(self.target.n_layers)),
        )

    @staticmethod
    def _turns(
        chats: Sequence[Conversation],
        new: list[list[int]],
        max_new_tokens: int,
        generation: dict[str, Any],
        gold: list[int] | None = None,
    ) -> list[Turn]:
        """Take a turn of each conversation, in one batch."""
        first, count = chats[0], len(chats)
        target, edit, keep = first.target, first._edit, first.answers == "keep"
        for chat, prompt in zip(chats, new, strict=True):
            target.check_length(
                f"turn {len(chat.turns) + 1}, with the {len(chat.ids)} tokens before it,",
                len(chat.ids) + len(prompt),
                max_new_tokens,
                "ask something shorter",
            )
        first._check_generation(generation, count)
        whole = [[*chat.ids, *prompt] for chat, prompt in zip(chats, new, strict=True)]
        seen = [chat._held.seen for chat in chats]
        asked = [len(row) - at for row, at in zip(whole, seen, strict=True)]
        gaps, close = _gaps(seen, asked, edit)
        past, queries = max(seen) + close, max(asked)
        padding = first._pad()
        ids, mask = _padded(whole, seen, past, past + queries, padding)
        windowed = any(layer_window(target, i) is not None for i in range(target.n_layers))
        before = rows.joined([chat._held for chat in chats], gaps and windowed, int(close))
        cache = before.cache(target)
        noting = Noting(before, cache, close)
        # The prompt is read in one pass, on this cache.
        ours: dict[str, Any] = {"use_cache": True, "cache_implementation": None, "prefill_chunk_size": None}
        settings = decoding(target, **{"do_sample": False, "pad_token_id": padding, **generation, **ours})
        ends = _ends(settings.get("eos_token_id", target.hf.generation_config.eos_token_id))
        if count > 1:
            settings["stopping_criteria"] = StoppingCriteriaList([rows.Ends(ends, noting.take)])
        with (noting if edit is None else noting | edit).on(target) as run, torch.no_grad():
            output = generate_in_pieces(
                run,
                target.hf,
                ids.to(target.device),
                attention_mask=mask.to(target.device),
                past_key_values=cache,
                max_new_tokens=max_new_tokens,
                fixed=gold is not None,
                **settings,
            )
        sequences: Tensor = getattr(output, "sequences", output)
        answers = sequences[:, ids.shape[1] :].tolist() if gold is None else [gold]
        if count > 1:
            answers = [_until(answer, ends) for answer in answers]
        made: list[tuple[Turn, Held]] = []
        for i, answer in enumerate(answers):
            held = noting.held_by(i, len(whole[i]), keep) if count > 1 else noting.held(len(whole[i]), keep)
            turn = chats[i]._said(new[i], answer, seen[i], i if count > 1 else None, noting, run)
            made.append((replace(turn, output=output), held))
        for chat, (turn, held) in zip(chats, made, strict=True):
            chat.turns, chat._held = [*chat.turns, turn], held
        return [turn for turn, _ in made]


def _padded(
    whole: list[list[int]], seen: list[int], past: int, width: int, padding: int
) -> tuple[Int[Tensor, "row column"], Int[Tensor, "row column"]]:
    """Ids and mask of rows whose cached tokens end at column `past` and whose new ones end at `width`."""
    ids = torch.full((len(whole), width), padding)
    mask = torch.zeros_like(ids)
    for i, (row, at) in enumerate(zip(whole, seen, strict=True)):
        for part, end in ((row[:at], past), (row[at:], width)):
            ids[i, end - len(part) : end], mask[i, end - len(part) : end] = torch.tensor(part, dtype=torch.int64), 1
    return ids, mask


def _gaps(seen: list[int], asked: list[int], edit: Intervention | None) -> tuple[bool, bool]:
    """Whether padding lies between past and new tokens of a row, and whether that gap has to be closed.

    Gaps are closed for a policy. One more padding token is then added, so that every row has a gap and all are closed.
    """
    gaps = any(seen) and (len(set(seen)) > 1 or len(set(asked)) > 1)
    return gaps, gaps and edit is not None and any(isinstance(part, Policy) for part in edit.parts)


def _ends(ids: Any) -> list[int]:
    """Ids that end an answer, from a generation configuration's single id, list of ids or None."""
    return list(ids) if isinstance(ids, list | tuple) else [] if ids is None else [int(ids)]


def _until(answer: list[int], ends: list[int]) -> list[int]:
    """An answer up to the first id that ends it; what follows is padding."""
    return answer[: next((n + 1 for n, token in enumerate(answer) if token in ends), len(answer))]


def _kind(cache: Stock | str | None, edit: Intervention | None) -> Any:
    """The kind of cache, checked.

    Raises:
        SinkscopeError: There is no such cache, or the edit has a cache of its own.
    """
    if cache is not None and cache not in get_args(Stock):
        raise SinkscopeError(f'cache={cache!r}: expected "offloaded", "quantized", "fp8", or None')
    for part in () if cache is None or edit is None else edit.parts:
        if isinstance(part, Policy | LoopServe | LoopGuard):
            raise SinkscopeError(
                f"{type(part).__name__} chooses from a cache of its own, and cache={cache!r} is transformers': "
                "give one of them"
            )
    return cache
