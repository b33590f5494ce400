"""What may be typed wrong around LoopServe: settings in Python, and the commands of lines, dialogues and reports."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
import typer
from organisms.tiny import tiny_model

import sinkscope as ss
from sinkscope.app.cli import command_line, main
from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.kv import H2O, TOVA, AdaKV, AShape, MInference, Progressive, SnapKV, StreamingLLM, TriShape, make_policy


@pytest.fixture
def untyped() -> Iterator[None]:
    """Without the tests' own check of types, which would speak first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ss.LoopServe(alpha=0), "alpha=0: expected a share above 0 and up to 1"),
        (lambda: ss.LoopServe(alpha=1.5), "alpha=1.5"),
        (lambda: ss.LoopServe(alpha=float("nan")), "alpha=nan"),
        (lambda: ss.LoopServe(interval=0), "interval=0: expected a whole number from 1"),
        (lambda: ss.LoopServe(sample=0), "sample=0: expected a whole number from 1"),
        (lambda: ss.LoopServe(budget=0), "budget=0: expected a number of tokens from 1, or a fraction"),
        (lambda: ss.LoopServe(budget=1.5), "budget=1.5"),
        (lambda: ss.LoopServe(first=-1), "first=-1: expected a whole number from 0"),
        (lambda: Progressive(budget=8, first=4, last=8), "budget=8 is below the 4 first and 8 last tokens"),
        (lambda: SnapKV(budget=32), "budget=32 is below the 0 first and 64 last tokens"),
        (lambda: StreamingLLM(budget=3), "budget=3 is below the 4 first"),
        (lambda: make_policy("snapkv", UNIFORM=True), "policy 'snapkv' has no 'UNIFORM'; it has: budget, first"),
    ],
)
def test_settings_that_make_no_sense(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(SinkscopeError) as caught:
        make()
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (partial(ss.LoopServe, alpha="a"), "LoopServe: alpha='a': expected a share"),
        (partial(ss.LoopServe, budget="x"), "LoopServe: budget='x': expected a number"),
        (partial(ss.LoopServe, interval=True), "LoopServe: interval=True: expected a whole number"),
        (partial(ss.LoopServe, interval=1.5), "LoopServe: interval=1.5: expected a whole number"),
        (partial(ss.LoopServe, sample=4.5), "LoopServe: sample=4.5: expected a whole number"),
        (partial(ss.LoopServe, prefill="no"), "LoopServe: prefill='no': expected True or False"),
        (partial(ss.LoopServe, variant="best"), "LoopServe: variant='best': expected 'exact' or 'faithful'"),
        (partial(ss.LoopServe, dense_above="x"), "LoopServe: dense_above='x': expected a number"),
        (partial(Progressive, after="x"), "Progressive: after='x': expected a whole number"),
        (partial(StreamingLLM, budget="x"), "StreamingLLM: budget='x': expected a number"),
        (partial(StreamingLLM, budget=None), "StreamingLLM: budget=None: expected a number"),
        (partial(StreamingLLM, budget=True), "StreamingLLM: budget=True: expected a number"),
        (partial(TOVA, every=1.5), "TOVA: every=1.5: expected a whole number from 1 or 'prefill'"),
        (partial(TOVA, every="never"), "TOVA: every='never'"),
        (partial(TOVA, first=None), "TOVA: first=None: expected a whole number"),
        (partial(H2O, recent="half"), "H2O: recent='half': expected a number"),
        (partial(SnapKV, window=6.5), "SnapKV: window=6.5: expected a whole number"),
        (partial(AdaKV, floor=None), "AdaKV: floor=None: expected a number"),
        (partial(AShape, local="4k"), "AShape: local='4k': expected a whole number"),
        (partial(TriShape, dense_rows=1.5), "TriShape: dense_rows=1.5: expected a whole number"),
        (partial(MInference, vertical=None), "MInference: vertical=None: expected a whole number"),
    ],
)
def test_settings_of_another_type(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(SinkscopeError) as caught:
        make()
    assert str(caught.value).startswith(says)


@pytest.mark.usefixtures("untyped")
def test_whole_numbers_are_numbers() -> None:
    assert ss.LoopServe(alpha=1, dense_above=1).alpha == H2O(recent=1).recent == 1


@pytest.mark.parametrize("policy", [StreamingLLM(budget=8), ss.LoopServe(shortest=0), ss.LoopGuard(budget=64)], ids=str)
def test_generating_without_a_cache(policy: Any) -> None:
    """A policy of the cache could only look on."""
    model = tiny_model("llama")[0]
    ids = torch.arange(5, 17)[None]
    with policy.on(model):
        with pytest.raises(UnsupportedError, match=r"use_cache=False.*generate with use_cache=True"):
            model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=False)
        out = model.generate(ids, max_new_tokens=4, do_sample=False)  # and nothing is left of it
    assert out.shape == (1, 16)


