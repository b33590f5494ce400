"""token_positions against planted sinks, the model's own attention weights, and a browser that reads its page."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from organisms import Organism, organism
from organisms.hard import hard

from sinkscope.app.cli import main
from sinkscope.app.pages import page
from sinkscope.errors import SinkscopeError
from sinkscope.files.notation import neuron_name
from sinkscope.files.result import Result
from sinkscope.sinks.first_token.positions import TokenPositions, _tokenized, token_positions

BAD = "<img src=x onerror=alert(1)>"


def _found(o: Organism, folder: Path, passage: str | None, **more: Any) -> TokenPositions:
    text = folder / "typical.txt"
    text.write_text(o.tokenizer.decode(o.natural(6, 64, seed=5)[:, 1:].flatten().tolist()))
    return token_positions(o.model, passage, tokenizer=o.tokenizer, text=text, **more)


def _words(o: Organism, ids: list[int]) -> str:
    return o.tokenizer.decode(ids)


@pytest.mark.parametrize("family", ["llama", "gemma2", "neox", "gpt2", "mixtral"])
def test_bos_alone_has_the_norm_of_a_sink(family: str, tmp_path: Path) -> None:
    o = organism(family, 1)
    ids = o.natural(1, 20)[0].tolist()
    found = _found(o, tmp_path, _words(o, ids[1:]))
    assert [t.id for t in found.tokens] == ids and found.tokens[0].kind == "BOS"
    assert found.sink_layer == found.layer == o.truth.sink_layer and found.high == (0,)
    assert {n.name for n in found.neurons} >= {neuron_name(*site) for site in o.truth.neurons}
    for neuron in found.neurons:
        values = np.abs(neuron.values)
        assert values[0] > 5 * values[1:].max()
    with torch.no_grad():
        hidden = o.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    for layer in range(len(found.norm) - 1):  # the last one comes behind the final norm
        assert found.norm[layer] == pytest.approx(hidden[layer + 1][0].norm(dim=-1).numpy(), rel=1e-4)
    assert found.first_norm[found.layer] == pytest.approx(found.norm[found.layer, 0], rel=1e-3)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "mistral"])
def test_attention_received_is_that_of_the_models_own_weights(family: str, tmp_path: Path) -> None:
    o = organism(family, 2)
    ids = o.natural(1, 300)[0].tolist()  # more than one chunk of queries
    found = _found(o, tmp_path, _words(o, ids[1:]))
    o.model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = o.model(torch.tensor([ids]), output_attentions=True).attentions
    for layer, rows in enumerate(weights):
        for key in (0, 1, 255, 256, 298):
            later = rows[0, :, key + 1 :, key].mean(1)
            assert found.attention[layer, key] == pytest.approx(float(later.mean()), abs=2e-4)
            assert found.largest[layer, key] == pytest.approx(float(later.max()), abs=2e-4)
    assert np.isnan(found.attention[:, -1]).all() and np.isnan(found.uniform[-1])
    assert found.uniform[298] == pytest.approx(1 / 300) and found.uniform[297] == pytest.approx((1 / 299 + 1 / 300) / 2)
    assert found.received[0][0] > 3 * found.uniform[0]


def test_two_tokens_of_one_cluster_are_both_sinks_without_bos(tmp_path: Path) -> None:
    """As "Sch Com" in Llama 2; a token of another group, and both behind BOS, are none."""
    o = organism("llama", 1)
    first, second = o.tokens_of(0)[:2]
    other = o.tokens_of(1)[0]
    together = _found(o, tmp_path, _words(o, [first, second]), bos=False)
    assert together.high == (0, 1) and together.bos  # held against BOS also where the text has none
    layer = together.layer
    assert together.first_norm[layer] == pytest.approx(
        _found(o, tmp_path, _words(o, [other] * 3)).first_norm[layer], rel=1e-3
    )
    assert _found(o, tmp_path, _words(o, [first, other]), bos=False).high == (0,)
    assert _found(o, tmp_path, _words(o, [first, second])).high == (0,)
    told = together.conclusion()
    assert "2 of 2 tokens have a norm spike" in told and f"({together.norm[layer, 1]:.4g})" in told


def test_a_model_without_a_sink_has_no_token_of_that_norm(tmp_path: Path) -> None:
    o = organism("llama", 1, kind="none")
    found = _found(o, tmp_path, _words(o, o.natural(1, 12)[0, 1:].tolist()))
    assert found.sink_layer is None and found.high == () and found.neurons == ()
    assert found.conclusion().startswith("No token's norm spikes") and "No MLP makes a norm spike" in found.text()


HARDER = [
    ("both", "llama"),
    ("both", "gpt2"),
    ("delimiter", "gpt2"),
    ("delimiter", "neox"),
    ("delimiter_shared", "gemma2"),
]
HARDER += [("no_norm", "llama"), ("delimiter_no_spike", "mixtral"), ("attention_spike", "llama"), ("late", "llama")]


@pytest.mark.parametrize(("name", "family"), HARDER)
def test_models_that_are_not_the_textbook_case(name: str, family: str, tmp_path: Path) -> None:
    """A massive dimension on all tokens hides no spike, delimiters spike too, and attention alone is no spike."""
    h = hard(name, family)
    (tmp_path / "text.txt").write_text(h.text())
    row = h.natural(1, 48, seed=7)[0].tolist()
    words = h.tokenizer.decode(row[1:])
    found = token_positions(h.model, words, tokenizer=h.tokenizer, text=tmp_path / "text.txt")
    later = {row.index(token) for token, neurons in h.truth.later.items() if neurons}
    assert {*found.high, *found.elsewhere} == ({0} if h.truth.spike else set()) | later
    assert found.sink_layer == h.truth.sink_layer and found.shared_dims == h.truth.shared_dims
    if h.truth.reading:  # heads that were planted to attend to the first token, whether or not its norm spikes
        layer = h.truth.reading[0][0]
        assert found.largest[layer, 0] > 0.5 > 5 * found.uniform[0]


def test_neurons_and_layer_of_ones_own(tmp_path: Path) -> None:
    o = organism("mixtral", 1)
    site = o.truth.neurons[0]
    ids = o.natural(1, 12)[0].tolist()
    words = _words(o, ids[1:])
    own = _found(o, tmp_path, words, layer=1, neurons=["0.1.2", ".".join(map(str, site))])
    assert own.layer == 1 and own.sink_layer == o.truth.sink_layer
    assert own.neurons[1] in _found(o, tmp_path, words).neurons
    for name, said in (
        ("1.2", "is a mixture of experts; give .layer, expert, neuron."),
        ("9.0.1", "layer 9 is not in .*: give one from 0 to"),
        ("x", "expected a neuron"),
        ("1.", "1."),
    ):
        with pytest.raises(SinkscopeError, match=said):
            _found(o, tmp_path, words, neurons=[name])
    with pytest.raises(SinkscopeError, match="layer 99 is not in"):
        _found(o, tmp_path, words, layer=99)


def test_the_chat_template_and_its_tokens(tmp_path: Path) -> None:
    o = organism("llama", 1)
    o.tokenizer.chat_template = "{{ bos_token }} dog {{ messages[0].content | trim }} cat </s> poem"
    said = _words(o, o.tokens_of(0)[:3])
    found = _found(o, tmp_path, f"  {said} ", chat=True)
    assert [t.kind for t in found.tokens] == ["BOS", "template", *["word"] * 3, "template", "special", "template"]
    assert [t.text.strip() for t in found.tokens] == ["<s>", "dog", *said.split(), "cat", "</s>", "poem"]
    assert _found(o, tmp_path, said, chat=True, bos=False).tokens[0].kind == "template"
    assert "Tokens of the chat template (2)" in found.text()  # the last token receives nothing
    o.tokenizer.chat_template = "{{ raise_exception('Only\n tools, please') }}"
    with pytest.raises(SinkscopeError, match=r"^the chat template of .+ failed \(Only\): leave out chat$"):
        _found(o, tmp_path, said, chat=True)
    o.tokenizer.chat_template = None
    with pytest.raises(SinkscopeError, match="has no chat template"):
        _found(o, tmp_path, said, chat=True)


def test_delimiters_line_ends_and_parts_of_characters() -> None:
    found = token_positions(passage="one, two.\n\nthr\u00e9e \U0001f600 <s> \u4e2d!")
    kinds = {t.text.strip(" "): t.kind for t in found.tokens}
    assert kinds[","] == kinds["."] == kinds["!"] == "delimiter"
    assert kinds["one"] == kinds["\u00e9"] == "word"
    assert any("\n" in t.text and t.kind == "delimiter" for t in found.tokens)
    assert "".join(t.text for t in found.tokens if not t.text.startswith(("\u00c3", "\u00f0"))).count("\U0001f600") == 1
    assert [t.kind for t in found.tokens if t.text.strip() == "<s>"] == ["BOS", "special"]


def test_a_slow_tokenizer_has_its_tokens_found_in_the_text() -> None:
    words = {0: "one", 1: "two", 2: ","}

    class Slow(SimpleNamespace):
        is_fast = False

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [0, 2, 1, 0]}

        def decode(self, ids: list[int]) -> str:
            return words[ids[0]]

    assert _tokenized(Slow(), "one,  two one") == ([0, 2, 1, 0], [3, 4, 9, 13])


def test_the_file_and_the_text_of_the_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("the first token takes it all\n" * 12)
    assert main(["positions", "--file", str(tmp_path / "a.txt"), "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["kind"] == "positions" and len(told["result"]["tokens"]) > 60
    loaded = Result.from_dict(told)
    assert isinstance(loaded, TokenPositions) and loaded.to_dict()["result"] == told["result"]
    assert len(loaded.text().splitlines()) < 60 and len(loaded.rows()) == len(loaded.tokens)
    assert main(["positions"]) == 0
    assert "of 64 tokens" in capsys.readouterr().out


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "long.txt").write_text("token " * 5000)
    for words, said in (
        ([""], "the text is empty"),
        (["  "], "the text is empty"),
        (["a", "--file", "x"], "given twice"),
        (["--file", str(tmp_path / "no.txt")], "no such file"),
        (["--file", str(tmp_path / "empty.txt")], "the text is empty"),
        (["--file", str(tmp_path / "bytes.txt")], "not UTF-8"),
        (["--file", str(tmp_path)], "is a directory"),
        (["--file", str(tmp_path / "long.txt")], "but the context of bundled is"),
        (["a", "--chat"], "no chat template"),
        (["a", "--neuron", "7"], "l1.n338"),
        (["a", "b"], "unexpected"),
    ):
        assert main(["positions", *words]) == 2, words
        shown = capsys.readouterr()
        assert shown.out == "" and shown.err.count("\n") == 1 and said.lower() in shown.err.lower(), words


def test_nothing_of_a_text_becomes_markup() -> None:
    found = token_positions(passage=f"a {BAD}</script><!-- \u202e b")
    shown = page(found)
    assert BAD not in shown and "<!-- " not in shown.split("<main>")[1].split("</main>")[0] and "\u202e" not in shown
    assert "&lt;" in shown
