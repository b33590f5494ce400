"""Short names."""

from __future__ import annotations

from sinkscope.models.checkpoints.checkpoint import hub_id_of, list_models


def test_every_model_has_a_name_of_its_own_and_is_found_by_every_spelling():
    names = list_models()
    assert len({hub_id.lower() for hub_id in names.values()}) == len(names) >= 40
    assert all(hub_id_of(name) == hub_id for name, hub_id in names.items())
    assert hub_id_of("Llama-2-7b-HF") == hub_id_of("llama-2-7b") == "meta-llama/Llama-2-7b-hf"