def test_prompts_need_no_cache() -> None:
    model = tiny_model("llama")[0]
    ids = torch.arange(5, 17)[None]
    with ss.LoopServe(shortest=0, decode=False, alpha=0.5, dense_above=2.0).on(model) as run:
        model.generate(ids, max_new_tokens=2, do_sample=False, use_cache=False)
    assert run.counts["prefill"]


# --- Commands --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of what people have lying around."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "folder").mkdir()
    (folder / "empty").write_text("")
    (folder / "binary").write_bytes(bytes(range(256)) * 40)
    (folder / "words.txt").write_text("hello\nworld\n")
    (folder / "object.jsonl").write_text('{"a": 1}\n')
    return folder


# Made anew in every call, a command takes longer than what is tested.
_command, _line = functools.cache(typer.main.get_command), functools.cache(command_line)
NAMES = ("lines", "overlap", "dialogues", "build", "run", "table", "report")  # of the commands that are typed here


@pytest.fixture
def refused(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[[str], str]:
    """Type a command that has to be refused beside these files, where "OUT" is a path; what it says."""
    monkeypatch.chdir(files)
    monkeypatch.setattr("typer.main.get_command", _command)
    monkeypatch.setattr("sinkscope.app.cli.command_line", lambda words: _line(tuple(w for w in words if w in NAMES)))
    out = tmp_path / "out"
    there = sorted(os.listdir(files))

    def typed(words: str) -> str:
        capfd.readouterr()
        code = main([word.strip("'").replace("OUT", str(out)) for word in words.split()])
        said, err = capfd.readouterr()
        assert (code, said, err.count("\n")) == (2, "", 1), err
        assert err.startswith("error: ") and len(err) < 400
        assert sorted(os.listdir(files)) == there and not out.exists()
        return err.removeprefix("error: ").strip()

    return typed


LINES = [
    ("--model ./none", "no file or folder './none'"),
    ("--model ''", "the model name is empty"),
    ("--text none", "cannot read none: no such file or directory"),
    ("--text empty", "'empty' is empty"),
    ("--text binary", "binary is not UTF-8 text: convert it"),
    ("--text folder", "cannot read folder: is a directory"),
    ("--text words.txt", "give a longer --text"),
    ("--data none", "'none': no such file"),
    ("--data empty", "empty is empty: give a file of LongBench, LongBench v2, LongEval"),
    ("--data binary", "binary is not UTF-8 text"),
    ("--data folder", "'folder': is a directory"),
    ("--data words.txt", "words.txt line 1 is not JSON"),
    ("--data object.jsonl", "object.jsonl line 1: the fields of a prompt are missing"),
    ("--count 0", "'--count'"),
    ("--count -2", "it is '-2'"),
    ("--count 99999", "99999 were asked for: give a longer --text, or a smaller --count"),
    ("--length 0", "--length 0: expected 16 to"),
    ("--length -5", "--length -5: expected 16 to"),
    ("--length 999999", "--length 999999: expected 16 to"),
    ("--length x", "'--length'"),
    ("--eta 0", "--eta 0.0: expected a share above 0 and up to 1"),
    ("--eta 1.5", "--eta 1.5"),
    ("--eta nan", "--eta nan"),
    ("--eta x", "'--eta'"),
    ("--layer 99", "layer 99 is not in bundled, which has 6 layers: give one from 0 to 5"),
    ("--layer -1", "layer -1 is not in bundled, which has 6 layers: give one from 0 to 5"),
    ("--seed -1", "'--seed'"),
    ("--backend bridge", "queries and keys of a TransformerBridge are not offered"),
    ("--json folder", "folder is a folder"),
    ("--json words.txt/x.json", "a part of the path is a file"),
    ("--json OUT --html OUT", "given for two outputs"),
    ("--html -", "only --json writes to standard output"),
]


@pytest.mark.parametrize(
    ("command", "words", "says"),
    [
        *(("lines", *case) for case in LINES),
        *(pytest.param("overlap", *case, marks=() if i % 3 else pytest.mark.slow) for i, case in enumerate(LINES[::3])),
    ],
)
def test_lines_and_overlap(refused: Callable[[str], str], command: str, words: str, says: str) -> None:
    assert says in refused(f"{command} {words}")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("lines --head 3", "--head '3': expected a head such as L5.H3"),
        ("lines --head 99.0", "head 99.0 is not measured: expected one of layers 0 to 5, heads 0 to 7"),
        ("overlap --count 1", "'--count'"),
        ("overlap --budget 0", "--budget 0.0: expected a share"),
        ("overlap --budget 1.5", "--budget 1.5"),
        ("overlap --budget x", "'--budget'"),
        ("overlap --window 0", "'--window'"),
        ("overlap --window 5000", "--window 5000: expected at most 512, the tokens of the shortest prompt"),
        ("overlap --max-new-tokens -1", "'--max-new-tokens'"),
        ("overlap --max-new-tokens 99999", "do not fit 512 tokens: raise --length, or lower --max-new-tokens"),
    ],
)
def test_lines_or_overlap(refused: Callable[[str], str], words: str, says: str) -> None:
    assert says in refused(words)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("bench table", "Missing argument"),
        ("bench table none", "none is no folder of `sinkscope bench`"),
        ("bench table words.txt", "words.txt is no folder"),
        ("bench table folder --json folder", "folder is a folder"),
        ("report", "Missing argument 'DIR'"),
        ("report none", "none does not exist: give the folder"),
        ("report words.txt", "words.txt is no folder"),
        ("report folder", "no results in folder: it should hold what --json"),
        ("report . --out folder", "folder is a folder"),
        ("report . --out words.txt/x.html", "a part of the path is a file"),
    ],
)
def test_table_and_report(refused: Callable[[str], str], words: str, says: str) -> None:
    assert says in refused(words)


