"""Commands as they are typed, on SmolLM2 as a GGUF file and as a folder: what they print is what plain hooks read."""

from __future__ import annotations

import plain
import pytest
import torch

from sinkscope.app.card import SinkCard


def test_a_half_download_is_refused_in_one_line(refusal, smollm2, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    half = tmp_path / "half.gguf"
    with smollm2.path.open("rb") as whole:
        half.write_bytes(whole.read(3 << 20))
    assert "half.gguf" in refusal(["find-sinks", str(half)])
    half.write_text("<html>not found</html>")
    assert "half.gguf" in refusal(["generate", "Hello", "--model", str(half)])


def test_generate_prints_what_plain_greedy_decoding_writes(typed, smollm2):
    prompt = "The capital of France is"
    said = typed(["generate", prompt, "--model", str(smollm2.folder), "--no-chat", "--max-new-tokens", "6"]).out
    ids = torch.tensor([smollm2.tokenizer(prompt).input_ids])
    assert said.strip() == smollm2.tokenizer.decode(plain.greedy(smollm2.model, ids, 6)).strip()


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_scan_writes_a_card_that_names_the_neurons(typed, smollm2, tmp_path):
    out = tmp_path / "scans" / "smollm2"
    typed(["scan", str(smollm2.folder), "--quick", "--out", str(out)])
    card = SinkCard.load(out / "card.json")
    assert [part.name for part in card.parts if part.conclusion.startswith("not measured")] == []
    assert "L11.N1229" in (out / "card.json").read_text()
    typed(["report", str(out), "--out", str(tmp_path / "report.html")])
    assert "L11.N1229" in (tmp_path / "report.html").read_text()
