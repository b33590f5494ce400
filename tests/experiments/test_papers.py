"""Every artefact of the papers is listed, has a command or a reason, and its command runs."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from covering import slow
from repository import ROOT

from experiments.papers.__main__ import PAPERS, main, without
from experiments.papers.artefact import Artefact, Paper
from experiments.papers.loopserve.asked import Named
from experiments.papers.loopserve.kept_answers import RANDOM, At, Change, Cost, KeptAnswers, beside_control
from sinkscope.app.commands import COMMANDS
from sinkscope.measure import Mean, mean_of

NUMBERING = {
    "repeated-token": ["Fig. 1-9", "Table 1-3", "Theorem 4.1", "Theorem D.2", "Listing 1", "App. A-D"],
    "loopguard": ["Fig. 1-5", "Table 1-3", "Lemma 1", "Eq. 1-18", "App. A-E"],
    "loopserve": ["Fig. 1-13", "Table 1-8", "Algorithm 1-6", "Theorem 1", "Obs. 1-4"],
}
"""How each paper numbers what it shows."""
SMALL = "--methods loopserve:0.25 --dialogues 1 --length 160 --new 18"
SECONDS = {
    "repeated-token fig5": "--copies 20",
    "loopserve fig4": "--dialogues 3 --length 96 --new 12 --window 4",
    "loopserve fig10c": SMALL,
    "loopserve theorem1": "--tokens 6",
    "loopguard lemma1": "--count 4 --new 96",
    "loopguard table3": "--count 4 --new 96",
    "loopguard overhead": "--rounds 3 --new 8",
}
"""Artefacts that take about a second, with the options of their smallest size."""
SHORT = "--max-repeats 40 --tokens the"
LONGER = {
    "repeated-token fig1": "--copies 40",
    "repeated-token fig2": SHORT,
    "repeated-token fig3": "--copies 60",
    "repeated-token fig4": "--pieces 24 --neuron 3",
    "repeated-token theorem": "--copies 40",
    "repeated-token fig6": "--sample 4 --copies 40",
    "repeated-token circuit": "",
    "repeated-token table1": "--copies 40",
    "repeated-token divergence": SHORT,
    "repeated-token clusters": "--n-tokens 64 --sequences 8",
    "repeated-token patch": "--max-repeats 300 --pieces 8",
    "repeated-token listing1": "--copies 40",
    "repeated-token table3": "--copies 40 --new 4 --training {readme}",
    **{f"loopserve {name}": SMALL for name in ("table1", "fig9a", "fig10a", "fig10b", "table3")},
    "loopserve fig1": "--count 2 --length 64",
    "loopserve fig11": "--dialogues 1 --length 320 --new 18",
    "loopguard fig2": "--count 4 --new 300",
    "loopguard table1": "--count 4 --new 96",
    "loopguard table2": "--count 3",
    "loopguard fig1": "--max-new-tokens 200",
    "loopguard appb": "--count 4 --new 96",
    "loopguard appd": "--count 4 --new 96",
    "loopguard fig5": "--max-new-tokens 200",
}
"""Those that take longer."""


def numbers(ranges: list[str]) -> list[str]:
    """What a list of ranges, such as "Fig. 1-3", stands for."""
    found: list[str] = []
    for words in ranges:
        kind, _, span = words.rpartition(" ")
        first, _, last = span.partition("-")
        if not last:
            found.append(words)
        elif first.isdigit():
            found += [f"{kind} {number}" for number in range(int(first), int(last) + 1)]
        else:
            found += [f"{kind} {chr(letter)}" for letter in range(ord(first), ord(last) + 1)]
    return found


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_every_number_of_the_paper_is_listed(paper: Paper) -> None:
    listed = {number for artefact in paper.artefacts for number in artefact.numbers}
    parts = {re.sub(r" [a-f]$", "", re.sub(r"(?<=\d)[a-f]$", "", number)) for number in listed}
    missing = [number for number in numbers(NUMBERING[paper.name]) if number not in listed | parts]
    assert not missing


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_an_artefact_has_one_answer(paper: Paper) -> None:
    names = [artefact.name for artefact in paper.artefacts]
    assert len({*names}) == len(names)
    for artefact in paper.artefacts:
        assert [bool(artefact.command), bool(artefact.module), bool(artefact.reason)].count(True) == 1, artefact.name
        if artefact.command:
            assert artefact.command.split()[0] in COMMANDS, artefact.name
        if artefact.is_measured:
            assert artefact.cost is not None, artefact.name


def all_artefacts() -> list[tuple[Paper, Artefact]]:
    return [(paper, artefact) for paper in PAPERS for artefact in paper.measured]


def test_every_command_is_tried() -> None:
    names = {f"{paper.name} {artefact.name}" for paper, artefact in all_artefacts()}
    assert names == {*SECONDS, *LONGER}


@pytest.mark.parametrize("name", [*SECONDS, *map(slow, LONGER)])
def test_its_command_runs(name: str, tmp_path, capsys) -> None:
    words = (SECONDS | LONGER)[name].format(readme=ROOT / "README.md")
    assert main([*name.split(), "--out", str(tmp_path), *words.split()]) == 0
    assert capsys.readouterr().out.startswith("Conclusion: ")
    assert [*tmp_path.glob("*.json")]


def test_every_form_and_place_has_its_rows(tmp_path, capsys) -> None:
    """Windows that find what the answer attends to: each place is judged both ways, and shares are shares."""
    assert main(["loopserve", "fig4", "--out", str(tmp_path), *SECONDS["loopserve fig4"].split()]) == 0
    rows = json.loads((tmp_path / "loopserve_fig4_bundled.json").read_text())["result"]["rows"]
    keys = {(row["key"]["share"], row["key"]["place"], row["key"]["later"]) for row in rows}
    assert len(keys) == len(rows) == 3 * 3 * 2
    for row in rows:
        assert all(0 <= row[name]["value"] <= 1 for name in ("last", "earlier", "first", "second", "random", "other"))
        assert row["key"]["later"] or row["first"]["value"] > row["key"]["share"]
    assert main(["loopserve", "fig4", "--new", "32"]) == 2
    assert "--new 32: give more than 32" in capsys.readouterr().err


def test_no_subset_of_lines_is_cheaper(tmp_path) -> None:
    assert main(["loopserve", "theorem1", "--out", str(tmp_path), "--tokens", "5"]) == 0
    rows = json.loads((tmp_path / "loopserve_theorem1_bundled.json").read_text())["result"]["rows"]
    printed, greedy, control = (row["times"]["value"] for row in rows)
    assert 1 <= greedy < control and 1 <= printed


def test_bad_words_are_refused_in_one_line(capsys) -> None:
    assert main(["repeated-token", "fig99"]) == 2
    assert main(["repeated-token", "fig5", "--words", "cat"]) == 2
    assert main(["nobody"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(line.startswith("error: ") for line in lines), lines


def change(method: str, place: str, late: list[float]) -> Change:
    return Change(key=At(method, place), rise=Mean(0.0), late=mean_of(np.array(late)), same=None)


@pytest.mark.parametrize(("late", "words"), [(0.3, "clearly better than kept"), (-0.3, "clearly better than none")])
def test_a_control_that_wins_behind_the_first_tokens_is_said(late, words):
    """What loopserve reads freely says nothing: the mean over all tokens is the same for both here."""
    noise = [0.01, 0.0, -0.01, 0.0]
    rows = []
    for place in ("begin", "end"):
        rows.append(change("kept", place, [late + one for one in noise]))
        rows.append(change(RANDOM, place, noise[::-1]))
    costs = tuple(Cost(key=Named(name), time=Mean(1.0)) for name in ("kept", RANDOM))
    said = KeptAnswers(rows=tuple(beside_control(rows)), costs=costs).conclusion()
    assert words in said and ("1 of 1 methods" in said) == (late < 0), said
    alone = [change("kept", "begin", [late]), change(RANDOM, "begin", [0.0])]
    assert "no difference" in KeptAnswers(rows=tuple(beside_control(alone)), costs=costs).conclusion()


def test_options_that_are_given_take_the_place_of_an_artefacts_own():
    own = ["--methods", "a,b", "--whole", "--json", "x.json"]
    assert without(own, ["--methods", "c"]) == ["--whole", "--json", "x.json"]
    assert without(own, ["--methods=c", "--whole"]) == ["--json", "x.json"]


def test_without_a_word_it_lists_everything(capsys) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    for paper in PAPERS:
        for artefact in paper.artefacts:
            assert f"  {artefact.name} " in text


def test_nothing_lies_outside_the_folder() -> None:
    """What is measured of a paper lies in experiments/papers."""
    assert not (ROOT / "experiments" / "repeated_token").exists()
    assert not (ROOT / "experiments" / "loopserve").exists()
    assert not (ROOT / "experiments" / "loopguard").exists()
