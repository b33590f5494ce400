"""The task of the emergence experiment against its rules, and a killed run against one that was not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import drawn, emergence
from experiments.emergence import is_trigger, main, sequences, transitions
from sinkscope.errors import SinkscopeError
from sinkscope.models.text import typical_text


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"EVERY": 2, "BATCH": 4, "HELD_OUT": 4}.items():
        monkeypatch.setattr(emergence, name, value)


def test_sequences_follow_the_task() -> None:
    table = transitions(typical_text())
    ids = sequences(table, 200, True, torch.Generator().manual_seed(0))
    assert ids.shape == (200, emergence.LENGTH) and (ids[:, 0] == 0).all() and (ids[:, 1:] > 0).all()
    trigger = is_trigger(ids)
    assert not trigger[:, 1].any() and 0.15 < trigger.float().mean() < 0.6
    assert torch.equal(ids[:, 3:][trigger[:, 2:-1]], ids[:, 1:-2][trigger[:, 2:-1]])  # repeated after a trigger
    assert not (trigger[:, 1:] & trigger[:, :-1]).any()
    # elsewhere the bigrams are those of the table
    before, after = ids[:, 1:-1][~trigger[:, 1:-1]], ids[:, 2:][~trigger[:, 1:-1]]
    common = int(before.bincount().argmax())
    seen = after[before == common].bincount(minlength=len(table)).float()
    assert (seen / seen.sum() - table[common]).abs().max() < 0.06
    torch.testing.assert_close(table.sum(-1), torch.ones(len(table)))
    without = sequences(table, 50, False, torch.Generator().manual_seed(0))
    assert without.shape == (50, emergence.LENGTH) and (without > 0).all()


@pytest.mark.usefixtures("small")
def test_the_command_writes_data_and_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> Any:
        raise SinkscopeError("no browser")

    monkeypatch.setattr(drawn, "write_png", refuse)
    main(["--steps", "2", "--seeds", "2", "--out", str(tmp_path)])
    data = json.loads((tmp_path / "emergence.json").read_text())
    assert [(run["bos"], run["seed"], len(run["rows"])) for run in data["result"]["runs"]] == [
        (True, 0, 2),
        (False, 0, 2),
        (True, 1, 2),
        (False, 1, 2),
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["emergence.html", "emergence.json"]
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 4 and "no PNG: no browser" in err
    means = [t for t in emergence.figure(data).data if t.name == "with BOS"]
    rows = [run["rows"][-1] for run in data["result"]["runs"] if run["bos"]]
    for mean, name in ((means[0], "idle_attention"), (means[1], "sink_rate"), (means[-1], "excess_loss")):
        assert mean.y[-1] == pytest.approx((rows[0][name] + rows[1][name]) / 2)


def test_idle_attention_is_that_of_positions_without_a_trigger() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=32, max_position_embeddings=64, initializer_range=0.5, **emergence.SIZES)
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config).eval()
    ids = sequences(transitions(typical_text()), 5, True, torch.Generator().manual_seed(0))
    best = 0.0
    for layer in model(ids, output_attentions=True).attentions:
        got = [
            float(layer[row, 0, at, 0])
            for row in range(5)
            for at in range(1, ids.shape[1])
            if int(ids[row, at]) not in (1, 2, 3)
        ]
        best = max(best, sum(got) / len(got))
    assert emergence.measure(model, ids, 0.0)["idle_attention"] == pytest.approx(best, rel=1e-4)
