"""What a user does with a model, and in which words the call is made: one row each.

Every way returns the logits of all positions of all rows, each row where it was at the beginning, whatever became of
the order of rows in between; `generate` returns what was written and its logits.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import or_
from typing import Any

import torch
import transformers as tf
from torch import Tensor
from transformers import DynamicCache
from transformers.generation import MaxTimeCriteria

import sinkscope as ss
from sinkscope import DRY

from .edits import EDITS, Draw
from .families import FAMILIES, PAD, VOCAB
from .settings import tokenizer

NEW = 6
SILENT = -12345.0
"""Stands where a way says nothing."""
Inside = Callable[[], AbstractContextManager[Any]]


@dataclass
class Use:
    """A model, its inputs, and the context of an intervention.

    Attributes:
        call: What is called.
        model: The model, for `generate` and its configuration.
        draw: The draw.
        ids: Ids of all rows.
        mask: 1 where they are real.
        inside: Opens the context and gives its runs.
        edits: The interventions, for functions that enter them by themselves; none by plain means.
        shift: Where the first token stands, if a call has to say so.
    """

    call: Callable[..., Any]
    model: Any
    draw: Draw
    ids: Tensor
    mask: Tensor
    inside: Inside
    edits: Sequence[Any] | None = None
    shift: int = 0

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    @property
    def prompt(self) -> int:
        """Length of the prompt in ways that go on by single tokens."""
        return max(1, self.length - 4)

    def cache(self) -> Any:
        return DynamicCache(config=self.model.config)

    def run(self, start: int, stop: int, cache: Any = None, order: Tensor | None = None) -> Tensor:
        """Logits of a range of positions; `order` says which row stands where."""
        ids, mask = self.ids[:, start:stop], self.mask[:, :stop]
        if order is not None:
            ids, mask = ids[order], mask[order]
        more = {} if cache is None else {"past_key_values": cache}
        if self.shift:
            more["position_ids"] = torch.arange(start, stop)[None] + self.shift
        return CALLS[self.draw["call"]].make(self, ids, mask, more)


def positions_of(mask: Tensor) -> Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)


def _keyword(use: Use, ids: Tensor, mask: Tensor, more: dict[str, Any]) -> Tensor:
    return use.call(input_ids=ids, attention_mask=mask, **more).logits


def _positional(use: Use, ids: Tensor, mask: Tensor, more: dict[str, Any]) -> Tensor:
    if more or not FAMILIES[use.draw["family"]].mask_second:
        return use.call(ids, attention_mask=mask, **more).logits
    return use.call(ids, mask).logits


def _positions(use: Use, ids: Tensor, mask: Tensor, more: dict[str, Any]) -> Tensor:
    positions = positions_of(mask)[:, mask.shape[1] - ids.shape[1] :]
    return use.call(input_ids=ids, attention_mask=mask, position_ids=positions, **more).logits


def _no_mask(use: Use, ids: Tensor, _mask: Tensor, more: dict[str, Any]) -> Tensor:
    return use.call(input_ids=ids, **more).logits


def _tuple(use: Use, ids: Tensor, mask: Tensor, more: dict[str, Any]) -> Tensor:
    return use.call(input_ids=ids, attention_mask=mask, return_dict=False, **more)[0]


@dataclass(frozen=True)
class Call:
    """In which words a call is made."""

    make: Callable[[Use, Tensor, Tensor, dict[str, Any]], Tensor]
    fits: Callable[[Draw], bool] = lambda draw: True


CALLS = {
    "keyword": Call(_keyword),
    "positional": Call(_positional),
    "positions": Call(_positions, lambda draw: FAMILIES[draw["family"]].positions),
    "no mask": Call(_no_mask, lambda draw: draw["padding"] == "none"),
    "tuple": Call(_tuple, lambda draw: draw["cache"] != "generate"),
}


def forward(use: Use) -> Tensor:
    with use.inside():
        return use.run(0, use.length)


def steps(use: Use, cache: Any = None) -> Tensor:
    cache = cache or use.cache()
    with use.inside():
        found = [use.run(0, use.prompt, cache)]
        for start in range(use.prompt, use.length):
            found.append(use.run(start, start + 1, cache))
    return torch.cat(found, 1)


def chunks(use: Use) -> Tensor:
    cache, found = use.cache(), []
    with use.inside():
        for start in range(0, use.length, 7):
            found.append(use.run(start, min(use.length, start + 7), cache))
    return torch.cat(found, 1)


def outside(use: Use) -> Tensor:
    """The cache was filled before the block."""
    cache = use.cache()
    before = use.run(0, use.prompt, cache)
    with use.inside():
        return torch.cat([torch.full_like(before, SILENT), use.run(use.prompt, use.length, cache)], 1)


def _diverted(use: Use, cache: Any) -> None:
    """Another token than the next one comes to this cache."""
    other = copy.copy(use)
    other.ids = use.ids.flip(1).roll(1, 1)
    other.run(use.prompt, use.prompt + 1, cache)


def copied(use: Use, goes_on: int = 1) -> Tensor:
    """It goes on with a copy (or with the first one: 0), and the other with something else."""
    caches = [use.cache()]
    with use.inside():
        found = [use.run(0, use.prompt, caches[0])]
        caches.append(copy.deepcopy(caches[0]))
        _diverted(use, caches[1 - goes_on])
        for start in range(use.prompt, use.length):
            found.append(use.run(start, start + 1, caches[goes_on]))
    return torch.cat(found, 1)


def reordered(use: Use) -> Tensor:
    """After a token rows change places, as in a beam search."""
    cache, order = use.cache(), torch.arange(len(use.ids), device=use.ids.device).flip(0)
    with use.inside():
        found = [use.run(0, use.prompt, cache), use.run(use.prompt, use.prompt + 1, cache)]
        cache.reorder_cache(order)
        for start in range(use.prompt + 1, use.length):
            found.append(use.run(start, start + 1, cache, order).flip(0))
    return torch.cat(found, 1)


def selected(use: Use) -> Tensor:
    """After a token only the last row goes on."""
    cache, last = use.cache(), torch.tensor([len(use.ids) - 1], device=use.ids.device)
    with use.inside():
        found = [use.run(0, use.prompt, cache), use.run(use.prompt, use.prompt + 1, cache)]
        cache.batch_select_indices(last)
        for start in range(use.prompt + 1, use.length):
            rest = use.run(start, start + 1, cache, last)
            found.append(torch.cat([torch.full_like(found[1][:-1], SILENT), rest]))
    return torch.cat(found, 1)


def repeated(use: Use) -> Tensor:
    """Each row goes on as two, which say the same."""
    cache, order = use.cache(), torch.arange(len(use.ids), device=use.ids.device).repeat_interleave(2)
    with use.inside():
        found = [use.run(0, use.prompt, cache)]
        cache.batch_repeat_interleave(2)
        for start in range(use.prompt, use.length):
            found.append(use.run(start, start + 1, cache, order)[1::2])
    return torch.cat(found, 1)


def cropped(use: Use) -> Tensor:
    """A token is taken back."""
    cache = use.cache()
    with use.inside():
        found = [use.run(0, use.prompt, cache), use.run(use.prompt, use.prompt + 1, cache)]
        other = copy.copy(use)
        other.ids = use.ids.flip(1)
        other.run(use.prompt + 1, use.prompt + 2, cache)
        cache.crop(-1)
        for start in range(use.prompt + 1, use.length):
            found.append(use.run(start, start + 1, cache))
    return torch.cat(found, 1)


def static(use: Use) -> Tensor:
    return steps(use, tf.StaticCache(config=use.model.config, max_cache_len=use.length + 8))


class Waiting:
    """A call in another thread that waits before its first layer until it is told to go on."""

    def __init__(self, use: Use):
        self._use = use
        self._go, self._there = threading.Event(), threading.Event()
        self._given: list[Any] = []
        self._thread = threading.Thread(target=self._work)
        self._hook = FAMILIES[use.draw["family"]].block(use.model, 0).register_forward_pre_hook(self._wait)

    def _wait(self, *_: Any) -> None:
        if threading.current_thread() is self._thread:
            self._there.set()
            self._go.wait(20)

    def _work(self) -> None:
        try:
            with torch.no_grad():
                self._given.append(self._use.run(0, self._use.length))
        except Exception as error:
            self._given.append(error)
        self._there.set()

    def begin(self) -> None:
        self._thread.start()
        self._there.wait(20)

    def go_on(self, after: float = 0.0) -> None:
        threading.Timer(after, self._go.set).start()

    def given(self) -> Tensor:
        """What the call gives."""
        self._thread.join()
        self._hook.remove()
        if isinstance(self._given[0], Exception):
            raise self._given[0]
        return self._given[0]


def begun_before(use: Use) -> Tensor:
    """A call that begins before the block goes on inside it."""
    waiting = Waiting(use)
    waiting.begin()
    try:
        with use.inside():
            waiting.go_on()
            return waiting.given()
    finally:
        waiting.go_on()


def begun_inside(use: Use) -> Tensor:
    """A call that begins inside the block still runs when the block is left."""
    waiting = Waiting(use)
    try:
        with use.inside():
            waiting.begin()
            waiting.go_on(after=0.05)
        return waiting.given()
    finally:
        waiting.go_on()


def gradients(use: Use) -> Tensor:
    """What the inputs do to the logits, beside these."""
    embedded: list[Tensor] = []
    me = threading.get_ident()

    def keep(_module: Any, _args: Any, output: Tensor) -> Tensor:
        if threading.get_ident() != me:
            return output
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    hook = use.model.get_input_embeddings().register_forward_hook(keep)
    try:
        with torch.enable_grad(), use.inside():
            logits = use.run(0, use.length)
            (gradient,) = torch.autograd.grad((logits * use.mask[..., None]).tanh().sum(), embedded[-1:])
    finally:
        hook.remove()
    return torch.cat([logits.detach(), gradient], -1)


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "min": {"min_new_tokens": NEW},
    "suppress": {"suppress_tokens": [1, 5]},
    "beams": {"num_beams": 3},
    "returned": {"num_beams": 2, "num_return_sequences": 2},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "chunked": {"prefill_chunk_size": 7},
    "no eos": {"eos_token_id": None},
    "no cache": {"use_cache": False},
    "drawn": {"do_sample": True, "temperature": 0.9, "top_k": 20},
    "nucleus": {"do_sample": True, "top_p": 0.8},
    "penalty": {"repetition_penalty": 1.3},
    "dry": {"logits_processor": [DRY(multiplier=4.0, allowed_length=1)]},
    "bad words": {"bad_words_ids": [[5], [7, 9]]},
    "stop text": {"stopping_criteria": [MaxTimeCriteria(3_600)]},
}
SAMPLES = ("drawn", "nucleus")
BY_TOKENS = ("beams", "returned", "lookup")
"""Options with which the logits of steps are not those of the rows."""
ROW_ALONE = ("greedy", "min", "suppress", "no eos", "no cache", "penalty", "dry", "lookup")
"""Options under which a row says the same alone."""
AS_GREEDY = ("no cache", "lookup")
"""Options which say the same as none."""


def generate(use: Use) -> Tensor:
    option = use.draw["options"]
    settings = {"max_new_tokens": NEW, "return_dict_in_generate": True, "do_sample": False, **OPTIONS[option]}
    settings["output_logits"] = option not in BY_TOKENS
    with use.inside():
        torch.manual_seed(7)
        output = use.model.generate(input_ids=use.ids, attention_mask=use.mask, **settings)
    if option in BY_TOKENS:
        return output.sequences[:, use.length :]
    return torch.stack(output.logits, 1)


def beam_scores(use: Use) -> Tensor:
    """How far the scores of beams are from those of their tokens, read one by one into another cache: nowhere."""
    settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "num_beams": 3, "length_penalty": 0.0}
    with use.inside():
        output = use.model.generate(
            input_ids=use.ids,
            attention_mask=use.mask,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            **settings,
        )
        again = copy.copy(use)
        again.inside = nullcontext
        again.ids = output.sequences
        again.mask = torch.cat([use.mask, torch.ones_like(output.sequences[:, use.length :])], 1)
        again.draw = {**use.draw, "call": "positions" if FAMILIES[use.draw["family"]].positions else "keyword"}
        cache = again.cache()
        found = [again.run(0, use.length, cache)[:, -1:]]
        for start in range(use.length, again.length - 1):
            found.append(again.run(start, start + 1, cache))
    logits = torch.cat(found, 1).float()
    scores = logits.log_softmax(-1).gather(-1, again.ids[:, use.length :, None]).sum((1, 2))
    return (output.sequences_scores - scores)[:, None, None]


def looping(use: Use) -> Tensor:
    """What is generated while a guard cuts the cache; right is the plain model under masks (`replayed`)."""
    settings = {"max_new_tokens": 24, "eos_token_id": None, "do_sample": False}
    with use.inside() as runs:
        output = use.model.generate(
            input_ids=use.ids,
            attention_mask=use.mask,
            return_dict_in_generate=True,
            output_logits=True,
            **settings,
        )
    logits = torch.stack(output.logits, 1)
    events = [event for run in runs or () for event in run.events if event.kind == "guard"]
    return logits - replayed(use, output.sequences, events)


def replayed(use: Use, ids: Tensor, events: Sequence[Any]) -> Tensor:
    """Logits of each new token by the plain model, row by row, where what a guard had cut before is masked."""
    found: list[Tensor] = []
    for number in range(len(ids)):
        row = ids[number, int((use.mask[number] == 0).sum()) :]
        sees = torch.ones(len(row), len(row), dtype=torch.bool, device=row.device).tril()
        for event in events:
            if event.row == number:
                stays = torch.zeros(event.position + 1, dtype=torch.bool, device=row.device)
                for start, stop in event.data["kept"]:
                    stays[start:stop] = True
                sees[event.position + 1 :, : event.position + 1] &= stays
        places = torch.arange(len(row), device=row.device)[None]
        hidden = torch.where(sees, 0.0, torch.finfo(torch.float32).min)
        output = use.model(input_ids=row[None], attention_mask=hidden[None, None], position_ids=places, use_cache=False)
        found.append(output.logits[:, -25:-1])
    return torch.cat(found)


def steered(use: Use) -> Tensor:
    """What is written while a guard cuts and steers."""
    with use.inside():
        output = use.model.generate(
            input_ids=use.ids, attention_mask=use.mask, max_new_tokens=60, eos_token_id=None, do_sample=False
        )
    return output[:, use.length :]


def ss_generate(use: Use) -> Tensor:
    """What `ss.generate` writes after prompts of different lengths, which plain transformers reads one by one."""
    rows = [row[real].tolist() for row, real in zip(use.ids, use.mask.bool(), strict=True)]
    new = 60 if EDITS[use.draw["edit"]].steers else NEW
    if use.edits is None:
        written = []
        for row in rows:
            ids = torch.tensor([row], device=use.ids.device)
            settings = {"max_new_tokens": new, "do_sample": False, "pad_token_id": PAD}
            output = use.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
            written.append(output[0, len(row) :].tolist())
    else:
        found = ss.generate(
            use.model,
            rows,
            interventions=list(use.edits),
            max_new_tokens=new,
            batch_size=len(rows),
            tokenizer=tokenizer(),
        )
        written = [one.tokens for one in found]
    wide = torch.full((len(rows), new), -1)
    for number, tokens in enumerate(written):
        wide[number, : len(tokens)] = torch.tensor(tokens)
    return wide


def joined(edits: Sequence[Any]) -> Any:
    """Several interventions as one."""
    return reduce(or_, edits) if edits else None


def conversation(use: Use, answers: str = "recompute") -> Tensor:
    """Two turns, which plain transformers reads as one text each."""
    prompts, said = [use.ids[0, : use.prompt].tolist(), use.ids[0, use.prompt :].tolist()], []
    chat = None
    if use.edits is not None:
        chat = ss.Conversation(use.model, joined(use.edits), answers=answers, tokenizer=tokenizer(), chat=False)
    text: list[int] = []
    for prompt in prompts:
        if chat is not None:
            said.append(list(chat.ask(prompt, max_new_tokens=4).ids))
            continue
        ids = torch.tensor([text + prompt], device=use.ids.device)
        settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": PAD}
        output = use.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
        said.append(output[0, ids.shape[1] :].tolist())
        text = output[0].tolist()
    wide = torch.full((2, 4), -1)
    for number, tokens in enumerate(said):
        wide[number, : len(tokens)] = torch.tensor(tokens)
    return wide


def conversation_kept(use: Use) -> Tensor:
    return conversation(use, "keep")


@dataclass(frozen=True)
class Way:
    """What is done with the model and its cache.

    Attributes:
        run: Does it.
        alone: The plainest way with the same answer for a row by itself.
        fits: Draws to which it belongs.
        tokens: Whether new tokens are written, after the whole of the ids.
        nothing: Whether right is 0, because differences are returned.
        plain: Whether right is the plain model, because the call is none of the block's.
    """

    run: Callable[[Use], Tensor]
    alone: str | None = None
    fits: Callable[[Draw], bool] = field(default=lambda draw: True)
    tokens: bool = False
    plain: bool = False
    nothing: bool = False


def _rows_move(draw: Draw) -> bool:
    return draw["rows"] > 1 and _long(draw)


def _long(draw: Draw) -> bool:
    return draw["length"] >= 20


def _crops(draw: Draw) -> bool:
    """A window has dropped what a crop needs, and so has a policy."""
    return _long(draw) and FAMILIES[draw["family"]].window is None and not EDITS[draw["edit"]].budget


def _another_thread(draw: Draw) -> bool:
    wrapper = draw["wrapper"] in ("bare", "module") and draw["other"] == "nothing"
    return wrapper and draw["hooks"] == "none" and not EDITS[draw["edit"]].alone


def _bare(draw: Draw) -> bool:
    """Whether the model stands by itself, in full precision."""
    return draw["wrapper"] == "bare" and draw["dtype"] == "float32"


def _one_row(draw: Draw) -> bool:
    return draw["rows"] == 1 and _bare(draw) and _long(draw) and draw["hooks"] == "none"


def _scores(draw: Draw) -> bool:
    return _bare(draw) and not EDITS[draw["edit"]].budget


def _replays(draw: Draw) -> bool:
    """Whether a mask of one's own and positions are taken, and no window hides more."""
    family = FAMILIES[draw["family"]]
    takes = family.positions and family.dispatches and family.window is None and draw["attention"] != "own without mask"
    return takes and EDITS[draw["edit"]].acts and draw["wrapper"] == "bare" and draw["hooks"] == "none"


