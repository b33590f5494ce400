"""Which keys a layer's own rules or a mask hide from later queries, and what cannot be followed: it is refused."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sinkscope.engine.step import Step
from sinkscope.errors import UnsupportedError
from sinkscope.models.numbering import check_caches_filled
from sinkscope.models.target import Target
from sinkscope.models.windows import layers_with_states
from sinkscope.results.notation import count_of


def cache_layers(target: Target) -> list[int]:
    """Return layers whose part of the cache holds keys and values alone; others keep a state.

    There are none if an indexer chooses, or if attention is outside transformers' attention interface.
    """
    if not target.adapter.attention_interface:
        return []
    for layer in target.attending:
        if hasattr(target.sub(layer, "attn"), "indexer"):
            return []
    states = layers_with_states(target)
    return [number for number in range(target.n_layers) if number not in states]


def scope_line(target: Target) -> str:
    """Return what is served of a model, in one line."""
    layers = range(target.n_layers)
    policies = [layer for layer in cache_layers(target) if layer in target.attending]
    parts = {
        "sink neurons and patches": [layer for layer in layers if layer in target.with_neurons],
        "attention": target.attending,
        "cache policies and guards": policies,
    }
    sentences = list[str]()
    for what, served in parts.items():
        where = f"{len(served)} of {len(layers)} layers"
        if len(served) == len(layers):
            where = "all layers"
        sentences.append(f"{what} in {where}")
    return "; ".join(sentences)


def check_servable(target: Target) -> None:
    """Refuse a model on which no cache policy and no attention observer can act.

    Raises:
        UnsupportedError: It is a TransformerBridge, its attention is outside transformers' attention interface, or its
            cache holds no keys and values of which a layer sees all.
    """
    if target.kind == "bridge":
        raise UnsupportedError(
            "a TransformerBridge computes its own attention, on which no cache policy, guard or observer acts: give "
            "the plain Hugging Face model"
        )
    if not target.adapter.attention_interface:
        raise UnsupportedError(
            f"a model of type {target.adapter.model_type!r} computes attention inside its modules, where no cache "
            "policy, guard or attention observer reaches it: use another model for these; find-sinks and edits work on "
            "this one"
        )
    shared = getattr(target.config, "num_kv_shared_layers", 0) or 0
    if shared:
        raise UnsupportedError(
            f"{count_of(shared, 'layer')} of {target.name} attend to the keys of earlier layers, which cannot be cut "
            "or observed for these alone: use another model for cache policies, guards and observers; find-sinks and "
            "edits work on this one"
        )
    check_caches_filled(target)
    if not cache_layers(target):
        raise UnsupportedError(
            f"the cache of {target.name} is not a plain key/value cache (it keeps a recurrent state, or an indexer "
            "selects keys): use another model for cache policies and attention observers"
        )


def check_mask(mask: Any, step: Step, target: Target) -> None:
    """Refuse a further turn whose mask hides tokens that earlier calls read.

    Raises:
        UnsupportedError: It does.
    """
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] < step.past:
        return
    earlier = step.earlier.pos
    hidden = (mask[:, : step.past] == 0).to(earlier.device) & (earlier >= 0)
    if bool(hidden.any()):
        pad = target.config.get_text_config().pad_token_id
        tokens = count_of(int(hidden.sum()), "token")
        raise UnsupportedError(
            f"the attention mask of this turn hides {tokens} that earlier calls have read; without a mask, "
            f"`generate` takes every token equal to pad_token_id={pad} for padding: pass attention_mask with 1 at "
            "every real token"
        )
