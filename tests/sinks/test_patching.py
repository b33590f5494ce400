"""`patch`: planted neurons, the proof against slower ways, refusals, and the commands."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

import numpy as np
import pytest
import torch
from attack_kit import text_file
from organisms import Organism
from organisms import organism as new_organism

from sinkscope.errors import SinkscopeError
from sinkscope.hooks.edit import SinkPatch
from sinkscope.results.result import Result
from sinkscope.results.row import row_of
from sinkscope.sinks.patch import PatchResult, Verdict, copies_rows, verdict_of
from sinkscope.sinks.patch import patch as measured

pytestmark = pytest.mark.few_texts

organism = functools.cache(new_organism)  # only read where nothing else is said


def made_of(o: Organism, folder: Path, **changes) -> PatchResult:
    most = 2 * (o.truth.repeats_expected or 50)
    options = {"max_repeats": most, "pieces": 6, "length": 48, "text": text_file(o, folder, 16)}
    return measured(o.model, tokenizer=o.tokenizer, **(options | changes))


@functools.cache
def made_once(family: str, seed: int, kind: str = "sink") -> tuple[Organism, PatchResult]:
    o = organism(family, seed, kind=kind)
    with TemporaryDirectory() as folder:
        return o, made_of(o, Path(folder))


def test_only_words_that_need_repair_prove_it():
    """A word that does not reach the spike intact is no proof, and an infinite perplexity is no harmless one."""
    _, made = made_once("llama", 5)
    cost = made.proof[-1]

    def with_copies(intact, patched=(0.1, 0.1, 0.1), one_copy=(0.1, 0.1, 0.1), attention=(0.9, 0.1)):
        along, given = torch.tensor([[intact], [patched], [intact]]), torch.tensor(attention)[[0, 1, 0], None, None]
        read = along, torch.tensor([one_copy]), given.expand(3, 1, 3), torch.zeros(3, 3)
        return replace(made, words=3, proof=(*copies_rows("abc", ("layers 1-2",), *read), cost))

    some = with_copies((0.25, 0.9, 0.8))
    assert verdict_of(some, 0.01)[0] == "made"
    assert "copies of 2 of 3 words reach at most " in some.conclusion()
    assert verdict_of(with_copies((0.25, 0.25, 0.4)), 0.01)[0] == "no-repeats"
    at_once = with_copies((0.9, 0.9, 0.8), one_copy=(0.9, 0.9, 0.8))
    assert verdict_of(at_once, 0.01)[0] == "no-repeats"  # what one copy does at once is not what repetition does
    assert verdict_of(with_copies((0.9, 0.9, 0.8), (0.1, 0.9, 0.1)), 0.01)[0] == "not-repaired"
    assert verdict_of(with_copies((0.9, 0.9, 0.8), attention=(0.9, 0.5)), 0.01)[0] == "not-repaired"

    def with_change(change: float) -> PatchResult:
        row = row_of(cost.table, cost.name, patched=change)
        return replace(some, proof=(*some.proof[:-1], row))

    assert verdict_of(with_change(np.nan), 0.01)[0] == "refused"
    refused = "refused", "the perplexity of held-out text rises by 2.00%, and the limit is 1.00%."
    assert verdict_of(with_change(0.02), 0.01) == refused
    assert verdict_of(with_change(0.02), 0.03)[0] == "made"
    with pytest.raises(SinkscopeError, match="it harms"):
        _ = replace(made, verdict="refused", reason="it harms").patch


# --- the commands ----------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_make_then_eval(here, typed):
    o = organism("llama", 2)
    o.save("model")
    text_file(o, here, 16)
    few = "--model model --text words.txt --pieces 4 --length 24 --max-repeats 250"
    out, err = typed(f"patch {few} --out out/patch.json --json made.json")
    assert err == "JSON: made.json\n" and "words reach at most 0% of the spike" in " ".join(out.split())
    made = Result.load("made.json")
    assert isinstance(made, PatchResult)
    sites = SinkPatch.load("out/patch.json").checked_sites
    assert sites == made.patch.checked_sites and [site.site for site in sites] == list(o.truth.neurons)
    evaluated = json.loads(typed(f"patch {few} --file out/patch.json --json -").out)
    assert evaluated["result"]["verdict"] == "given"
    sites = [(neuron["layer"], neuron["neuron"]) for neuron in evaluated["result"]["sites"]]
    assert sites == list(o.truth.neurons)


def test_what_makes_no_file_ends_with_status_1(here, typed):
    organism("llama", 0, kind="none").save("none")
    out, err = typed("patch --model none --out p.json --json made.json --max-repeats 8", 1)
    made = Result.load("made.json")
    made.figure()
    assert (
        "no neurons are known that a norm spike" in " ".join(out.split())
        and err == "JSON: made.json\n"
        and not Path("p.json").exists()
    )
    assert [replace(made, verdict=one).exit_code for one in get_args(Verdict)] == [0, 0, 1, 1, 1, 1]
