"""`sinkscope view`: its arrays against planted circuits and the own values of a model, and what it answers."""

from __future__ import annotations

import copy
import json
import re
import socket

import numpy as np
import pytest
import stranger
import torch
from attack_kit import text_file
from covering import slow
from organisms import Organism, organism
from plain_hooks import attention, norms, zeroed
from refusals import refused
from starlette.testclient import TestClient

import sinkscope as ss
from sinkscope.app.cli import main
from sinkscope.app.view import command, page
from sinkscope.app.view.explorer import Explorer, ids_of
from sinkscope.app.view.page import live_page, serve
from sinkscope.app.view.result import ModelView
from sinkscope.measure import Setup
from sinkscope.results.notation import Neuron

TEXT = "A class is a block. A block is a piece of text."


def viewed(o: Organism, length: int, folder) -> tuple[ModelView, list[int], Explorer]:
    """The view of a drawn text, its tokens, and what answers."""
    text, ids = text_file(o, folder, 6, seed=5), o.natural(1, length)[0].tolist()
    one = Explorer(Setup.open(o.model, tokenizer=o.tokenizer, text=text, loading="whole"))
    return one.view(o.tokenizer.decode(ids[1:])), ids, one


@pytest.mark.few_texts
@pytest.mark.parametrize("family", ["llama", slow("mixtral")])
def test_the_planted_neurons_make_the_spike_and_random_ones_do_not(family, tmp_path):
    o = organism(family, 1)
    found, ids, one = viewed(o, 20, tmp_path)
    text = found.texts[0]
    intact, zeroed, *heads, patched, control = [one for one in text.variants if not one.name.startswith("token ")]
    marks = tuple(row.name for row in one.circuit.marking if ".H" in row.name)
    assert found.marks == marks and [one.name for one in heads] == ["marking heads replaced"] * bool(marks)
    assert found.layer >= o.truth.sink_layer and text.spikes == (0,)
    assert set(found.neurons) == {str(Neuron.of(site)) for site in o.truth.neurons}
    assert intact.norm == pytest.approx(norms(o.model, torch.tensor([ids]))[:, 0].numpy(), rel=1e-3)
    at_sink = [variant.norm[found.layer, 0] for variant in (intact, zeroed, patched, control)]
    assert at_sink[1] < 0.5 * at_sink[0] and at_sink[2:] == pytest.approx([at_sink[0]] * 2, rel=0.1)
    before, after, random = (f"{float(f'{at_sink[number]:.4g}'):,g}" for number in (0, 1, 3))
    assert f"from {before} to {after} (random control: {random})" in zeroed.sentence
    assert control.name == found.control


@pytest.mark.few_texts
def test_attention_is_that_of_the_models_own_weights(tmp_path):
    o = organism("llama", 2)
    found, ids, _ = viewed(o, 300, tmp_path)  # more than one chunk of queries
    text = found.texts[0]
    intact = text.variants[0]
    weights = attention(o.model, torch.tensor([ids]))[:, 0]  # layer head query key
    later = weights.tril(-1).sum(2) / torch.arange(len(ids) - 1, -1, -1).clamp(min=1)
    assert intact.received.array() == pytest.approx(later.numpy(), abs=1 / 255)
    for head, packed in zip(text.heads, intact.rows, strict=True):
        assert np.abs(packed.array() - weights[head].numpy()).max() < 1 / 255
    assert len(text.heads) > 9


def test_a_model_without_a_sink_offers_no_switch_and_says_so(tmp_path):
    found, _, _ = viewed(organism("llama", 1, kind="none"), 12, tmp_path)
    assert found.neurons == () and [variant.name for variant in found.texts[0].variants] == ["intact"]
    assert found.conclusion().startswith("0 of 12 tokens have a norm spike") and found.texts[0].spikes == ()


def test_a_measurement_of_a_stranger_that_fails_says_why(bundled, tmp_path):
    source = stranger.SOURCE.read_text().replace(
        "    traced = trace(", "    raise ValueError('no')\n    traced = trace("
    )
    with stranger.installed(tmp_path, source):
        (said,) = Explorer(bundled.setup).others.values()
    assert said == "not measured, because it failed (ValueError: no)."


def test_a_token_that_is_isolated_makes_a_sink_and_one_with_the_first_id_is_another_text(bundled):
    text = bundled.view(TEXT).texts[0]
    ids, layer, at = ids_of(bundled.setup, TEXT), bundled.layer, len(text.tokens) // 2
    intact, isolated, placed = text.variants[0], *text.variants[-2:]
    assert [one.name for one in (isolated, placed)] == [f"token {at} isolated", f"token {at} with the first id"]
    assert isolated.norm[layer, at] > 0.5 * intact.norm[layer, 0] > 3 * intact.norm[layer, at]
    assert isolated.norm[layer, :at] == pytest.approx(intact.norm[layer, :at])  # which see it no more and no less
    ids[at] = ids[0]
    changed = norms(bundled.setup.target.hf, torch.tensor([ids]))[layer, 0].numpy()
    assert placed.norm[layer] == pytest.approx(changed, rel=2e-3)
    (asked,) = bundled.answer({"switch": "token 3 isolated"})["result"]["texts"][0]["variants"]
    assert asked["name"] == "token 3 isolated"
    assert "expected a token from 1" in bundled.answer({"switch": "token 700 isolated"})["error"]


