"""The screen of the weights: its bound against a search for the input that writes most, and planted answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from organisms import FAMILIES, Organism, organism, tiny_model

from sinkscope.app.cli import main
from sinkscope.models.open import StreamTarget, open_target
from sinkscope.models.target import Target
from sinkscope.sinks.first_token.find import find_sinks
from sinkscope.sinks.first_token.screen import NeuronScreen, neuron_screen, reaches

DENSE = ["llama", "gemma2", "olmo2", "phi3", "gpt2", "gpt_neox", "opt", "phi", "olmo"]


def _screen(o: Organism, folder: Path, **more: Any) -> NeuronScreen:
    text = folder / "text.txt"
    text.write_text(o.tokenizer.decode(o.natural(2, 64)[:, 1:].flatten().tolist()))
    return neuron_screen(o.model, tokenizer=o.tokenizer, text=text, **more)


def _sites(found: NeuronScreen) -> list[tuple[int, ...]]:
    return [(c.layer, c.neuron) if c.expert is None else (c.layer, c.expert, c.neuron) for c in found.candidates]


def _written(target: Target, layer: int, neuron: int, x: torch.Tensor) -> torch.Tensor:
    """Norm that the neuron writes for residual streams `x`, by the model's own modules, without activation and bias."""
    a, block = target.adapter, target.layers[layer]
    names = (a.mid, "post_attention_layernorm", "input_layernorm")
    norm: Any = None if a.mid == a.mlp else next(block.get_submodule(n) for n in names if n and hasattr(block, n))
    zero, read = torch.zeros(1, target.d_model), x
    if norm is not None:
        read = norm(x)
    else:
        read = x / x.norm(dim=-1, keepdim=True) * target.d_model**0.5
    shift = norm(zero) if norm is not None and norm(zero).abs().max() > 0 else zero  # a LayerNorm's bias
    read = read - shift
    outs = [block.get_submodule(path) for path in (a.gate, a.up) if path]
    values = [out(read) - out(zero) for out in outs]
    parts = list(values[0].chunk(2, -1)) if a.fused_gate_up else values
    size = torch.stack([p[..., neuron].abs() for p in parts]).prod(0)
    column = target.w_out(layer, [neuron])[0].float()
    if a.post_mlp_norm is not None:
        behind: Any = block.get_submodule(a.post_mlp_norm)
        column = column * behind(torch.ones(1, target.d_model))[0]
    return size * column.norm()


@pytest.mark.parametrize("kind", DENSE)
def test_reach_is_the_most_that_any_input_makes_the_neuron_write(kind: str) -> None:
    """Gradient ascent over residual streams, through the model's own norm and projections, reaches it from below."""
    torch.manual_seed(0)
    target = Target.of(tiny_model(kind)[0])
    for name, p in target.hf.named_parameters():
        if "norm" in name or "ln_" in name:  # gains that matter
            p.data = torch.rand_like(p) + 0.5 if name.endswith("weight") else p.data
    (found,) = reaches(target, 1)
    reach = found.reach
    neuron = 3
    x = torch.randn(32, target.d_model, requires_grad=True)
    optimizer = torch.optim.Adam([x], lr=0.1)
    for _ in range(120):
        optimizer.zero_grad()
        (-_written(target, 1, neuron, x).sum()).backward()
        optimizer.step()
    most = float(_written(target, 1, neuron, x).max())
    assert most <= 1.001 * float(reach[neuron])
    assert most >= 0.99 * float(reach[neuron])


def test_the_formula_is_the_largest_eigenvalue() -> None:
    target = Target.of(tiny_model("llama")[0])
    (found,) = reaches(target, 0)
    reach, cosine = found.reach, found.cosine
    assert cosine is not None
    block: Any = target.layers[0]
    gain = block.post_attention_layernorm.weight
    for n in range(4):
        g, u = (block.get_submodule(f"mlp.{p}_proj").weight[n] * gain for p in ("gate", "up"))
        form = torch.outer(g, u)
        largest = torch.linalg.eigvalsh((form + form.T) / 2).abs().max()
        column = block.mlp.down_proj.weight[:, n].norm()
        assert float(reach[n]) == pytest.approx(float(target.d_model * largest * column), rel=1e-4)
        assert float(cosine[n]) == pytest.approx(float(torch.cosine_similarity(g, u, dim=0)), abs=1e-5)


def test_experts_are_told_apart() -> None:
    target = Target.of(tiny_model("mixtral")[0])
    found = reaches(target, 0)
    module: Any = target.sub(0, "mlp.experts")
    assert [one.expert for one in found] == list(range(module.num_experts))
    layer: Any = target.layers[0]
    gain = layer.post_attention_layernorm.weight
    for one in found:
        expert, reach = one.expert, one.reach
        gate, up = (rows * gain for rows in module.gate_up_proj[one.expert].chunk(2))
        form = torch.outer(gate[2], up[2])
        largest = torch.linalg.eigvalsh((form + form.T) / 2).abs().max()
        column = module.down_proj[expert][:, 2].norm()
        assert float(reach[2]) == pytest.approx(float(target.d_model * largest * column), rel=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_planted_neurons_are_the_first(family: str, tmp_path: Path) -> None:
    o = organism(family, 0)
    found = _screen(o, tmp_path)
    assert set(o.truth.neurons) <= set(_sites(found)[: len(o.truth.neurons)])
    assert found.candidates[0].z > 3 or family == "gemma2"  # whose norm behind the MLP lifts every neuron there


def test_the_model_of_the_package(tmp_path: Path) -> None:
    proven = find_sinks(max_repeats=4)
    found = neuron_screen()
    assert {n.site for n in proven.causal} == set(_sites(found)[: len(proven.causal)])
    for n in proven.neurons[:3]:  # a bound is a bound
        assert found.candidates[0].reach > n.contribution_norm
    assert found.neurons == 6 * 512


def test_without_a_sink_it_ranks_and_claims_nothing(tmp_path: Path) -> None:
    found = _screen(organism("llama", 1, kind="none"), tmp_path)
    assert len(found.candidates) == 8 and max(c.z for c in found.candidates) < 4
    assert "only find-sinks without --screen" in found.conclusion()


def test_a_folder_is_read_once_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    o = organism("llama", 0)
    folder = o.save(tmp_path / "model")
    monkeypatch.setattr(StreamTarget, "forward", lambda *_a, **_k: pytest.fail("a forward pass"))
    target = open_target(folder, None, None, None, None, False)
    assert isinstance(target, StreamTarget)
    target.store.hold(1)
    for layer in range(target.n_layers):
        reaches(target, layer)
    inside = [name for name in target.store.source.read if ".layers." in name]
    assert len(inside) == len(set(inside))
    text = tmp_path / "text.txt"
    text.write_text(o.tokenizer.decode(o.natural(2, 64)[:, 1:].flatten().tolist()))
    streamed = neuron_screen(folder, text=text)
    assert _sites(streamed) == _sites(_screen(o, tmp_path))


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["find-sinks", "--screen", "--top-k", "2", "--html", str(tmp_path / "a.html"), "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["kind"] == "screen" and told["result"]["candidates"][0]["neuron"] == 338
    assert (tmp_path / "a.html").stat().st_size > 10_000
    assert main(["find-sinks", "--screen", "--all", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["massive"]["kind"] == "massive-activations"
    assert main(["find-sinks", "--screen", "--max-repeats", "9"]) == 2
    assert "no use for it" in capsys.readouterr().err
