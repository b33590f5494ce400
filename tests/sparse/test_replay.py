"""The choice of lines, recorded for the layers of a prompt: what it gives, what it launches, and what may be in it."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from kv_kit import model_of, prompts
from launches import Launches
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sinkscope.hooks.edit.base import under
from sinkscope.opening.live import target_of
from sinkscope.sparse import choice as rule
from sinkscope.sparse import serve, sparse
from sinkscope.sparse.bands import BlockGrid, Copies
from sinkscope.sparse.choice import recorded_bands, sampled_rows, select_bands
from sinkscope.sparse.replay import Replayed
from sinkscope.sparse.serve import LoopServe

SERVE = LoopServe(alpha=0.6, shortest=0, sample=12, dense_above=9.0, decode=False)
MOST = 8


class Again(Replayed):
    """Does the work again in place of a CUDA graph."""

    def first(self):
        return self.work()

    def record(self):
        results = tuple(torch.empty_like(result) for result in self.work())

        def replay():
            for result, new in zip(results, self.work(), strict=True):
                result.copy_(new)

        return replay, results


class Uncounted(Again):
    """A recording, which is one launch whatever is in it."""

    def record(self):
        replay, results = super().record()

        def launched():
            torch.empty(0)  # stands for the launch
            with _disable_current_modes():
                replay()

        return launched, results


def test_every_call_gives_what_the_work_gives_and_the_work_reads_its_buffers():
    read: list[int] = []

    def work(a, b):
        read.append(a.data_ptr())
        return a + b, a * b.flip(0)

    replayed = Again(work, (torch.zeros(3), torch.zeros(3)))
    for number in range(5):
        a, b = torch.arange(3.0) + number, torch.ones(3) * number
        total, product = replayed(a, b)
        assert torch.equal(total, a + b) and torch.equal(product, a * b.flip(0))
    assert len(set(read)) == 1
    with pytest.raises(RuntimeError):
        replayed(torch.zeros(4), torch.zeros(3))


def test_where_no_graph_can_be_recorded_each_layer_launches_its_work_and_it_is_said_once():
    class Broken(Again):
        def record(self):
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    replayed = Broken(lambda a: (a + 1,), (torch.zeros(2),))
    with pytest.warns(UserWarning, match="step by step.*stream is capturing$") as said:
        for number in range(4):
            assert torch.equal(replayed(torch.full((2,), number))[0], torch.full((2,), number + 1.0))
    assert len(said) == 1


def test_a_model_gives_the_same_with_a_recorded_choice(monkeypatch):
    """Two rows of different lengths, each in a recording of its own, and a later turn."""
    model = model_of("qwen3", num_hidden_layers=5)
    ids, mask = prompts([330, 271])
    outputs, events = [], []
    for recorded_on in ({}, {"cpu": Again}):
        monkeypatch.setattr(serve, "RECORDED_ON", recorded_on)
        with SERVE.on(model) as run, torch.no_grad():
            first = model(ids, attention_mask=mask, use_cache=True)
            more = torch.cat([mask, torch.ones(2, 100, dtype=torch.int64)], 1)
            later = model(ids[:, :100], attention_mask=more, past_key_values=first.past_key_values)
        outputs.append((first.logits[mask.bool()], later.logits))
        events.append([event.data for event in run.events])
    assert_close(*outputs)
    assert events[0] == events[1] and len(events[0]) == 20


def launches(monkeypatch, edit, layers: int) -> int:
    """Of a prompt; attention on columns and bands is one kernel, and a recorded choice another."""
    monkeypatch.setattr(serve, "RECORDED_ON", {"cpu": Uncounted})
    made = sampled_rows(BlockGrid(400, 400), SERVE.sample, 0, SERVE.dense_rows)
    monkeypatch.setattr(serve, "sampled_rows", lambda *_: made)  # drawn on the host, where nothing is launched
    attend = sparse.line_attention

    def kernel(scores, value, chosen, **_):
        with _disable_current_modes(), monkeypatch.context() as own:
            own.setattr(sparse, "triton_module", lambda *_: None)
            return attend(scores, value, chosen).transpose(0, 1).contiguous()

    fake = SimpleNamespace(attention_on=kernel, lists_of=lambda _: ())
    monkeypatch.setattr(sparse, "triton_module", lambda *_: fake)
    target, ids = target_of(model_of("llama", num_hidden_layers=layers)), prompts([400])[0]
    with torch.no_grad(), under(edit, target), Launches() as seen:
        target.hf(ids, use_cache=False)
    return seen.count.total()


def test_a_layer_of_a_prompt_takes_few_launches(monkeypatch):
    """The fourth layer, in which the choice is replayed, over that of the plain model."""
    launches(monkeypatch, SERVE, 1)  # the lengths of lines are known from then on
    of_layer = launches(monkeypatch, SERVE, 4) - launches(monkeypatch, SERVE, 3)
    plain = launches(monkeypatch, None, 4) - launches(monkeypatch, None, 3)
    assert 0 < of_layer - plain <= MOST
    choice = launches(monkeypatch, SERVE, 1) - launches(monkeypatch, None, 1)
    assert choice > 4 * MOST  # the first layer, in which nothing is recorded yet


class OnDevice(TorchDispatchMode):
    """Refuses what cannot be recorded: anything that is not on the device, also numbers that are copied there."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor):
                assert tensor.is_meta, function
        return result


def test_nothing_in_the_recorded_choice_waits_for_the_device_or_reads_the_host(monkeypatch):
    """On tensors that have a device and no numbers; the kernels' launches are left out."""
    triton = pytest.importorskip("sinkscope.sparse.triton")
    sums = pytest.importorskip("sinkscope.sparse.triton_sums")
    monkeypatch.setattr(triton, "launch", lambda *_, **__: None)
    monkeypatch.setattr(sums, "launch", lambda *_, **__: None)
    monkeypatch.setattr(rule, "triton_module", lambda _, name: triton if name == "triton" else sums)
    place = torch.device("meta")
    query, key = torch.empty(4, 600, 64, device=place), torch.empty(2, 700, 64, device=place)
    rows, start = torch.zeros(64, dtype=torch.int64, device=place), torch.arange(11, device=place)
    copies = Copies(rows, rows, rows, start)
    choose = partial(select_bands, alpha=0.9, begin=4, checked=64, dense_rows=16, dense_above=0.5, copies=copies)
    replayed = recorded_bands(choose, rule.Scores(query, key, 0.125), (query, key, rows), 16, Again)
    replayed(query, key, rows)  # fills caches
    with OnDevice():
        results = replayed.work()
        assert len(results) == 7
        for waits in (rows.nonzero, rows[0].item):  # what a recording may not do is noticed
            with pytest.raises((RuntimeError, NotImplementedError)):
                waits()
        with pytest.raises(AssertionError):
            torch.where(rows > 0, rows, torch.tensor(0))