def test_the_next_tokens_are_those_of_the_models_own_logits(bundled):
    setup = bundled.setup
    zeroed_neurons = bundled.view(TEXT).texts[0].variants[1]
    with torch.no_grad(), zeroed(setup.target.hf, tuple(one.site for one in bundled.neurons)):
        best = setup.target.hf(torch.tensor([ids_of(setup, TEXT)])).logits[0, -1].softmax(-1).topk(5)
    words, shares = zip(*zeroed_neurons.following, strict=True)
    assert list(words) == [setup.tokenizer.decode([token]) for token in best.indices]
    assert shares == pytest.approx(best.values.tolist(), abs=1e-4)


def test_the_command_writes_the_page_and_refuses_bad_texts(bundled, tmp_path, monkeypatch, typed, refusal):
    text = tmp_path / "text.txt"
    text.write_text("a block is a piece of text")
    data = json.loads(typed(f"view --text {text} --html {tmp_path}/a.html --json -").out)
    assert data["kind"] == "view" and data["model"]["name"] == "bundled"
    assert '" text"' in (tmp_path / "a.html").read_text()
    monkeypatch.setattr(Explorer, "sinks", property(lambda _: pytest.fail("the model is measured")))
    for wrong, said in ((" \n", "the text is empty"), ("a block " * 500, "a view shows 512 at most")):
        text.write_text(wrong)
        assert said in refusal(f"view --text {text} --json -")


# Live

WRONG = (
    ({"text": " "}, "the text is empty"),
    ({"text": "a \\ud800"}, "surrogate"),
    ({"off": ["L99.N1"]}, "L99|layer"),
    ({"switch": "other"}, "no switch"),
    ({"off": "L1.N338"}, "expected"),
    ([1], "expected"),
)


def test_the_live_page_answers_only_under_its_address(bundled):
    client = TestClient(live_page(bundled.answer, "bundled", "secret"), base_url="http://127.0.0.1")
    shown = client.get("/secret/")
    assert shown.status_code == 200 and "connect-src 'self'" in shown.text
    for path in ("/", "/view", "/other/", "/other/view"):
        assert client.get(path).status_code == 404
    assert client.get("/secret/", headers={"Host": "evil.example"}).status_code == 400
    assert client.get("/secret/view").status_code == 405
    client.post("/secret/view", json={"text": "a block"})
    passes = []
    inner = bundled.setup.target.base.register_forward_pre_hook(lambda *_: passes.append(1))
    off = client.post("/secret/view", json={"text": "a block", "off": ["L1.N338"]}).json()["result"]
    inner.remove()
    assert len(passes) == 2  # the edited model and the control: the text is not read intact again
    (own,) = off["texts"][0]["variants"]
    assert own["name"] == "without L1.N338" and "from 6" in own["sentence"] and "random" in own["sentence"]
    for wrong, reason in WRONG:
        body = json.dumps(wrong).replace("\\\\", "\\")
        assert re.search(reason, client.post("/secret/view", content=body).json()["error"]), wrong
    for body in (b"", b"\xff\xfe", b"[" * 200_000):
        answer = client.post("/secret/view", content=body)
        assert answer.status_code == 400 and "is not JSON" in answer.json()["error"]


def test_a_port_that_is_taken_is_refused_in_one_line():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        with refused("address already in use; give another"):
            serve(dict, "bundled", other.getsockname()[1], print)


def test_a_notebook_shows_a_widget_that_python_answers(bundled, monkeypatch, tmp_path):
    monkeypatch.setattr(Explorer, "showing", lambda text, *_, **__: copy.copy(bundled))
    shown = ss.view(text="a block is a piece of text")
    sent = []
    monkeypatch.setattr(shown, "send", sent.append)
    shown._handle_custom_msg({"number": 3, "request": {"text": "a block", "off": ["L1.N338"]}}, [])
    assert sent[0]["number"] == 3
    assert sent[0]["answer"]["result"]["texts"][0]["variants"][-1]["name"] == "without L1.N338"
    assert "connect-src 'none'" in shown.save_html(tmp_path / "view.html").read_text()
    for module in (command, page):
        monkeypatch.setattr(module, "find_spec", lambda name: None)  # as where it is not installed
    with refused("a widget needs anywidget"):
        ss.view()
    assert main(["view"]) == 2
