"""Saved conversations: continued they are what they would have been, and anything else than a whole one is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kv_kit import shallow_of as model_of
from test_conversation import NEW, SMALL, ask, logits, said, tensors

from sinkscope.errors import SinkscopeError
from sinkscope.interventions.sink_detector import SinkDetector
from sinkscope.interventions.sink_patch import SinkPatch
from sinkscope.kv import H2O, TOVA, AdaKV, Full, StreamingLLM
from sinkscope.kv.loopguard import LoopGuard
from sinkscope.kv.loopserve import saved
from sinkscope.kv.loopserve.conversation import Conversation

GUARD = LoopGuard.paper(budget=40, anchors=2, window=8, variant="always", monitor={"warmup": 0, "every": 3})


@pytest.mark.parametrize(
    ("edit", "answers"),
    [
        (None, "recompute"),
        (None, "keep"),
        (SMALL, "recompute"),
        (SMALL | GUARD, "keep"),
        (H2O(budget=20), "keep"),
        (AdaKV(budget=20, window=4, floor=0.0), "keep"),
        (StreamingLLM(budget=20, positions="rebased"), "recompute"),
        (TOVA(budget=20, mode="select"), "keep"),
        (SinkPatch(layer=1, neurons=[3, 5]), "recompute"),
        (SinkDetector(layer=1, neurons=[3], levels=[0.001], threshold=-1e9) | H2O(budget=20), "recompute"),
    ],
    ids=str,
)
def test_continued_as_if_never_saved(edit: Any, answers: Any, tmp_path: Path) -> None:
    chat = Conversation(model_of("llama"), edit, answers=answers)
    for number in range(2):
        ask(chat, number)
    chat.save(tmp_path / "talk")
    restored = Conversation.load(tmp_path / "talk", model_of("llama"), edit)
    assert (restored.answers, restored.chat, restored.ids) == (answers, False, chat.ids)
    assert all(torch.equal(a, b) for a, b in zip(tensors(chat), tensors(restored), strict=True))
    for old, new in zip(chat.turns, restored.turns, strict=True):
        assert (old.prompt, old.ids, old.text, old.prompt_tokens, old.queries, old.read) == (
            new.prompt,
            new.ids,
            new.text,
            new.prompt_tokens,
            new.queries,
            new.read,
        )
        assert [(e.kind, e.step, e.position) for e in old.events] == [(e.kind, e.step, e.position) for e in new.events]
        for a, b in zip(old.lines, new.lines, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert a.queries == b.queries
                assert torch.equal(a.vertical, b.vertical) and torch.equal(a.slash, b.slash)
    goes_on, again = ask(chat, 2), ask(restored, 2)
    assert torch.equal(logits(goes_on), logits(again)) and goes_on.ids == again.ids
    assert goes_on.events == again.events
    assert all(torch.equal(a, b) for a, b in zip(tensors(chat), tensors(restored), strict=True))


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved conversation of one turn."""
    folder = tmp_path_factory.mktemp("saved") / "talk"
    chat = Conversation(model_of("llama"), SMALL)
    ask(chat, 0)
    chat.save(folder)
    return folder


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: model_of("llama", seed=1), "was held with LlamaForCausalLM (fingerprint "),
        (lambda: model_of("llama", num_hidden_layers=3), "was held with LlamaForCausalLM (fingerprint "),
        (lambda: model_of("qwen3"), "give the same model"),
        (lambda: model_of("llama").double(), "give the same model"),
    ],
)
def test_another_model_is_refused(talk: Path, make: Callable[[], Any], words: str) -> None:
    with pytest.raises(SinkscopeError, match=re.escape(words)) as caught:
        Conversation.load(talk, make(), SMALL)
    assert "\n" not in str(caught.value)


def _edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        file = folder / "conversation.json"
        data = json.loads(file.read_text(encoding="utf-8"))
        change(data)
        file.write_text(json.dumps(data), encoding="utf-8")

    return do


def _flip(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)


def _cut(name: str) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        (file,) = folder.glob(name)
        file.write_bytes(file.read_bytes()[:-10])

    return do


