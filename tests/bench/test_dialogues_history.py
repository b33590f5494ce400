"""Dialogues that go on from what a method said, and on one cache: against turns replayed by hand and planted facts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from organisms.tiny import tiny_model

import sinkscope as ss
from sinkscope.app.cli import main
from sinkscope.bench.dialogues.recall import recall_dialogue, recall_dialogues
from sinkscope.bench.dialogues.run import Said, run_dialogues
from sinkscope.bench.dialogues.tables import tabulate_dialogues
from sinkscope.bench.files import read_folder
from sinkscope.errors import SinkscopeError
from sinkscope.kv import StreamingLLM

SOME = recall_dialogues(3, turns=2, total=100)


@cache
def model() -> Any:
    return ss.load("recall", backend="hf")


def _records(folder: Path) -> tuple[Said, ...]:
    return tuple(replace(record, seconds=0.0) for record in read_folder(folder, Said, "dialogues").records)


class _EnoughError(Exception):
    pass


def test_a_conversation_goes_on_from_what_the_method_said(tmp_path: Path) -> None:
    """Replayed by hand with one StreamingLLM per turn; the full cache, always right, makes the gold history itself."""
    given: dict[str, Any] = {"positions": ["end"], "budget": 40, "max_new_tokens": 8}
    for history in ("gold", "model"):
        out = tmp_path / history
        run_dialogues(model(), SOME[:2], ["full", "streaming"], out=out, history=history, batch_size=2, **given)
    gold, own = ({(r.method, r.prompt): r for r in _records(tmp_path / name)} for name in ("gold", "model"))
    assert {key: r for key, r in gold.items() if key[0] == "full"} == {
        key: r for key, r in own.items() if key[0] == "full"
    }
    tokenizer = model().tokenizer
    other = 0
    for dialogue in SOME[:2]:
        said: list[str] = []
        for number, turn in enumerate(dialogue.turns):
            said.append(turn.prompts["end"])
            ids = tokenizer("\n\n".join(said), return_tensors="pt")
            with StreamingLLM(budget=40).on(model()):
                made = model().generate(**ids, do_sample=False, max_new_tokens=8)[0].tolist()
            length = ids["input_ids"].shape[1]
            record = own["streaming", f"{dialogue.id} end {number}"]
            assert record.tokens == tuple(made[length:]) and record.prompt_tokens == length
            other += record.prompt_tokens != gold["streaming", record.prompt].prompt_tokens
            said.append(tokenizer.decode(made[length:]))
    assert other  # a wrong answer stood in a history
    table = tabulate_dialogues([tmp_path / "gold", tmp_path / "model"])
    assert [(g.history, g.questions) for g in table.groups if (g.method, g.position) == ("full", "end")] == [
        ("gold", 4),
        ("model", 4),
    ]
    assert "recall by recall after its own answers: full 100.0%" in table.summary()
    assert [line.count("full") for line in table.details()] == [1, 1]


def test_a_conversation_cut_off_ends_the_same(tmp_path: Path) -> None:
    """Dialogues of unequal numbers of turns, batched over dialogues; what was done in the first run is the history."""
    hf, tokenizer = tiny_model("llama", num_hidden_layers=1)
    some = [SOME[0], replace(SOME[1], turns=SOME[1].turns[:1]), SOME[2]]
    given: dict[str, Any] = {
        "tokenizer": tokenizer,
        "max_new_tokens": 3,
        "positions": ["end"],
        "history": "model",
        "batch_size": 3,
    }

    def work(name: str, progress: Any = None) -> tuple[Said, ...]:
        run_dialogues(hf, some, ["full", "tova:budget=8"], out=tmp_path / name, progress=progress, **given)
        return _records(tmp_path / name)

    def stop(_what: str, done: int, _total: int) -> None:
        if done >= 3:
            raise _EnoughError

    whole = work("whole")
    with pytest.raises(_EnoughError):
        work("cut", stop)
    assert len(_records(tmp_path / "cut")) == 3
    assert work("cut") == whole and len(whole) == 10
    with pytest.raises(SinkscopeError, match='history was "model", now "gold"'):
        run_dialogues(hf, some, ["full"], out=tmp_path / "cut", **{**given, "history": "gold"})
    with pytest.raises(SinkscopeError, match=r"turn 2, question at end: .* but the context"):
        run_dialogues(hf, some[:1], ["full"], out=tmp_path / "x", **{**given, "max_new_tokens": 500})
    assert not (tmp_path / "x").exists()  # nothing was computed


# --- One cache over the turns ----------------------------------------------------------------------------------------


def test_what_a_turn_threw_away_is_missing_in_the_next(tmp_path: Path) -> None:
    """The first token of an answer comes from the turn's whole prompt.

    On a fresh cache it is always right; on one that grows it is where the fact was said in this turn, and not where
    it was said in the first, which a window of 40 tokens forgot while it answered.
    """
    dialogues = [recall_dialogue(i, turns=2, tokens=(100, 60), hops=1) for i in range(3)]
    given: dict[str, Any] = {"positions": ["end"], "budget": 40, "max_new_tokens": 5}
    for kind in ("fresh", "grow"):
        run_dialogues(model(), dialogues, ["full", "streaming"], out=tmp_path / kind, cache=kind, **given)
    fresh, grown = ({(r.method, r.prompt): r for r in _records(tmp_path / name)} for name in ("fresh", "grow"))
    for (method, name), record in grown.items():
        if method == "full":
            assert replace(record, read=None) == replace(fresh[method, name], read=None)
            assert record.read == pytest.approx(fresh[method, name].read)
        assert record.prompt_tokens == fresh[method, name].prompt_tokens
    seen: set[bool] = set()
    for dialogue in dialogues:
        for number, turn in enumerate(dialogue.turns):
            key = ("streaming", f"{dialogue.id} end {number}")
            right = turn.answers[0].split()[0]
            own = turn.depends == (number,)
            assert fresh[key].text.split()[0] == right
            assert (grown[key].text.split()[:1] == [right]) == own, key
            seen.add(own)
    assert seen == {True, False}
    made = tabulate_dialogues([tmp_path / "fresh", tmp_path / "grow"])
    assert [(g.cache, g.score) for g in made.groups if (g.method, g.position) == ("full", "end")] == [
        ("fresh", 1.0),
        ("grow", 1.0),
    ]
    assert "recall by recall on one cache: full 100.0%" in made.summary()


def test_own_answers_on_one_cache_and_a_dialogue_that_was_cut_off(tmp_path: Path) -> None:
    """With the full cache, right answers are its own, so both histories are the same; a cut one is run again whole."""

    methods = ["full", "loopserve-0:budget=24"]

    def work(name: str, history: str, progress: Any = None, methods: list[str] = methods) -> tuple[Said, ...]:
        run_dialogues(
            model(),
            SOME[:2],
            methods,
            out=tmp_path / name,
            positions=["end"],
            history=history,
            cache="grow",
            progress=progress,
            max_new_tokens=6,
        )
        return _records(tmp_path / name)

    def stop(_what: str, done: int, _total: int) -> None:
        if done >= 6:
            raise _EnoughError

    whole = work("whole", "model")
    gold = work("gold", "gold", methods=["full"])
    assert [r for r in whole if r.method == "full"] == [*gold]
    with pytest.raises(_EnoughError):
        work("cut", "model", stop)
    assert len(_records(tmp_path / "cut")) == 6
    assert work("cut", "model") == whole and len(whole) == 8
    assert {r.read for r in whole if r.method != "full"} != {r.read for r in whole if r.method == "full"}
    for kind in ("fresh", "grow"):  # the right answers are the history, though the first token alone is asked for
        run_dialogues(model(), SOME[:1], ["full"], out=tmp_path / kind, positions=["end"], cache=kind, max_new_tokens=1)
    assert _records(tmp_path / "fresh") == _records(tmp_path / "grow")


def test_bad_input_and_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["dialogues", "run", "--count", "1", "--methods", "full", "--positions", "end", "--cache", "grow"]
    assert main([*words, "--out", str(tmp_path / "r"), "--batch-size", "2"]) == 2
    assert "a cache that grows is of one dialogue; use batch_size=1" in capsys.readouterr().err
    assert main([*words, "--out", str(tmp_path / "r"), "--history", "model"]) == 0
    assert "recall by recall after its own answers on one cache: full 100.0%" in capsys.readouterr().out
    assert main([*words[:-1], "fresh", "--out", str(tmp_path / "r"), "--history", "model"]) == 2
    assert 'cache was "grow", now null' in capsys.readouterr().err


@pytest.mark.slow
def test_two_ray_workers_make_the_same_table_after_their_own_answers(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    some = recall_dialogues(3, turns=2, total=160)
    given: dict[str, Any] = {"positions": ["end"], "max_new_tokens": 8, "budget": 40, "history": "model"}
    model = ss.load("recall", backend="hf")
    for workers in (1, 2):
        run_dialogues(model, some, ["full", "streaming"], out=tmp_path / str(workers), workers=workers, **given)
    one, two = (tabulate_dialogues([tmp_path / name]) for name in "12")
    assert one.to_dict()["result"] == two.to_dict()["result"]
