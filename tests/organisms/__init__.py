"""Models whose answer is known, made without downloads: planted circuits (sinks, loops) and tiny random models."""

from . import planted_places  # noqa: F401  (enters its kinds)
from .build import organism
from .hard import HARD, UNSEEN, hard, mask_of
from .loop import LoopOrganism, loop_organism
from .organism import Organism, Truth
from .plan import FAMILIES, KINDS
from .tiny import MODEL_TYPES, tiny_model
from .tokens import bpe_tokenizer, tokenizer_for, word_tokenizer

__all__ = [
    "FAMILIES",
    "HARD",
    "KINDS",
    "MODEL_TYPES",
    "UNSEEN",
    "LoopOrganism",
    "Organism",
    "Truth",
    "bpe_tokenizer",
    "hard",
    "loop_organism",
    "mask_of",
    "organism",
    "tiny_model",
    "tokenizer_for",
    "word_tokenizer",
]
