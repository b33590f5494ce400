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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope.bench.dialogues.form import POSITIONS, Dialogue, DialogueTurn
from sinkscope.bench.dialogues.run import (
    AskedTurn,
    cells_of,
    check_given,
    question,
    read_of,
    reads,
)
from sinkscope.bench.dialogues.tables import FIDELITY, TEXT, Near
from sinkscope.bench.files import open_folder
from sinkscope.bench.methods import Budget, Method
from sinkscope.bench.runner import Asked, Batch, PerCall, ask, check_can, run_batches
from sinkscope.console import Progress
from sinkscope.errors import SinkscopeError
from sinkscope.interventions.base import Event, Intervention, Run
from sinkscope.interventions.decode import Told
from sinkscope.kv import Full
from sinkscope.kv.cache import CacheLayer
from sinkscope.kv.session import Moment, Rows, Session
from sinkscope.parallel import Tally, check_workers
from sinkscope.text import typical_text

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
    workers: int = 1,
    ray: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Compare methods with full attention, token by token; what is in `out` already is not done again.

    Full attention reads every prompt twice: to be compared with, and to weigh what each method left readable. That is
    kept as a bit per method, step, layer, kv head and token.

    Args:
        model: Hugging Face, TransformerBridge, nnsight (dispatched) or `Target`, whole in memory; or `NamedModel`.
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
        workers: processes; more than one run over Ray.
        ray: address of a Ray cluster; None: this machine, or what `RAY_ADDRESS` names.
        progress: called as `progress("answers", done, total)`.

    Returns:
        `out`.

    Raises:
        SinkscopeError: as for `run_dialogues`, and for a right answer without a token.
    """
    sizes = {"max_new_tokens": max_new_tokens, "batch_size": batch_size}
    chosen, places = check_given(dialogues, methods, positions, budget, **sizes)
    if along not in get_args(Along):
        raise SinkscopeError(f"along={along!r}: expected one of {', '.join(get_args(Along))}")
    check_workers(workers, ray)
    to = ask(model, tokenizer, max_new_tokens, budget, chat)
    rows: list[tuple[AskedTurn, list[int] | None]] = []
    for place in places:
        for each in dialogues:
            right = [turn.answers[0] for turn in each.turns]
            for number, answer in enumerate(right):
                made = question(to, each, place, number, right[:number], chat)
                rows.append((made, _gold(to, made, answer) if along == "gold" else None))
    check_can(to, chosen, [len(each.ids) for each, _ in rows])
    settings = {"version": VERSION, "command": FIDELITY, **to.settings(), "chat": chat, "along": along}
    tally = Tally("answers", len(rows) * len(chosen), progress)
    with open_folder(out, {**settings, "history": "gold"}, dialogues, Near) as kept:
        batches: list[Batch] = []
        for start in range(0, len(rows), batch_size):
            some = tuple(rows[start : start + batch_size])
            each = {method: Batch(to.fingerprint, (method,), some) for method in chosen}
            there = tuple(method for method, batch in each.items() if kept.records.keys() >= {*batch.keys})
            missing = tuple(method for method in chosen if method not in there)
            batches += [Batch(to.fingerprint, part, some) for part in (there, missing) if part]
        run_batches(to, [batches], answer_along, kept, tally, model=model, workers=workers, ray=ray)
    return Path(out)


def _gold(to: Asked, each: AskedTurn, answer: str) -> list[int]:
    ids = to.target.tokenizer(answer, add_special_tokens=False, verbose=False)["input_ids"]
    cut = to.cut([int(i) for i in ids][: to.new])[0]
    if not cut:
        raise SinkscopeError(
            f'dialogue {each.dialogue!r}, turn {each.turn + 1}: its right answer has no tokens; give along="full"'
        )
    return cut


def answer_along(to: Asked, batch: Batch) -> list[Near]:
    """Full attention, every method, and full attention again to weigh what they left.

    Args:
        to: the model, whole.
        batch: its rows are pairs of an `AskedTurn` and the ids of its answer; None: what full attention says.
    """
    rows = [each.ids for each, _ in batch.rows]
    answers = None if batch.rows[0][1] is None else [answer for _, answer in batch.rows]
    full = _Logits()
    made = _say(to, rows, answers, Full(), full)[0]
    told = [to.cut(row)[0] for row in made] if answers is None else answers
    left: list[_Readable] = []
    found: list[tuple[Method, _Logits, PerCall, list[Event], float]] = []
    for method in batch.methods:
        started = time.perf_counter()
        logits, count, readable = _Logits(full.values), reads(), _Readable()
        events = _say(to, rows, told, method.make(to.budget) | count | readable, logits)[1]
        left.append(readable)
        found.append((method, logits, count, events, round(time.perf_counter() - started, 3)))
    weigh = _Weigh(left)
    _say(to, rows, told, Full() | weigh)
    return [
        Near(
            **each.heads(to, method),
            kl=tuple(round(float(step[row]), 6) for step in logits.kl[: len(answer)]),
            agree=tuple(bool(step[row]) for step in logits.agree[: len(answer)]),
            kept=tuple(round(step[row], 6) for step in kept[: len(answer) - 1]),
            read=read_of(count.counts, row, len(answer)),
            cells=cells_of(events, row),
            seconds=seconds,
        )
        for (method, logits, count, events, seconds), kept in zip(found, weigh.kept(), strict=True)
        for row, ((each, _), answer) in enumerate(zip(batch.rows, told, strict=True))
    ]


def _say(
    to: Asked, rows: list[list[int]], answers: list[list[int]] | None, edit: Intervention, logits: _Logits | None = None
) -> tuple[list[list[int]], list[Event]]:
    """New tokens and events; with `answers` it says these, whatever it would have said."""
    if answers is None:
        return to.generate(rows, edit, logits)
    told = Told(answers, max(map(len, rows)), to.pad)
    return to.generate(rows, edit, logits, max(map(len, answers)), logits_processor=[told])


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


def _there(layer: CacheLayer) -> Bool[Tensor, "batch _ pos"]:
    """Positions that hold a token which is not hidden, by kv head, or by query head if each hides its own."""
    there = layer.readable
    pos = layer.pos.repeat_interleave(there.shape[1] // layer.pos.shape[1], 1)
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
        step = self._calls - 1
        for left, sums in zip(self._left, self._sums, strict=True):
            bits = torch.from_numpy(np.unpackbits(left.steps[step][rows.layer], axis=-1)).to(rows.pos.device)
            paid = rows.probs[:, :, -1].double().unflatten(1, (bits.shape[1], -1))
            pos = rows.pos.repeat_interleave(bits.shape[1] // rows.pos.shape[1], 1)
            there = bits.gather(-1, pos.clamp(min=0)) > 0  # nothing is paid to padding
            share = (paid * there[:, :, None]).sum(-1) / paid.sum(-1)
            if len(sums) == step:
                sums.append(torch.zeros(len(paid), dtype=torch.float64))
            sums[step] += share.mean((1, 2)).cpu()
