"""Methods as they are written, and what they become."""

from __future__ import annotations

import json

import pytest
from refusals import refused
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from sinkscope.bench.benchmark import run as run_bench
from sinkscope.bench.methods import read_methods
from sinkscope.loops.guard.steer import DRY
from sinkscope.opening.load import load


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h20", "method 'h20' is unknown: expected some of adakv, full"),
        ("streaming:sinks=3", "'sinks=3' is no setting, or is given twice: it has"),
        ("full:0.5", "'budget=0.5' is no setting, or is given twice: it has none"),
        ("h2o:0.5:budget=8", "'budget=8' is no setting, or is given twice"),
        ("h2o:0.0", "budget=0.0: expected a number of tokens from 1, or a fraction"),
        ("h2o:recent=many", "recent='many'"),
        ("sinkscope.kv:Nothing", "Nothing"),
        ("", "no method is given: choose from adakv, full"),
    ],
)
def test_what_is_wrong_with_a_method(text, message):
    with refused(words=[message]):
        read_methods([text] if text else [])


def test_samplers_do_what_transformers_does(tmp_path):
    """A penalty and DRY by `generate` itself; a temperature by the draws of the seed."""
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
