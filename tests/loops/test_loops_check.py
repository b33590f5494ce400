"""`loops.check` and `sinkscope loops`: planted loops against what surrounds them, and bad files."""

from __future__ import annotations

import io
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loop_texts import prose

from sinkscope.app.cli import main
from sinkscope.errors import SinkscopeError
from sinkscope.loops import LoopCheck, check, type_token_ratio
from sinkscope.loops.text.outputs import Splitter, TokenRecord, parse, spans, split
from sinkscope.results.result import Result
from sinkscope.results.tables import SCREEN

ROOT = Path(__file__).parents[2]


def _lines(*records: dict[str, Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def test_numbers_are_those_of_the_signals():
    ids = [*range(300), *[5, 6, 7] * 300]
    (record,) = check(ids, max_new=1200).records
    assert record.ttr == type_token_ratio(ids)
    assert record.loop_rule is False  # the first 300 tokens make it diverse as a whole
    assert check(ids[300:], max_new=900).records[0].loop_rule is True
    assert check(ids[300:], max_new=1200).records[0].loop_rule is False  # three quarters of what was allowed
    assert check(torch.tensor(ids)).records == check(ids).records
    assert record.steps[-1] == len(record.curve) * 10 == 1200 and record.curve[-1] == pytest.approx(3 / 256, abs=1e-4)


def test_a_loop_that_was_left_is_still_told():
    """The end is healthy; the monitor saw the middle."""
    ids = [*range(300), *[1, 2] * 200, *range(1000, 1400)]
    (record,) = check(ids).records
    assert record.verdict == "looped"
    assert (record.period, record.onset, record.repeats) == (2, 300, 200)


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (f"{prose(200)} {'one more cup of tea, ' * 40}", "loops"),
        (f"{prose(200)} {'one more cup of tea, ' * 40} and that is all.", "loops"),
        (f"{prose(200)} {'one more cup of tea, ' * 40} {prose(60, 1)}", "looped"),
        ('{"name": "Ada",' + "\n    " * 200, "loops"),
        ('{"name": "Ada",' + "".join(" \n"[i * i % 7 % 2] * (i % 5 + 1) for i in range(300)), "loops"),
        ("".join(f"{i}. I will open the file and read it again.\n" for i in range(30)), "suspicious"),
        ("".join(f"| {i} | stone | river | 7 | lamp |\n" for i in range(30)), "suspicious"),
        (" ".join(" ".join(random.Random(i).sample("we open the old red box".split(), 6)) + "." for i in range(30)),
         "suspicious"),
        (prose(400), "clean"),
        ("def f():\n" + " " * 60 + "return 1\n", "clean"),
    ],
)  # fmt: skip
def test_row_conclusion_code_and_json_say_the_same(text, verdict, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("x.txt").write_text(text)
    code = main(["loops", "x.txt", "--json", "x.json"])
    out = capsys.readouterr().out
    words = {"loops": "loops", "looped": "looped", "suspicious": "is suspicious", "clean": "is clean"}
    assert code == (3 if verdict in ("loops", "looped") else 0)
    assert f"The output in x.txt {words[verdict]};" in out and re.search(rf"x\.txt +{verdict} ", out)
    result = json.loads(Path("x.json").read_text())["result"]
    assert result["records"][0]["verdict"] == verdict
    assert {name: result[name] for name in ("loops", "looped", "suspicious")} == {
        name: int(name == verdict) for name in ("loops", "looped", "suspicious")
    }


@given(st.lists(st.text(alphabet=" \n\tab我ก-.", max_size=40), max_size=12))
def test_a_text_in_any_pieces_has_the_same_words(pieces):
    text = "".join(pieces)
    splitter = Splitter()
    words = [word for piece in pieces for word in splitter.feed(piece)] + splitter.feed("", last=True)
    assert words == split(text) == [word for word, _ in spans(text)]


def test_the_verdict_is_shown_beside_a_long_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / f"{'long-name-' * 12}.txt").write_text("one more cup of tea, " * 40)
    assert main(["loops", str(tmp_path / f"{'long-name-' * 12}.txt")]) == 3
    out = capsys.readouterr().out
    assert re.search(r"^long-name-.*\.\.\..*\.txt +loops +\d+", out, re.M)
    assert max(map(len, out.partition("\n\n")[0].splitlines())) <= 80


