"""How near a method stays to full attention along one text: divergence, top-1 agreement, attention mass kept.

Every method reads the same prompt and is then given the same answer token by token, whatever it would have said itself.

- *KL*: sum of p (log p - log q) over the vocabulary, in nats; p of full attention, q of the method, at every token of
  the answer. The first one comes from the prompt alone: 0 where a method leaves prompts as they are.
- *agreement*: both have the same likeliest token there.
- *mass kept*: of the attention that a decoding step pays with the full cache along the same text, the share that lies
  on positions which the method can read at this step, per layer and head. Methods that make only prompts sparse keep 1.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope.bench.dialogues.asking import (
    Asked,
    Question,
    Reads,
    asked,
    cells_of,
    check_can,
    check_given,
    check_sizes,
    padded,
    question,
    read_of,
)
from sinkscope.bench.dialogues.fidelity_table import COMMAND, TEXT, Near
from sinkscope.bench.dialogues.form import POSITIONS, Dialogue, DialogueTurn
from sinkscope.bench.dialogues.methods import Budget, Method
from sinkscope.bench.loopbench.store import Folder
from sinkscope.errors import SinkscopeError
from sinkscope.interventions.base import Event, Intervention, Run
from sinkscope.kv import Full
from sinkscope.kv.cache import CacheLayer
from sinkscope.kv.loopserve.conversation import Told
from sinkscope.kv.session import Moment, Rows, Session
from sinkscope.text import typical_text

Progress = Callable[[str, int, int], None]
Along = Literal["full", "gold"]
VERSION = 1


def text_dialogues(
    tokenizer: Any, count: int = 8, *, prompt_tokens: int = 512, answer_tokens: int = 64, text: str | None = None
) -> tuple[Dialogue, ...]:
    """Consecutive pieces of a text as dialogues of one turn: the right answer is how the text goes on.

    Args:
        tokenizer: measures the pieces.
        count: of them.
        prompt_tokens: of each.
        answer_tokens: that follow.
        text: None: the text in the package, which the model in the package was not trained on.

    Raises:
        SinkscopeError: the text is too short.
    """
    whole = typical_text() if text is None else text
    ids = tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"]
    length = prompt_tokens + answer_tokens
    if len(ids) < count * length:
        raise SinkscopeError(
            f"the text has {len(ids)} tokens, and {count} pieces of {prompt_tokens} + {answer_tokens} are wanted: give "
            f"at most {len(ids) // length}, shorter ones, or a longer text"
        )
    found: list[Dialogue] = []
    for number in range(count):
        piece = ids[number * length : (number + 1) * length]
        prompt, answer = tokenizer.decode(piece[:prompt_tokens]), tokenizer.decode(piece[prompt_tokens:])
        turn = DialogueTurn({place: prompt for place in POSITIONS}, (answer,), (0,))
        found.append(Dialogue(f"{TEXT}-{number}", TEXT, (turn,)))
    return tuple(found)


def run_fidelity(
    model: object,
    dialogues: Sequence[Dialogue],
    methods: Sequence[str],
    *,
    out: str | os.PathLike[str],
    along: Along = "full",
    positions: Sequence[str] = ("end",),
    tokenizer: Any = None,
    budget: Budget = 256,
    max_new_tokens: int = 64,
    batch_size: int = 1,
    chat: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Compare methods with full attention, token by token; what is in `out` already is not done again.

    Full attention reads every prompt twice: to be compared with, and to weigh what each method left readable. That is
    kept as a bit per method, step, layer, kv head and token.

    Args:
        model: Hugging Face, TransformerBridge, nnsight (dispatched) or `Target`, whole in memory.
        dialogues: see `read_dialogues`, `recall_dialogues` and `text_dialogues`; right answers are the history.
        methods: as for `run_dialogues`.
        out: folder; settings, dialogues and records are kept there.
        along: "full": the answer that the full cache gives, greedily. "gold": the (first) right one.
        positions: of the question: "begin", "middle", "end".
        tokenizer: where the model carries none.
        budget: as for `run_dialogues`.
        max_new_tokens: longer answers are cut there.
        batch_size: turns that run together.
        chat: wrap turns in the tokenizer's chat template.
        progress: called as `progress("answers", done, total)`.

    Returns:
        `out`.

    Raises:
        SinkscopeError: as for `run_dialogues`, and for a right answer without a token.
    """
    chosen, places = check_given(dialogues, methods, positions)
    if along not in get_args(Along):
        raise SinkscopeError(f"along={along!r}: expected one of {', '.join(get_args(Along))}")
    check_sizes(chosen, budget, max_new_tokens=max_new_tokens, batch_size=batch_size)
    to = asked(model, tokenizer, max_new_tokens, budget, chat)
    turns = [
        (question(to, each, place, number, [turn.answers[0] for turn in each.turns[:number]]), turn.answers[0])
        for place in places
        for each in dialogues
        for number, turn in enumerate(each.turns)
    ]
    answers = [_gold(to, each, answer) for each, answer in turns] if along == "gold" else []
    asking = [each for each, _ in turns]
    check_can(to, chosen, sorted({len(each.ids) for each in asking}))
    settings = {"version": VERSION, "command": COMMAND, **to.settings(), "along": along, "history": "gold"}
    with Folder(out, settings, [asdict(dialogue) for dialogue in dialogues], Near) as store:
        for start in range(0, len(asking), batch_size):
            part = slice(start, start + batch_size)
            missing = [
                method
                for method in chosen
                if any((to.fingerprint, method.spec, each.name) not in store.records for each in asking[part])
            ]
            if missing:
                store.append(_batch(to, missing, asking[part], answers[part] or None))
            if progress is not None:
                progress("answers", min(start + batch_size, len(asking)) * len(chosen), len(asking) * len(chosen))
    return Path(out)