WAYS = {
    "none": Way(forward, "none", lambda draw: not EDITS[draw["edit"]].budget),
    "steps": Way(steps, "steps"),
    "chunks": Way(chunks, None, _long),
    "outside": Way(outside, None, lambda draw: draw["edit"] in ("full", "guard")),
    "copied": Way(copied, "steps", _long),
    "copied from": Way(partial(copied, goes_on=0), "steps", _long),
    "reordered": Way(reordered, "steps", _rows_move),
    "selected": Way(selected, "steps", _rows_move),
    "repeated": Way(repeated, "steps", _long),
    "cropped": Way(cropped, "steps", _crops),
    "static": Way(static, None, _long),
    "begun before": Way(begun_before, None, _another_thread, plain=True),
    "begun inside": Way(begun_inside, None, _another_thread),
    "gradients": Way(gradients, None, lambda draw: draw["dtype"] == "float32" and draw["wrapper"] != "nnsight"),
    "generate": Way(generate, "generate", tokens=True),
    "beam scores": Way(beam_scores, "beam scores", _scores, tokens=True, nothing=True),
    "looping": Way(looping, None, _replays, tokens=True, nothing=True),
    "steered": Way(steered, "steered", lambda draw: draw["edit"] == "guard steers" and _bare(draw), tokens=True),
    "ss.generate": Way(
        ss_generate, "ss.generate", lambda draw: _bare(draw) and draw["padding"] != "right", tokens=True
    ),
    "conversation": Way(conversation, None, _one_row, tokens=True),
    "conversation kept": Way(conversation_kept, None, _one_row, tokens=True),
}


