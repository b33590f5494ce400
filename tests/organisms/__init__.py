"""Models whose answer is known, made without downloads: planted circuits (sinks, loops) and tiny random models."""

from .kinds import KINDS, mask_of, organism
from .loop import LoopOrganism, loop_organism
from .planted import Organism, Truth
from .tiny import MODEL_TYPES, tiny_model

__all__ = [
    "KINDS",
    "MODEL_TYPES",
    "LoopOrganism",
    "Organism",
    "Truth",
    "loop_organism",
    "mask_of",
    "organism",
    "tiny_model",
]
