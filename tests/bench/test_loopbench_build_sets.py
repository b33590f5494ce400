"""Sets that ship, files of prompts, honest texts, and the score of 2WikiMultihopQA."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from experiments.loopbench import make_honest
from sinkscope.bench.files import read_longbench, write_set
from sinkscope.bench.loopbench.prompts import (
    DATA,
    SHIPPED,
    BenchPrompt,
    build,
    honest_texts,
    load_prompts,
    wiki2_prompt,
)
from sinkscope.bench.loopbench.prompts import WIKI2_HEAD as HEAD
from sinkscope.bench.loopbench.prompts import WIKI2_TAIL as TAIL
from sinkscope.bench.scorers import best_f1, f1, normalise
from sinkscope.errors import SinkscopeError
from sinkscope.models.load import open_tokenizer

GOOD = BenchPrompt("dc-0000", "dc", "List them.", 4, "a", 0, False)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return open_tokenizer("bundled")[0]


# --- what ships ---


def test_the_small_set_is_what_the_builder_makes(tmp_path: Path, tokenizer: Any) -> None:
    for bench, task, name in (("dc", "multi_news", "news"), ("ri", "narrativeqa", "stories")):
        records = read_longbench(task, DATA / f"{name}.jsonl")
        built = build(bench, records, tokenizer, tokenizer_name="bundled", count=len(records.records))
        for path in write_set([p.to_json() for p in built.made], built.manifest, tmp_path / f"small-{bench}.jsonl"):
            mine, shipped = path.read_text("utf-8"), (DATA / path.name).read_text("utf-8")
            without = (re.sub(r'"sinkscope": "[^"]+"', "", text) for text in (mine, shipped))
            assert len(set(without)) == 1, path.name


def test_the_small_set_fits_the_model_in_the_package(tokenizer: Any) -> None:
    prompts = load_prompts()
    assert Counter(p.bench for p in prompts) == {"dc": 12, "ri": 12}
    assert len({p.id for p in prompts}) == len({p.source_id for p in prompts}) == 24
    context = json.loads((DATA.parents[2] / "models/bundled/config.json").read_text())["max_position_embeddings"]
    for prompt in prompts:
        assert prompt.tokens == len(tokenizer(prompt.prompt)["input_ids"])
        assert 256 <= prompt.tokens <= 1000
        assert prompt.tokens + 2500 <= context, "T_max of the paper"
    assert sum(f.stat().st_size for f in DATA.iterdir()) < 300_000
    assert load_prompts("small-dc") + load_prompts("small-ri") == prompts
    assert {name for names in SHIPPED.values() for name in names} < {f.name for f in DATA.iterdir()}


def test_the_documentation_of_building(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/loopbench/building.md").read_text("utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    exec(compile(block, "building.md", "exec"), {})
    (shown,) = re.findall(r"^```text\n(.*?)^```", page, re.M | re.S)
    assert capsys.readouterr().out == shown
    tokens = [p.tokens for p in load_prompts()]
    assert f"12 prompts of each form, of {min(tokens)} to {max(tokens)} tokens" in page
    assert f"returns {len(honest_texts())} texts" in page


# --- files of prompts ---


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"id": "dc-0001", "ben', "line 2 is not JSON"),
        ("[]", "line 2 is \\[\\], expected an object"),
        ({"bench": None}, "line 2: bench is None, expected 'dc', 'ri', 'stories', 'organism' or '2wiki'"),
        ({"bench": "cd"}, "line 2: bench is 'cd', expected 'dc', 'ri', 'stories', 'organism' or '2wiki'"),
        ({"tokens": "4"}, "line 2: tokens is '4', expected a whole number"),
        ({"tokens": True}, "line 2: tokens is True, expected a whole number"),
        ({"truncated": 0}, "line 2: truncated is 0, expected True or False"),
        ({"prompt": " "}, "line 2: the prompt is empty"),
        ({"id": "dc-0000"}, "line 2: id 'dc-0000' is that of p.jsonl line 1 too"),
        ({"colour": "red"}, "line 2: colour is 'red', expected no field of this name"),
        ({"answers": "yes"}, "line 2: answers is 'yes', expected a list"),
        ({"bench": "2wiki"}, "line 2: answers is missing or empty, expected at least one"),
        ("without prompt", "line 2: prompt is missing"),
    ],
)
def test_a_damaged_file_of_prompts(tmp_path: Path, line: Any, said: str) -> None:
    second = json.loads(replace(GOOD, id="dc-0001").to_json())
    if line == "without prompt":
        line = json.dumps({k: v for k, v in second.items() if k != "prompt"})
    text = line if isinstance(line, str) else json.dumps({**second, **line})
    (tmp_path / "p.jsonl").write_text(f"{GOOD.to_json()}\n{text}\n")
    with pytest.raises(SinkscopeError, match=f"p.jsonl {said}"):
        load_prompts(tmp_path / "p.jsonl")


def test_other_files_of_prompts(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    odd = replace(GOOD, prompt='line\nseparator \u2028 and "\u6cb3"', bench="2wiki", answers=("a", "\u00e9"))
    path.write_text(odd.to_json() + "\n\n", encoding="utf-8")
    assert load_prompts(path) == [odd]
    for content, said in ((b"\n", "is empty: give a file that"), (b"\xff", "not UTF-8")):
        path.write_bytes(content)
        with pytest.raises(SinkscopeError, match=said):
            load_prompts(path)
    with pytest.raises(SinkscopeError, match=r"'nothing': no such file or directory: give .* small"):
        load_prompts("nothing")


# --- honest texts ---


def test_honest_texts_are_what_the_generator_makes() -> None:
    assert (DATA / "honest.jsonl").read_text(encoding="utf-8") == make_honest.lines()
    assert honest_texts() == make_honest.honest_texts()


def test_honest_texts_are_many_and_different() -> None:
    texts = honest_texts()
    assert len(texts) >= 24
    assert len({t.id for t in texts}) == len({t.prompt for t in texts}) == len(texts)
    assert {t.kind for t in texts} == {"table", "data", "code", "refrain", "list", "log"}
    for text in texts:
        assert 200 <= len(re.findall(r"\w+", text.prompt)) <= 900, text.id
        lines = [line.strip() for line in text.prompt.splitlines() if re.search(r"\w", line)]
        assert len(set(lines)) >= (16 if text.kind == "refrain" else 24), f"{text.id}: entries differ"
        assert all(a != b for a, b in pairwise(lines)), f"{text.id}: the same line twice, at once"
        if text.id in ("refrain-song", "refrain-counting", "refrain-pantoum"):
            assert len(set(lines)) < 0.75 * len(lines), f"{text.id}: lines come back"
    by_id = {t.id: t.prompt for t in texts}
    assert len(json.loads(by_id["data-json"])) == 30
    names = re.findall(r'"name": "([^"]+)"', by_id["data-entities"])
    assert len(names) == len(set(names)) >= 30
    compile(by_id["code-tests"], "code-tests", "exec")
    compile(by_id["code-getters"], "code-getters", "exec")


def test_the_monitor_lets_honest_texts_pass(tokenizer: Any) -> None:
    from sinkscope.loops import Monitor

    def triggers(ids: list[int]) -> bool:
        monitor = Monitor()
        return any(monitor.update(token).trigger for token in ids)

    assert not [t.id for t in honest_texts() if triggers(tokenizer(t.prompt)["input_ids"][:640])]
    assert triggers(tokenizer('{"name": "Ada", "type": "Person"}, ' * 80)["input_ids"]), "it can"


# --- 2WikiMultihopQA ---


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The Eiffel Tower!", "eiffel tower"),
        ("An  apple,\na pear;the\tfig.", "apple pearthe fig"),  # punctuation goes first and leaves no gap
        ("Theatre of another Anna", "theatre of another anna"),
        ("U.S. (the 50th)", "us 50th"),
        ("a-the", "athe"),
        ("The a AN", ""),
        ("'\u201cquote\u201d'", "\u201cquote\u201d"),  # only ASCII punctuation
    ],
)
def test_normalise(text: str, words: str) -> None:
    assert normalise(text) == words


@pytest.mark.parametrize(
    ("said", "right", "value"),
    [
        ("the Eiffel tower.", "Eiffel Tower", 1.0),
        ("Paris, France", "Paris", 2 / 3),  # precision 1/2, recall 1
        ("cat cat", "the cat", 2 / 3),  # a word counts as often as it stands in both
        ("cat cat dog", "cat cat cat", 2 / 3),  # 2/3 and 2/3
        ("one two three four", "four five six", 2 / 7),  # 1/4 and 1/3
        ("London", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("Paris", "the", 0.0),
        ("", "", 0.0),
        ("the", "a", 0.0),
    ],
)
def test_f1(said: str, right: str, value: float) -> None:
    assert f1(said, right) == pytest.approx(value)
    assert f1(right, said) == pytest.approx(value)


def test_the_best_answer_counts() -> None:
    assert best_f1("Paris, France", ["London", "Paris", "Paris in France"]) == pytest.approx(0.8)  # 1 and 2/3
    assert best_f1("Paris", []) == 0
    said, right = ["Paris", "no", "Paris, France"], [["paris"], ["yes"], ["Paris"]]
    assert sum(map(best_f1, said, right)) == pytest.approx(5 / 3)


def test_prompt_of_2wiki() -> None:
    prompt = wiki2_prompt("Passage 1: {x}", "Who?")
    assert prompt == HEAD + "Passage 1: {x}" + TAIL.format("Who?")
    assert prompt.endswith("Question: Who?\nAnswer:")
    assert prompt.count("answer alone") == 2
