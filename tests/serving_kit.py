"""Servers as their documentation has them: how vLLM (both interfaces) and SGLang call logits processors.

No server is installed here. What calls the processors follows, word for word, the pages and docstrings that
docs/serving.md names. A request's model is a script: without an action it says `stream`, token by token.
"""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum, auto
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

dill = pytest.importorskip("dill")
VOCAB = 24
END = 23


@dataclass(kw_only=True)
class SamplingParams:
    """The fields of vLLM's that are used here."""

    max_tokens: int = 16
    extra_args: dict[str, Any] | None = None
    eos_token_id: int | None = END
    all_stop_token_ids: set[int] = field(default_factory=lambda: {END})


@dataclass(eq=False)
class Request:
    """A request, what it has said, and what the reference needs to know: (tokens read, tokens made) of each step."""

    stream: list[int]
    params: SamplingParams
    prompt: list[int] = field(default_factory=lambda: [1, 2, 3])
    output: list[int] = field(default_factory=list)
    log: list[tuple[int, int]] = field(default_factory=list)
    edited: list[int] = field(default_factory=list)

    def logits(self, position: int) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor(self.stream[position]), VOCAB).float()

    def said(self, row: torch.Tensor, position: int) -> int:
        if not torch.equal(row, self.logits(position)):
            self.edited.append(position)
        return int(row.argmax())


class Server:
    """What the servers below share: tokens that a request's list does not hold yet."""

    running: list[Request]

    def __init__(self):
        self.unknown = {}

    def settle(self, request: Request):
        """Write the real tokens over the placeholders."""
        if known := self.unknown.pop(request, None):
            request.output[request.output.index(-1) :] = known

    def over(self, request: Request) -> bool:
        return END in [*request.output, *self.unknown.get(request, ())] or len(request.output) + 8 > len(request.stream)


class MoveDirectionality(Enum):
    UNIDIRECTIONAL = auto()
    SWAP = auto()


class BatchProcessor(ABC):
    """vllm.v1.sample.logits_processor.LogitsProcessor"""

    @abstractmethod
    def __init__(self, vllm_config, device, is_pin_memory: bool): ...

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def is_argmax_invariant(self) -> bool: ...

    @abstractmethod
    def update_state(self, batch_update): ...


class SlotProcessor(ABC):
    """vllm.v1.worker.gpu.sample.logits_processor.LogitsProcessor"""

    def add_request(self, req_idx: int, sampling_params) -> bool:
        return True

    @abstractmethod
    def apply(self, logits: torch.Tensor, ctx) -> torch.Tensor: ...


class CustomLogitProcessor(ABC):
    """sglang.srt.sampling.custom_logit_processor.CustomLogitProcessor"""

    @abstractmethod
    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor: ...

    @classmethod
    def to_str(cls) -> str:
        return json.dumps({"callable": dill.dumps(cls).hex()})

    @classmethod
    def from_str(cls, json_str: str):
        return dill.loads(bytes.fromhex(json.loads(json_str)["callable"]))()


HOMES = {
    "vllm.v1.sample.logits_processor": {"LogitsProcessor": BatchProcessor},
    "vllm.v1.worker.gpu.sample.logits_processor": {"LogitsProcessor": SlotProcessor},
    "sglang.srt.sampling.custom_logit_processor": {"CustomLogitProcessor": CustomLogitProcessor},
}


def install(monkeypatch: pytest.MonkeyPatch, homes: dict[str, dict[str, Any]]):
    """Make modules importable that hold these names, and forget processors made for others."""
    from sinkscope.loops import servers as serving

    for name in ("VllmLoopProcessor", "SglangLoopProcessor"):
        monkeypatch.delitem(vars(serving), name, raising=False)
    for name, held in homes.items():
        module = ModuleType(name)
        module.__dict__.update(held)
        monkeypatch.setitem(sys.modules, name, module)