def _drawn(rows: int, length: int, generator: torch.Generator) -> Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=generator)


def _with_pads(rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Some real tokens are what padding is, too."""
    ids = _drawn(rows, length, generator)
    ids[torch.rand(ids.shape, generator=generator) < 0.3] = PAD
    return ids


def _repeating(rows: int, length: int, generator: torch.Generator) -> Tensor:
    """A piece of three tokens again and again."""
    return _drawn(rows, 3, generator).repeat(1, length // 3 + 1)[:, :length]


TEXTS = {"random": _drawn, "has pads": _with_pads, "repeats": _repeating}
"""The ids that are read."""


def inputs(draw: Draw, seed: int) -> tuple[Tensor, Tensor]:
    """Ids `[row pos]` and their mask."""
    generator = torch.Generator().manual_seed(seed)
    length, rows = draw["length"], draw["rows"]
    ids = TEXTS[draw["text"]](rows, length, generator)
    mask = torch.ones_like(ids)
    if draw["padding"] != "none" and length > 4:
        for row in range(1, rows):
            count = int(torch.randint(1, max(2, length // 2), (1,), generator=generator))
            where = slice(0, count) if draw["padding"] == "left" else slice(length - count, length)
            ids[row, where], mask[row, where] = PAD, 0
    return ids.to(draw["device"]), mask.to(draw["device"])
