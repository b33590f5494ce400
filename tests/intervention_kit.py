"""What the tests of interventions share: the three kinds of one model, and edits done by hand as reference."""

from __future__ import annotations

import atexit
import copy
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.opening.live import target_of


def bridge_of(model, tokenizer):
    """A bridge of a copy: booting changes the model in place."""
    from transformer_lens.model_bridge import TransformerBridge

    inner = copy.deepcopy(model)
    inner.config.architectures = [type(inner).__name__]
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    tokenizer.save_pretrained(folder)
    tokenizer.init_kwargs["name_or_path"] = folder
    inner.config.save_pretrained(folder)
    return TransformerBridge.boot_transformers(folder, hf_model=inner, tokenizer=tokenizer)


def nnsight_of(model, tokenizer):
    from nnsight import TransformersModel

    return TransformersModel(copy.deepcopy(model), tokenizer=tokenizer, task="text-generation")


KINDS = {"hf": lambda model, _tokenizer: model, "bridge": bridge_of, "nnsight": nnsight_of}


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
    names = [n for n in vars(nn.Module()) if n.endswith("_hooks")]
    return sum(len(getattr(m, name)) for m in model.modules() for name in names)


@contextmanager
def listing_1(model, sites: list[tuple[int, int]], site: str = "post") -> Iterator[None]:
    """The paper's listing for whole sequences without padding: the second value from the second position on."""
    target, handles = target_of(model), []

    def patched(tensor: Tensor, neuron: int) -> Tensor:
        tensor = tensor.clone()
        tensor[:, 1:, neuron] = tensor[:, 1:2, neuron]
        return tensor

    for layer, neuron in sites:
        module = target.mlp_part(layer, "down" if site == "post" else "up")
        if site == "post":
            handles.append(module.register_forward_pre_hook(lambda _m, args, n=neuron: (patched(args[0], n),)))
        else:
            handles.append(module.register_forward_hook(lambda _m, _args, out, n=neuron: patched(out, n)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def greedy(model, ids: Tensor, steps: int, around: Callable[[], AbstractContextManager[Any]]) -> Tensor:
    """Greedy decoding the slow way: the whole sequence again for every token, under an edit done by hand."""
    for _ in range(steps):
        with around():
            ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids
