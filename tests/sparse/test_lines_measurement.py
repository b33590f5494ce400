"""What lines carry and share: every number equals the one from the whole matrix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations, product
from statistics import fmean

import numpy as np
import pytest
import torch
from intervention_kit import bridge_of
from lines_kit import Line, lines_of
from organisms import tiny_model
from plain_hooks import attention
from refusals import refused
from torch import Tensor
from torch.nn.functional import pad

from sinkscope.files.store import json_lines
from sinkscope.hooks.edit.knockout import Knockout
from sinkscope.measure.margin import margin_of
from sinkscope.results.mean import Mean
from sinkscope.sparse.attention import Scores, line_sums
from sinkscope.sparse.head_lines import top_lines
from sinkscope.sparse.lines import LineWeights, Mass, On, lines

EMPTY = torch.zeros(1, 50, 1)
NOTHING = Scores(EMPTY, EMPTY, 1.0, sinks=torch.tensor([50.0]))  # a learned sink takes all


def ids_of(length: int) -> list[int]:
    return torch.randint(4, 90, (length,)).tolist()


def test_the_conclusion_names_the_strongest_control_at_the_share_that_is_shown():
    model, tokenizer = tiny_model("llama")
    single, result = (lines(model, [ids_of(40)] * n, etas=[0.02, 0.1], layers=[0], tokenizer=tokenizer) for n in (1, 3))
    assert single.inputs is None
    assert single.strongest()[0].share.margin is None
    zero = 0 * result.mass
    controls = [on for on in On if on is not On.HEAVIEST]
    for strongest in controls:
        shares = {On.HEAVIEST: 0.9, **dict.fromkeys(controls, 0.3), strongest: 0.8}
        fields = {on.value: zero + np.array([0, share])[:, None, None] for on, share in shares.items()}
        made = replace(result, **fields, text_mass=result.text_mass * 0 + 0.9)
        assert made.strongest()[1].key is strongest
        label = Mass(key=strongest, share=Mean(0.8)).label
        assert made.conclusion() == (
            "The heaviest 10% of lines (columns and diagonals of each head's attention) hold 90% of the attention; as "
            f"a control, other lines that cover as many cells hold at most 80% ({label})."
        )
        assert replace(made, text_mass=made.text_mass + np.array([-0.4, 0, 0.4])).conclusion().startswith("Not shown")


def heaviest(weights: Tensor, share: float, whole: bool) -> set[Line]:
    """The heaviest lines, one after the other, whose cells are then empty; a share of all lines of so many queries.

    A whole line weighs all its cells, also those of lines that were chosen before it.
    """
    cells = lines_of(*weights.shape)
    ranked = sorted(cells, key=lambda line: (line[0] == "slash", line[1]))  # of equal lines columns come first
    members = torch.stack([cells[line].flatten() for line in ranked]).double()
    held = weights.double().flatten().clone()
    chosen: set[Line] = set()
    for _ in range(max(1, int(share * 2 * len(weights) + 1e-9))):
        units = {}
        for line, weight in zip(ranked, (members @ held * 10_000).round().tolist(), strict=True):
            if line not in chosen and weight:
                units[line] = weight
        if units:
            line = max(units, key=lambda line: units[line])  # the first of equal ones
            chosen.add(line)
            if not whole:
                held[cells[line].flatten()] = 0
    return chosen


def by_sets(weights: Tensor, eta: float, before: set[Line], whole: bool) -> tuple[set[Line], dict[str, float]]:
    """The lines of one head in one text, and its numbers, from sets of cells."""
    n, half = len(weights), len(weights) // 2
    cells, numbers = lines_of(n, n), range(1, n + 1)
    chosen = heaviest(weights, eta, whole)

    def on(lines: Iterable[Line]) -> Tensor:
        return torch.stack([cells[line] for line in lines if line in cells]).any(0)

    def share(lines: Iterable[Line]) -> float:
        return float(weights[on(lines)].sum() / weights.sum())

    def near(number: int) -> list[Line]:
        return [("vertical", 0), *(("slash", offset) for offset in range(number))]

    votes = {line: float(weights[-64:][held[-64:]].sum()) for line, held in cells.items()}
    votes["slash", 0] = torch.inf  # the nearest offset is always there
    ranked = sorted(cells, key=lambda line: -votes[line])

    def voted(number: int) -> list[Line]:
        """Of vertical lines 1,000 for 6,096 slash lines, and at least one of each."""
        vertical, slash = ([line for line in ranked if line[0] == kind] for kind in ("vertical", "slash"))
        return [*vertical[: max(1, number * 1000 // 6096)], *slash[:number]]

    most = int(on(chosen).sum())
    first, second = heaviest(weights[:half, :half], eta, whole), heaviest(weights[half:], eta, whole)
    inside = heaviest(weights[half:, half:], eta, whole)
    return chosen, {
        "mass": share(chosen),
        "near_mass": share(near(next(number for number in numbers if on(near(number)).sum() >= most))),
        "last_mass": share(voted(max(number for number in numbers if number == 1 or on(voted(number)).sum() <= most))),
        **({"other_mass": share(before)} if before else {}),
        "cells": most / (n * (n + 1) / 2),
        "segments": len(first & second) / len(second),
        "segments_relative": len(first & inside) / len(inside),
        "segments_random": chance(first, second, n) / len(second),
    }


def chance(a: Iterable[Line], b: Iterable[Line], keys: int) -> float:
    """Lines that are in both of two draws, of as many of each kind, on average."""
    counts = [[sum(kind == wanted for kind, _ in lines) for lines in (a, b)] for wanted in ("vertical", "slash")]
    return sum(one * other / keys for one, other in counts)


@pytest.mark.parametrize(
    ("model_type", "whole"), [("gemma2", False), ("gpt_oss", False), ("gpt2", False), ("gpt2", True)]
)
def test_all_numbers_equal_those_of_the_whole_matrix(model_type, whole):
    """Against sets of cells of the models' own attention: window, soft cap and learned sinks too."""
    model, tokenizer = tiny_model(model_type)
    texts = [ids_of(30), ids_of(41), ids_of(33)]
    etas, layers = (0.05, 0.2, 1.0), [0, 2]
    result = lines(model, texts, etas=etas, layers=layers, whole=whole, tokenizer=tokenizer)
    dense = [attention(model, torch.tensor([ids])) for ids in texts]
    for e, row, head in product(range(3), range(2), range(4)):
        found: list[tuple[set[Line], dict[str, float]]] = []
        for every in dense:
            before = found[-1][0] if found else set()
            found.append(by_sets(every[layers[row], 0, head].double(), etas[e], before, whole))
        expected = {}
        for name in found[-1][1]:
            expected[name] = fmean(numbers[name] for _, numbers in found if name in numbers)
        pairs = list(combinations([chosen for chosen, _ in found], 2))
        expected["inputs"] = fmean(len(one & other) / len(one | other) for one, other in pairs)
        lengths = list(combinations(map(len, texts), 2))
        random = [chance(*pair, max(keys)) for pair, keys in zip(pairs, lengths, strict=True)]
        expected["inputs_random"] = fmean(
            both / (len(one) + len(other) - both) for both, (one, other) in zip(random, pairs, strict=True)
        )
        for name, value in expected.items():
            assert getattr(result, name)[e, row, head] == pytest.approx(value, abs=2e-4), name
    assert result.mass[-1] == pytest.approx(1, abs=1e-4)
    np.testing.assert_allclose(result.text_mass.mean(1), result.mean("mass"))
    (subject,) = result.compared()
    share = {row.key: row.share for row in subject.rows}
    for key, name in ((On.HEAVIEST, "mass"), ("inputs", "inputs"), ("segments", "segments")):
        assert share[key].value == pytest.approx(result.mean(name)[0])
    assert share[On.HEAVIEST].margin == margin_of(result.text_mass[0])


