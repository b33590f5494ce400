"""Read the adapter of a model off the model itself; no module's name is known beforehand.

One layer of each kind is called again and again with the input that it got in a pass over a few tokens:

1. the layers are the largest list of modules;
2. the down projection of an MLP is linear. An input of it depends on one output of earlier linear modules at its token,
   or on one in each half, and on nothing else: derivatives say so. `up` is the factor in which that input is linear;
3. what is added to the output of the down projection, or of experts, must arrive as a constant multiple at the layer's
   output, directly or through a norm;
4. experts are recomputed from hidden states, choice and weights;
5. attention is captured at transformers' attention interface: a linear module on which queries, keys or values depend
   is a projection, and the output projection reads the heads side by side.

`inference.probe` and `inference.sums` then prove the adapter on the model's own weights.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from sinkscope.errors import SinkscopeError
from sinkscope.models.adapters import Adapter
from sinkscope.models.config import first_line
from sinkscope.models.hooks import Args, Kwargs, hidden_of, with_hidden
from sinkscope.models.stack import DRAFT, NotInferredError, first_of_kinds, not_inferred, stack_path
from sinkscope.models.target import Target
from sinkscope.opening.inference.heads import weighing_module
from sinkscope.opening.inference.kinds import common_adapter
from sinkscope.opening.inference.probe import token_ids
from sinkscope.opening.inference.stage import LENGTH, Stage, Tap
from sinkscope.tap.stock import eager
from sinkscope.tap.tap import listening

_EQUAL = 4  # of them, at the end: they enter the first layer as different vectors if positions were added before it


def infer(hf: nn.Module) -> Adapter:
    """Infer the adapter of a model from a few passes over a few tokens. The model is left as it was.

    Args:
        hf: The plain Hugging Face model. Of a model whose layers are read from disk, only the first layer of each kind
            and the ones before it are read.

    Raises:
        UnsupportedError: Some part was not found; the message says which.
    """
    model: Any = hf
    model_type = str(model.config.model_type)
    try:
        with torch.no_grad():
            return replace(_infer(model), model_type=model_type)
    except (MemoryError, torch.OutOfMemoryError, SinkscopeError):
        raise
    except NotInferredError as error:
        raise not_inferred(model, error) from None
    except Exception as error:  # a model may do anything in a pass
        error = NotInferredError(f"a pass raised {type(error).__name__}: {first_line(error)}")
        raise not_inferred(model, error) from None


def _infer(model: Any) -> Adapter:
    names = {module: name for name, module in model.named_modules()}
    stack = stack_path(model, names)
    base = stack
    while base and "input_ids" not in inspect.signature(model.get_submodule(base).forward).parameters:
        base = base.rpartition(".")[0]
    draft = replace(DRAFT, base=base, layers=stack, embed=names[model.get_input_embeddings()])
    target = Target(model, model, "hf", draft)
    tap = Tap()
    with listening(target, tap.see):
        try:
            stages = _stages(target, tap)
        except (AttributeError, TypeError):  # some models outside the interface cannot run under its name
            stages = list[Stage]()
        if any(stage.clean.attention for stage in stages):
            return common_adapter(draft, stages)
    with eager(target):
        found = dict.fromkeys(weighing_module(stage) for stage in _stages(target, tap))
    path = "|".join(path for path in found if path is not None)
    if not path:
        raise NotInferredError(
            "no softmax attention was found in its layers, neither at transformers' interface nor as the second output "
            "of a module"
        )
    outside = replace(target, adapter=replace(draft, attn=path, attention_interface=False))
    with eager(outside), listening(outside, tap.see):
        return common_adapter(outside.adapter, _stages(outside, tap))


def _stages(target: Target, tap: Tap) -> list[Stage]:
    """The first layer of each kind, with the input that it gets."""
    firsts = first_of_kinds(target)
    calls = dict[int, tuple[Args, Kwargs]]()

    def keep(number: int, _module: Any, args: Args, kwargs: Kwargs) -> None:
        if number in calls:
            raise NotInferredError(f"layer {number} runs several times in a pass")
        hidden = hidden_of(args, kwargs).clone()  # some layers add to it in place
        calls[number] = with_hidden(args, kwargs, hidden)
        if number == max(firsts):
            target.stop()

    with target.hooks(*[(target.layers[number], "pre", partial(keep, number)) for number in firsts]):
        ids = token_ids(target, LENGTH)
        ids[:, -_EQUAL:] = ids[:, -1:]
        target.forward(ids)
    stages: list[Stage] = []
    for number, (args, kwargs) in sorted(calls.items()):
        hidden = hidden_of(args, kwargs)
        if hidden.ndim != 3 or hidden.shape[:2] != (1, LENGTH):
            raise NotInferredError(
                f"its layers do not get one residual stream of {LENGTH} tokens, but of shape {tuple(hidden.shape)}"
            )
        stages.append(Stage(target, number, args, kwargs, tap))
    return stages