class Batches(Server):
    """vLLM's persistent batch.

    Finished requests are replaced by new ones from the lowest index on; further new ones are appended; what is left
    empty is removed, and the last requests are moved into the lowest holes; then some are swapped.

    Args:
        placeholders: asynchronous scheduling: lists get -1, which the real token replaces right before `apply`.
    """

    def __init__(self, processor, *, placeholders: bool = False):
        self.processor, self.placeholders = processor, placeholders
        super().__init__()
        self.batch = []

    @property
    def running(self) -> list[Request]:
        return [request for request in self.batch if request]

    def _places(self, left: list[Request], new: list[Request]) -> tuple[list[int], list[Any], list[Any]]:
        holes = sorted(i for i, request in enumerate(self.batch) if request in left)
        added, moved = [], []
        for request in new:
            index = holes.pop(0) if holes else len(self.batch)
            self.batch[index : index + 1] = [request]
            added.append((index, request.params, request.prompt, request.output))
        for hole in holes:
            self.batch[hole] = None
        removed = sorted(holes, reverse=True)
        while None in self.batch:
            hole = self.batch.index(None)
            last = max((i for i, request in enumerate(self.batch) if request), default=-1)
            if last > hole:
                moved.append((last, hole, MoveDirectionality.UNIDIRECTIONAL))
                self.batch[hole], self.batch[last] = self.batch[last], None
            else:
                del self.batch[hole:]
        return removed, added, moved

    def step(self, rng: Random, left: list[Request], new: list[Request]):
        removed, added, moved = self._places(left, new)
        for _ in range(rng.choice((0, 0, 1, 2)) if len(self.batch) > 1 else 0):
            a, b = rng.sample(range(len(self.batch)), 2)
            self.batch[a], self.batch[b] = self.batch[b], self.batch[a]
            moved.append((a, b, MoveDirectionality.SWAP))
        update = SimpleNamespace(removed=removed, added=added, moved=moved)
        self.processor.update_state(update if removed or added or moved else None)
        for request in list(self.unknown):
            self.settle(request)
        if not self.batch:
            return
        logits = self.processor.apply(torch.stack([r.logits(len(r.output)) for r in self.running]))
        for request, row in zip(self.running, logits, strict=True):
            at = len(request.output)
            made = request.said(row, at)
            request.log.append((at, 1))
            if self.placeholders:
                self.unknown[request] = [made]
                request.output.append(-1)
            else:
                request.output.append(made)


class Slots(Server):
    """vLLM's Model Runner V2: stable slots, rows in another order each step, tokens on the device only.

    Args:
        drafts: rows of a request beside its first; each checks one drafted token.
    """

    def __init__(self, make, *, drafts: int = 0, slots: int = 4, length: int = 200):
        def zeros(*shape: int) -> SimpleNamespace:
            tensor = torch.zeros(shape, dtype=torch.int32)
            return SimpleNamespace(gpu=tensor, np=tensor.numpy())

        super().__init__()
        self.drafts, self.slots = drafts, {}
        self.states = SimpleNamespace(
            max_num_reqs=slots,
            all_token_ids=zeros(slots, length),
            prompt_len=zeros(slots),
            prefill_len=zeros(slots),
            total_len=zeros(slots),
        )
        speculative = SimpleNamespace(num_speculative_tokens=drafts) if drafts else None
        self.processor = make(SimpleNamespace(speculative_config=speculative), self.states)
        self.read = {}
        self.chunked = set()

    @property
    def running(self) -> list[Request]:
        return list(self.slots.values())

    def step(self, rng: Random, left: list[Request], new: list[Request]):
        self.slots = {slot: request for slot, request in self.slots.items() if request not in left}
        for request in new:
            slot = rng.choice([s for s in range(self.states.max_num_reqs) if s not in self.slots])
            self.slots[slot] = request
            filled = [*request.prompt, *request.output]
            self.states.all_token_ids.gpu[slot] = -7  # what another request has left
            self.states.all_token_ids.gpu[slot, : len(filled)] = torch.tensor(filled)
            self.states.prompt_len.np[slot] = len(request.prompt)
            self.states.prefill_len.np[slot] = self.states.total_len.gpu[slot] = len(filled)
            self.processor.add_request(slot, request.params)
            self.read.setdefault(request, 0)
            if rng.random() < 0.3:
                self.chunked.add(request)
        slots = rng.sample(sorted(self.slots), rng.randint(1, len(self.slots))) if self.slots else []
        rows = []  # slot, place among the rows of the request, position
        lengths = []
        for slot in slots:
            total = int(self.states.total_len.gpu[slot])
            if self.slots[slot] in self.chunked:  # its prompt is not read to the end: the token is thrown away
                rows.append((slot, 0, total - 2))
                lengths.append(total - 1)
            else:
                rows += [(slot, j, total - 1 + j) for j in range(1 + self.drafts)]
                lengths.append(total + self.drafts)
        if rows:
            self._sample(rng, slots, rows, lengths)

    def _sample(self, rng: Random, slots: list[int], rows: list[tuple[int, int, int]], lengths: list[int]):
        owners = [self.slots[slot] for slot, _, _ in rows]
        at = [len(r.output) + j for r, (_, j, _) in zip(owners, rows, strict=True)]
        drafted = [rng.choice((r.stream[p], r.stream[p], 0)) for r, p in zip(owners, at, strict=True)]
        ctx = SimpleNamespace(
            expanded_idx_mapping=torch.tensor([slot for slot, _, _ in rows], dtype=torch.int32),
            idx_mapping=torch.tensor(slots, dtype=torch.int32),
            idx_mapping_np=np.array(slots),
            pos=torch.tensor([position for _, _, position in rows]),
            seq_lens_upper_bound_np=np.array(lengths),
        )
        given = torch.stack([r.logits(p) for r, p in zip(owners, at, strict=True)])
        logits = self.processor.apply(given, ctx)
        for slot in slots:
            request = self.slots[slot]
            before = len(request.output)
            for i in [i for i, (s, _, _) in enumerate(rows) if s == slot]:
                if request in self.chunked:
                    self.chunked.remove(request)
                    break
                request.output.append(request.said(logits[i], at[i]))
                if request.output[-1] != drafted[i]:
                    break  # this draft is rejected, and so are the later ones
            else:
                assert len(request.output) == before + 1 + self.drafts
            if len(request.output) > before:
                # What one step has made is read in the step after the next: the next one only begins the copy.
                request.log.append((self.read[request], len(request.output) - before))
                self.read[request] = before
            total = [*request.prompt, *request.output]
            self.states.all_token_ids.gpu[slot, : len(total)] = torch.tensor(total)
            self.states.total_len.gpu[slot] = len(total)