def test_shares_of_lines_lose_none_to_rounding_and_lines_without_weight_are_never_chosen():
    """0.29 * 100 is a little less than 29 in floating point."""
    assert int(top_lines(NOTHING, torch.rand(1, 2, 50) + 0.1, [0.29]).sum()) == 29
    weights = pad(torch.tensor([[[3.0, 0.0, 1.0], [0.0, 4.0, 0.0]]]), (0, 47))
    chosen = top_lines(NOTHING, weights, [0.01, 0.03, 1.0])
    assert chosen.sum((2, 3)).flatten().tolist() == [1, 3, 3]
    assert chosen[0, 0].nonzero().tolist() == [[1, 1]]
    assert chosen[1, 0, 0].nonzero().flatten().tolist() == [0, 2]


def test_another_texts_lines_hold_as_much_where_the_text_is_the_same_and_less_where_it_is_not():
    model, tokenizer = tiny_model("llama")
    text, other = ids_of(40), ids_of(40)
    options = {"etas": [0.1], "layers": [0], "tokenizer": tokenizer}
    same, different = lines(model, [text, text], **options), lines(model, [text, other], **options)
    np.testing.assert_allclose(same.other_mass, same.mass, atol=1e-6)
    assert same.strongest()[1].key is On.OTHER_TEXT
    assert same.mean("inputs")[0] == 1
    assert same.mean("inputs_random")[0] < 0.5, "random lines agree less"
    assert different.mean("other_mass")[0] < different.mean("mass")[0] - 0.01 and different.mean("inputs")[0] < 1


