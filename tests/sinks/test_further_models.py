"""What each command says of models of which a report easily says too much."""

from __future__ import annotations

import re

import pytest
import torch
from attack_kit import text_file
from conclusion_kit import check_size
from covering import covering
from organisms.further import FURTHER, Further, further, natural
from organisms.hard import HardModel, Site
from raw_kit import attention, norms, zeroed
from torch import Tensor

from sinkscope.files.notation import neuron_name
from sinkscope.sinks.attack.attack import cluster_attack
from sinkscope.sinks.first_token.circuit import circuit
from sinkscope.sinks.first_token.find import find_sinks
from sinkscope.sinks.first_token.marking_heads import marking_heads
from sinkscope.sinks.patch.make import make_patch
from sinkscope.sinks.repetition.repeat import repeat

COMMANDS = {
    "find_sinks": lambda model, n, options: find_sinks(model, max_repeats=n, **options),
    "circuit": lambda model, n, options: circuit(model, max_repeats=n, **options),
    "marking_heads": lambda model, _, options: marking_heads(model, count=4, **options),
    "cluster_attack": lambda model, _, options: cluster_attack(model, lengths=[4], sequences=8, prefix="", **options),
    "make_patch": lambda model, n, options: make_patch(model, words=1, max_repeats=n, pieces=2, length=16, **options),
    "repeat": lambda model, n, options: repeat(model, ablate=True, max_repeats=n, **options),
}
FAST = (("opposed", "neox"), ("turned", "gpt2"))
CASES = covering([(name, family) for name, families in FURTHER.items() for family in families], FAST)


def check_planted(h: HardModel, about: Further):
    """What is planted, with plain hooks."""
    truth, rows = h.truth, natural(h, about, 8, about.at + 60)
    norm = norms(h.model, rows)
    ratio = norm[:, :, about.at] / norm[:, :, 4:].flatten(1).median(1).values[:, None]
    assert bool((ratio.amax(0) > 10).all()) if truth.sets else ratio.max() < 3

    def received() -> Tensor:
        """Mean attention of every head to the position, in each text: [layer, row, head]."""
        return attention(h.model, rows)[..., about.at + 1 :, about.at].mean(-1)

    above = (received() > 0.3).float().mean(1) >= 0.5  # in most texts
    assert (int(above.sum()) >= 2) == about.heads

    def left(sites: tuple[Site, ...]) -> Tensor:
        with zeroed(h.model, sites):
            seen = received()
        return torch.stack([seen[layer, :, head] for layer, head in truth.reading]).mean()

    for sites in truth.sets:
        with zeroed(h.model, tuple(sites)):
            lost = 1 - norms(h.model, rows)[truth.sink_layer, :, about.at] / norm[truth.sink_layer, :, about.at]
        assert lost.min() > 0.7
    for site in about.alone:
        assert left((site,)) < 0.3 < left(())


@pytest.mark.parametrize(("name", "family"), CASES)
def test_no_command_says_more_than_is_so(name, family, tmp_path):
    h, about = further(name, family)
    check_planted(h, about)
    sites = {neuron_name(*site) for one in h.truth.sets for site in one}
    words = {"set": f"(?:(?:{'|'.join(map(re.escape, sites))})(?:, | and )?){{{len(sites)}}}"}
    words["alone"] = "|".join(re.escape(neuron_name(*site)) for site in about.alone)
    options = {"tokenizer": h.tokenizer, "bos": None if about.bos else False, "text": text_file(h, tmp_path, 60)}
    wrong = []
    for command in about.says:
        result = COMMANDS[command](h.model, about.repeats, options)
        check_size(result.conclusion())
        text = "\n".join([result.conclusion(), *result.details()])
        wanted = [
            pattern.replace("{set}", words["set"]).replace("{alone}", words["alone"]) for pattern in about.says[command]
        ]
        wrong += [f"{command} lacks {pattern}" for pattern in wanted if not re.search(pattern, text)]
        wrong += [f"{command} has {pattern}" for pattern in about.never if re.search(pattern, text, re.MULTILINE)]
        if wrong:
            wrong.append(text)
    assert not wrong, "\n".join(wrong)
