"""Edits of a running model: ablate neurons, write values, patch. `with intervention.on(model) as run:`."""

from sinkscope.engine.run import Event, Run
from sinkscope.hooks.edit.base import Composed, Intervention
from sinkscope.hooks.edit.edits import Ablate, Add, NeuronEdit, Put
from sinkscope.hooks.edit.knockout import Knockout
from sinkscope.hooks.edit.sink_patch import SinkPatch

__all__ = [
    "Ablate",
    "Add",
    "Composed",
    "Event",
    "Intervention",
    "Knockout",
    "NeuronEdit",
    "Put",
    "Run",
    "SinkPatch",
]