class Overlapped(Server):
    """SGLang's sampler: the processor gets a copy of the masked rows and each row's own parameters.

    Args:
        overlap: now and then the latest token is not in `output_ids` yet.
        drafts: rows of a request beside its first.
        expanded: the list of parameters has an entry for each row, and not one for each request.
    """

    def __init__(self, processor, *, overlap: bool = False, drafts: int = 0, expanded: bool = False):
        self.processor, self.overlap, self.drafts, self.expanded = processor, overlap, drafts, expanded
        super().__init__()
        self.shown = {}

    @property
    def running(self) -> list[Request]:
        return list(self.shown)

    def step(self, rng: Random, left: list[Request], new: list[Request]):
        for request in left:
            del self.shown[request]
        for request in new:
            shown = SimpleNamespace(output_ids=[], eos_token_ids={END}, tokenizer=None)
            shown.custom_params = {**(request.params.extra_args or {}), "__req__": shown}
            self.shown[request] = shown
        batch = rng.sample(self.running, len(self.running))
        if not batch:
            return
        for request in batch:
            late = self.overlap and rng.random() < 0.7
            self.shown[request].output_ids[:] = request.output[: len(request.output) - late]
        n = 1 + self.drafts
        rows = [(request, len(request.output) + j) for request in batch for j in range(n)]
        params = [self.shown[r].custom_params for r in batch for _ in range(n if self.expanded else 1)]
        logits = self.processor(torch.stack([r.logits(p) for r, p in rows]), params)
        for i, request in enumerate(batch):
            before = len(request.output)
            for j in range(n):
                request.output.append(request.said(logits[i * n + j], before + j))
                if rng.random() < 0.4:
                    break
            request.log.append((len(self.shown[request].output_ids), len(request.output) - before))


def play(server: Batches | Slots | Overlapped, rng: Random, requests: list[Request], *, preempt: bool = False):
    """Let requests come, go, and come back at random, until all of them are over."""
    waiting = list(requests)
    for _ in range(2000):
        left = [request for request in server.running if server.over(request)]
        others = [request for request in server.running if request not in left]
        back = [rng.choice(others)] if preempt and others and rng.random() < 0.15 else []
        free = 4 - len(others) + len(back)
        new = [waiting.pop(0) for _ in range(min(len(waiting), rng.randint(0, free)))]
        waiting = [*back, *waiting]
        for request in left + back:
            server.settle(request)
        server.step(rng, left + back, new)
        if not waiting and not server.running:
            return
    raise AssertionError("the requests never end")
