"""`sinkscope view`: its arrays against planted circuits and the own values of a model, and what it answers."""

from __future__ import annotations

import json
import re
import socket

import numpy as np
import pytest
import stranger
import torch
from attack_kit import text_file
from covering import slow
from organisms import organism
from plain_hooks import attention, norms, zeroed
from refusals import refused
from starlette.testclient import TestClient

import sinkscope as ss
from sinkscope.app.view import command
from sinkscope.app.view.explorer import Explorer, ids_of
from sinkscope.app.view.page import live_page, serve
from sinkscope.measure import Setup
from sinkscope.results.notation import Neuron

TEXT = "A class is a block. A block is a piece of text."


@pytest.mark.few_texts
@pytest.mark.parametrize(("family", "length"), [("llama", 300), slow("mixtral", 20)])  # more than one chunk of queries
def test_a_text_is_read_as_the_model_reads_it_and_the_planted_neurons_make_the_spike(family, length, tmp_path):
    o = organism(family, 1)
    ids = o.natural(1, length)
    setup = Setup.open(o.model, tokenizer=o.tokenizer, text=text_file(o, tmp_path, 6, seed=5), loading="whole")
    found = Explorer(setup).view(o.tokenizer.decode(ids[0, 1:]))
    (text,) = found.texts
    read = {one.name: one for one in text.variants}
    intact, zeroed, random = (read[name] for name in ("intact", "sink neurons zeroed", found.control))
    assert found.layer >= o.truth.sink_layer and text.spikes == (0,)
    assert set(found.neurons) == {str(Neuron.of(site)) for site in o.truth.neurons}
    assert intact.norm == pytest.approx(norms(o.model, ids)[:, 0].numpy(), rel=1e-3)
    weights = attention(o.model, ids)[:, 0]  # layer head query key
    later = weights.tril(-1).sum(2) / torch.arange(length - 1, -1, -1).clamp(min=1)
    assert intact.received.array() == pytest.approx(later.numpy(), abs=1 / 255)
    for head, packed in zip(text.heads, intact.rows, strict=True):
        assert np.abs(packed.array() - weights[head].numpy()).max() < 1 / 255
    before, after, beside = (one.norm[found.layer, 0] for one in (intact, zeroed, random))
    assert after < 0.5 * before and beside == pytest.approx(before, rel=0.1) == read["patched"].norm[found.layer, 0]
    before, after, beside = (f"{float(f'{norm:.4g}'):,g}" for norm in (before, after, beside))
    assert f"from {before} to {after} (control: {beside})" in zeroed.sentence


def test_a_model_without_a_sink_offers_no_switch_and_says_so():
    o = organism("llama", 1, kind="none")
    setup = Setup.open(o.model, tokenizer=o.tokenizer, loading="whole")
    found = Explorer(setup).view(o.tokenizer.decode(o.natural(1, 12)[0, 1:]))
    assert found.neurons == () and [variant.name for variant in found.texts[0].variants] == ["intact"]
    assert found.conclusion().startswith("0 of 12 tokens have a norm spike") and found.texts[0].spikes == ()


def test_a_measurement_of_a_stranger_that_fails_says_why(bundled, tmp_path):
    source = stranger.SOURCE.read_text().replace("    traced =", "    raise ValueError('no')\n    traced =")
    with stranger.installed(tmp_path, source):
        (said,) = Explorer(bundled.setup).others.values()
    assert said == "not measured, because it failed (ValueError: no)."


def test_switched_texts_are_those_of_the_model_alone(bundled):
    """A token that sees only itself makes a sink, one with the first id is another text; and the next tokens."""
    (text,) = bundled.view(TEXT).texts
    ids, layer, at, model = ids_of(bundled.setup, TEXT), bundled.layer, len(text.tokens) // 2, bundled.setup.target.hf
    intact, isolated, placed = text.variants[0], *text.variants[-2:]
    assert [one.name for one in (isolated, placed)] == [f"token {at} isolated", f"token {at} with the first id"]
    assert isolated.norm[layer, at] > 0.5 * intact.norm[layer, 0] > 3 * intact.norm[layer, at]
    assert isolated.norm[layer, :at] == pytest.approx(intact.norm[layer, :at])  # which see it no more and no less
    other = torch.tensor([[*ids[:at], ids[0], *ids[at + 1 :]]])
    assert placed.norm[layer] == pytest.approx(norms(model, other)[layer, 0].numpy(), rel=2e-3)
    with torch.no_grad(), zeroed(model, tuple(one.site for one in bundled.neurons)):
        best = model(torch.tensor([ids])).logits[0, -1].softmax(-1).topk(5)
    words, shares = zip(*text.variants[1].following, strict=True)
    assert list(words) == [bundled.setup.tokenizer.decode([token]) for token in best.indices]
    assert shares == pytest.approx(best.values.tolist(), abs=1e-4)


