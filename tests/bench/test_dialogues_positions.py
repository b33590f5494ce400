"""Where questions stand in a chat log: rules, their accuracy on messages labelled by hand, and the count."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from longbench_files import prose

from experiments.loopserve import positions
from experiments.loopserve.positions import PLACES, locate, main, question_positions
from experiments.loopserve.questions import SHIPPED, accuracy, sample, shipped
from sinkscope.app.cli import main as sinkscope
from sinkscope.bench.dialogues.positions import PAPER, Positions
from sinkscope.errors import SinkscopeError
from sinkscope.files.result import Result

END = "I have a dog and a cat. The dog barks all night. What can I do?"
FRONT = "What can I do? I have a dog and a cat. The dog barks all night."
MIDDLE = "I have a dog and a cat. What can I do? The dog barks all night and we live in a small flat."
SINGLE, NONE, FOREIGN = "What can I do?", "Wrong. It is a cat.", "Это кошка. Что мне делать?"
ASKED = (
    "What can I do about that?",
    "Write a poem about it.",
    "how do i fix that",
    "Could you say why",
    "Please explain it.",
)
asked = st.sampled_from(ASKED)
told = st.integers(0, 999).map(lambda seed: prose(12, seed))


@settings(max_examples=40)
@given(asked, told, told)
def test_the_place_is_that_of_the_question(question: str, one: str, two: str) -> None:
    """`prose` asks nothing; line breaks or spaces between make no difference."""
    for gap in ("\n", "\n\n") if question[-1].isalpha() else ("\n", "\n\n", " "):
        assert locate(gap.join((question, one, two))).place == "front"
        assert locate(gap.join((one, question, two))).place == "middle"
        assert locate(gap.join((one, two, question))).place == "end"
        assert locate(gap.join((one, question, two))).asked == (question,)
    assert locate(f"{one}\n\n{two}").place == "none"
    assert locate(question).place == "single"


@settings(max_examples=20)
@given(asked, told)
def test_greetings_do_not_count_and_several_questions_reach_from_first_to_last(question: str, text: str) -> None:
    assert locate(f"Hello! {question}\n{text}").place == "front"
    assert locate(f"{text}\n{question}\n\nThanks a lot!").place == "end"
    assert locate(f"Hi there, {question}").place == "single"
    both = locate(f"{question}\n{text}\nIs it so?")
    assert both.place == "end" and both.asked == (question, "Is it so?")


@pytest.mark.parametrize(
    "material",
    [
        "```\n# what is this?\nprint(input('name?'))\n```",
        "> What did he mean?",
        'He asked her, "Where have you been? Tell me everything." Then he left.',
        "Review: Why did I buy it? Write to me if you know.",
        "Anna: Are you coming?\nTom: Where to?",
        'if (x > 3 ? true : false) {\n  return "why?";\n}',
    ],
)
def test_nothing_is_asked_in_material(material: str) -> None:
    assert locate(f"It is a cat.\n\n{material}").place == "none"
    found = locate(f"{material}\n\nWhat does it mean?")
    assert (found.place, found.asked) == ("end", ("What does it mean?",))


@pytest.mark.parametrize("piece", ["a: b, ", "Write: ", "Is it? No. ", "f(x) = {1}; ", " ", "A. ", '"x" ', "so ", "x,"])
def test_long_messages_take_no_longer_than_many_short_ones(piece: str) -> None:
    """Patterns that look back and forth over a whole message would take minutes for this."""
    started = time.process_time()
    locate("Tell me why. " + piece * (10_000 // len(piece)) + "z")
    assert time.process_time() - started < 5


def test_what_follows_a_request_with_a_colon_is_what_it_is_about() -> None:
    text = "Where is the station? I have lost my way. Can you help me?"
    for gap in (" ", "\n", "\n\n"):
        found = locate(f"Translate to French:{gap}{text}")
        assert (found.place, found.asked) == ("front", ("Translate to French:",))


def test_the_sample_is_two_parts_with_all_labels() -> None:
    parts = {part: sample(part) for part in ("development", "held-out")}
    texts = [text for rows in parts.values() for _, text in rows]
    assert len(texts) == len(set(texts)) >= 120
    for rows in parts.values():
        labels = Counter(label for label, _ in rows)
        assert set(labels) == set(PLACES) and min(labels.values()) >= 6 and labels.total() >= 60


def test_accuracy_is_that_of_the_rules_and_the_docs_say_it() -> None:
    found, pairs = accuracy(), sample("held-out")
    assert positions.accuracy() == found and SHIPPED.read_text(encoding="utf-8") == shipped()
    assert found.right == sum(locate(text).place == label for label, text in pairs)
    assert found.messages == len(pairs) == sum(sum(row.values()) for row in found.confusion.values())
    assert found.right == sum(found.confusion[place][place] for place in PLACES)
    assert found.low < found.share < found.high and found.share >= 0.9
    root = Path(__file__).parents[2]
    page = " ".join((root / "docs/dialogues.md").read_text(encoding="utf-8").split())

    def stated(part: Any) -> str:
        return f"({part['share']:.0%}, {part['low']:.0%} to {part['high']:.0%})"

    assert f"{found.right} of {found.messages} held-out messages {stated(vars(found))}" in page
    assert f"our own, development | {accuracy('development').right} of {len(sample('development'))} |" in page
    real = json.loads((root / "figures/loopserve_questions.json").read_text(encoding="utf-8"))["result"]
    assert real["packaged"]["held-out"] == vars(found), "run python -m experiments.loopserve.questions again"
    real = real["arena_hard"]
    assert f"Arena-Hard, held-out | {real['held-out']['right']} of 60 {stated(real['held-out'])}" in page
    assert f"Arena-Hard, development | {real['development']['right']} of 60 |" in page
    assert f"always says `end` is right on {real['held-out']['always_end']:.0%} of that sample" in page


TALKS = [[END, FRONT], [MIDDLE], [SINGLE, NONE, END], [FOREIGN]]


def rows(kind: str) -> list[Any]:
    """The talks in each log's own format, with answers that ask much themselves."""
    role, text, human, bot = (
        ("from", "value", "human", "gpt") if kind == "conversations" else ("role", "content", "user", "assistant")
    )
    made = []
    for i, talk in enumerate(TALKS):
        said = [{role: "system", text: "You help. What is it?"}] if kind == "messages" else []
        for message in talk:
            said += [{role: human, text: message}, {role: bot, text: FRONT}]
        made.append({"id": i, kind: said})
    return made


