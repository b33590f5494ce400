"""Models whose answer is known, made without downloads: planted circuits (sinks, loops) and tiny random models."""

from .kept_loops import kept_loop
from .kinds import KINDS, mask_of, organism
from .planted import Organism
from .tiny import MODEL_TYPES, tiny_model

__all__ = ["KINDS", "MODEL_TYPES", "Organism", "kept_loop", "mask_of", "organism", "tiny_model"]