def test_of_equal_lines_columns_come_first_and_then_the_nearest_offsets():
    """Lines equal but for the rounding of their sums, too."""
    equal = 1 + 1e-6 * torch.rand(1, 2, 50)
    for share, columns, offsets in ((0.3, 30, 0), (0.5, 50, 0), (0.7, 50, 20)):
        chosen = top_lines(NOTHING, equal, [share])[0, 0]
        assert [kind.nonzero().flatten().tolist() for kind in chosen] == [[*range(columns)], [*range(offsets)]]


def test_a_line_weighs_what_it_holds_beyond_lines_of_the_other_kind():
    """All queries attend to the first key alone, or each to the key before it."""
    key = torch.zeros(1, 20, 20)
    key[0, 0, 0] = 100
    query = torch.ones(1, 20, 20)
    first = Scores(query, key, 1.0)
    assert top_lines(first, line_sums(first), [0.1, 1.0]).nonzero().tolist() == [[0, 0, 0, 0], [1, 0, 0, 0]]
    assert top_lines(first, line_sums(first), [0.1], weighs_whole=True)[0, 0].sum(1).tolist() == [1, 3]
    before = Scores(torch.eye(20).roll(1, 0)[None] * 100, torch.eye(20)[None], 1.0)
    chosen = top_lines(before, line_sums(before), [0.1])[0, 0]
    assert [kind.nonzero().flatten().tolist() for kind in chosen] == [[0], [1]]


def test_a_file_of_texts_and_the_command(tmp_path, typed):
    file, out = tmp_path / "texts.jsonl", tmp_path / "x.json"
    file.write_text(json_lines({"text": f"Dialogue: A: hello {i}\nSummary: they greet. " * 8} for i in range(3)))
    typed(f"lines --data {file} --count 2 --length 64 --layers 2 --etas 0.1 --json {out}")
    printed = LineWeights.load(out)
    assert printed.tokens == (64, 64) and printed.layers == (2,) and str(tmp_path) not in out.read_text()


def test_records_of_longbench_are_read_by_a_field(tmp_path, typed):
    file, out = tmp_path / "samsum.jsonl", tmp_path / "x.json"
    texts = [f"Dialogue: A: hello {i}\nSummary: they greet. " * 8 for i in range(3)]
    file.write_text(json_lines({"input": "Dialogue: B", "context": text, "answers": ["a"]} for text in texts))
    words = f"lines --data {file} --count 3 --length 64 --layers 2 --etas 0.1 --json {out}"
    typed(f"{words} --field context")
    assert LineWeights.load(out).tokens == (64, 64, 64)
    for more, said in (("", "with --field"), (" --field nothing", "no text or chat in the field 'nothing'")):
        assert said in typed(words + more, 2).err


def test_short_texts_other_models_and_masks_are_refused():
    model, tokenizer = tiny_model("llama")
    for given, texts, message in (
        (model, 5, "texts=5: expected"),
        (model, "ab", r"a text has \d tokens, at least 16"),
        (model, [], "there are 0 texts: give more"),
        (tiny_model("falcon")[0], [ids_of(40)], "computes attention inside its modules"),
        (bridge_of(model, tokenizer), [ids_of(40)], "computes its own attention"),
    ):
        with refused(message):
            lines(given, texts, tokenizer=tokenizer)
    with refused("this mask is neither"):
        lines(model, [ids_of(40)], tokenizer=tokenizer, interventions=Knockout([3]))