def test_results_come_back_from_json(tmp_path):
    found = check(["", "one word", "the " * 300], name="some texts")
    assert Result.load(found.save(tmp_path / "x.json")) == found
    assert isinstance(found, LoopCheck) and found.records[0].tokens == 0 and found.records[0].ttr is None
    assert found.conclusion() == (
        "Of 3 outputs in some texts, 1 loops and 2 are clean; the median type-token ratio is 0.0033, and 1 of the "
        "clean ones."
    )
    assert found.details() == [
        "The loops have a median period of 1 tokens and begin at token 0 (median).",
        "299 tokens behind the first copies are wasted.",
    ]


def test_words_are_split_as_documented():
    assert split("It's 12,5\n  done_x! 我不ok") == ["It", "'", "s", "12", ",", "5", "done_x", "!", "我", "不", "ok"]
    assert split("ha" * 9) == ["hahahahahaha", "hahaha"]


def test_the_first_field_of_a_json_line_that_is_there_is_the_output():
    """Ids before text, whichever comes first; strings and ids both make tokens; empty lines are skipped."""
    text = _lines({"text": "a b a", "tokens": [5, 6]}) + "\n" + _lines({"output": "x y x"}, {"tokens": ["q", "q"]})
    assert parse(text, "a.jsonl") == [
        TokenRecord("line 1", [5, 6]),
        TokenRecord("line 3", [0, 1, 0], "x y x"),
        TokenRecord("line 4", [0, 0]),
    ]
    assert parse('{"a": 1}', "a.txt")[0].ids == [0, 1, 2, 1, 3, 4, 5]
    assert parse('{"text": "a"}', "a.txt", "jsonl") == [TokenRecord("line 1", [0], "a")]


FOLLOW = ["--follow"]