def _gold(to: Asked, each: Question, answer: str) -> list[int]:
    ids = to.target.tokenizer(answer, add_special_tokens=False, verbose=False)["input_ids"]
    cut = to.cut([int(i) for i in ids][: to.new])[0]
    if not cut:
        raise SinkscopeError(
            f'dialogue {each.dialogue!r}, turn {each.turn + 1}: its right answer has no tokens; give along="full"'
        )
    return cut


def _batch(
    to: Asked, methods: Sequence[Method], batch: Sequence[Question], answers: list[list[int]] | None
) -> list[Near]:
    """Full attention, every method, and full attention again to weigh what they left."""
    rows = [each.ids for each in batch]
    full = _Logits()
    made = _generate(to, rows, answers, Full(), full)[0]
    told = answers if answers is not None else [to.cut(row)[0] for row in made]
    left: list[_Readable] = []
    found: list[tuple[Method, _Logits, Reads, list[Event], float]] = []
    for method in methods:
        started = time.perf_counter()
        logits, reads, readable = _Logits(full.values), Reads(), _Readable()
        events = _generate(to, rows, told, method.make(to.budget) | reads | readable, logits)[1]
        left.append(readable)
        found.append((method, logits, reads, events, round(time.perf_counter() - started, 3)))
    weigh = _Weigh(left)
    _generate(to, rows, told, Full() | weigh)
    records: list[Near] = []
    for (method, logits, reads, events, seconds), kept in zip(found, weigh.kept(), strict=True):
        for row, (each, answer) in enumerate(zip(batch, told, strict=True)):
            n = len(answer)
            records.append(
                Near(
                    model=to.fingerprint,
                    method=method.spec,
                    prompt=each.name,
                    dialogue=each.dialogue,
                    position=each.position,
                    turn=each.turn,
                    prompt_tokens=len(each.ids),
                    kl=tuple(round(float(step[row]), 6) for step in logits.kl[:n]),
                    agree=tuple(bool(step[row]) for step in logits.agree[:n]),
                    kept=tuple(round(step[row], 6) for step in kept[: n - 1]),
                    read=read_of(reads, row, n),
                    cells=cells_of(events, row),
                    seconds=seconds,
                )
            )
    return records


