"""The tree of a model shows each module with the sites that are read there, and what could not be proved."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from organisms.decoders import decoder
from organisms.tiny import MODEL_TYPES, tiny_model
from transformers import PreTrainedModel

import sinkscope as ss
from sinkscope.hooks.trace import resolve
from sinkscope.models.describe import sites_of_part
from sinkscope.opening.load import target_of


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_each_site_stands_at_the_module_at_which_it_is_read(model_type):
    target = target_of(tiny_model(model_type)[0])
    for layer in range(target.n_layers):
        shown = {
            site: target.sub(layer, part) for part in target.paths[layer] for site in sites_of_part(target, layer, part)
        }
        for name, module in shown.items():
            if f"blocks.{layer}.{name}" not in target.unproved:
                (site,) = resolve(target, f"blocks.{layer}.{name}")
                assert site.point is None or site.point.module is module, site.name


def test_a_llama_is_read_in_a_minute():
    lines = target_of(ss.load()).describe().splitlines()
    assert lines[:3] == [
        "bundled (LlamaForCausalLM): 6 layers of width 192, 8 heads on 4 kv heads",
        "model.embed_tokens: Embedding 2048 x 192: hook_embed",
        "model.layers: 0-5",
    ]
    assert lines[-2].split() == ["down_proj", "Linear", "192", "x", "512", "mlp.hook_post"]


def test_what_could_not_be_proved_is_named_with_its_reason():
    text = target_of(decoder("bloom")).describe()
    assert "  not offered: attn.hook_q: its heads are not seen to be those of softmax attention" in text


def test_a_notebook_shows_models_that_were_loaded_here_alone(monkeypatch):
    shown = {}
    formatters = {"text/html": SimpleNamespace(for_type=shown.__setitem__)}
    shell = SimpleNamespace(display_formatter=SimpleNamespace(formatters=formatters))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    model = ss.load()
    assert shown[PreTrainedModel](model) == target_of(model)._repr_html_()
    assert shown[PreTrainedModel](tiny_model("llama")[0]) is None
