"""Scripts about one verdict and about GGUF files: their sums against plain ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gguf_file import write_gguf
from organisms import tiny_model
from repository import ROOT
from transformers import AutoTokenizer

from experiments import gguf_truth
from experiments.loopguard import verdicts
from sinkscope.loops import check
from sinkscope.opening.load import load

WAITING = verdicts.SETTINGS["data waits for 512 tokens"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(ROOT / "sinkscope/models/bundled")


def test_honest_texts_are_counted_by_checker_and_guard(tokenizer: Any) -> None:
    halves = {half: verdicts.honest_texts(half) for half in ("choose", "report")}
    assert [len(texts) for texts in halves.values()] == [64, 64]
    assert not {text.form for text in halves["choose"]} & {text.form for text in halves["report"]}
    row = verdicts.of_honest(WAITING, {"bundled": tokenizer}, "choose")
    looping: list[str] = []
    for text in halves["choose"]:
        if check(text.answer, prompt=text.prompt).exit_code == 3:
            looping.append(text.form)
    assert row["texts"] == 64 and row["checker"] == looping
    assert {one.removeprefix("bundled: ") for one in row["disagree"]} == {*row["bundled"]} ^ {*looping}


def test_outputs_that_come_later_or_no_more_are_counted(tokenizer: Any) -> None:
    prose, code = ("the bird and the stone, " * 60).strip(), "x_1 = x_1 + y_1;\n" * 12
    outputs = [{"tokens": tokenizer(text)["input_ids"]} for text in (prose, code, code * 8, "A bird sang.")]
    row = verdicts.of_loops(WAITING, tokenizer, outputs)
    assert (row["outputs"], row["later"], row["no_more"], row["reported"]) == (4, 1, 1, 1)
    assert row["cut"] == 2 and row["delay_most"] > 100 and row["checker_disagrees"] == 0


def test_a_copy_of_a_gguf_file_has_the_scaling_and_distances_are_in_nats(tmp_path: Any) -> None:
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "a.gguf", *tiny_model("llama"))
    models: dict[str, Any] = {}
    for name, change in gguf_truth.SCALINGS.items():
        if change is not None:
            gguf_truth.copy(tmp_path / "a.gguf", tmp_path / f"{name}.gguf", change)
            models[name] = load(tmp_path / f"{name}.gguf")
    assert models["linear"].config.rope_parameters["rope_type"] == "linear"
    assert models["yarn"].config.rope_parameters["rope_type"] == "yarn"
    ids = [[5, 6, 7], [8, 9, 10, 11]]
    model = load(tmp_path / "a.gguf")
    truth: list[dict[int, float]] = []
    with torch.no_grad():
        for one in ids:
            top = model(torch.tensor([one])).logits[0, -1].log_softmax(-1).topk(3)
            truth.append(dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
    assert gguf_truth.distance(model, ids, truth) == {"nats": 0.0, "most": 0.0, "same": 1.0}
    shifted = [{token: value + 0.5 for token, value in said.items()} for said in truth]
    assert gguf_truth.distance(model, ids, shifted)["nats"] == pytest.approx(0.5)
    assert gguf_truth.distance(models["factors"], [[3, *range(5, 40)]] * 2, truth)["nats"] > 0
