"""One quantity has one number on all pages, or the page says over which other texts it is.

The numbers of SmolLM2 are those of `find-sinks` in figures/find_sinks_smollm2.json. Plain hooks read other texts, and
the view reads one story: a sentence with their numbers says so. A sink rate is one that `find-sinks` measured, and the
heads that mark the first token of the model in the package are those of figures/circuit.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from repository import FIGURES, ROOT

from sinkscope.results.result import Result
from sinkscope.results.row import of_table

PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHER = re.compile(r"plain hooks|this story|other texts|without BOS", re.I)
"""Words by which a sentence says that its number is over other texts."""
FOUND = Result.load(FIGURES / "find_sinks_smollm2.json")
FIRST, SECOND = FOUND.spikes[:2]
CIRCUIT = Result.load(FIGURES / "circuit.json")
HEADS_FILE = CIRCUIT.marking
MARKING = {str(head) for head in HEADS_FILE.marking.heads}
OF_FIRST = str(HEADS_FILE.heads[int(HEADS_FILE.left[0].argmin())])
"""The head without which least is left of the spike of BOS itself."""
RATIOS = {f"{FIRST.ratio:.0f}", f"{SECOND.ratio:.0f}"}
READERS = f"{FOUND.readers.get('heads'):.0f}"
EDITED = [*FIRST.table("effects").values(), *FIRST.table("alone").values(), *FIRST.table("controls").values()]
HEADS = {
    f"{FOUND.readers.get('total'):.0f}": {READERS},
    str(FIRST.heads): {f"{row.get('heads'):.0f}" for row in EDITED},
}
"""Heads that read the first token, of all and of those behind the main spike, as the result has them."""


def sentences() -> Iterator[tuple[str, str]]:
    """The sentences and cells of all pages, with the name of the page."""
    for page in PAGES:
        text = re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.S)
        for block in re.split(r"\n\s*\n|\n(?=[|#])", text):
            heading = block if block.startswith("|") else ""
            for sentence in re.split(r"(?<=[.:;])\s+(?=[A-Z*`])|\|", block):
                yield page.relative_to(ROOT).as_posix(), " ".join(sentence.split()) if not heading else sentence


def heads_said(sentence: str) -> list[tuple[str, str]]:
    """Numbers of heads with the whole, such as ("28", "151")."""
    margin = r"(?: \(?± \d+\)?)?"
    whole = "|".join(HEADS)
    return re.findall(rf"\b(\d+){margin} of (?:its |the )?({whole})\b{margin} heads", sentence)


def wrong_numbers(sentence: str, *, of_smollm: bool) -> list[str]:
    """What a sentence says otherwise than the result, without naming other texts."""
    if OTHER.search(sentence):
        return []
    wrong: list[str] = []
    for heads, whole in heads_said(sentence):
        if heads not in HEADS[whole]:
            wrong.append(f"{heads} of {whole} heads")
    for heads, readers in re.findall(r"(\d+) of the (\d+) heads that read the first token", sentence):
        if readers not in (READERS, str(FIRST.heads)):
            wrong.append(f"{heads} of the {readers} heads")
    if of_smollm:
        for ratio in re.findall(r"(\d+) times (?:the typical|as long as a typical)", sentence):
            if ratio not in RATIOS:
                wrong.append(f"{ratio} times the typical norm")
    return wrong


def test_the_numbers_of_smollm2_are_those_of_its_result_on_every_page():
    wrong: list[str] = []
    read = 0
    for page, sentence in sentences():
        of_smollm = re.search(r"SmolLM2|L11\.N1229|layers 11 to 29", sentence) is not None and "Gemma" not in sentence
        read += len(heads_said(sentence)) + len(re.findall(r"times the typical", sentence)) * of_smollm
        wrong += [f"{page}: {said}: {sentence[:160]}" for said in wrong_numbers(sentence, of_smollm=of_smollm)]
    assert wrong == []
    assert read >= 6  # a page that words them anew is still read


def test_every_sink_rate_of_a_page_was_measured_by_find_sinks():
    card = json.loads((FIGURES / "bundled_model.json").read_text())["result"]
    bundled = rate_of("find_sinks.json")
    rates = {rate_of(path.name) for path in FIGURES.glob("find_sinks*.json")}
    rates |= {f"{model['sink_rate']['value']:.0%}" for model in models_with_rates(card)}
    said = [(page, rate) for page, rate in rates_said() if rate not in rates]
    assert said == [] and len(list(rates_said())) >= 2
    assert bundled in {rate for _, rate in rates_said()}


def rate_of(name: str) -> str:
    """The sink rate of a result of `find-sinks`, as a page says it."""
    return f"{of_table(Result.load(FIGURES / name).attention, 'attention')['sink rate'].get('share'):.0%}"


def models_with_rates(part: object) -> Iterator[dict]:
    """Each part of a file that has a sink rate."""
    for value in part.values() if isinstance(part, dict) else ():
        if isinstance(value, dict) and "sink_rate" in value:
            yield value
        yield from models_with_rates(value)


def rates_said() -> Iterator[tuple[str, str]]:
    """The percentages in lines about a sink rate, with the name of the page."""
    for page in PAGES:
        for line in page.read_text().splitlines():
            if re.search(r"sink rate", line, re.I) and not OTHER.search(line):
                for rate in re.findall(r"\d+ ?%", line):
                    yield page.name, rate.replace(" ", "")


def test_the_heads_that_mark_the_first_token_are_the_same_ones_everywhere():
    """`why-sink` asks many tokens alone, and the first token of texts: its head is the one that BOS itself needs."""
    assert set(map(str, CIRCUIT.marks)) == {OF_FIRST} and OF_FIRST not in MARKING
    named: list[tuple[str, set[str]]] = []
    for page, sentence in sentences():
        for heads, verb in re.findall(r"((?:L\d+\.H\d+(?:, | and )?)+) (marks?) the first token", sentence):
            named.append((page, set(re.findall(r"L\d+\.H\d+", heads))))
            assert named[-1][1] == (MARKING if verb == "mark" else {OF_FIRST}), page
    assert named


@pytest.mark.parametrize(
    ("sentence", "said"),
    [
        ("In SmolLM2 the norm is 190 times the typical one.", "190 times the typical norm"),
        ("Without L11.N1229 25 of its 151 heads attend there.", "25 of 151 heads"),
        ("It is 159 of 270 heads.", "159 of 270 heads"),
        ("![128 of the 211 heads that read the first token look elsewhere]", "128 of the 211 heads"),
    ],
)
def test_another_number_is_found_unless_the_sentence_names_its_texts(sentence, said):
    assert wrong_numbers(sentence, of_smollm=True) == [said]
    assert wrong_numbers(f"By plain hooks: {sentence}", of_smollm=True) == []
