"""Only what a model wrote is judged, what its record asked for is no loop, and equal turns are a loop of turns."""

from __future__ import annotations

import gzip
import io
import json
from typing import Any

import pyarrow as pa
import pytest
from loop_texts import prose
from pyarrow import parquet
from refusals import refused
from server_streams import FIXTURES, filled

from sinkscope.files.store import json_lines
from sinkscope.files.texts import read_texts
from sinkscope.loops import CheckedOutput, LoopCheck, check, check_file

LOG = "INFO retry the same request now\n" * 60
SHORT = "It waits for a lock."
SLEPT = "I went home and slept. " * 30
CHATS: dict[str, Any] = json.loads((FIXTURES / "chats.json").read_text())
"""Chats in the forms of servers, exports and agents: <log> was said to the model, <answer> is what it wrote."""


def chat(name: str, answer: str) -> str:
    """The text of a file with a chat."""
    form = filled(CHATS[name], {"log": LOG, "answer": answer})
    return json_lines(form["lines"]) if "lines" in form else json.dumps(form["value"])


def records_in(text: str | bytes, name: str = "x.json") -> tuple[CheckedOutput, ...]:
    data = text.encode() if isinstance(text, str) else text
    return check_file(io.BytesIO(data), name=name).records


@pytest.mark.parametrize("name", CHATS)
def test_only_what_the_model_wrote_is_an_output(name):
    file = CHATS[name]["file"]
    (found,) = records_in(chat(name, SHORT), file)
    assert found.verdict == "clean" and found.tokens in range(6, 20)
    assert [one.verdict for one in records_in(chat(name, SLEPT), file)] == ["loops"]


ASKED, HELLO = "Write the word hello 100 times.", "hello " * 100
TALK = [{"role": "user", "content": ASKED}]
ASKING: dict[str, Any] = {
    "prompt": {"prompt": ASKED, "completion": HELLO},
    "instruction": {"instruction": ASKED, "input": "", "output": HELLO},
    "messages": {"messages": [*TALK, {"role": "assistant", "content": HELLO}]},
    "request": {"request": {"messages": TALK}, "response": HELLO},
    "messages and response": {"messages": TALK, "response": HELLO},
}


@pytest.mark.parametrize("name", ASKING)
def test_what_a_record_asks_for_is_no_loop(name):
    text = json.dumps(ASKING[name])
    (found,) = records_in(text)
    assert found.verdict == "clean"
    for other in ("hello 40 times.", "hello."):
        (found,) = records_in(text.replace("hello 100 times.", other))
        assert found.verdict == "loops"


def test_a_message_a_line_knows_what_was_asked_for():
    rows = [*TALK, {"role": "assistant", "content": HELLO}]
    assert [one.verdict for one in records_in(json_lines(rows), "x.jsonl")] == ["clean"]
    for asked in ("1000 times", "1,000 times", "a thousand times"):
        assert check("hello " * 1000, prompt=f"Write hello {asked}").records[0].verdict == "clean"


