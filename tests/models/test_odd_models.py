"""Odd but plausible models and arguments: measured, or refused in one line that says what was expected."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path

import pytest
import torch
from checkpoints import spoiled
from organisms import Organism, organism

import sinkscope as ss
from sinkscope.app.cli import main
from sinkscope.bench.run import bench
from sinkscope.errors import SinkscopeError
from sinkscope.tap.internals import attention_name

SHORT = ("--max-repeats", "32")
COMMANDS = {
    "find-sinks": SHORT,
    "circuit": SHORT,
    "heads": ("--count", "4"),
    "repeat": SHORT,
    "attack": ("--sequences", "4"),
    "barcode": ("--max-new-tokens", "8", "--no-control"),
    "lines": ("--count", "2", "--length", "64"),
}
QUICK = ("find-sinks", "repeat")


@cache
def planted() -> Organism:
    return organism("llama", 3)


def of_one_number(folder: Path, number: float) -> Path:
    """A model all of whose weights are one number."""
    model = copy.deepcopy(planted().model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)
    planted().tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def of_context(folder: Path, context: int) -> Path:
    planted().save(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": context}))
    return folder


MODELS = {
    "zero": lambda at: of_one_number(at, 0.0),
    "constant": lambda at: of_one_number(at, 0.01),
    "context 1": lambda at: of_context(at, 1),
    "context 2": lambda at: of_context(at, 2),
}


@pytest.mark.parametrize(
    ("model", "command"),
    [
        pytest.param(model, command, marks=[] if command in QUICK and (i + j) % 2 == 0 else pytest.mark.slow)
        for i, model in enumerate(MODELS)
        for j, command in enumerate(COMMANDS)
    ],
)
def test_models_of_nothing(tmp_path, capsys, model, command):
    code = main([command, "--model", str(MODELS[model](tmp_path / "m")), *COMMANDS[command]])
    out, err = capsys.readouterr()
    assert "nobody foresaw" not in err
    if code == 0:
        assert "Conclusion: " in out
    else:
        assert code == 2 and [line[:7] for line in err.splitlines() if not line.startswith("note: ")] == ["error: "]


@pytest.mark.parametrize("ends", ["x", [1.5], {"a": 1}, True, 10**30, [None], [], -1, 10**9, [1, 2]])
def test_odd_ids_of_the_end(tmp_path, ends):
    folder = spoiled(tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    if (type(ends) is int and ends < 10**20) or ends in ([], [1, 2]):
        assert ss.generate(ss.load(folder, backend="hf"), "poem book", max_new_tokens=2)
        return
    with pytest.raises(
        SinkscopeError, match=r"eos_token_id (of the generation_config of m|in generation_config.json is ).* expected"
    ):
        ss.generate(ss.load(folder, backend="hf"), "poem book", max_new_tokens=2)


def test_attention_that_a_checkpoint_names_is_not_followed(tmp_path):
    names = dict.fromkeys(
        ("attn_implementation", "_attn_implementation", "experts_implementation"), "kernels-community/x"
    )
    model = ss.load(spoiled(tmp_path / "m", **names), backend="hf")
    assert attention_name(model.config) == "sdpa" and model.config._experts_implementation != "kernels-community/x"


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (lambda model, tok: ss.find_sinks(model.model, tokenizer=tok), "LlamaModel has no head"),
        (lambda model, tok: ss.SinkPatch(layer=1, neurons=[2]).on(model.model), "AutoModelForCausalLM"),
        (lambda model, tok: ss.find_sinks(model, tokenizer=3), "tokenizer=3: expected a tokenizer"),
        (lambda model, tok: ss.generate(model, "poem", tokenizer="gpt2"), "tokenizer='gpt2': expected a tokenizer"),
        (lambda model, tok: ss.generate(model, "a \ud800", tokenizer=tok), "prompt 1 holds half of a surrogate pair"),
        (lambda model, tok: ss.trace(model, ["a \udcff"], ["hook_embed"]), "half of a surrogate pair, character 3"),
        (lambda model, tok: ss.Conversation(model, tokenizer=tok).ask("\ud800"), "half of a surrogate pair"),
        (lambda model, tok: ss.repeat(model, tokenizer=tok, tokens=["\ud800"]), "half of a surrogate pair"),
        (lambda model, tok: ss.Ablate(sites="L1.N\u00b2"), "L1.N"),
        (lambda model, tok: ss.Ablate(sites="L1.N" + "9" * 5000), "L1.N"),
        (lambda model, tok: ss.load("x" * 5000), r"xx \.\.\. .*too long"),
    ],
)
def test_arguments_from_python(use, says):
    model = planted().model
    model.tokenizer = planted().tokenizer
    with pytest.raises(SinkscopeError, match=says) as caught:
        use(model, planted().tokenizer)
    assert len(str(caught.value)) < 700 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "task", ["needle:lengths=100000000", "needle:samples=1000000000", "text:prompt=1000000000", "text:count=99999999"]
)
def test_nothing_of_any_length_is_built(task):
    with pytest.raises(SinkscopeError, match=r"the context of|expected a whole number from 1 to"):
        bench(task=task, methods=["full"])
