"""Every artefact of the papers is listed, has a command or a reason, and its command runs."""

from __future__ import annotations

import re

import pytest
from covering import slow
from repository import ROOT

from experiments.papers.__main__ import PAPERS, main
from experiments.papers.artefact import Artefact, Paper
from sinkscope.app.commands import COMMANDS

NUMBERING = {
    "repeated-token": ["Fig. 1-9", "Table 1-3", "Theorem 4.1", "Listing 1", "App. A-D"],
    "loopguard": ["Fig. 1-5", "Table 1-3", "Lemma 1", "Eq. 1-18", "App. A-E"],
    "loopserve": ["Fig. 1-13", "Table 1-8", "Algorithm 1-6", "Theorem 1", "Obs. 1-4"],
}
"""How each paper numbers what it shows."""
SHORT = "--count 4 --new 96"
SECONDS = {
    "repeated-token fig5": "--copies 20",
    "loopguard lemma1": SHORT,
    "loopguard table3": SHORT,
    "loopguard overhead": "--rounds 3 --new 8",
}
"""Artefacts that take about a second, with the options of their smallest size."""
MINUTES = {
    "loopguard fig2": "--count 4 --new 300",
    "loopguard table1": SHORT,
    "loopguard table2": "--count 3",
    "loopguard fig1": "--max-new-tokens 200",
    "loopguard appb": SHORT,
    "loopguard appd": SHORT,
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
    assert names == {*SECONDS, *MINUTES}


@pytest.mark.parametrize("name", [*SECONDS, *map(slow, MINUTES)])
def test_its_command_runs(name: str, tmp_path, capsys) -> None:
    words = SECONDS.get(name) or MINUTES.get(name) or ""
    assert main([*name.split(), "--out", str(tmp_path), *words.split()]) == 0
    assert capsys.readouterr().out.startswith("Conclusion: ")
    assert [*tmp_path.glob("*.json")]


def test_bad_words_are_refused_in_one_line(capsys) -> None:
    assert main(["repeated-token", "fig99"]) == 2
    assert main(["repeated-token", "fig5", "--words", "cat"]) == 2
    assert main(["nobody"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(line.startswith("error: ") for line in lines), lines


def test_without_a_word_it_lists_everything(capsys) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    for paper in PAPERS:
        for artefact in paper.artefacts:
            assert f"  {artefact.name} " in text


def test_nothing_lies_outside_the_folder() -> None:
    """What is measured of a paper lies in experiments/papers."""
    assert not (ROOT / "experiments" / "repeated_token").exists()
    assert not (ROOT / "experiments" / "loopguard").exists()