def _generate(
    to: Asked, rows: list[list[int]], answers: list[list[int]] | None, edit: Intervention, logits: _Logits | None = None
) -> tuple[list[list[int]], list[Event]]:
    """New tokens and events; with `answers` it says these, whatever it would have said."""
    ids, mask = padded(to, rows)
    hooks = [] if logits is None else [(to.target.hf, "post", logits)]
    with edit.on(to.target) as run, to.target.hooks(*hooks), torch.no_grad():
        made = to.target.hf.generate(
            input_ids=ids,
            attention_mask=mask,
            pad_token_id=to.pad,
            do_sample=False,
            max_new_tokens=to.new if answers is None else max(map(len, answers)),
            logits_processor=[] if answers is None else [Told(answers, ids.shape[1], to.pad)],
        )
        return made[:, ids.shape[1] :].tolist(), run.events


class _Logits:
    """Of every step, as the model gives them; or, beside those of full attention, how far they are from them."""

    def __init__(self, full: list[Tensor] | None = None) -> None:
        self.values: list[Tensor] = []  # [batch vocab]
        self.kl: list[Tensor] = []  # [batch]
        self.agree: list[Tensor] = []
        self._full = full

    def __call__(self, _module: Any, _args: Any, _kwargs: Any, output: Any) -> None:
        logits = output.logits[:, -1].float()
        if self._full is None:
            self.values.append(logits)
            return
        full = self._full[len(self.kl)]
        self.kl.append(divergence(full, logits).cpu())
        self.agree.append((full.argmax(-1) == logits.argmax(-1)).cpu())


def divergence(full: Float[Tensor, "batch vocab"], other: Float[Tensor, "batch vocab"]) -> Float[Tensor, " batch"]:
    """KL(full || other) of two rows of logits, nats."""
    p, q = full.double().log_softmax(-1), other.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).clamp(min=0)


class _Readable(Intervention):
    """Notes, after every decoding step, which true positions each kv head could read: `[layer][batch kv_head bit]`."""

    def __init__(self) -> None:
        self.steps: list[list[Any]] = []
        self._prompt = True

    def enter(self, run: Run, key: int) -> None:
        """Look at the cache after every call but that of the prompt."""
        session = Session.of(run)
        session.own_cache()

        def note(moment: Moment) -> None:
            if self._prompt:
                self._prompt = False
                return
            self.steps.append([np.packbits(_there(layer).cpu().numpy(), axis=-1) for layer in moment.layers])

        session.after_call(note)


def _there(layer: CacheLayer) -> Bool[Tensor, "batch kv_head pos"]:
    """Positions that hold a token which is not hidden."""
    pos, there = layer.pos, layer.readable
    found = torch.zeros(*pos.shape[:2], layer.seen + 1, dtype=torch.bool, device=pos.device)
    return found.scatter_(-1, pos.masked_fill(~there, layer.seen), True)[..., : layer.seen]


class _Weigh(Intervention):
    """Of what full attention pays in every decoding step, the share on positions that others left readable."""

    def __init__(self, left: list[_Readable]) -> None:
        self._left = left
        self._sums: list[list[Tensor]] = [[] for _ in left]  # per step, over layers
        self._calls = self._layers = 0

    def enter(self, run: Run, key: int) -> None:
        """Watch the newest query of every layer."""
        session = Session.of(run)
        session.own_cache()
        session.watch(self._add, last=1)
        session.after_call(lambda moment: self._next(len(moment.layers)))

    def kept(self) -> list[list[list[float]]]:
        """Of each, per step and row: mean over layers and heads."""
        return [[(total / self._layers).tolist() for total in sums] for sums in self._sums]

    def _next(self, layers: int) -> None:
        self._calls, self._layers = self._calls + 1, layers

    def _add(self, rows: Rows) -> None:
        if not self._calls:  # the prompt
            return
        step, paid = self._calls - 1, rows.probs[:, :, -1].double().unflatten(1, (rows.pos.shape[1], -1))
        for left, sums in zip(self._left, self._sums, strict=True):
            bits = torch.from_numpy(np.unpackbits(left.steps[step][rows.layer], axis=-1)).to(paid.device)
            there = bits.gather(-1, rows.pos.clamp(min=0)) > 0  # nothing is paid to padding
            share = (paid * there[:, :, None]).sum(-1) / paid.sum(-1)
            if len(sums) == step:
                sums.append(torch.zeros(len(paid), dtype=torch.float64))
            sums[step] += share.mean((1, 2)).cpu()
