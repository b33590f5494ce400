"""Several conversations asked at once, each as if alone; and conversations on transformers' own caches."""

from __future__ import annotations

import re
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from kv_kit import shallow_of as model_of
from test_conversation import ALARM, SMALL, ask, said, tensors
from transformers.cache_utils import DynamicLayer, QuantizedLayer

from sinkscope.errors import SinkscopeError
from sinkscope.interventions.sink_patch import SinkPatch
from sinkscope.kv import H2O, TOVA, AdaKV, Full, SnapKV, StreamingLLM
from sinkscope.kv.loopguard import LoopGuard
from sinkscope.kv.loopserve import LoopServe, saved
from sinkscope.kv.loopserve.conversation import Conversation
from sinkscope.kv.loopserve.saved import Turn

NEW = 6
TEXTS = ((40, 9, 5), (17, 30, 12), (26, 4, 21))  # lengths of the prompts of three conversations, turn by turn
MORE: Any = {"max_new_tokens": NEW, "output_logits": True, "return_dict_in_generate": True}
GUARD = LoopGuard.paper(budget=30, anchors=2, window=8, variant="always", monitor={"warmup": 0, "every": 3})


def prompt(row: int, turn: int) -> list[int]:
    return said(0, TEXTS[row][turn] + row)[row:]


@cache
def first_answer(family: str, edit: Any) -> tuple[int, ...]:
    return Conversation(model_of(family), edit).ask(prompt(0, 0), max_new_tokens=NEW).ids