@pytest.mark.parametrize(
    ("more", "name", "content", "said"),
    [
        ([], "x.txt", "", "x.txt is empty: expected a text, or JSON lines"),
        ([], "x.jsonl", " \n\n", "x.jsonl is empty"),
        ([], "x.jsonl", '{"text": "a"}\n\n{"text": \n', "x.jsonl line 3 is not JSON: give JSON lines with text"),
        ([], "x.jsonl", '{"text": "a"}\n[1, 2]\n', "x.jsonl line 2 has none of the fields tokens, output, text"),
        ([], "x.jsonl", '{"tokens": [1, -2]}\n', "x.jsonl line 1: tokens is [1, -2]: expected a string, or a list of"),
        ([], "x.jsonl", '{"text": 5}\n', "x.jsonl line 1: text is 5"),
        ([], "x.txt", b"\xff\xfe\xfa", "x.txt is not UTF-8 text"),
        ([], "y.txt", None, "cannot read y.txt: no such file"),
        (["--variant", "p2"], "x.txt", "a b c", "unknown variant 'p2': there are repeats, tolerant, full"),
        (["--variant", "p1"], "x.txt", "a b c", "--variant p1 judges by a model's probabilities"),
        (["--variant", "p1", *FOLLOW], "x.txt", "a b c", "--variant p1 judges by a model's probabilities"),
        (["--max-new", "0"], "x.txt", "a b c", "max_new=0: expected a whole number from 1"),
        (["--tee"], "x.txt", "a b c", "--tee"),
        # Sessions.
        ([], "x.json", '{"a": 1}', "x.json is no chat history: expected messages with role and content"),
        ([], "x.json", "[1, 2]", "x.json is no chat history"),
        ([], "x.json", '{"messages": [', "x.json line 1 is not JSON: give messages with role and content"),
        ([], "x.json", '[{"role": "user", "content": "a"}, {"b": 1}]', "x.json session entry 2 is no message"),
        ([], "x.jsonl", '{"role": "user", "content": "a"}\n{"text": "b"}\n', "x.jsonl line 1 has none of the fields"),
        (
            [],
            "x.json",
            '[{"messages": [{"role": "user"}]}, {"messages": 5}]',
            "x.json session 2 has no list 'messages'",
        ),
        (["--clean", "o.json"], "x.txt", "words", "--clean has no effect on x.txt, which holds no session"),
        # Streams.
        ([*FOLLOW, "--format", "session"], "x.txt", "a b c", "session"),
        (FOLLOW, "-", b"", "standard input is empty"),
        (FOLLOW, "-", b"\xff\xfe\xfa bad", "standard input is not UTF-8 text"),
        (FOLLOW, "-", 'data: {"choices": [\n\n', "standard input line 1 is no output of a model"),
        (FOLLOW, "-", 'data: {"error": {"message": "no such\\nmodel"}}\n\n', "the server reports an error"),
        (FOLLOW, "-", '{"error": "overloaded"}\n', "the server reports an error, overloaded"),
        (FOLLOW, "-", '{"prompt": "a"}\n', "expected one of the fields choices, tokens, output, text, token"),
        (FOLLOW, "-", '{"tokens": [1, -2]}\n', "-2 is no token"),
        (FOLLOW, "-", 'data: {"choices": [{"delta": 5}]}\n\n', "standard input line 1 is no output of a model"),
    ],
)
def test_bad_input_is_refused_in_a_line(more, name, content, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if isinstance(content, str):
        content = b"\xef\xbb\xbf" + content.encode()  # some editors begin a file with it: it is no part of a line
    if name == "-":
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    elif content is not None:
        Path(name).write_bytes(content)
    assert main(["loops", name, *more]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and said in err and err.count("\n") == 1
    assert not Path("o.json").exists()


@pytest.mark.parametrize("wrong", [[], [1.5, 2.5], [[1], [2.5]], [True, False]])
def test_an_input_that_is_neither_text_nor_ids_is_refused(wrong):
    with pytest.raises(SinkscopeError, match=r"cannot be checked|expected a string, or a list of token ids"):
        check(wrong)


def test_command_writes_what_the_function_finds(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("runs.jsonl").write_text(_lines({"text": prose(300)}, {"tokens": [*range(300), *[1, 2] * 300]}))
    assert main(["loops", "runs.jsonl", "--json", "x.json", "--html", "x.html", "--max-new", "900"]) == 3
    out, err = capsys.readouterr()
    found = Result.load("x.json")
    assert (
        isinstance(found, LoopCheck)
        and out == found.text(lines=SCREEN) + "\n"
        and err == "JSON: x.json\nPage: x.html\n"
    )
    assert found.model.name == "runs.jsonl" and [r.verdict for r in found.records] == ["clean", "loops"]
    assert [r.loop_rule for r in found.records] == [False, False]
    assert 'class="plot"' in Path("x.html").read_text(encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO("the " * 500))
    assert main(["loops", "-", "--json", "-"]) == 3
    piped = json.loads(capsys.readouterr().out)
    assert piped["kind"] == "loops" and piped["result"]["loops"] == 1 and piped["model"]["name"] == "standard input"


def test_the_figure_shows_loops_and_their_detection():
    found = check([prose(400), [*range(300), *[1, 2] * 300]])
    data = found.figure().data
    assert {trace.name for trace in data if trace.mode == "lines"} == {"loops", "clean"}
    points = {trace.name: list(trace.x) for trace in data if trace.mode == "markers"}
    assert points == {"detected": [found.records[1].detected]}


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
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "x.txt")], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "\nConclusion: The output in x.txt loops; the median" in done.stdout
    assert done.stdout.splitlines()[-2].startswith("loop in ")
    assert done.stdout.splitlines()[-1] == "[] 3 3"


def test_the_example_of_the_documentation():
    page = (ROOT / "docs/measure/loops.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    exec(compile(example, "loops.md", "exec"), {})