# Live

WRONG = {
    '{"text": " "}': "the text is empty",
    '{"text": "a \\ud800"}': "surrogate",
    '{"off": ["L99.N1"]}': "L99|layer",
    '{"switch": "other"}': "no switch",
    '{"switch": "token 700 isolated"}': "expected a token from 1",
    '{"off": "L1.N338"}': "expected",
    "[1]": "expected",
    "": "is not JSON",
    "[" * 200_000: "is not JSON",
}


def test_the_live_page_answers_only_under_its_address(bundled):
    client = TestClient(live_page(bundled.answer, "bundled", "secret"), base_url="http://127.0.0.1")
    shown = client.get("/secret/")
    assert shown.status_code == 200 and "connect-src 'self'" in shown.text
    for path in ("/", "/view", "/other/view"):
        assert client.get(path).status_code == 404
    assert client.get("/secret/", headers={"Host": "evil.example"}).status_code == 400
    client.post("/secret/view", json={"text": "a block"})
    passes = []
    inner = bundled.setup.target.base.register_forward_pre_hook(lambda *_: passes.append(1))
    off = client.post("/secret/view", json={"text": "a block", "off": ["L1.N338"]}).json()["result"]
    inner.remove()
    assert len(passes) == 2  # the edited model and the control: the text is not read intact again
    (own,) = off["texts"][0]["variants"]
    assert own["name"] == "without L1.N338" and "from 6" in own["sentence"] and "(control: " in own["sentence"]
    for wrong, reason in WRONG.items():
        assert re.search(reason, client.post("/secret/view", content=wrong).json()["error"]), wrong


def test_a_port_that_is_taken_is_refused_in_one_line():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        with refused("address already in use; give another"):
            serve(dict, "bundled", other.getsockname()[1], print)


def test_a_notebook_and_the_command_show_the_same_page(bundled, monkeypatch, tmp_path, typed):
    def showing(text, *_, **__):
        bundled.text = text
        return bundled

    monkeypatch.setattr(bundled, "text", None)
    monkeypatch.setattr(Explorer, "showing", showing)
    shown = ss.view(text="a block is a piece of text")
    sent = []
    monkeypatch.setattr(shown, "send", sent.append)
    shown._handle_custom_msg({"number": 3, "request": {"text": "a block", "off": ["L1.N338"]}}, [])
    (own,) = sent[0]["answer"]["result"]["texts"][0]["variants"]
    assert (sent[0]["number"], own["name"]) == (3, "without L1.N338")
    assert "connect-src 'none'" in shown.save_html(tmp_path / "view.html").read_text()
    (tmp_path / "text.txt").write_text("a block is a piece of text")
    data = json.loads(typed(f"view --text {tmp_path}/text.txt --html {tmp_path}/page.html --json -").out)
    assert data["result"]["texts"] == json.loads(shown.result.to_json())["result"]["texts"]
    page = (tmp_path / "page.html").read_text()
    (on_page,) = json.loads(re.search(r"application/json[^>]*>(.*?)</script>", page, re.S)[1])["result"]["texts"]
    (text,) = data["result"]["texts"]
    assert " text" in on_page["tokens"]
    for kept, variant in zip(on_page["variants"], text["variants"], strict=True):
        intact = text["variants"][0]["rows"]  # None stands for what is as there
        assert [row or own for row, own in zip(kept["rows"], intact, strict=True)] == variant["rows"]
    monkeypatch.setattr(command, "find_spec", lambda name: None)  # as where it is not installed
    with refused("a widget needs anywidget"):
        ss.view()