def put(path: Path, made: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
    return path


def counts(found: Positions) -> tuple[int, ...]:
    return (*(share.count for share in found.places), found.single, found.no_question, found.foreign)


@pytest.mark.parametrize("kind", ["conversation", "conversations", "messages"])
def test_every_log_gives_the_same_counts(tmp_path: Path, kind: str) -> None:
    files = [put(tmp_path / "a.jsonl", rows(kind)), put(tmp_path / "b.log", [row[kind] for row in rows(kind)])]
    (tmp_path / "c.json").write_text(json.dumps(rows(kind), indent=2))
    pytest.importorskip("pyarrow")
    pd.DataFrame(rows(kind)).to_parquet(tmp_path / "d.parquet")
    for file in (*files, tmp_path / "c.json", tmp_path / "d.parquet"):
        found = question_positions(file)
        assert counts(found) == (1, 1, 2, 2, 1, 1, 1), file.name
        assert (found.conversations, found.messages) == (4, 7)


def test_a_message_a_line_one_conversation_and_parts(tmp_path: Path) -> None:
    messages = [message for talk in TALKS for message in talk]
    (tmp_path / "log.txt").write_text("\n\n".join(messages), encoding="utf-8")
    found = question_positions(tmp_path / "log.txt")
    assert counts(found) == (1, 1, 2, 2, 1, 1, 1) and found.conversations == 7
    said = [{"role": "user", "content": [{"type": "text", "text": END}, {"type": "image_url"}]}]
    (tmp_path / "one.json").write_text(json.dumps(said, indent=1))
    found = question_positions(tmp_path / "one.json")
    assert counts(found)[:3] == (0, 0, 1) and found.conversations == 1


def test_the_language_of_the_log_is_believed(tmp_path: Path) -> None:
    languages = ("English", "German", "English", "unknown")
    made = [{**row, "language": name} for row, name in zip(rows("conversation"), languages, strict=True)]
    assert counts(question_positions(put(tmp_path / "a.jsonl", made))) == (1, 0, 2, 1, 1, 1, 2)


def test_shares_beside_the_paper_s(tmp_path: Path) -> None:
    assert sum(PAPER.values()) == 6676
    found = question_positions(put(tmp_path / "a.jsonl", rows("messages")))
    assert [share.share for share in found.places] == [0.25, 0.25, 0.5, 0.5]
    assert [round(share.paper_share, 3) for share in found.places] == [0.234, 0.218, 0.548, 0.452]
    # Wilson's interval of 2 in 4, worked out by hand.
    assert found.places[2].low == pytest.approx(0.1500, abs=1e-4)
    assert found.places[2].high == pytest.approx(0.8500, abs=1e-4)
    nothing = question_positions(put(tmp_path / "b.jsonl", rows("messages")[3:]))
    assert {share.share for share in nothing.places} == {None} and nothing.figure() is not None


def test_which_conversations(tmp_path: Path) -> None:
    file = put(tmp_path / "a.jsonl", rows("conversation"))
    assert counts(question_positions(file, min_turns=2)) == (1, 0, 2, 1, 1, 1, 0)
    drawn = [question_positions(file, count=2, seed=seed) for seed in range(12)]
    assert all(found.conversations == 2 for found in drawn)
    assert len({counts(found) for found in drawn}) > 1
    assert counts(question_positions(file, count=2, seed=3)) == counts(drawn[3])


def test_examples_and_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = put(tmp_path / "a.jsonl", rows("conversation"))
    out, png = tmp_path / "o.json", tmp_path / "o.html"
    words = [str(file), "--examples", "1", "--json", str(out), "--html", str(png)]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "a.jsonl: 4 of 7 messages in 4 conversations with a question" in said and "54.8%" in said
    assert f"end, a.jsonl line 1, message 1: What can I do?\n    {END}" in said
    assert f"middle, a.jsonl line 2: What can I do?\n    {MIDDLE}" in said
    found = Result.load(out)
    assert isinstance(found, Positions) and found.to_json() == out.read_text()
    assert [example.position for example in found.examples] == ["front", "middle", "end"]
    one = question_positions(put(tmp_path / "b.jsonl", rows("conversation")[:1])).summary()
    assert "in 1 conversation with a question" in one and "1 conversations" not in one
    drawn: Any = found.figure()
    bars, paper = drawn.data
    assert list(bars.y) == [0.25, 0.25, 0.5, 0.5] and paper.y[0] == pytest.approx(1562 / 6676)


def test_the_labels_of_a_log_are_counted_like_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, labels, out = put(tmp_path / "a.jsonl", rows("conversation")), tmp_path / "labels.jsonl", tmp_path / "o.json"
    log = question_positions(file, examples=1, min_turns=2, count=1, labels=labels)
    options = ["--examples", "1", "--min-turns", "2", "--count", "1", "--json", str(out)]
    assert sinkscope(["dialogues", "positions", str(labels), *options]) == 0
    found = Result.load(out)
    assert isinstance(found, Positions) and found.accuracy is None and log.accuracy is not None
    assert (found.places, found.examples, counts(found)) == (log.places, log.examples, counts(log))
    assert "rules" not in capsys.readouterr().out
    for row, says in ({"place": "end"}, "conversation is missing"), ({"conversation": "a", "place": "top"}, "place is"):
        assert sinkscope(["dialogues", "positions", str(put(labels, [row]))]) == 2
        said = capsys.readouterr().err
        assert says in said and "labelled messages" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("none.jsonl", None, "no such file or directory: give a chat log:"),
        ("a.jsonl", "\n \n", "a.jsonl is empty: give a chat log"),
        ("a.jsonl", '{"messages": []}\n{"messages"', "a.jsonl line 2 is not JSON: give a chat log"),
        ("a.jsonl", "What is it?", "a.jsonl line 1 is not JSON"),
        ("a.json", '[\n {"messages": []},\n {"messages" []}\n]', "a.json line 3 is not JSON"),
        ("a.jsonl", '{"prompt": "a"}\n', "a.jsonl line 1 has none of conversation, conversations, messages: give"),
        ("a.jsonl", '{"messages": "hello"}\n', 'a.jsonl line 1 is "hello", expected a list of messages'),
        ("a.jsonl", '{"messages": []}\n7', "a.jsonl line 2 is 7, expected a list of messages"),
        ("a.jsonl", '{"messages": ["hello"]}', 'a.jsonl line 1, message 1 is "hello", expected role and content'),
        ("a.jsonl", '{"messages": [{"role": "user"}]}', "line 1, message 1 is"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": 3}]}', "line 1, message 1: 3 is no text"),
        ("a.jsonl", '{"messages": []}', "a.jsonl has no conversation with 1 message of a user"),
        ("a.txt", b"\xff\xfe\x00", "a.txt is not UTF-8 text"),
        ("a.parquet", "x", "a.parquet cannot be read as parquet"),
    ],
)
def test_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str | bytes | None, says: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main([str(tmp_path / name)]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


@pytest.mark.parametrize("wrong", [{"min_turns": 0}, {"count": 0}, {"count": 9}, {"examples": -1}, {"min_turns": 4}])
def test_bad_numbers(tmp_path: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(SinkscopeError, match=rf"{next(iter(wrong))}=|has no conversation with 4"):
        question_positions(put(tmp_path / "a.jsonl", rows("messages")), **wrong)