def call(command: str) -> dict[str, Any]:
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def told(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def say(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


TEST = "python -m pytest -q | grep passed"
WAIT = "I am still working on the task, please wait."
QUESTIONS = [one for n in range(42) for one in (user(prose(9, n)), say(WAIT))]
TURNS = {
    "equal calls and results": ([call(TEST), told("1263 passed, 4 skipped")] * 42, "loops"),
    "equal calls, other results": ([one for n in range(42) for one in (call(TEST), told(f"{n} passed"))], "suspicious"),
    "equal sentences": ([say(WAIT), user("go on")] * 42, "loops"),
    "equal sentences, other questions": (QUESTIONS, "suspicious"),
    "two calls in turn": ([call(TEST), told("no"), call("ls -la /tmp/work"), told("x")] * 21, "loops"),
    "calls that differ": ([one for n in range(42) for one in (call(prose(7, n)), told("ok"))], "clean"),
    "three equal calls": ([call(TEST), told("1263 passed, 4 skipped")] * 3, "clean"),
    "one answer that loops": ([user("so?"), say(WAIT * 40), user("and?"), say("Well.")], "clean"),
}  # fmt: skip


@pytest.mark.parametrize("name", TURNS)
def test_equal_turns_are_a_loop_of_turns(name):
    turns, verdict = TURNS[name]
    for text, file in ((json.dumps({"messages": turns}), "x.json"), (json_lines(turns), "x.jsonl")):
        found = [one for one in records_in(text, file) if one.channel == "turns"]
        assert [one.verdict for one in found] == ([] if verdict == "clean" else [verdict])


def test_rules_do_not_count_and_letters_do():
    end = "\nAll twelve checks passed, and nothing is left to do.\n"
    for sign in "─═=-*#~_.·•■":
        for title in ("Results\n", "Here it is.\n\n", "", "Two words "):
            for length in (100, 192, 400):
                (found,) = check(f"{title}{sign * length}{end}").records
                assert found.verdict in ("clean", "suspicious"), (sign, title, length)
    box = f"┌{'─' * 78}┐\n" + f"│{' ' * 78}│\n" * 12 + f"└{'─' * 78}┘\n"
    assert check(f"The box\n{box}{end}").records[0].verdict in ("clean", "suspicious")
    for word in ("ha", "!", "😂", "the "):
        assert check(word * 600).records[0].verdict == "loops"


FAR = "".join(f"{prose(11, number)}.\n" for number in range(300)) * 3


def test_zeros_in_base64_and_steps_without_text_are_no_answers():
    (found,) = check('{"rate": 8000, "pcm": "' + "A" * 9000 + '"}').records
    assert found.verdict == "clean"
    assert check("A" * 9000).records[0].verdict == "loops"
    hidden = {"type": "response_item", "payload": {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}}
    said = {"type": "response_item", "payload": {"type": "message", "role": "assistant", "content": SHORT}}
    assert [one.verdict for one in records_in(json_lines([hidden, said, hidden]), "s.jsonl")] == ["clean"]
    cohere = {"chat_history": [{"role": "USER", "message": LOG}, {"role": "CHATBOT", "message": SLEPT}]}
    assert [one.verdict for one in records_in(json.dumps(cohere))] == ["loops"]


DOUBTFUL = {
    "short lines in any order": "".join(f"{('OK.', 'Done.', 'Yes.', 'Sure.')[n * n % 7 % 4]}\n" for n in range(120)),
    "a cycle of 3,300 words": FAR,
    "few words in any order": " ".join(("the", "the the", "the,")[n * n % 7 % 3] for n in range(150)),
}


@pytest.mark.parametrize("name", DOUBTFUL)
def test_short_lines_and_far_cycles_are_suspicious_at_least(name):
    assert check(DOUBTFUL[name]).records[0].verdict in ("suspicious", "loops")
    assert check(FAR[: len(FAR) // 3]).records[0].verdict == "clean"


def test_short_items_that_count_are_a_loop_from_64_tokens_on():
    for items in (" ".join(f"{n}. Grapefruit" for n in range(9, 60)), "".join(f"{n}) plum\n" for n in range(40))):
        (found,) = check(items).records
        assert found.verdict == "loops" and found.detected <= 80
    (found,) = check("".join(f"Chapter {n} {'.' * 60} {7 * n}\n" for n in range(1, 30))).records
    assert found.verdict == "suspicious"


CSV = f'id,Prompt,Response\n1,"Why, so?","{SLEPT}"\n2,{SLEPT},"A fine answer.\nOn two lines."\n'
ROWS = [
    {"id": "1", "Prompt": "Why, so?", "Response": SLEPT},
    {"id": "2", "Prompt": SLEPT, "Response": "A fine answer.\nOn two lines."},
]


def files(folder: Any) -> dict[str, Any]:
    """One table in each form that is read."""
    (folder / "a.csv").write_text(CSV)
    (folder / "a.tsv").write_text(CSV.replace('"Why, so?"', '"Why; so?"').replace(",", "\t"))
    (folder / "b.csv").write_bytes(b"\xef\xbb\xbf" + CSV.replace('"Why, so?"', '"Why; so?"').replace(",", ";").encode())
    (folder / "c.csv").write_bytes(gzip.compress(CSV.encode()))  # its name does not say so
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(json_lines(ROWS).encode()))
    parquet.write_table(pa.Table.from_pylist(ROWS), folder / "e.parquet")
    return {path.name: path for path in sorted(folder.iterdir())}


def test_tables_are_read_by_their_columns(tmp_path, typed):
    for name, path in files(tmp_path).items():
        found = check_file(path.open("rb"), name=name).records
        assert [(one.verdict, one.name) for one in found] == [("loops", "line 1"), ("clean", "line 2")], name
        assert [len(record.messages) for record in read_texts(path)] == [2, 2]
        assert [record.messages[1].text[:6] for record in read_texts(path)] == ["I went", "A fine"]
    typed(f"loops {tmp_path} --json {tmp_path}/x.json", 3)
    assert len(LoopCheck.load(tmp_path / "x.json").records) == 12
    (tmp_path / "f.csv").write_text("a,b\nx,y\n")
    assert (
        "f.csv has the columns a, b: name the one with the answers by --field"
        in typed(f"loops {tmp_path}/f.csv", 2).err
    )
    assert "f.csv is clean" in typed(f"loops {tmp_path}/f.csv --field b").out
    with refused(words=["f.csv record 1 holds no text that is known, there are a, b"]):
        list(read_texts(tmp_path / "f.csv"))
    assert [record.text for record in read_texts(tmp_path / "f.csv", "b")] == ["y"]


def test_a_table_of_messages_or_of_chats_is_read(tmp_path):
    talk = [user(LOG), say(SHORT)]
    parquet.write_table(pa.Table.from_pylist([{"messages": talk}] * 2), tmp_path / "a.parquet")
    (tmp_path / "b.csv").write_text(f"role,content\nuser,{LOG!r}\nassistant,{SHORT}\n")
    (tmp_path / "c.csv").write_text('n,messages\n1,"{}"\n'.format(json.dumps(talk).replace('"', '""')))
    for name, count in (("a.parquet", 2), ("b.csv", 1), ("c.csv", 1)):
        found = check_file((tmp_path / name).open("rb"), name=name).records
        assert [one.verdict for one in found] == ["clean"] * count, name
    assert [one.role for record in read_texts(tmp_path / "c.csv") for one in record.messages] == ["user", "assistant"]


def test_damaged_files_say_so_in_a_line(tmp_path, typed, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    assert "a.parquet is no parquet file" in typed(f"loops {tmp_path}/a.parquet", 2).err
    (tmp_path / "b.csv").write_bytes(b"text\n\xff\xfe\n")
    assert "b.csv is not UTF-8 text" in typed(f"loops {tmp_path}/b.csv", 2).err
    monkeypatch.setattr("sinkscope.files.tables.find_spec", lambda name: None)
    assert "which needs pyarrow: " in typed(f"loops {tmp_path}/a.parquet", 2).err


def test_loops_by_prompt_and_by_any_field(tmp_path, typed):
    lines = []
    for number in range(12):
        text = prose(60, number) if number % 3 else "I went home and slept. " * 20
        lines.append(
            {"prompt": f"Tell me {'a' if number % 2 else 'b'}", "response": text, "model": {"name": f"m{number % 3}"}}
        )
    (tmp_path / "x.jsonl").write_text(json_lines(lines))
    out = typed(f"loops {tmp_path}/x.jsonl --by model.name --json {tmp_path}/x.json", 3).out
    found = LoopCheck.load(tmp_path / "x.json")
    groups = {one.value: one for one in found.groups()}
    assert [(one.answers, one.loop) for one in groups.values()] == [(4, 4), (4, 0), (4, 0)]
    assert groups["m0"].low == pytest.approx(0.51, abs=0.01) and groups["m0"].high == 1  # Wilson, by hand
    assert groups["m0"].onset == 0 and groups["m0"].wasted == sum(one.wasted or 0 for one in found.records)
    assert "51% to 100%" in out and "Loops by model.name" in out
    assert "Tell me b" in typed(f"loops {tmp_path}/x.jsonl --by prompt", 3).out
