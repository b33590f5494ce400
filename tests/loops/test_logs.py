"""`sinkscope loops` on logs: public shapes, lines that cannot be read, several files, and what is said first."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path

import pytest
from loop_texts import prose
from server_streams import LINES, STREAMS, filled

import sinkscope as ss
from sinkscope.files.store import json_lines
from sinkscope.loops import LoopCheck, Watch, check, check_file

LOOP = "I went to the market and bought an apple for my mother. " * 12
FINE = prose(120)
TOKENS, FINE_TOKENS = (one.tokens for one in check([LOOP, FINE]).records)


@pytest.mark.parametrize("shape", LINES)
def test_the_answer_of_a_line_is_read_and_its_prompt_is_not(shape):
    """In lines, and in one document on several lines."""
    values = []
    for prompt, answer in (("Tell me.", LOOP), (LOOP, FINE)):
        values.append(filled(LINES[shape], {"prompt": prompt, "answer": answer, "id": "req-7f3a"}))
    for text, fine in ((json_lines(values), [("clean", FINE_TOKENS)]), (json.dumps(values[0], indent=1), [])):
        found = check_file(io.BytesIO(text.encode()), name="x.jsonl").records
        if shape.startswith("MT-bench"):  # two answers, the first of which is one word
            found = found[1::2]
        assert (found[0].verdict, found[0].tokens, found[0].id) == ("loops", TOKENS, "req-7f3a")
        assert [(one.verdict, one.tokens) for one in found[1:]] == fine


@pytest.mark.parametrize("server", STREAMS)
@pytest.mark.parametrize("form", ["sse", "jsonl"])
def test_a_stream_is_judged_as_its_text(server, form):
    sent = [json.dumps(event) for event in STREAMS[server](LOOP)]
    text = "".join(f"data: {event}\n\n" for event in sent) if form == "sse" else "\n".join(sent)
    watch = Watch()
    assert len(list(watch.follow(io.BytesIO(text.encode()), name="x.jsonl"))) == 1
    assert [(one.verdict, one.tokens) for one in watch.checked] == [("loops", TOKENS)]


def test_bad_lines_are_skipped_counted_and_named_at_the_end(tmp_path, monkeypatch, typed):
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"id": "a", "text": FINE}), "{broken", json.dumps({"error": "slow"}), *['{"a": 1}'] * 48]
    Path("x.jsonl").write_text("\n".join([*lines, json.dumps({"id": "b", "text": LOOP})]))
    said = typed("loops x.jsonl --json x.json", 3).out
    assert "Skipped 50: x.jsonl line 2 is no output of a model" in said and "line 20" in said and "and 30 more" in said
    found = LoopCheck.load("x.json")
    assert [one.verdict for one in found.records] == ["clean", "loops"] and found.skipped == 50
    Path("x.jsonl").write_text("\n".join(lines[1::-1]))
    assert "Skipped 1: x.jsonl line 1" in typed("loops x.jsonl", 1).out  # what was not read may loop


@pytest.mark.parametrize(
    ("field", "line"),
    [
        ("response.choices", {"response": {"choices": [{"index": 0, "message": {"content": LOOP}}]}}),
        ("log.said", {"log": {"said": LOOP}, "text": FINE}),
        ("turns.1", {"turns": [FINE, LOOP]}),
        ("history", {"history": [{"role": "user", "content": FINE}, {"role": "assistant", "content": LOOP}]}),
    ],
)
def test_a_field_says_where_the_answers_are(field, line, tmp_path, typed):
    (tmp_path / "x.log").write_text(json.dumps(line) + "\n")
    out = typed(f"loops {tmp_path}/x.log --field {field} --json {tmp_path}/x.json", 3).out
    (found,) = LoopCheck.load(tmp_path / "x.json").records
    assert found.verdict == "loops" and "loops" in out


def test_several_files_folders_and_gz(tmp_path, monkeypatch, typed):
    monkeypatch.chdir(tmp_path)
    Path("logs/.hidden").mkdir(parents=True)
    Path("logs/.hidden/x.txt").write_text(LOOP)
    Path("logs/fine.txt").write_text(FINE)
    Path("logs/picture.png").write_bytes(b"\x89PNG")
    Path("logs/broken.txt").write_bytes(b"\xff\xfe")
    with gzip.open("logs/day.jsonl.gz", "wt") as file:
        file.write(json.dumps({"id": "r9", "text": LOOP}) + "\n" + json.dumps({"text": FINE}))
    Path("one.jsonl").write_text(json.dumps({"text": FINE}))
    out, err = typed("loops logs one.jsonl --json x.json", 3)
    assert "note: picture.png was not read" in err and ".hidden" not in err
    found = LoopCheck.load("x.json")
    names = [one.name for one in found.records]
    assert names == ["day.jsonl.gz line 1", "day.jsonl.gz line 2", "fine.txt", "one.jsonl line 1"]
    assert "Of 4 outputs in 4 files" in out and "Skipped 1: broken.txt is not UTF-8 text" in out
    (Path("logs") / "day.jsonl.gz").write_bytes(Path("logs/day.jsonl.gz").read_bytes()[:-20])
    assert "day.jsonl.gz breaks off" in typed("loops logs", 3).out


def test_loops_come_first_with_their_id_and_an_excerpt(tmp_path, typed):
    lines = [{"id": f"r{number}", "text": FINE} for number in range(20)] + [{"id": "bad", "text": LOOP}]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, lines)))
    rows = [line for line in typed(f"loops {tmp_path}/x.jsonl", 3).out.splitlines() if "line " in line]
    assert rows[0].split()[:4] == ["line", "21", "loops", "bad"] and "I went to the market" in rows[0]


def test_an_excerpt_begins_where_the_loop_began():
    for words in ("Hello", "Hello there", "Hello, you"):
        (one,) = ss.loops.check(f"{words} " + "I am sorry, but no. " * 30).records
        assert one.excerpt == "I am sorry , but no ." and one.onset == len(words.replace(",", " ,").split())


def test_fail_on_suspicious(tmp_path, typed):
    (tmp_path / "x.txt").write_text("".join(f"| {n} | apple | 7.5 | red |\n" for n in [3] * 30))
    path = str(tmp_path / "x.txt")
    assert "suspicious" in typed(["loops", path]).out
    for more in ([], ["--follow"]):
        typed(["loops", path, "--fail-on", "suspicious", *more], 3)


def test_the_others_are_read_where_a_file_is_missing_or_broken(tmp_path, monkeypatch, typed):
    monkeypatch.chdir(tmp_path)
    Path("loop.txt").write_text(LOOP)
    Path("broken.jsonl").write_text("{broken\n")
    found = typed("loops a.txt loop.txt b.txt broken.jsonl", 2)
    assert found.err.splitlines()[0].startswith("error: cannot read a.txt: no such file") and "b.txt" in found.err
    assert "Skipped 3: " in found.out and "Of 1 output in 4 files, 1 loops." in found.out
    out = typed("loops loop.txt broken.jsonl", 3).out
    assert "Skipped 1: broken.jsonl line 1" in out
