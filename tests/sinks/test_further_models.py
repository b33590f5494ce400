"""What each command says of models of which a report easily says too much."""

from __future__ import annotations

import re

import pytest
from attack_kit import text_file
from conclusion_kit import check_size
from covering import covering
from organisms.further import FURTHER
from organisms.hard import hard

from sinkscope.results.notation import neuron_name
from sinkscope.sinks.attack.attack import attack
from sinkscope.sinks.circuit.circuit import circuit
from sinkscope.sinks.find.find import find_sinks
from sinkscope.sinks.marking_heads import heads
from sinkscope.sinks.patch.make import patch_make
from sinkscope.sinks.repetition.repeat import repeat

COMMANDS = {
    "find_sinks": lambda model, n, options: find_sinks(model, max_repeats=n, **options),
    "circuit": lambda model, n, options: circuit(model, max_repeats=n, **options),
    "heads": lambda model, _, options: heads(model, count=4, **options),
    "attack": lambda model, _, options: attack(model, lengths=[4], sequences=8, prefix="", **options),
    "patch_make": lambda model, n, options: patch_make(model, max_repeats=n, pieces=2, length=16, **options),
    "repeat": lambda model, n, options: repeat(model, ablate=True, max_repeats=n, **options),
}
FAST = (("opposed", "neox"), ("turned", "gpt2"))
CASES = covering([(name, family) for name, families in FURTHER.items() for family in families], FAST)


@pytest.mark.parametrize(("name", "family"), CASES)
def test_no_command_says_more_than_is_so(name, family, tmp_path):
    h = hard(name, family)
    sites = {neuron_name(*site) for one in h.truth.sets for site in one}
    words = {"set": f"(?:(?:{'|'.join(map(re.escape, sites))})(?:, | and )?){{{len(sites)}}}"}
    options = {"tokenizer": h.tokenizer, "bos": None if h.truth.bos else False, "text": text_file(h, tmp_path, 60)}
    wrong = []
    for command in h.truth.says:
        result = COMMANDS[command](h.model, h.truth.repeats, options)
        check_size(result.conclusion())
        text = "\n".join([result.conclusion(), *result.details()])
        wanted = [pattern.replace("{set}", words["set"]) for pattern in h.truth.says[command]]
        wrong += [f"{command} lacks {pattern}" for pattern in wanted if not re.search(pattern, text)]
        wrong += [f"{command} has {pattern}" for pattern in h.truth.never if re.search(pattern, text, re.MULTILINE)]
        if wrong:
            wrong.append(text)
    assert not wrong, "\n".join(wrong)
