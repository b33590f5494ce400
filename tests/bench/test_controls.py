"""The controls of the benchmark: random slots and sampling do what they are said to do."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from bench_kit import tiny, words

from sinkscope.bench.benchmark import run as run_bench
from sinkscope.bench.methods import RandomSlots
from sinkscope.bench.record import Prompt, Turn
from sinkscope.bench.table import tabulate_records
from sinkscope.bench.task import PromptFile
from sinkscope.bench.tasks.text import TextFidelity
from sinkscope.files.store import json_lines
from sinkscope.kv.policy import LayerMoment


def slots(pos: torch.Tensor, layer: int) -> torch.Tensor:
    moment = mock.Mock(spec=LayerMoment, kv=SimpleNamespace(pos=pos), layer=layer)
    return RandomSlots(budget=8).scores(moment)


def test_random_slots_differ_by_head_and_layer_and_stay():
    pos = torch.arange(400).expand(1, 2, -1)
    first, second = slots(pos, 0)[0]
    kept = [set(scores.topk(100).indices.tolist()) for scores in (first, second, slots(pos, 1)[0, 0])]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert 10 < len(kept[one] & kept[other]) < 40, "a quarter of 100 by chance"
    assert torch.equal(slots(pos[:, :, 50:], 0)[0, 0], first[50:]), "a position keeps its score when others go"
    for quarter in range(4):
        inside = [position for position in kept[0] if position // 100 == quarter]
        assert 10 < len(inside) < 40, "no part of a text is kept more"


def test_sampling_draws_at_temperature_one_and_others_do_not():
    model, tokenizer = tiny()
    prompts = tuple(Prompt(str(n), (Turn(words(20, n), ("a",)),), "s") for n in range(4))
    records = run_bench(model, PromptFile(given=prompts, new=6), ["full", "sampling"], tokenizer=tokenizer)
    tokens = [record.tokens for record in records]
    assert tokens[:4] != tokens[4:]
    again = run_bench(model, PromptFile(given=prompts, new=6), ["full", "sampling"], tokenizer=tokenizer, seed=1)
    assert [record.tokens for record in again][:4] == tokens[:4]
    assert [record.tokens for record in again][4:] != tokens[4:]


@pytest.mark.parametrize(
    ("methods", "wins"),
    [
        (["streaming:24:first=0:last=24", "random:8"], False),
        (["streaming:4:first=3:last=1", "random:30"], True),  # of 30 tokens, four are left
    ],
)
def test_random_slots_win_only_where_they_keep_more(methods, wins, tmp_path):
    model, tokenizer = tiny()
    rows = [{"prompt": words(30, n), "answers": [words(6, n + 3)]} for n in range(6)]
    (tmp_path / "p.jsonl").write_text(json_lines(rows))
    task = TextFidelity(source=str(tmp_path / "p.jsonl"))
    found = tabulate_records([run_bench(model, task, methods, tokenizer=tokenizer)])
    (policy, control) = found.groups
    assert control.method == methods[1] and (control.score < policy.score) == wins
    said = found.conclusion()
    assert said.startswith(f"{policy.method} has ")
    assert said.endswith(f"The control, {control.method}: {control.score:.2g}.")
    assert (": the control is better." in said) == wins
