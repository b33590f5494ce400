"""`loops.check` and `sinkscope loops`: planted loops against what surrounds them, and bad files."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop_texts import TABLES, prose, rows_of
from refusals import refused
from repository import python
from server_streams import SERVERS, events

from sinkscope.files.store import json_lines
from sinkscope.loops import LoopCheck, check, check_file
from sinkscope.loops.text.outputs import Splitter, spans, split


@pytest.mark.parametrize("row", rows_of("verdicts.jsonl"))
def test_row_conclusion_code_and_json_say_the_same(row, tmp_path, monkeypatch, typed):
    """Each part of a text is repeated, with a number in place of {i}."""
    verdict, text = row["verdict"], ""
    for part, first, end in row["parts"]:
        text += "".join(part.replace("{i}", str(number)) for number in range(first, end))
    monkeypatch.chdir(tmp_path)
    Path("x.txt").write_text(text)
    looping = verdict in ("loops", "looped")
    out = typed("loops x.txt --json x.json", 3 if looping else 0).out
    assert re.search(rf"x\.txt +{verdict} ", out) and ("\nTry: " in out) == looping
    (record,) = LoopCheck.load("x.json").records
    if verdict == "loops" and record.period is not None:
        repeated = record.wasted + record.period
        assert record.tokens - record.onset - 48 <= repeated <= record.tokens
        assert f"Conclusion: x.txt loops: its last {repeated} tokens repeat a piece of {record.period}" in out
    assert record.verdict == verdict


@given(st.lists(st.text(alphabet=" \n\tab我ก-.", max_size=40), max_size=12))
def test_a_text_in_any_pieces_has_the_same_words(pieces):
    text = "".join(pieces)
    splitter = Splitter()
    words = [word for piece in pieces for word in splitter.feed(piece)] + splitter.feed("", last=True)
    assert words == split(text) == [word for word, _ in spans(text)]


def test_words_are_split_as_documented():
    assert split("It's 12,5\n  done_x! 我不ok2") == "It|'|s|12|,|5|\n|done_x|!|我|不|ok|2".split("|")
    assert split("!" * 9 + "ﾊﾊกก") == ["!!!!", "!!!!", "!", "ﾊ", "ﾊ", "ก", "ก"]
    assert split("ha" * 9 + " " * 40) == ["hahahahahaha", "hahaha", " ", " "]


CALLS = {"tool_calls": [{"function": {"name": "look", "arguments": '{"at": "the lamp"}'}}] * 60}
ANSWERS = {
    "calls": {"choices": [{"index": 0, "message": CALLS}]},
    "tool": {"type": "message", "content": [{"type": "tool_use", "input": {"x": "one more cup of tea, " * 40}}]},
    "ids": {"text": "fine", "tokens": [*range(90), *[1, 2] * 90]},
    "tokens": {"output": [f"w{i % 4}" for i in range(90)]},
}


@pytest.mark.parametrize("name", ANSWERS)
def test_calls_of_tools_and_tokens_are_read(name):
    text = json_lines([{"text": prose(90)}, ANSWERS[name]])
    verdicts = [one.verdict for one in check_file(io.BytesIO(text.encode()), form="jsonl").records]
    assert verdicts == ["clean", "loops"]


EMPTY = [
    {"choices": [{"message": {"content": ""}}]},
    {"choices": [{"message": {"content": None, "a_field_of_tomorrow": prose(90)}}]},
    {"model": "m", "response": "", "done": True},
    {"text": "", "tokens": []},
]


def test_an_answer_without_text_is_never_clean(tmp_path, typed, monkeypatch):
    """Neither in a file nor in a stream, nor among others; the exit code is none of a check that was made."""
    for answer in EMPTY:
        found = check_file(io.BytesIO(json_lines([{"text": prose(90)}, answer]).encode()), form="jsonl")
        assert [one.verdict for one in found.records] == ["clean", "empty"] and found.exit_code == 1
    (tmp_path / "x.json").write_text(json.dumps(EMPTY[0]))
    assert typed(f"loops {tmp_path / 'x.json'}", 1).out.endswith("x.json has no text.\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(json.dumps(EMPTY[0]).encode())))
    assert "note: no text was found in " in typed("loops --follow", 1).err


def test_reasoning_in_two_fields_is_read_once():
    message = {"content": "Yes.", "reasoning": prose(90), "reasoning_content": prose(90)}
    message["reasoning_details"] = [{"type": "reasoning.text", "text": prose(90)}]
    (once,) = check_file(io.BytesIO(json_lines([{"choices": [{"message": message}]}]).encode())).records
    assert once.tokens == check(f"{prose(90)} Yes.").records[0].tokens


@pytest.mark.parametrize(("server", "name"), zip(SERVERS, cycle(["x.txt", "x.log", "x.json"]), strict=False))
def test_a_saved_stream_is_judged_without_its_envelope(server, name):
    """As the text in it, whatever the name of its file."""
    for text in (prose(100), f"{prose(50)} {'one more cup of tea, ' * 20}"):
        sent = SERVERS[server](text)
        content = json_lines(sent) if server.startswith("ollama") else events(sent)
        (found,) = check_file(io.BytesIO(content.encode()), name=name).records
        assert replace(found, name="1", id="") == check(text).records[0]


@pytest.mark.parametrize("text", ['{"name": "Ada"}\n', 'data: {"choices"\n', "data: seen since 1990\n", ": so\n"])
def test_a_text_that_resembles_a_stream_stays_a_text(text, tmp_path, typed):
    (tmp_path / "x.txt").write_text(f"{text}{prose(50)}")
    if text.startswith("data: {"):  # no JSON follows
        assert "line 1 is no output" in typed(f"loops {tmp_path / 'x.txt'}", 2).err
    else:
        assert "x.txt is clean" in typed(f"loops {tmp_path / 'x.txt'}").out


def test_ids_are_shown_apart(tmp_path, typed):
    (tmp_path / "x.json").write_text(json.dumps({"tokens": [12, 345, 678] * 60}))
    assert "12 345 678" in typed(f"loops {tmp_path / 'x.json'}", 3).out


@pytest.mark.parametrize("name", sorted(TABLES))
def test_tables_whose_rows_follow_a_rule_are_no_loops(name):
    assert check(TABLES[name]).exit_code == 0


class Slow(io.BytesIO):
    """A file that never gives more than 1 KiB."""

    def read1(self, size: int | None = -1) -> bytes:
        return super().read(min(1024, size or 1))


@pytest.mark.parametrize("form", ["text", "jsonl"])
def test_a_file_is_told_of_while_it_is_read(form):
    texts = [f"{prose(200)} {'one more cup of tea, ' * 20} ", *(prose(200, seed) for seed in range(1, 5))]
    content = "".join(texts) if form == "text" else json_lines({"text": text} for text in texts)
    source = Slow(content.encode())
    places: list[int] = []
    found = check_file(source, form=form, told=lambda _: places.append(source.tell()))
    assert places[0] < len(content) / 2 and source.tell() == len(content) and found.exit_code == 3


def test_command_writes_what_the_function_finds(tmp_path, monkeypatch, typed):
    monkeypatch.chdir(tmp_path)
    Path("runs.jsonl").write_text(json_lines([{"text": prose(300)}, {"tokens": [*range(300), *[1, 2] * 300]}]))
    said = typed("loops runs.jsonl --json x.json", 3)
    assert said.out.count("line 2 ") == 1 and said.err == "JSON: x.json\n"
    found = LoopCheck.load("x.json")
    assert found.model.name == "runs.jsonl" and [r.verdict for r in found.records] == ["clean", "loops"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the " * 500)))
    piped = json.loads(typed("loops - --json -", 3).out)
    assert (piped["result"]["records"][0]["verdict"], piped["model"]["name"]) == ("loops", "standard input")


def test_no_torch_is_loaded(tmp_path):
    """By the command, also as it follows a stream, and by the function."""
    (tmp_path / "x.txt").write_text("the " * 400)
    code = (
        "import sys\nfrom sinkscope.app.cli import main\n"
        "code = main(['loops', sys.argv[1]])\n"
        "import sinkscope as ss\nss.loops.check('a b')\n"
        "follow = main(['loops', '--follow', sys.argv[1]])\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'plotly', 'pandas'} & set(sys.modules)), code, follow)"
    )
    done = python(code, str(tmp_path / "x.txt"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[] 3 3"


def test_a_file_is_given_by_its_path_or_open_in_bytes(tmp_path):
    file = tmp_path / "answer.txt"
    file.write_text("I am sorry, I cannot. " * 60)
    for source in (file, str(file), file.open("rb")):
        assert [one.verdict for one in check_file(source).records] == ["loops"]
    for wrong, words in (
        (tmp_path / "no.txt", "cannot read no.txt"),
        (file.open(), "is no binary file"),
        (5, "5 is no"),
    ):
        with refused(words=[words]):
            check_file(wrong)