def _other_tensors(folder: Path) -> None:
    """A safetensors file that is whole and says what the JSON expects of it, but holds something else."""
    from safetensors.torch import save_file

    (file,) = folder.glob("*.safetensors")
    save_file({"x": torch.zeros(2)}, file)
    _edit(lambda data: data.update(sha256=saved._sha256(file)))(folder)  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_flip, "is missing or damaged"),
        (_cut("*.safetensors"), "is missing or damaged"),
        (lambda folder: next(folder.glob("*.safetensors")).unlink(), "is missing or damaged"),
        (_cut("*.json"), "conversation.json is not JSON"),
        (lambda folder: (folder / "conversation.json").unlink(), "no such file or directory"),
        (shutil.rmtree, "no such file or directory"),
        (_edit(lambda data: data.update(kind="lines")), "has kind and schema ('lines', 1)"),
        (_edit(lambda data: data.update(schema=9)), "has kind and schema ('conversation', 9)"),
        (_edit(lambda data: data.pop("layers")), "layers is missing"),
        (_edit(lambda data: data.update(turns=3)), "turns is 3"),
        (_edit(lambda data: data["turns"][0].update(ids=[96])), "conversation.json, turn 1: token id 96 is none of"),
        (_edit(lambda data: data["turns"][0].update(prompt=[5, 6])), "its two files do not fit"),
        (_edit(lambda data: data["layers"].pop()), "its two files do not fit"),
        (_edit(lambda data: data["layers"][0].update(seen=3)), "its two files do not fit"),
        (_edit(lambda data: data.update(tensors="../" + data["tensors"])), "is missing or damaged"),
        (_other_tensors, "its two files do not fit"),
    ],
)
def test_damaged_and_foreign_files_are_refused_in_one_line(
    talk: Path, tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(talk, folder)
    damage(folder)
    with pytest.raises(SinkscopeError, match=re.escape(words)) as caught:
        Conversation.load(folder, model_of("llama"), SMALL)
    assert "\n" not in str(caught.value) and caught.value.page in ("saved-conversation", None)


def test_the_edit_has_to_be_given_again_and_may_be_another(talk: Path) -> None:
    with pytest.raises(SinkscopeError, match=r"was held under LoopServe\(budget=12, alpha=0.8"):
        Conversation.load(talk, model_of("llama"))
    chat = Conversation.load(talk, model_of("llama"), Full())
    turn = ask(chat, 1)
    assert turn.read == turn.prompt_tokens + NEW / 2 and turn.lines == (None,) * 2


def test_an_edit_that_is_not_the_saved_one_knows_nothing_of_earlier_tokens(tmp_path: Path) -> None:
    chat = Conversation(model_of("llama"), SinkPatch(layer=1, neurons=[3, 5]))
    ask(chat, 0)
    chat.save(tmp_path)
    with pytest.raises(SinkscopeError, match="the first 40 tokens were read before this run"):
        ask(Conversation.load(tmp_path, model_of("llama"), SinkPatch(layer=1, neurons=[7])), 1)


def test_an_earlier_save_stands_until_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = Conversation(model_of("llama"))
    ask(chat, 0)
    chat.save(tmp_path)
    ask(chat, 1)

    def fails(*_: Any) -> None:
        raise KeyboardInterrupt

    for name in ("write_atomic", "_sha256"):
        with monkeypatch.context() as m:
            m.setattr(saved, name, fails)
            with pytest.raises(KeyboardInterrupt):
                chat.save(tmp_path)
        assert len(Conversation.load(tmp_path, model_of("llama")).turns) == 1
    chat.save(tmp_path)
    assert len(Conversation.load(tmp_path, model_of("llama")).turns) == 2
    kinds = sorted(file.suffix for file in tmp_path.iterdir())
    assert kinds == [".json", ".safetensors"]
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    chat = Conversation(model_of("llama"))
    with pytest.raises(SinkscopeError, match="nothing was said yet"):
        chat.save(tmp_path)
    chat.ask(said(0), max_new_tokens=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(SinkscopeError, match="cannot write"):
        chat.save(tmp_path / "file")
    with pytest.raises(SinkscopeError, match="cannot write"):
        chat.save(tmp_path / "file" / "below")
