"""Odd but plausible models and arguments: measured, or refused in one line that says what was expected."""

from __future__ import annotations

import json
from functools import cache

import pytest
from checkpoints import spoiled
from organisms import Organism, organism

import sinkscope as ss
from sinkscope.bench.run import bench
from sinkscope.errors import SinkscopeError
from sinkscope.tap.internals import attention_name


@cache
def planted() -> Organism:
    return organism("llama", 3)


@pytest.mark.parametrize("ends", ["x", [1.5], True, 10**30, [], 10**9, [1, 2]])
def test_odd_ids_of_the_end(tmp_path, ends):
    folder = spoiled(tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    if (type(ends) is int and ends < 10**20) or ends in ([], [1, 2]):
        assert ss.generate(ss.load(folder), "poem book", max_new_tokens=2)
        return
    with pytest.raises(
        SinkscopeError, match=r"eos_token_id (of the generation_config of m|in generation_config.json is ).* expected"
    ):
        ss.generate(ss.load(folder), "poem book", max_new_tokens=2)


def test_attention_that_a_checkpoint_names_is_not_followed(tmp_path):
    names = dict.fromkeys(
        ("attn_implementation", "_attn_implementation", "experts_implementation"), "kernels-community/x"
    )
    model = ss.load(spoiled(tmp_path / "m", **names))
    assert attention_name(model.config) == "sdpa" and model.config._experts_implementation != "kernels-community/x"


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (lambda model, tok: ss.find_sinks(model.model, tokenizer=tok), "LlamaModel has no head"),
        (lambda model, tok: ss.SinkPatch(layer=1, neurons=[2]).on(model.model), "AutoModelForCausalLM"),
        (lambda model, tok: ss.find_sinks(model, tokenizer=3), "tokenizer=3: expected a tokenizer"),
        (lambda model, tok: ss.generate(model, "poem", tokenizer="gpt2"), "tokenizer='gpt2': expected a tokenizer"),
        (lambda model, tok: ss.generate(model, "a \ud800", tokenizer=tok), "prompt 1 holds half of a surrogate pair"),
        (lambda model, tok: ss.load("x" * 5000), r"xx \.\.\. .*too long"),
    ],
)
def test_arguments_from_python(use, says):
    model = planted().model
    model.tokenizer = planted().tokenizer
    with pytest.raises(SinkscopeError, match=says) as caught:
        use(model, planted().tokenizer)
    assert len(str(caught.value)) < 700 and "\n" not in str(caught.value)


@pytest.mark.parametrize("task", ["needle:lengths=100000000", "needle:samples=1000000000", "text:prompt=1000000000"])
def test_nothing_of_any_length_is_built(task):
    with pytest.raises(SinkscopeError, match=r"the context of|expected a whole number from 1 to"):
        bench(task=task, methods=["full"])
