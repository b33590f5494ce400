"""`sinkscope view`: its arrays against planted circuits and the model's own values, and its page in a browser."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import browser
import numpy as np
import pytest
import torch
from covering import slow
from organisms import Organism, organism
from starlette.testclient import TestClient

import sinkscope as ss
from sinkscope.app.cli import main
from sinkscope.app.view import notebook, server
from sinkscope.app.view.explorer import Explorer, Request
from sinkscope.app.view.packed import Packed, codes_of
from sinkscope.app.view.page import view_page
from sinkscope.app.view.readings import heads_that_fit, read_text
from sinkscope.app.view.result import ModelView, ViewedText
from sinkscope.app.view.server import LARGEST_REQUEST, application, serve
from sinkscope.app.view.switches import switch_off
from sinkscope.app.view.writing import generation_of
from sinkscope.display.notation import neuron_name
from sinkscope.display.result import Result
from sinkscope.errors import SinkscopeError
from sinkscope.sinks.first_token.circuit import Circuit, circuit

CLICK = "document.querySelector('{}').click()"
PICTURE = "document.querySelector('#rows').innerHTML"
SENTENCE = "document.querySelector('#sentence').textContent"
CELL = "document.querySelector('#cell').textContent"
LOADED = "!!document.querySelector('.token')"


def explorer(o: Organism, folder: Path, bos: bool | None = None) -> Explorer:
    text = folder / "typical.txt"
    text.write_text(o.tokenizer.decode(o.natural(6, 64, seed=5)[:, 1:].flatten().tolist()))
    return Explorer.open(o.model, tokenizer=o.tokenizer, text=text, bos=bos)


def read(one: Explorer, o: Organism, ids: list[int]) -> ViewedText:
    return one.view(o.tokenizer.decode(ids)).texts[0]


@pytest.mark.parametrize("family", ["llama", *(slow(other) for other in ("mixtral", "gpt2"))])
def test_the_planted_neurons_make_the_spike_and_random_ones_do_not(family, tmp_path):
    o = organism(family, 1)
    ids = o.natural(1, 20)[0].tolist()
    one = explorer(o, tmp_path)
    found = one.view(o.tokenizer.decode(ids[1:]))
    text = found.texts[0]
    intact, zeroed, patched, control = text.variants
    assert found.layer == o.truth.sink_layer and text.spikes == (0,)
    assert set(found.neurons) == {neuron_name(*site) for site in o.truth.neurons}
    with torch.no_grad():
        hidden = o.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    for layer, states in enumerate(hidden[1:-1]):  # the last one comes behind the final norm
        assert intact.norm[layer] == pytest.approx(states[0].norm(dim=-1).numpy(), rel=1e-3)
    at_sink = [variant.norm[found.layer, 0] for variant in text.variants]
    assert at_sink[1] < 0.5 * at_sink[0] and at_sink[2:] == pytest.approx([at_sink[0]] * 2, rel=0.1)
    assert (np.abs(intact.activation[:, 0]) > 5 * np.abs(intact.activation[:, 1:]).max(1)).all()
    if family != "mixtral":  # values of experts are those before an edit
        assert not zeroed.activation.any() and (patched.activation[:, 0] == intact.activation[:, 0]).all()
    assert f"from {at_sink[0]:.4g} to {at_sink[1]:.4g}" in zeroed.sentence
    assert f"(random control: {at_sink[3]:.4g})" in zeroed.sentence
    assert control.name == "random control" and all(len(one.sentence.split()) <= 30 for one in text.variants)


def test_the_next_tokens_are_those_of_the_models_own_logits(bundled):
    text = bundled.view("A class is a block. A block is").texts[0]
    setup = bundled.sink.setup
    ids = setup.tokenizer("A class is a block. A block is", return_tensors="pt").input_ids
    if setup.bos is not None and ids[0, 0] != setup.bos:
        ids = torch.cat([torch.tensor([[setup.bos]]), ids], 1)
    with torch.no_grad():
        probabilities = setup.target.hf(ids).logits[0, -1].softmax(-1)
    intact = text.variants[0].following
    assert [word for word, _ in intact] == [setup.tokenizer.decode([token]) for token in probabilities.topk(5).indices]
    assert [share for _, share in intact] == pytest.approx(probabilities.topk(5).values.tolist(), abs=1e-4)
    zeroed = next(one for one in text.variants if one.name == "sink neurons zeroed")
    ((layer, neuron),) = bundled.sink.neurons
    down = setup.target.hf.model.layers[layer].mlp.down_proj
    keep = torch.ones(down.in_features).index_fill(0, torch.tensor(neuron), 0.0)
    hook = down.register_forward_pre_hook(lambda _, args: (args[0] * keep,))
    with torch.no_grad():
        other = setup.target.hf(ids).logits[0, -1].softmax(-1)
    hook.remove()
    assert [share for _, share in zeroed.following] == pytest.approx(other.topk(5).values.tolist(), abs=1e-4)


def test_attention_is_that_of_the_models_own_weights(tmp_path):
    o = organism("mistral", 2)
    ids = o.natural(1, 300)[0].tolist()  # more than one chunk of queries
    text = read(explorer(o, tmp_path), o, ids[1:])
    intact = text.variants[0]
    received = intact.received.array()
    o.model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = o.model(torch.tensor([ids]), output_attentions=True).attentions
    for (layer, head), packed in zip(text.heads, intact.rows, strict=True):
        own = weights[layer][0, head].numpy()
        assert np.abs(packed.array() - own).max() < 1 / 255
        for key in (0, 1, 255, 256, 298):
            assert received[layer, head, key] == pytest.approx(float(own[key + 1 :, key].mean()), abs=1 / 255)
    assert not received[..., -1].any() and len(text.heads) > 9


@pytest.mark.slow
def test_two_tokens_of_one_cluster_are_both_sinks_without_bos(tmp_path):
    """As "Sch Com" in Llama 2; a token of another group, and both behind BOS, are none."""
    o = organism("llama", 1)
    first, second = o.tokens_of(0)[:2]
    without = explorer(o, tmp_path, bos=False)
    assert read(without, o, [first, second]).spikes == (0, 1)
    assert read(without, o, [first, o.tokens_of(1)[0]]).spikes == (0,)
    assert read(explorer(o, tmp_path), o, [first, second]).spikes == (0,)
    with pytest.raises(SinkscopeError, match="no word that this tokenizer knows"):
        without.view(" \n")
    with pytest.raises(SinkscopeError, match="shows 512 at most"):
        without.view(o.tokenizer.decode(o.natural(1, 600)[0].tolist()))


def test_a_model_without_a_sink_offers_no_switch_and_says_so(tmp_path):
    o = organism("llama", 1, kind="none")
    one = explorer(o, tmp_path)
    one.sink.measure_circuit()
    found = one.view(o.tokenizer.decode(o.natural(1, 12)[0, 1:].tolist()))
    assert found.neurons == () and [variant.name for variant in found.texts[0].variants] == ["intact"]
    assert found.conclusion().startswith("0 of 12 tokens have a norm spike") and found.texts[0].spikes == ()


@pytest.mark.slow
def test_marking_heads_are_those_of_the_circuit_and_switches_of_ones_own_have_a_control(tmp_path):
    o = organism("llama", 1)
    one = explorer(o, tmp_path)
    one.sink.circuit = circuit.on(one.sink.setup, max_repeats=8)
    ids = o.natural(1, 24)[0].tolist()
    marks = [f"L{layer}.H{head}" for layer, head in one.sink.marks]
    text = o.tokenizer.decode(ids[1:])
    found = one.view(text)
    variants = {variant.name: variant for variant in found.texts[0].variants}
    assert marks and found.marks == tuple(marks) and found.circuit
    replaced = variants["marking heads replaced"]
    assert replaced.norm[found.layer, 0] < 0.5 * variants["intact"].norm[found.layer, 0]
    for asked in (Request(text=text, off=tuple(marks)), Request(text=text, switch=replaced.name)):
        (again,) = one.answer_to(asked).texts[0].variants  # measured alone, it is the same
        assert (again.norm == replaced.norm).all() and again.sentence.split(":")[1] == replaced.sentence.split(":")[1]
    for words, message in (("L0.H99", "H99|head 99"), ("L0.N1.2.3", "neuron"), ("nothing", "expected a")):
        with pytest.raises(SinkscopeError, match=message):
            one.answer_to(Request(text=text, off=(words,)))


def test_values_are_packed_in_eight_bits_and_rows_only_as_far_as_there_is_room(tmp_path):
    values = torch.rand(3, 5, generator=torch.Generator().manual_seed(0)) ** 4
    packed = Packed.of(codes_of(values))
    assert np.abs(packed.array() - values.numpy()).max() <= 1 / 255 and packed.shape == (3, 5)
    assert Packed.of(codes_of(torch.tensor([-1.0, torch.nan, 9.0]))).array().tolist() == [0, 0, 1]
    o = organism("llama", 1)
    one = explorer(o, tmp_path)
    reading = read_text(one.sink, o.natural(1, 24)[0].tolist())
    every = heads_that_fit(reading, 1 << 20)
    some = heads_that_fit(reading, sum(len(Packed.of(reading.rows[head]).codes) for head in every) // 2)
    least = min(reading.received[place][0] for place in some)
    assert 1 < len(some) < len(every) and len(heads_that_fit(reading, 0)) == 1
    assert all(reading.received[place][0] <= least for place in {*every} - {*some})


# The page


@pytest.fixture(scope="module")
def bundled():
    """The model in the package, opened once."""
    return Explorer.open()


@pytest.fixture(scope="module")
def view(bundled):
    """The model in the package on a short text, with its circuit and a generation."""
    bundled.sink.circuit = Circuit.load(Path(__file__).parents[2] / "figures/circuit.json")
    text = "A class is a block. A block is a piece of text."
    return replace(bundled.view(text), generation=generation_of(bundled.sink.setup, 12))


@pytest.fixture(scope="module")
def chrome():
    if browser.found() is None:
        pytest.skip("needs chromium or Chrome on the PATH")
    with browser.Browser(seconds=240) as tab:
        yield tab


def press(chrome: browser.Browser, key: str):
    chrome.send("Input.dispatchKeyEvent", type="keyDown", key=key)


def opened(chrome: browser.Browser, page: Path, width: int, **how: bool):
    chrome.open(page, width, **how)
    until = time.monotonic() + 20
    while not chrome.run(LOADED):
        assert time.monotonic() < until
    chrome.run("new Promise((done) => setTimeout(done, 50))")


def test_a_result_comes_back_from_its_file_and_makes_the_same_page(view, tmp_path):
    view.save(tmp_path / "view.json")
    loaded = Result.load(tmp_path / "view.json")
    assert isinstance(loaded, ModelView)
    page = view_page(view, "bundled")
    assert view_page(loaded, "bundled") == page and len(page) < 5e6
    assert "http:" not in page.replace("http://www.w3.org/2000/svg", "") and "https:" not in page


def test_the_page_in_a_browser(view, tmp_path, chrome):
    page = tmp_path / "view.html"
    page.write_text(view_page(view, "</script><b>"), encoding="utf-8")
    chrome.errors.clear()
    for how in ({"width": 390, "phone": True}, {"width": 390, "dark": True}, {"width": 1400}):
        opened(chrome, page, **how)
        for tab in ("generation", "text"):
            chrome.run(CLICK.format(f"#tab-{tab}"))
            assert chrome.run("document.documentElement.scrollWidth <= innerWidth"), (how, tab)
    text = view.texts[0]
    assert chrome.run("document.querySelectorAll('.token').length") == len(text.tokens)
    assert chrome.run(SENTENCE) == text.variants[0].sentence

    before = chrome.run(PICTURE)  # a head shows its rows
    chrome.run(CLICK.format("#head-0-1"))
    chrome.run("new Promise((done) => setTimeout(done, 100))")
    assert chrome.run(PICTURE) != before
    assert chrome.run("document.querySelector('#rows-title').textContent") == "Rows of L0.H1"
    place = text.heads.index((0, 1))
    strongest = text.variants[0].rows[place].array()[-1].max()
    assert f"gives {strongest:.0%} to" in chrome.run("document.querySelector('#rows-text').textContent")

    for number, variant in enumerate(text.variants):  # a switch changes the sentence, the tokens and the heads
        chrome.run(CLICK.format(f"#variant-{number}"))
        chrome.run("new Promise((done) => setTimeout(done, 100))")
        assert chrome.run(SENTENCE) == variant.sentence
        said = chrome.run("document.querySelector('#readout').textContent")
        assert f"norm {float(f'{variant.norm[view.layer, 0]:.4g}'):g} after" in said
        attention = variant.received.array()[2, 0, 0]
        assert chrome.run("document.querySelector('#head-2-0').title") == f"L2.H0: {round(100 * attention)}%"

    assert chrome.run("location.hash").endswith(f"head=L0.H1&model={text.variants[-1].name.replace(' ', '+')}")

    chrome.run("document.querySelector('#token-0').focus()")  # the keys reach everything
    for key, there in (("ArrowRight", "token-1"), ("End", f"token-{len(text.tokens) - 1}"), ("Home", "token-0")):
        press(chrome, key)
        assert chrome.run("document.activeElement.id") == there
    assert chrome.run("document.querySelectorAll('.token[tabindex=\"0\"]').length") == 1
    chrome.run(CLICK.format("#tab-generation"))
    assert chrome.run("[...document.querySelectorAll('.written')].length") == 2
    assert chrome.errors == [] and all(url.startswith(("file:", "blob:", "data:")) for url in chrome.asked)


def test_a_switch_that_changes_no_norm_says_what_to_try(bundled):
    bundled.sink.measure_sinks()
    text = bundled.texts("A class is a block.")[0]
    switch = switch_off(bundled.sink, "without L0.H1", [], [(0, 1)])
    wanted = f"Without L0.H1: after layer {bundled.sink.layer}, no token's norm changes; try L1.N338, or another text."
    assert bundled.change(switch, text, text.intact) == wanted
    neurons = switch_off(bundled.sink, "without L1.N338", [(1, 338)], [])
    assert bundled.change(neurons, text, text.intact).endswith("; try another text.")


def test_the_command_writes_the_page_and_refuses_bad_texts(bundled, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Explorer, "open", lambda *_, **__: bundled)
    text = tmp_path / "text.txt"
    text.write_text("a block is a piece of text", encoding="utf-8")
    words = ["view", "--text", str(text), "--no-generation", "--html", str(tmp_path / "a.html"), "--json", "-"]
    assert main(words) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["kind"] == "view" and data["model"]["name"] == "bundled" and data["result"]["generation"] is None
    assert '" text"' in (tmp_path / "a.html").read_text(encoding="utf-8")
    text.write_text(" \n", encoding="utf-8")
    assert main(["view", "--text", str(text), "--json", "-"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and "no word that this tokenizer knows" in shown.err


# Live


def test_the_live_page_answers_only_under_its_address(bundled):
    client = TestClient(application(bundled, "secret"), base_url="http://127.0.0.1")
    page = client.get("/secret/")
    assert page.status_code == 200 and "connect-src 'self'" in page.text
    for path in ("/", "/view", "/other/", "/other/view"):
        assert client.get(path).status_code == 404
    assert client.get("/secret/", headers={"Host": "evil.example"}).status_code == 400
    assert client.get("/secret/view").status_code == 405
    passes = []
    inner = bundled.sink.setup.target.base.register_forward_pre_hook(lambda *_: passes.append(1))
    client.post("/secret/view", json={"text": "a block"})
    passes.clear()
    off = client.post("/secret/view", json={"text": "a block", "off": ["L1.N338"]}).json()["result"]
    assert len(passes) == 2  # the edited model and the control: the text is not read intact again
    inner.remove()
    (own,) = off["texts"][0]["variants"]
    assert own["name"] == "without L1.N338" and "from 6" in own["sentence"] and "random" in own["sentence"]
    assert off["texts"][0]["tokens"][0] == "<s>"
    for wrong, reason in (
        ({"text": " "}, "no word"),
        ({"off": ["L99.N1"]}, "L99|layer"),
        ({"switch": "other"}, "no switch"),
        ({"place": -1}, "place"),
        ({"off": "L1.N338"}, "expected"),
        ([1], "expected"),
    ):
        assert re.search(reason, client.post("/secret/view", json=wrong).json()["error"]), wrong


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[" * 200_000, b'{"text": "\\ud800"}'])
def test_a_body_that_is_no_json_is_refused_in_one_line(bundled, body):
    answer = TestClient(application(bundled, "secret"), base_url="http://127.0.0.1").post("/secret/view", content=body)
    assert answer.status_code == 400 and "is not JSON in UTF-8" in answer.json()["error"]


def spoken(bundled, messages):
    """What the page answers to these messages of a server, and how many of them it took."""
    answers, taken = [], []

    async def receive():
        taken.append(messages[min(len(taken), len(messages) - 1)])
        return taken[-1]

    async def send(message):
        answers.append(message)

    scope = {"type": "http", "method": "POST", "path": "/secret/view", "headers": [(b"host", b"127.0.0.1")]}
    asyncio.run(application(bundled, "secret")({**scope, "query_string": b"", "root_path": ""}, receive, send))
    return answers, len(taken)


def test_of_a_body_that_is_too_large_the_rest_is_never_read(bundled):
    part = {"type": "http.request", "body": b" " * (LARGEST_REQUEST // 4), "more_body": True}
    answers, taken = spoken(bundled, [part] * 1000)
    assert answers[0]["status"] == 413 and taken == 5


def test_a_client_that_leaves_is_no_error(bundled):
    part = {"type": "http.request", "body": b"{", "more_body": True}
    answers, _ = spoken(bundled, [part, {"type": "http.disconnect"}])
    assert answers[0]["status"] == 400


@pytest.mark.slow
def test_the_page_says_which_heads_look_elsewhere_and_shows_both_rows(view, tmp_path, chrome):
    page = tmp_path / "view.html"
    page.write_text(view_page(view, "x"), encoding="utf-8")
    text = view.texts[0]
    intact, zeroed, random = text.variants[0], text.variants[1], text.variants[-1]
    assert "random" in random.name
    sink = text.spikes[0]
    readers = intact.received.array()[..., sink] > 0.3
    gone, control = [
        int((readers & (one.received.array()[..., sink] < intact.received.array()[..., sink] / 2)).sum())
        for one in (zeroed, random)
    ]
    assert gone > control  # the planted neurons make the sink
    opened(chrome, page, width=1400)
    headline = "document.querySelector('#headline').textContent"
    named = json.dumps(text.tokens[sink])
    assert chrome.run(headline).startswith(f"{readers.sum()} of {readers.size} heads give token {named} more than 30%")
    shown = "[...document.querySelectorAll('.pair figcaption')].map((one) => one.textContent)"
    assert chrome.run(shown) == ["intact"]
    chrome.run(CLICK.format("#variant-1"))
    chrome.run("new Promise((done) => setTimeout(done, 150))")
    before, after, beside = (json.dumps(one.following[0][0]) for one in (intact, zeroed, random))
    change = f"stays {before}" if before == after else f"changes from {before} to {after}"
    said = f"{gone} of the {readers.sum()} heads that read {named} look elsewhere ({random.name}: {control}); "
    said += f"the likeliest next token {change} ({random.name}: {beside})."
    assert chrome.run(headline) == said and chrome.run(shown) == ["intact", zeroed.name]

    head = text.heads[-1]  # the link opens the same view again, and the pointer reads a cell
    chrome.run(CLICK.format(f"#head-{head[0]}-{head[1]}"))
    chrome.run("new Promise((done) => setTimeout(done, 100))")
    link = chrome.run("location.href")
    chrome.send("Page.navigate", url="about:blank")
    chrome.send("Page.navigate", url=link)
    while not chrome.run(LOADED):
        time.sleep(0.02)
    chrome.run("new Promise((done) => setTimeout(done, 200))")
    assert chrome.run(headline) == said
    assert chrome.run("document.querySelector('#rows-title').textContent") == f"Rows of L{head[0]}.H{head[1]}"
    frame = "document.querySelector('#rows-before .frame')"
    chrome.run(f"{frame}.scrollIntoView()")
    x, y = chrome.run(f"{{const at = {frame}.getBoundingClientRect();[at.left + 1, at.bottom - 2]}}")
    chrome.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    chrome.run("new Promise((done) => setTimeout(done, 50))")
    share = intact.rows[-1].array()[-1, 0]
    last = len(text.tokens) - 1
    cell = f"token {last}, {json.dumps(text.tokens[-1])}, gives {share:.0%} to token 0, {json.dumps(text.tokens[0])}"
    assert chrome.run(CELL) == cell
    chrome.run("document.querySelector('#rows-before').focus()")  # and so do the keys
    press(chrome, "ArrowUp")
    share = intact.rows[-1].array()[-2, 0]
    assert f"token {last - 1}, " in chrome.run(CELL) and f"gives {share:.0%} to token 0" in chrome.run(CELL)
    press(chrome, "Enter")
    assert chrome.run("document.querySelector('#colour').value") == "row"
    assert chrome.run(f"document.querySelector('#token-{last - 1}').classList.contains('chosen')")

    chrome.run("HTMLAnchorElement.prototype.click = function () { window.saved = [this.download, this.href]; }")
    for kind, begins in (("svg", "data:image/svg+xml,"), ("png", "data:image/png;base64,")):
        chrome.run(f"window.saved = null; {CLICK.format(f'#save-{kind}')}")
        while not chrome.run("window.saved"):
            time.sleep(0.02)
        name, data = chrome.run("window.saved")
        assert name == f"L{head[0]}.H{head[1]}.{kind}" and data.startswith(begins) and len(data) > 500
        if kind == "svg":
            saved = ElementTree.fromstring(unquote(data.removeprefix(begins)))
            words = [text.text for text in saved.iter("{http://www.w3.org/2000/svg}text")]
            assert "intact" in words and zeroed.name in words and words.count("token that is read") == 2
            assert "var(" not in data and len(list(saved.iter("{http://www.w3.org/2000/svg}path"))) > 1


def test_the_rows_are_drawn_cell_by_cell_on_axes_of_tokens(view, tmp_path, chrome):
    """The shade of every cell of the drawing is that of the attention, and ticks stand at their tokens."""
    page = tmp_path / "view.html"
    page.write_text(view_page(view, "x"), encoding="utf-8")
    opened(chrome, page, width=1400)
    head = (1, 7)
    chrome.run(CLICK.format(f"#head-{head[0]}-{head[1]}"))
    chrome.run("new Promise((done) => setTimeout(done, 100))")
    text = view.texts[0]
    rows = text.variants[0].rows[text.heads.index(head)].array()
    drawn = np.zeros_like(rows)
    paths = "[...document.querySelectorAll('#rows .cells path')].map((one) => [one.getAttribute('fill-opacity'), "
    for shade, path in chrome.run(f"{paths}one.getAttribute('d')])"):
        for column, row, run in re.findall(r"M(\d+) (\d+)h(\d+)v1", path):
            drawn[int(row), int(column) : int(column) + int(run)] = float(shade)
    assert np.abs(drawn - np.sqrt(rows)).max() <= 0.5 / 24 + 1e-6 and drawn.any()
    places = "[...document.querySelectorAll('#rows text[y=\"221\"]')].map((one) => [one.textContent, one.getAttribute('x')])"
    for number, x in chrome.run(places):
        assert float(x) == pytest.approx(44 + 200 * (int(number) + 0.5) / len(rows))


@pytest.mark.slow
def test_two_texts_stand_side_by_side_and_the_link_opens_both(bundled, view, tmp_path, chrome):
    second = bundled.view("a function of a module").texts[0]
    page = tmp_path / "view.html"
    page.write_text(view_page(replace(view, texts=(*view.texts, second)), "x"), encoding="utf-8")
    opened(chrome, page, width=1400)
    choose = "document.querySelector('#beside').value = '1'; document.querySelector('#beside').dispatchEvent(new Event('change'))"
    for _ in ("chosen", "opened by the link"):
        chrome.run(choose)
        chrome.run("new Promise((done) => setTimeout(done, 150))")
        assert chrome.run("document.querySelectorAll('.strip')[1].children.length") == len(second.tokens)
        captions = chrome.run("[...document.querySelectorAll('.pair figcaption')].map((one) => one.textContent)")
        assert captions == [f"intact: {view.texts[0].name}", f"intact: {second.name}"]
        last = len(second.tokens) - 1
        chrome.run(f"document.querySelector('#other-{last}').focus()")
        norm = float(f"{second.variants[0].norm[view.layer, last]:.4g}")
        assert f": norm {norm:g} after" in chrome.run("document.querySelector('#readout').textContent")
        link, choose = chrome.run("location.href"), "0"
        assert "beside=1" in link
        chrome.send("Page.navigate", url="about:blank")
        chrome.send("Page.navigate", url=link)
        while not chrome.run(LOADED):
            time.sleep(0.02)


def test_the_first_visit_begins_with_a_tour_that_the_keys_go_through_or_end(view, tmp_path, chrome):
    page = tmp_path / "view.html"
    page.write_text(view_page(view, "x"), encoding="utf-8")
    steps = "[...document.querySelectorAll('.tour p')].map((one) => one.textContent.slice(0, 6))"
    opened(chrome, page, width=390)
    chrome.run("localStorage.clear()")
    opened(chrome, page, width=390)
    for number in (1, 2, 3):
        assert chrome.run(steps) == [f"{number} of 3"]
        assert chrome.run("document.activeElement.closest('.tour') !== null")
        chrome.run("document.activeElement.click()")
    assert chrome.run(steps) == [] and chrome.run("document.activeElement.id") == "tour"
    opened(chrome, page, width=390)
    assert chrome.run(steps) == []  # once
    chrome.run(CLICK.format("#tour"))
    assert chrome.run(steps) == ["1 of 3"]
    press(chrome, "Escape")
    assert chrome.run(steps) == []


def test_the_live_page_in_a_browser(bundled, chrome):
    bundled.text = "A class is a block. A block is a piece of text."
    addresses = []
    threading.Thread(target=serve, args=(bundled, 0, addresses.append), daemon=True).start()
    until = time.monotonic() + 20
    while not addresses and time.monotonic() < until:
        time.sleep(0.01)
    chrome.errors.clear()
    chrome.send("Page.navigate", url=addresses[0])

    def wait(condition):
        end = time.monotonic() + 60
        while not chrome.run(f"!!({condition})"):
            assert time.monotonic() < end, condition
            time.sleep(0.02)

    wait("document.querySelector('.part')")  # the circuit has come
    intact = chrome.run(SENTENCE)
    chrome.run("document.getElementById('off-L1.N338').click()")
    wait(f"{SENTENCE} !== {json.dumps(intact)}")
    assert chrome.run(SENTENCE).startswith("Without L1.N338: after layer 1, the norm changes most at token 0")
    chrome.run("document.getElementById('off-L1.N338').click()")
    wait(f"{SENTENCE} === {json.dumps(intact)}")
    chrome.run("document.querySelector('#other').value = 'l2.h0'; document.querySelector('form').requestSubmit()")
    wait(f"{SENTENCE}.startsWith('Without L2.H0: ')")  # the box takes a head, too
    chrome.run("document.getElementById('off-L2.H0').click()")
    wait(f"{SENTENCE} === {json.dumps(intact)}")
    chrome.run("document.querySelector('#typed').value = 'a function of a module'")
    chrome.run(CLICK.format("#read"))
    wait("[...document.querySelectorAll('.token')].some((token) => token.textContent.includes('module'))")
    chrome.run(CLICK.format("#tab-generation"))  # it fills itself
    wait("document.querySelectorAll('.written').length === 2")
    link = chrome.run("location.href")  # it says which text was typed
    chrome.send("Page.navigate", url="about:blank")
    chrome.send("Page.navigate", url=link)
    wait("[...document.querySelectorAll('.token')].some((token) => token.textContent.includes('module'))")
    assert chrome.errors == []


def test_a_notebook_shows_a_widget_that_python_answers(bundled, monkeypatch, tmp_path):
    monkeypatch.setattr(Explorer, "open", lambda *_, **__: bundled)
    shown = ss.view(text="a block is a piece of text", generation=False)
    sent = []
    monkeypatch.setattr(shown.widget, "send", sent.append)
    shown.widget._handle_custom_msg({"number": 3, "request": {"text": "a block", "off": ["L1.N338"]}}, [])
    assert sent[0]["number"] == 3
    assert sent[0]["answer"]["result"]["texts"][0]["variants"][-1]["name"] == "without L1.N338"
    assert "application/vnd.jupyter.widget-view+json" in shown._repr_mimebundle_()[0]
    assert shown.widget.view["result"]["texts"][0]["tokens"][1:3] == list(shown.result.texts[0].tokens[1:3])
    page = shown.save_html(tmp_path / "view.html")
    assert "connect-src 'none'" in page.read_text(encoding="utf-8")
    monkeypatch.setattr(notebook, "find_spec", lambda name: None)  # as where it is not installed
    without = notebook.View(shown.explorer, shown.result)
    with pytest.raises(SinkscopeError, match="a widget needs anywidget"):
        without._repr_mimebundle_()
    monkeypatch.setattr(server, "find_spec", lambda name: None)
    assert main(["view"]) == 2
