"""What may be typed wrong around LoopServe: settings in Python, and the commands of lines, dialogues and reports."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
import typer
from longbench_files import records, save
from organisms.tiny import tiny_model

import sinkscope as ss
from sinkscope.app.cli import command_line, main
from sinkscope.bench.dialogues.form import write_dialogues
from sinkscope.bench.dialogues.recall import recall_dialogues
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
    save(folder / "qasper.jsonl", records("qasper", [30, 40, 50, 60] * 3))
    (folder / "q.manifest.json").mkdir()
    good = write_dialogues(recall_dialogues(2, turns=2, total=200, hops=1, seed=0), folder / "good.jsonl")
    first, second = good.read_text().splitlines()
    content = json.loads(second)
    turns = content["turns"]
    for name, change in {
        "none": {"turns": []},
        "null": {"turns": [turns[0], None]},
        "task": {"task": "taks"},
        "place": {"turns": [turns[0], {**turns[1], "prompts": {"begin": "a"}}]},
        "answer": {"turns": [{**turns[0], "answers": []}]},
        "twice": {"id": json.loads(first)["id"]},
    }.items():
        (folder / f"{name}.jsonl").write_text(f"{first}\n{json.dumps(content | change)}\n")
    (folder / "lacks.jsonl").write_text(f"{first}\n{json.dumps({'id': 'a', 'task': 'recall'})}\n")
    (folder / "cut.jsonl").write_text(f"{first}\n{second[:80]}")
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
    ("words", "says"),
    [
        *LINES,
        ("--head 3", "--head '3': expected a head such as L5.H3"),
        ("--head 99.0", "head 99.0 is not measured: expected one of layers 0 to 5, heads 0 to 7"),
    ],
)
def test_lines(refused: Callable[[str], str], words: str, says: str) -> None:
    assert says in refused(f"lines {words}")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--task qaspr --source .", "task 'qaspr' is unknown: expected one of"),
        ("--task qasper --source none", "no file or folder 'none'"),
        ("--task qasper --source folder", "the folder folder has no qasper.jsonl"),
        ("--task qasper --source empty", "empty has no records of qasper"),
        ("--task qasper --source binary", "binary line 1 is not JSON"),
        ("--task qasper --source words.txt", "words.txt line 1 is not JSON"),
        ("--task qasper --source object.jsonl", "object.jsonl line 1: _id is missing"),
        ("--task qasper --source . --turns 99", "99 turns need"),
        ("--task qasper --source . --form printed", "'--form'"),
        ("--task qasper --source . --tokenizer none", "'none' is not a folder"),
        ("--task qasper --source . --model ./none", "no file or folder './none'"),
        ("--task qasper --source . --hops 3", "--total-tokens and --hops belong to recall"),
        ("--task recal", "recall, longeval_topics, longeval_lines, mt_bench, mt_bench_101, ruler_..., scbench_..."),
        ("--task qasper --source . --out q.jsonl", "q.manifest.json is a folder"),
        ("--task recall --count 0", "'--count'"),
        ("--task recall --count -3", "'--count'"),
        ("--task recall --turns 0", "'--turns'"),
        ("--task recall --turns 500", "give 24000 or more, or fewer turns"),
        ("--task recall --hops 0", "'--hops'"),
        ("--task recall --hops 99", "hops=99 in 3 turns: expected at least 1 and"),
        ("--task recall --total-tokens 1", "total=1 tokens for 3 turns"),
        ("--task recall --out good.jsonl", "good.jsonl is there already: give another --out, or --force"),
        ("--task recall --out folder --force", "folder is a folder"),
        ("--task recall --out words.txt/x", "a part of the path is a file"),
        ("--task recall --out -", "give the set a file of its own"),
        ("--task recall --out ''", "'' is not a file name"),
    ],
)
def test_dialogues_build(refused: Callable[[str], str], words: str, says: str) -> None:
    assert says in refused(f"dialogues build {words}" + (" --out OUT" if "--out" not in words else ""))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--model ./none", "no file or folder './none'"),
        ("--dialogues none", "'none': no such file"),
        ("--dialogues empty", "empty is empty"),
        ("--dialogues binary", "binary is not UTF-8 text"),
        ("--dialogues folder", "'folder': is a directory"),
        ("--dialogues object.jsonl", "object.jsonl line 1: id is missing"),
        ("--dialogues none.jsonl", "none.jsonl line 2: turns is [], expected a list of at least one"),
        ("--dialogues lacks.jsonl", "lacks.jsonl line 2: turns is missing"),
        ("--dialogues null.jsonl", "null.jsonl line 2: turns[1] is None, expected an object"),
        ("--dialogues place.jsonl", "place.jsonl line 2: turns[1]: prompts has begin, expected texts for begin,"),
        ("--dialogues answer.jsonl", "answer.jsonl line 2: turns[0]: answers is empty"),
        ("--dialogues twice.jsonl", "twice.jsonl line 2: id 'recall-0' is that of twice.jsonl line 1 too"),
        ("--dialogues cut.jsonl", "cut.jsonl line 2 is not JSON"),
        ("--dialogues task.jsonl", "task 'taks' is unknown"),
        ("--dialogues good.jsonl --count 99", "--count 99: good.jsonl has 2 dialogues"),
        ("--dialogues good.jsonl --max-new-tokens 32600", "dialogue 'recall-0', turn 2, question at begin: "),
        ("--count 0", "'--count'"),
        ("--methods snapkv:window=x", "window='x': expected a whole number"),
        ("--methods snapkv:windows=3", "snapkv has no setting 'windows=3': it has budget, first"),
        ("--methods loopserve:alpha=0", "alpha=0: expected a share"),
        ("--methods loopserve:alpha=1.5", "alpha=1.5"),
        ("--methods loopserve:interval=0", "interval=0: expected a whole number from 1"),
        ("--methods loopserve:interval=1.5", "interval=1.5: expected a whole number"),
        ("--methods progressive:every=0", "every=0: expected a whole number from 1"),
        ("--methods progressive:first=64:last=64 --budget 100", "budget=100 is below the 64 first and 64 last tokens"),
        ("--positions left", "positions=('left',): expected some of begin, middle, end"),
        ("--positions ,", "no name is given"),
        ("--budget 0", "--budget 0: expected a number of tokens from 1, or a fraction"),
        ("--budget 1.5", "--budget 1.5"),
        ("--budget x", "--budget 'x'"),
        ("--budget -5", "--budget -5"),
        ("--budget nan", "--budget 'nan'"),
        ("--batch-size 0", "'--batch-size'"),
        ("--max-new-tokens 0", "'--max-new-tokens'"),
        ("--out words.txt", "words.txt is a file"),
        ("--out words.txt/x", "cannot write words.txt/x"),
        ("--out .", "holds other files: give a new or empty folder"),
    ],
)
def test_dialogues_run(refused: Callable[[str], str], words: str, says: str) -> None:
    assert says in refused(f"dialogues run {words}" + (" --out OUT" if "--out" not in words else ""))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("dialogues table", "Missing argument"),
        ("dialogues table none", "none is no folder of `sinkscope dialogues run`"),
        ("dialogues table words.txt", "words.txt is no folder"),
        ("dialogues table folder", "folder is no folder of"),
        ("dialogues table folder --json folder", "folder is a folder"),
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


def test_a_run_folder_that_was_damaged(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Table and run both name the file and the line, and touch nothing."""
    words = "dialogues run --count 1 --methods full --positions end --max-new-tokens 2 --dialogues".split()
    words += [str(files / "good.jsonl"), "--out"]
    assert main([*words, str(tmp_path / "good")]) == 0
    for file, content, says in (
        ("settings.json", b"{", "settings.json cannot be read"),
        ("prompts.jsonl", b"[]\n", "prompts.jsonl line 1 is damaged"),
        ("runs.jsonl", b'{"a"\n', "runs.jsonl line 1 is damaged: delete that line"),
        ("runs.jsonl", bytes(range(256)), "runs.jsonl line 1 is damaged"),
    ):
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        (tmp_path / "bad" / file).write_bytes(content)
        for command in ([*words, str(tmp_path / "bad")], ["dialogues", "table", str(tmp_path / "bad")]):
            capsys.readouterr()
            assert main(command) == 2
            err = capsys.readouterr().err
            assert says in err and err.count("\n") == 1
        assert (tmp_path / "bad" / file).read_bytes() == content
    other = [word if word != "2" else "3" for word in words]
    assert main([*other, str(tmp_path / "good")]) == 2
    assert "was begun with other settings (max_new_tokens was 2, now 3)" in capsys.readouterr().err


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