def same(one: Turn, row: int, other: Turn) -> None:
    """A row of a batch is what the conversation alone is."""
    for name in ("prompt", "ids", "text", "prompt_tokens", "queries"):
        assert getattr(one, name) == getattr(other, name)
    assert one.read == pytest.approx(other.read)
    steps = len(other.ids)
    mine = torch.stack(one.output.logits, 1)[row, :steps]
    torch.testing.assert_close(mine, torch.stack(other.output.logits, 1)[0], atol=1e-5, rtol=1e-5)
    assert [(e.kind, e.row, e.step, e.position) for e in one.events] == [
        (e.kind, e.row, e.step, e.position) for e in other.events
    ]
    for a, b in zip(one.lines, other.lines, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert torch.equal(a.vertical, b.vertical) and torch.equal(a.slash, b.slash)


EDITS: list[tuple[str, Any]] = [
    ("llama", None),
    ("gpt2", None),
    ("opt", None),
    ("mistral", None),  # windows of 16
    ("gemma2", None),
    ("gemma2", H2O(budget=20)),
    ("qwen3", SMALL),
    ("llama", LoopServe(budget=12, first=0, interval=4, prefill=False, per_head=True)),
    ("llama", H2O(budget=20)),
    ("llama", H2O(budget=0.5)),
    ("llama", SnapKV(budget=20, window=4)),
    ("llama", AdaKV(budget=20, window=4, floor=0.0)),
    ("llama", StreamingLLM(budget=20, positions="rebased")),
    ("llama", TOVA(budget=20, mode="select")),
    ("llama", SinkPatch(layer=1, neurons=[3, 5])),
    ("llama", ALARM),
    ("llama", GUARD),
]
BOTH = (None, SMALL)  # of the others, each meets one way with answers; the second way is slow


@pytest.mark.parametrize(
    ("family", "edit", "answers"),
    [
        pytest.param(
            *(family, edit, answers),
            id=f"{family}-{type(edit).__name__}{at}-{answers}",
            marks=[] if (edit in BOTH and family in ("llama", "qwen3")) or at % 2 == way else pytest.mark.slow,
        )
        for at, (family, edit) in enumerate(EDITS)
        for way, answers in enumerate(("recompute", "keep"))
    ],
)
def test_rows_of_a_batch_are_what_they_are_alone(family: str, edit: Any, answers: str) -> None:
    """Lengths differ, answers end at different steps, and one conversation joins late; some have a third turn."""
    model = model_of(family)
    # Ends the first answer in its middle, if it does not say one word only.
    ids = first_answer(family, edit)
    end = next((at for at in range(2, NEW - 1) if ids[at] not in ids[:at]), 0)
    model.generation_config.eos_token_id = ids[end]
    batch, single = ([Conversation(model, edit, answers=answers) for _ in TEXTS] for _ in range(2))
    for turn in range(3 if edit in (None, SMALL) and answers == "recompute" else 2):
        rows = [2, 0, 1] if turn else [0, 1]  # in any order
        given = [prompt(row, turn) for row in rows]
        made = Conversation.ask_all([batch[row] for row in rows], given, **MORE)
        for at, row in enumerate(rows):
            same(made[at], at, single[row].ask(given[at], **MORE))
            assert batch[row].turns[-1] is made[at]
            for one, other in zip(*(each._held.layers for each in (batch[row], single[row])), strict=True):  # pyright: ignore[reportPrivateUsage]
                assert torch.equal(one.pos, other.pos) and (one.seen, one.rebased) == (other.seen, other.rebased)
                there = (one.pos >= 0)[..., None]  # what stands in holes does not matter
                torch.testing.assert_close(one.keys * there, other.keys * there, atol=1e-5, rtol=1e-5)
                torch.testing.assert_close(one.values * there, other.values * there, atol=1e-5, rtol=1e-5)
    ends = {len(turn.ids) for chat in single for turn in chat.turns}
    assert end + 1 in ends and (len(ends) > 1 or not end)
    assert same(batch[1].ask(prompt(0, 1), **MORE), 0, single[1].ask(prompt(0, 1), **MORE)) is None


def test_a_row_of_a_batch_branches_and_is_saved(tmp_path: Path) -> None:
    model, edit = model_of("llama"), H2O(budget=20)
    chats = [Conversation(model, edit, answers="keep") for _ in TEXTS]
    Conversation.ask_all(chats, [prompt(row, 0) for row in range(3)], **MORE)
    chats[1].save(tmp_path / "talk")
    branch, loaded = chats[1].branch(), Conversation.load(tmp_path / "talk", model, edit)
    goes_on = ask(chats[1], 1)
    for other in (branch, loaded):
        turn = ask(other, 1)
        assert turn.ids == goes_on.ids
        assert torch.equal(torch.stack(turn.output.logits), torch.stack(goes_on.output.logits))
        assert all(torch.equal(a, b) for a, b in zip(tensors(other), tensors(chats[1]), strict=True))


def test_what_cannot_be_asked_at_once() -> None:
    model = model_of("llama")
    chat, other = Conversation(model), Conversation(model)
    both: Any = ([chat, other], [[5, 6], [7]])
    cases: list[tuple[Any, Any, dict[str, Any], str]] = [
        ([chat, other], [[5]], {}, "2 conversations and 1 prompts"),
        ([], [], {}, "0 conversations and 0 prompts"),
        ([chat, chat], [[5], [6]], {}, "given twice"),
        ([chat, Conversation(model_of("llama"))], [[5], [6]], {}, "conversation 2 has another model"),
        ([chat, Conversation(model, Full())], [[5], [6]], {}, "conversation 2 has another edit"),
        ([chat, Conversation(model, answers="keep")], [[5], [6]], {}, "conversation 2 has another answers"),
        ([chat, Conversation(model, cache="offloaded")], [[5], [6]], {}, "conversation 2 has cache='offloaded'"),
        (*both, {"stop_strings": "a"}, "stop_strings is for one row of text, and here are 2"),
        (*both, {"num_beams": 2}, "num_beams=2"),
        ([chat, other], [[5], []], {}, "turn 1, the prompt: there is no token id in a row"),
    ]
    for chats, prompts, more, words in cases:
        with pytest.raises(SinkscopeError, match=re.escape(words)):
            Conversation.ask_all(chats, prompts, **more)
    guarded = [Conversation(model, LoopGuard(rewind=True)) for _ in range(2)]
    with pytest.raises(SinkscopeError, match="one row at a time"):
        Conversation.ask_all(guarded, [[5], [6]], max_new_tokens=2)
    assert not any(each.turns for each in (chat, other, *guarded))


def talk(model: Any, cache: Any, answers: str, edit: Any = None) -> Conversation:
    chat = Conversation(model, edit, answers=answers, cache=cache)
    for turn in range(3):
        ask(chat, turn)
    return chat


@pytest.mark.parametrize(
    ("family", "edit", "answers"),
    [
        ("llama", None, "recompute"),
        ("llama", None, "keep"),
        ("mistral", None, "keep"),
        ("llama", ALARM, "recompute"),
        pytest.param("mistral", None, "recompute", marks=pytest.mark.slow),
        pytest.param("llama", ALARM, "keep", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_offloaded_cache_says_the_same(family: str, edit: Any, answers: str, tmp_path: Path) -> None:
    model = model_of(family)
    plain, chat = talk(model, None, answers, edit), talk(model, "offloaded", answers, edit)
    for one, other in zip(chat.turns, plain.turns, strict=True):
        same(one, 0, other)
    assert all(type(layer) is DynamicLayer for layer in chat._held.layers)  # pyright: ignore[reportPrivateUsage]
    chat.save(tmp_path / "talk")
    branch = chat.branch()
    goes_on = ask(plain, 1)
    for kind in (None, "offloaded"):
        same(ask(Conversation.load(tmp_path / "talk", model, edit, cache=kind), 1), 0, goes_on)
    same(ask(branch, 1), 0, goes_on)
    same(ask(chat, 1), 0, goes_on)


def test_offloading_is_that_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU its streams do nothing; every layer leaves after its own call and comes back before it."""

    class Stream(nullcontext[None]):
        def wait_stream(self, other: Any) -> None:
            pass

    moved: dict[str, int] = {"offload": 0, "prefetch": 0}

    def counting(name: str) -> Any:
        stock = getattr(DynamicLayer, name)

        def count(layer: Any) -> None:
            moved[name] += layer.keys is not None
            stock(layer)

        return count

    for name in moved:
        monkeypatch.setattr(DynamicLayer, name, counting(name))
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream())
    monkeypatch.setattr(saved, "offloads", lambda target: True)
    model = model_of("llama")
    chat = talk(model, "offloaded", "recompute")
    assert chat.ids == talk(model, None, "recompute").ids
    calls = sum(len(turn.ids) for turn in chat.turns)
    assert moved["offload"] == 2 * calls and moved["prefetch"] >= calls


@pytest.mark.parametrize("answers", ["recompute", "keep"])
def test_a_quantised_cache_forgets_answers_and_failed_turns_alike(answers: str) -> None:
    """Keys and values are in 8 bits, in turns too; what is read again begins from the cache as the prompt left it."""
    layers = pytest.importorskip("transformers.cache_utils")
    if not hasattr(layers, "Fp8QuantizedLayer"):
        pytest.skip("this transformers has no cache in 8 bits")
    model = model_of("llama")
    plain, chat = talk(model, None, answers), talk(model, "fp8", answers)
    for layer in chat._held.layers:  # pyright: ignore[reportPrivateUsage]
        assert type(layer) is layers.Fp8QuantizedLayer
        length = len(chat.ids) - (len(chat.turns[-1].ids) if answers == "recompute" else 1)
        keys: Any = layer._quantized_keys  # pyright: ignore[reportPrivateUsage]
        assert layer.get_seq_length() == keys[0].shape[2] == length and keys[0].dtype == torch.float8_e4m3fn
    for turn, expected in zip(chat.turns[:1], plain.turns[:1], strict=True):
        difference = (torch.stack(turn.output.logits) - torch.stack(expected.output.logits)).abs()
        assert turn.ids[0] == expected.ids[0]
        assert float(difference[0].max()) < 1e-5 and 0 < float(difference[1].max()) < 0.2
        assert turn.read == expected.read
    branch = chat.branch()
    with pytest.raises(KeyError):
        ask(chat, 1, streamer=_Fails())
    assert len(chat.turns) == 3
    assert torch.equal(torch.stack(ask(branch, 1).output.logits), torch.stack(ask(chat, 1).output.logits))
    with pytest.raises(SinkscopeError, match="cache='fp8' is not saved"):
        chat.save("nowhere")


@pytest.mark.parametrize("package", ["optimum.quanto", "hqq"])
def test_a_cache_in_four_bits_answers_and_forgets(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With either package alone; skipped where it is not installed."""
    pytest.importorskip(package)
    other = {"optimum.quanto": "is_hqq_available", "hqq": "is_optimum_quanto_available"}[package]
    monkeypatch.setattr(f"transformers.cache_utils.{other}", lambda: False)
    model = model_of("llama")
    plain, chat = talk(model, None, "recompute"), talk(model, "quantized", "recompute")
    for layer in chat._held.layers:  # pyright: ignore[reportPrivateUsage]
        assert isinstance(layer, QuantizedLayer) and layer.nbits == 4
        assert layer.get_seq_length() == len(chat.ids) - len(chat.turns[-1].ids)
    # The first token comes from a prompt that was not quantised yet, all others from 4 bits.
    for turn, expected in zip(chat.turns[:1], plain.turns[:1], strict=True):
        difference = (torch.stack(turn.output.logits) - torch.stack(expected.output.logits)).abs()
        assert float(difference[0].max()) < 1e-5 and float(difference[1].max()) > 0
    with pytest.raises(SinkscopeError, match="cache='quantized' is not saved"):
        chat.save("nowhere")


class _Fails:
    count = 0

    def put(self, value: Any) -> None:
        self.count += 1
        if self.count == 3:
            raise KeyError

    def end(self) -> None:
        pass


def test_which_caches_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    with pytest.raises(SinkscopeError, match="cache='static': expected \"offloaded\""):
        Conversation(model, cache="static")
    for edit in (H2O(budget=20), SMALL, SinkPatch(layer=1, neurons=[3]) | GUARD):
        with pytest.raises(SinkscopeError, match=r"chooses from a cache of its own.*: give one of them$"):
            Conversation(model, edit, cache="offloaded")
    for name in ("is_optimum_quanto_available", "is_hqq_available"):
        monkeypatch.setattr(f"transformers.cache_utils.{name}", lambda: False)
    with pytest.raises(SinkscopeError, match=r"^cache='quantized' needs .* pip install optimum-quanto"):
        Conversation(model, cache="quantized").ask([5])
    with pytest.raises(SinkscopeError, match=r'does not quantise the cache of .*; use cache="offloaded"$'):
        Conversation(model_of("mistral"), cache="fp8").ask([5])
    evicted = Conversation(model, H2O(budget=20))
    ask(evicted, 0)
    evicted.save(tmp_path / "talk")
    with pytest.raises(SinkscopeError, match="cache='offloaded': tokens were evicted"):
        Conversation.load(tmp_path / "talk", model, SinkPatch(layer=1, neurons=[3]), cache="offloaded")
