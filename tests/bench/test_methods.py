"""Methods as they are written, and what they become."""

from __future__ import annotations

import json

import pytest
from refusals import refused
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from sinkscope.bench.benchmark import run as run_bench
from sinkscope.bench.methods import ANYWHERE, SAMPLERS, RandomSlots, method_classes, read_method, read_methods
from sinkscope.bench.table import tabulate_records
from sinkscope.kv import H2O, SnapKV
from sinkscope.loops.guard import LoopGuard, Steer
from sinkscope.loops.guard.steer import DRY
from sinkscope.opening.load import load
from sinkscope.sparse.serve import LoopServe
from sinkscope.sparse.shapes import AShape


@pytest.mark.parametrize(
    ("text", "spec", "made"),
    [
        ("full", "full", None),
        ("h2o:0.25", "h2o:0.25", H2O(budget=0.25)),
        ("h2o:budget=128:recent=0.5", "h2o:128:recent=0.5", H2O(budget=128, recent=0.5)),
        ("snapkv:window=4", "snapkv:64:window=4", SnapKV(budget=64, window=4)),
        ("loopguard", "loopguard:64", LoopGuard(budget=64)),
        ("loopguard:paper:256", "loopguard:paper:256", LoopGuard.paper(budget=256)),
        ("loopguard:penalty=1", "loopguard:64:penalty=1.0", LoopGuard(64, steer=Steer(penalty=1.0))),
        ("loopserve:alpha=0.9", "loopserve:64:alpha=0.9", LoopServe(alpha=0.9, budget=64, **ANYWHERE)),
        ("loopserve-p:paper", "loopserve-p:paper", LoopServe.paper(decode=False, **ANYWHERE)),
        (
            "loopserve-0:shortest=9",
            "loopserve-0:64:shortest=9",
            LoopServe(budget=64, first=0, **{**ANYWHERE, "shortest": 9}),
        ),
        ("a-shape:0.5", "a-shape:0.5", AShape(budget=0.5)),
        ("sampling", "sampling", None),
        ("dry:1.5", "dry:1.5", None),
        ("sinkscope.bench.methods:RandomSlots", "sinkscope.bench.methods:RandomSlots:64", RandomSlots(budget=64)),
        ("sinkscope.kv:SnapKV:0.5:window=2", "sinkscope.kv:SnapKV:0.5:window=2", SnapKV(budget=0.5, window=2)),
    ],
)
def test_a_text_becomes_a_method_and_back(text, spec, made):
    method = read_method(text, 64)
    assert str(method) == spec and read_method(spec) == method
    assert method.make() == made


def test_every_method_can_be_made_with_a_budget_of_the_task():
    for budget in (64, 0.5):
        for method in read_methods(list(method_classes()), budget):
            without = method.name in ("full", "loopserve-p", *SAMPLERS)
            shape = method.name in ("a-shape", "tri-shape", "minference")
            assert str(method) == (method.name if without or (shape and budget == 64) else f"{method.name}:{budget}")
            assert (method.make() is None) == (method.name in ("full", *SAMPLERS))
    assert [str(method) for method in read_methods(["h2o:8", "h2o:budget=8"])] == ["h2o:8"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h20", "method 'h20' is unknown: expected some of full, random"),
        ("streaming:sinks=3", "'sinks=3' is no setting, or is given twice: it has"),
        ("full:0.5", "'budget=0.5' is no setting, or is given twice: it has none"),
        ("h2o:0.5:budget=8", "'budget=8' is no setting, or is given twice"),
        ("h2o:0.0", "budget=0.0: expected a number of tokens from 1, or a fraction"),
        ("h2o:recent=many", "recent='many'"),
        ("sinkscope.kv:Nothing", "Nothing"),
        ("", "no method is given: choose from full, random"),
    ],
)
def test_what_is_wrong_with_a_method(text, message):
    with refused(words=[message]):
        read_methods([text] if text else [])


def test_a_policy_that_is_registered_later_is_a_method(monkeypatch: pytest.MonkeyPatch):
    method_classes()
    monkeypatch.setattr("sinkscope.bench.methods.policies", lambda: {"late": H2O})
    assert read_method("late:8").make() == H2O(budget=8)


def test_samplers_do_what_transformers_does(tmp_path):
    """A penalty and DRY by `generate` itself; a temperature by the draws of the seed; too few prompts get counts."""
    model = load("bundled")
    prompts = ["Once upon a time there was", "apple, apple, apple,", "In the beginning the sea was"]
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps({"prompt": text, "answers": ["x"]}) + "\n" for text in prompts))
    methods = ["full", "temperature:0.7", "dry:1.5", "repetition-penalty:1.3"]
    run = run_bench(model, f"loops:source={file}", methods, max_new_tokens=16)
    found = {str(method): [one.tokens for one in run if str(one.method) == str(method)] for method in methods}
    assert len({str(tokens) for tokens in found.values()}) == len(methods), "each changes something"
    processors = {"full": [], "dry:1.5": [DRY(1.5)], "repetition-penalty:1.3": [RepetitionPenaltyLogitsProcessor(1.3)]}
    for method, used in processors.items():
        for text, tokens in zip(prompts, found[method], strict=True):
            ids = model.tokenizer(text, return_tensors="pt")
            written = model.generate(
                **ids, max_new_tokens=16, do_sample=False, logits_processor=LogitsProcessorList(used)
            )
            assert list(tokens) == written[0, ids["input_ids"].shape[1] :].tolist()[: len(tokens)], method
    again = run_bench(model, f"loops:source={file}", ["temperature:0.7"], max_new_tokens=16)
    other = run_bench(model, f"loops:source={file}", ["temperature:0.7"], max_new_tokens=16, seed=1)
    assert [one.tokens for one in again] == found["temperature:0.7"] != [one.tokens for one in other]
    said = tabulate_records([run]).conclusion()
    assert said.startswith("3 prompts are too few to rank methods: ") and "±" not in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("temperature:0", "number=0: expected"),
        ("repetition-penalty:-1", "number=-1: expected"),
        ("dry:2:3", "given twice"),
        ("dry:x=2", "no setting"),
    ],
)
def test_bad_settings_of_samplers_are_refused(text, message):
    with refused(words=[message]):
        read_methods([text])