# --- Conversations ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("untyped")
def test_what_is_no_prompt_and_no_edit() -> None:
    model: Any = tiny_model("llama")[0]
    given: Any
    for given in (None, 5):
        with pytest.raises(
            SinkscopeError, match=r"turn 1, the prompt: .*: expected a text, a list of texts, token ids"
        ):
            ss.Conversation(model).ask(given)
    for given in ("loopserve", ss.LoopServe):
        with pytest.raises(SinkscopeError, match=r"^edit=.*: expected LoopServe\(...\), a policy, patch or guard, or"):
            ss.Conversation(model, given)


def test_conversation(tmp_path: Path) -> None:
    model, tokenizer = tiny_model("llama", max_position_embeddings=48)
    chat = ss.Conversation(model, ss.LoopServe(shortest=0), tokenizer=tokenizer)
    chat.ask([5, 6, 7], max_new_tokens=4)
    before = chat.ids
    with pytest.raises(SinkscopeError, match=r"turn 2, .*but the context of .* is 48: "):
        chat.ask([5] * 60, max_new_tokens=4)
    with pytest.raises(SinkscopeError, match="turn 2, the prompt: there is no token id in a row"):
        chat.ask([])
    assert chat.ids == before
    chat.save(tmp_path / "chat")
    with pytest.raises(SinkscopeError, match=r"chat was held with .*give the same model"):
        ss.Conversation.load(tmp_path / "chat", tiny_model("llama", num_hidden_layers=2)[0], ss.LoopServe())
    with pytest.raises(SinkscopeError, match=r"was held with .*give the same model"):
        other = tiny_model("llama", seed=3, max_position_embeddings=48)[0]
        ss.Conversation.load(tmp_path / "chat", other, ss.LoopServe())
