"""token_positions against planted sinks and the model's own norms and attention weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from organisms import Organism, organism
from organisms.hard import hard

from sinkscope.app.cli import main
from sinkscope.files.notation import neuron_name
from sinkscope.files.result import Result
from sinkscope.sinks.first_token.positions import TokenPositions, token_positions


def measured(o: Organism, folder: Path, ids: list[int], bos: bool | None = None) -> TokenPositions:
    text = folder / "typical.txt"
    text.write_text(o.tokenizer.decode(o.natural(6, 64, seed=5)[:, 1:].flatten().tolist()))
    return token_positions(o.model, o.tokenizer.decode(ids), tokenizer=o.tokenizer, text=text, bos=bos)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_bos_alone_has_the_norm_of_a_sink(family: str, tmp_path: Path) -> None:
    o = organism(family, 1)
    ids = o.natural(1, 20)[0].tolist()
    found = measured(o, tmp_path, ids[1:])
    assert found.tokens == tuple(o.tokenizer.decode([token]) for token in ids)
    assert found.layer == o.truth.sink_layer and found.spikes == [0]
    assert set(found.neurons) == {neuron_name(*site) for site in o.truth.neurons} and found.activation is not None
    assert (np.abs(found.activation[:, 0]) > 5 * np.abs(found.activation[:, 1:]).max(1)).all()
    with torch.no_grad():
        hidden = o.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    for layer, states in enumerate(hidden[1:-1]):  # the last one comes behind the final norm
        assert found.norm[layer] == pytest.approx(states[0].norm(dim=-1).numpy(), rel=1e-4)
    assert found.bos_norm[found.layer] == pytest.approx(found.norm[found.layer, 0], rel=1e-3)


def test_attention_received_is_that_of_the_models_own_weights(tmp_path: Path) -> None:
    o = organism("mistral", 2)
    ids = o.natural(1, 300)[0].tolist()  # more than one chunk of queries
    found = measured(o, tmp_path, ids[1:])
    o.model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = o.model(torch.tensor([ids]), output_attentions=True).attentions
    for layer, rows in enumerate(weights):
        for key in (0, 1, 255, 256, 298):
            assert found.attention[layer, key] == pytest.approx(float(rows[0, :, key + 1 :, key].mean()), abs=2e-4)
    assert np.isnan(found.attention[:, -1]).all()


def test_two_tokens_of_one_cluster_are_both_sinks_without_bos(tmp_path: Path) -> None:
    """As "Sch Com" in Llama 2; a token of another group, and both behind BOS, are none."""
    o = organism("llama", 1)
    first, second = o.tokens_of(0)[:2]
    other = o.tokens_of(1)[0]
    together = measured(o, tmp_path, [first, second], bos=False)
    with_bos = measured(o, tmp_path, [first, second])
    assert together.spikes == [0, 1] and with_bos.spikes == [0]
    assert together.bos_norm == pytest.approx(with_bos.bos_norm, rel=1e-3)  # also where the text has no BOS
    assert measured(o, tmp_path, [first, other], bos=False).spikes == [0]
    assert "2 of 2 tokens have a norm spike" in together.conclusion()


def test_a_model_without_a_sink_has_no_token_of_that_norm(tmp_path: Path) -> None:
    o = organism("llama", 1, kind="none")
    found = measured(o, tmp_path, o.natural(1, 12)[0, 1:].tolist())
    assert found.spikes == [] and found.neurons == () and found.activation is None
    assert found.conclusion().startswith("No token has a norm spike")


@pytest.mark.parametrize(("name", "family"), [("both", "gpt2"), ("delimiter_shared", "gemma2"), ("no_norm", "llama")])
def test_models_that_are_not_the_textbook_case(name: str, family: str, tmp_path: Path) -> None:
    """A massive dimension on all tokens hides no spike, and delimiters spike too."""
    h = hard(name, family)
    (tmp_path / "text.txt").write_text(h.text())
    row = h.natural(1, 48, seed=7)[0].tolist()
    words = h.tokenizer.decode(row[1:])
    found = token_positions(h.model, words, tokenizer=h.tokenizer, text=tmp_path / "text.txt")
    planted = {row.index(token) for token, neurons in h.truth.later.items() if neurons}
    if h.truth.spike:
        planted.add(0)
    assert set(found.spikes) <= planted and (0 in found.spikes) == h.truth.spike
    assert {pos for pos in planted if found.norm[-1, pos] > 3 * found.typical_norm[-1]} <= planted
    if h.truth.reading:  # heads that were planted to attend to the first token, whether or not its norm spikes
        layer = h.truth.reading[0][0]
        assert found.attention[layer, 0] > 3 * np.nanmedian(found.attention[layer])


def test_the_command_and_its_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["positions", "--json", str(tmp_path / "a.json")]) == 0
    loaded = Result.load(tmp_path / "a.json")
    assert isinstance(loaded, TokenPositions) and len(loaded.rows()) == 64 and loaded.attention.shape == (6, 64)
    capsys.readouterr()
    for words, reason in (
        ([""], "no word that this tokenizer knows"),
        ([" \n"], "no word that this tokenizer knows"),
        (["token " * 5000], "but the context of bundled is"),
        (["a", "b"], "unexpected"),
    ):
        assert main(["positions", *words]) == 2, words
        shown = capsys.readouterr()
        assert shown.out == "" and shown.err.count("\n") == 1 and reason in shown.err.lower(), words
