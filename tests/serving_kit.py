"""Servers as their documentation has them: how vLLM and SGLang call logits processors.

No server is installed here. What calls the processors follows, word for word, the pages and docstrings that
docs/serving.md names. A request's model is a script: without an action it says `stream`, token by token.
"""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
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
    """A request, what it has said, and for the reference, how many of its tokens each step could read."""

    stream: list[int]
    params: SamplingParams
    prompt: list[int] = field(default_factory=lambda: [1, 2, 3])
    output: list[int] = field(default_factory=list)
    log: list[int] = field(default_factory=list)
    edited: list[int] = field(default_factory=list)

    def say(self, row: torch.Tensor):
        """The next token, from what the processor made of its logits."""
        at = len(self.output)
        if not torch.equal(row, logits_of([(self, at)])[0]):
            self.edited.append(at)
        self.output.append(int(row.argmax()))

    def over(self) -> bool:
        return END in self.output or len(self.output) + 8 > len(self.stream)


def logits_of(rows: list[tuple[Request, int]]) -> torch.Tensor:
    """Logits `[row vocab]` of requests at positions of their streams."""
    tokens = [request.stream[position] for request, position in rows]
    return torch.nn.functional.one_hot(torch.tensor(tokens, dtype=torch.long), VOCAB).float()


def sample(visible: dict[Request, int], apply: Callable[[torch.Tensor], torch.Tensor]):
    """A step of requests, of whose tokens so many could be read: each says one."""
    rows = [(request, len(request.output)) for request in visible]
    for request, row in zip(visible, apply(logits_of(rows)), strict=True):
        request.say(row)
        request.log.append(visible[request])


class SlotProcessor(ABC):
    """vllm.v1.worker.gpu.sample.logits_processor.LogitsProcessor"""

    def add_request(self, req_idx, sampling_params):
        return True

    @abstractmethod
    def apply(self, logits, ctx): ...


class CustomLogitProcessor(ABC):
    """sglang.srt.sampling.custom_logit_processor.CustomLogitProcessor"""

    @abstractmethod
    def __call__(self, logits, custom_param_list=None): ...

    @classmethod
    def to_str(cls):
        return json.dumps({"callable": dill.dumps(cls).hex()})

    @classmethod
    def from_str(cls, json_str):
        return dill.loads(bytes.fromhex(json.loads(json_str)["callable"]))()


HOMES = {
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


class Slots:
    """vLLM's Model Runner V2: stable slots, rows in another order each step, tokens on the device only."""

    def __init__(self, make):
        def zeros(*shape: int) -> SimpleNamespace:
            tensor = torch.zeros(shape, dtype=torch.int32)
            return SimpleNamespace(gpu=tensor, np=tensor.numpy())

        self.slots = {}
        lengths = {name: zeros(4) for name in ("prompt_len", "prefill_len", "total_len")}
        self.states = SimpleNamespace(all_token_ids=zeros(4, 200), **lengths)
        self.processor = make(SimpleNamespace(speculative_config=None), self.states)
        self.read = {}  # of each request, how many tokens the step before could read
        self.chunked = set()  # slots whose prompt the next step does not read to the end

    def _write(self, slot: int) -> int:
        """The tokens of a request on the device; their number."""
        request = self.slots[slot]
        tokens = [*request.prompt, *request.output]
        self.states.all_token_ids.gpu[slot, : len(tokens)] = torch.tensor(tokens)
        self.states.total_len.gpu[slot] = len(tokens)
        return len(tokens)

    def step(self, rng: Random, left: list[Request], new: list[Request]):
        self.slots = {slot: request for slot, request in self.slots.items() if request not in left}
        for request in new:
            slot = rng.choice([s for s in range(4) if s not in self.slots])
            self.slots[slot] = request
            self.states.all_token_ids.gpu[slot] = -7  # what another request has left
            self.states.prefill_len.np[slot] = self._write(slot)
            self.states.prompt_len.np[slot] = len(request.prompt)
            self.processor.add_request(slot, request.params)
            self.read.setdefault(request, 0)
            if rng.random() < 0.3:
                self.chunked.add(slot)
        if not self.slots:
            return
        picked = rng.sample(sorted(self.slots), rng.randint(1, len(self.slots)))
        whole = [slot for slot in picked if slot not in self.chunked]
        parts = [slot for slot in picked if slot in self.chunked]
        self.chunked -= {*parts}
        total = {slot: self._write(slot) for slot in picked}
        ctx = SimpleNamespace(
            idx_mapping=torch.tensor([*parts, *whole], dtype=torch.int32),
            idx_mapping_np=np.array([*parts, *whole]),
            seq_lens_upper_bound_np=np.array([total[s] - 1 for s in parts] + [total[s] for s in whole]),
        )

        def apply(logits: torch.Tensor) -> torch.Tensor:
            return self.processor.apply(torch.cat([torch.zeros(len(parts), VOCAB), logits]), ctx)[len(parts) :]

        # What one step has made is read in the step after the next: the next one only begins the copy.
        requests = [self.slots[slot] for slot in whole]
        now = {request: len(request.output) for request in requests}
        sample({request: self.read[request] for request in requests}, apply)
        self.read.update(now)
        for slot in whole:
            self._write(slot)


class Overlapped:
    """SGLang's sampler: the processor gets a copy of the masked rows and each row's own parameters.

    Args:
        overlap: now and then the latest token is not in `output_ids` yet.
    """

    def __init__(self, processor, *, overlap: bool = False):
        self.processor, self.overlap = processor, overlap
        self.shown = {}

    def step(self, rng: Random, left: list[Request], new: list[Request]):
        for request in left:
            del self.shown[request]
        for request in new:
            shown = SimpleNamespace(output_ids=[], eos_token_ids={END}, tokenizer=None)
            shown.custom_params = {**(request.params.extra_args or {}), "__req__": shown}
            self.shown[request] = shown
        visible = {}
        for request in rng.sample(list(self.shown), len(self.shown)):
            visible[request] = max(0, len(request.output) - (self.overlap and rng.random() < 0.7))
            self.shown[request].output_ids[:] = request.output[: visible[request]]
        params = [self.shown[request].custom_params for request in visible]
        sample(visible, lambda logits: self.processor(logits, params))


def play(server: Slots | Overlapped, rng: Random, requests: list[Request], *, preempt: bool = False):
    """Let requests come and go at random, until all of them are over."""
    waiting, running = list(requests), []
    while waiting or running:
        left = [request for request in running if request.over()]
        running = [request for request in running if request not in left]
        new = [waiting.pop(0) for _ in range(min(len(waiting), rng.randint(0, 4 - len(running))))]
        server.step(rng, left, new)
        running += new
