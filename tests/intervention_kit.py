"""The three kinds of one model, and what each says."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.models.call_cache import bridge_hooks
from sinkscope.opening.load import load, target_of


def bridge_of(model, tokenizer):
    """A bridge of a copy: booting changes the model in place, and looks for a second tokenizer unless told of BOS."""
    from transformer_lens.model_bridge import TransformerBridge

    model, tokenizer = copy.deepcopy(model), copy.deepcopy(tokenizer)
    model.config.architectures = model.config.architectures or [type(model).__name__]
    tokenizer.init_kwargs.update(name_or_path="", add_bos_token=True)
    name = type(model).__name__
    bridge = TransformerBridge.boot_transformers(name, hf_model=model, tokenizer=tokenizer, dtype=model.dtype)
    for module, _, fn in bridge_hooks(bridge):
        module.register_forward_pre_hook(fn, with_kwargs=True)
    return bridge


def nnsight_of(model, tokenizer):
    from nnsight import TransformersModel

    return TransformersModel(copy.deepcopy(model), tokenizer=tokenizer, task="text-generation")


KINDS = {"hf": lambda model, _tokenizer: model, "bridge": bridge_of, "nnsight": nnsight_of}


def loaded(kind: str, *where: Any, **settings: Any):
    """A model that `load` reads, as one of the three kinds."""
    model = load(*where, **settings)
    return KINDS[kind](model, model.tokenizer)


@torch.no_grad()
def logits(model, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Logits of any kind of model, each called in its own way."""
    target = target_of(model)
    extra = {} if mask is None else {"attention_mask": mask}
    if target.kind == "bridge":
        return model(ids, **extra)
    if target.kind == "hf":
        return model(input_ids=ids, **extra).logits
    with model.trace({"input_ids": ids, "attention_mask": torch.ones_like(ids) if mask is None else mask}):
        out = model.output.logits.save()
    return out


def count_hooks(model: nn.Module) -> int:
    tables = [vars(module) for module in model.modules()]
    return sum(len(table[name]) for table in tables for name in table if name.endswith("_hooks"))
