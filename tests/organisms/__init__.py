"""Models whose answer is known, made without downloads: planted sink circuits and tiny random models."""

from .organism import Organism, Truth, organism
from .plan import FAMILIES, KINDS
from .tiny import MODEL_TYPES, tiny_model
from .tokens import bpe_tokenizer, tokenizer_for, word_tokenizer

__all__ = [
    "FAMILIES",
    "KINDS",
    "MODEL_TYPES",
    "Organism",
    "Truth",
    "bpe_tokenizer",
    "organism",
    "tiny_model",
    "tokenizer_for",
    "word_tokenizer",
]
