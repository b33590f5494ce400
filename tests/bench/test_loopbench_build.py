"""LoopBench-DC and LoopBench-RI as they are built: form, lengths, redundancy, history, seeds."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from longbench_files import PEOPLE, Words, prose, record, records, save

from sinkscope.bench.files import BuiltSet, LongBenchSource, read_longbench, write_set
from sinkscope.bench.loopbench import prompts as module
from sinkscope.bench.loopbench.prompts import TASKS, build, dc_prompt, dirty, load_prompts, ri_prompt, seed_history
from sinkscope.errors import SinkscopeError

LENGTHS = [40, 90, 150, 260, 400, 900]


def source(tmp_path: Path, bench: str, lengths: list[int] = LENGTHS) -> LongBenchSource:
    task = TASKS[bench]  # type: ignore[index]
    return read_longbench(task, save(tmp_path / f"{task}.jsonl", records(task, lengths)))


def made(where: LongBenchSource, bench: Any, **options: Any) -> BuiltSet[Any]:
    return build(bench, where, Words(), tokenizer_name="words", **options)


@pytest.mark.parametrize(("bench", "target"), [("dc", 330), ("ri", 420)])
def test_the_longest_are_cut_until_the_mean_is_the_target(tmp_path: Path, bench: str, target: int) -> None:
    where = source(tmp_path, bench)
    whole = {p.id: p for p in made(where, bench, count=6, target_tokens=10_000).made}
    cut = made(where, bench, count=6, target_tokens=target)
    longest = cut.manifest["longest"]
    for prompt in cut.made:
        assert prompt.tokens == len(Words()(prompt.prompt)["input_ids"])
        natural = whole[prompt.id]
        assert prompt.truncated == (natural.tokens > longest)
        if not prompt.truncated:
            assert prompt == natural
            continue
        assert longest - 3 <= prompt.tokens <= longest
        # What is left of the record is its beginning, ended between two words.
        kept, rest = _body(prompt.prompt, bench), _body(natural.prompt, bench)
        assert rest.startswith(kept + " ")
        assert prompt.prompt.replace(kept, "") == natural.prompt.replace(rest, "")
    mean = sum(p.tokens for p in cut.made) / 6
    assert 0 < cut.manifest["truncated"] < 6
    assert target - 3 <= mean <= target
    assert cut.manifest["tokens"]["mean"] == mean
    assert f"mean {mean:,.0f}, paper {3853 if bench == 'dc' else 5376:,}" in cut.text()


def _body(prompt: str, bench: str) -> str:
    begin, end = ("Transcript:\n", "\n\nItems:\n") if bench == "dc" else ("Narrative:\n", "\n\nProtocol:")
    return prompt.split(begin)[1].split(end)[0]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(1, 70))
def test_cap_against_trying_every_length(lengths: list[int], target: int) -> None:
    cap = module._cap(lengths, target)

    def mean_times(at: int) -> int:
        return sum(min(length, at) for length in lengths)

    fitting = [at for at in range(max(lengths) + 1) if mean_times(at) <= target * len(lengths)]
    assert cap == max(fitting)


def test_the_dirty_context_has_the_record_in_order_and_spans_again() -> None:
    text = prose(400, 3)
    sentences = [part + "." for part in text[:-1].split(". ")]
    soiled = dirty(text, random.Random(1), 0.5)
    pieces = [part + "." for part in soiled[:-1].split(". ")]
    counts = Counter(pieces)
    assert set(counts) == set(sentences)
    assert list(dict.fromkeys(pieces)) == sentences, "copies stand behind what they copy"
    again = len(soiled.split()) / len(text.split()) - 1
    assert 0.5 <= again < 0.5 + 20 / 400  # to the last sentence
    assert "\n" not in dirty("One.\nTwo!\n\nThree?", random.Random(0))
    assert any(pieces[i : i + 2] == sentences[j : j + 2] for i in range(9, len(pieces) - 1) for j in range(4)), "spans"


def test_text_without_full_stops_is_repeated_in_parts() -> None:
    text = " ".join(f"w{i}" for i in range(600))
    soiled = dirty(text, random.Random(0), 0.5).split()
    assert 900 <= len(soiled) <= 940
    assert set(soiled) == set(text.split())


def test_form_of_dc() -> None:
    prompt = dc_prompt("THE CONTEXT")
    parts = [
        "Wikipedia",
        '"name"',
        '"wikipedia url"',
        '"type"',
        "Organization, Person, Location, Event, Other",
        "THE CON",
    ]
    places = [prompt.index(part) for part in parts]
    assert places == sorted(places), "instruction, schema, type set, context (appendix C.1)"


def test_form_of_ri_and_its_history() -> None:
    narrative = "They met. Then Iskra saw Otto, and Otto saw Iskra, but Maud was late."
    counts = Counter()
    for seed in range(40):
        history = seed_history(narrative, random.Random(seed))
        prompt = ri_prompt(narrative, history)
        assert prompt.index("They met") < prompt.index("Protocol") < prompt.index("Iteration 1")
        assert prompt.endswith("\n[Draft Interpretation]\n"), "broken off at the next Draft header (appendix C.2)"
        done = re.findall(r"\[Draft Interpretation\]\n(.+)\n\[Self-Correction\]\n(.+)\n", history)
        assert history.count("[Draft Interpretation]") == len(done) + 1
        assert [int(n) for n in re.findall(r"Iteration (\d)", history)] == [*range(1, len(done) + 2)]
        assert len({draft for draft, _ in done}) == len(done)
        assert "{" not in history
        counts[len(done)] += 1
        assert set(re.findall(r"Iskra|Otto|Maud", history)) <= {"Iskra", "Otto"}, "names that come more than once"
    assert set(counts) == {1, 2}
    assert "narrator" in seed_history("no names here", random.Random(0))


def test_records_are_gone_through_again_with_the_next_seed(tmp_path: Path) -> None:
    where = source(tmp_path, "dc", [60, 70, 80, 90, 100])
    built = made(where, "dc", count=12, seed=3)
    assert [p.seed for p in built.made] == [3] * 5 + [4] * 5 + [5] * 2
    for i in (0, 5):
        assert len({p.source_id for p in built.made[i : i + 5]}) == 5
    assert len({p.prompt for p in built.made}) == 12
    assert len({p.id for p in built.made}) == 12
    assert built.manifest["passes"] == 3
    again = made(where, "dc", count=5, seed=4).made
    assert [p.prompt for p in again] == [p.prompt for p in built.made[5:10]]


def test_same_arguments_same_prompts(tmp_path: Path) -> None:
    for bench in ("dc", "ri"):
        where = source(tmp_path, bench)
        assert made(where, bench, count=8) == made(where, bench, count=8)
        assert made(where, bench, count=8).made != made(where, bench, count=8, seed=1).made


def test_a_narrative_asked_about_twice_begins_elsewhere(tmp_path: Path) -> None:
    text = prose(500, 0)
    lines = [record("narrativeqa", i, text) for i in range(4)]
    where = read_longbench("narrativeqa", save(tmp_path / "n.jsonl", lines))
    bodies = [_body(p.prompt, "ri") for p in made(where, "ri", count=4).made]
    assert bodies[0] == text
    assert len(set(bodies)) == 4
    for body in bodies[1:]:
        assert text.endswith(" " + body)
        assert len(body) > len(text) * 0.49


def test_text_without_spaces_is_cut_too(tmp_path: Path) -> None:
    class Characters:
        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": list(map(ord, text))}

    lines = [record("narrativeqa", 0, "\u6cb3" * 5000)]
    where = read_longbench("narrativeqa", save(tmp_path / "n.jsonl", lines))
    (prompt,) = build("ri", where, Characters(), tokenizer_name="c", count=1, target_tokens=3000).made
    assert 2998 <= prompt.tokens == len(prompt.prompt) <= 3000


def test_2wiki_keeps_both_ends_and_the_answers(tmp_path: Path) -> None:
    where = source(tmp_path, "2wiki")
    whole = made(where, "2wiki")
    assert whole.manifest["truncated"] == 0
    assert whole.manifest["paper"] is None
    assert len(whole.made) == len(LENGTHS)
    cut = made(where, "2wiki", target_tokens=200)
    contexts = {r.id: (r.context, r.question) for r in where.records}
    for prompt in cut.made:
        context, question = contexts[prompt.source_id]
        assert prompt.answers == ("Ellen Varga",)
        assert prompt.prompt.endswith(f"Question: {question}\nAnswer:")
        assert prompt.tokens <= 200
        if prompt.truncated:
            assert prompt.tokens >= 196
            passages = prompt.prompt.split("Passages:\n")[1].split("\n\nUsing")[0].split()
            words = context.split()
            joints = [i for i in range(1, len(passages)) if passages == words[:i] + words[i - len(passages) :]]
            assert any(abs(2 * i - len(passages)) <= 16 for i in joints), "as much of either end"
        else:
            assert context in prompt.prompt
    with pytest.raises(SinkscopeError, match=r"count=7: .* has 6 questions"):
        made(where, "2wiki", count=7)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"count": 0}, "count=0: expected a whole number from 1"),
        (
            {"target_tokens": 20},
            r"target_tokens=20: expected .* from \d+, because the form alone has \d+ tokens",
        ),
    ],
)
def test_numbers_that_cannot_be(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(SinkscopeError, match=said):
        made(source(tmp_path, "dc"), "dc", **options)


def test_written_and_read(tmp_path: Path) -> None:
    import hashlib

    for bench in ("dc", "2wiki"):
        built = made(source(tmp_path, bench), bench, count=5)
        prompts, manifest = write_set(
            [p.to_json() for p in built.made], built.manifest, tmp_path / "out" / f"{bench}.jsonl"
        )
        assert load_prompts(prompts) == list(built.made)
        content = json.loads(manifest.read_text())
        assert manifest.name == f"{bench}.manifest.json"
        assert content["prompts_sha256"] == hashlib.sha256(prompts.read_bytes()).hexdigest()
        task = tmp_path / f"{TASKS[bench]}.jsonl"  # type: ignore[index]
        assert content["source"]["sha256"] == hashlib.sha256(task.read_bytes()).hexdigest()
        assert str(tmp_path) not in manifest.read_text()
        fields = set(json.loads(prompts.read_text().splitlines()[0]))
        extra = {"answers"} if bench == "2wiki" else set()
        assert fields == {"id", "bench", "prompt", "tokens", "source_id", "seed", "truncated"} | extra
    assert PEOPLE[0] in prompts.read_text()
