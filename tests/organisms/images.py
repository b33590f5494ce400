"""Tiny random models of the types that are a text model behind an image tower."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .decoders import small_settings

LACK_BOS = ("qwen3_vl", "glm4v", "glm46v", "glm_ocr", "molmo2")
"""Types whose text configuration has no `bos_token_id`."""
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
_OWN: dict[str, dict[str, Any]] = {name: {"text_config": _ROPE} for name in LACK_BOS[1:4]}
_OWN["molmo2"] = {"adapter_config": {"vision_feature_layer": [1, 2]}}


def image_decoder(model_type: str):
    """A random model of a type, which reads text alone as well."""
    config_class = CONFIG_MAPPING[model_type]
    settings = small_settings(config_class(), {})
    for part, own in _OWN.get(model_type, {}).items():
        settings[part] |= own
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config_class(**settings)).float().eval().requires_grad_(False)
