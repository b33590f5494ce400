"""Small tokenizers built in memory, no files: one of words, and one of byte-level BPE.

The word one maps one word to one token, so a text reads back as the ids it was made of. transformers rebuilds the
tokenizer of a saved qwen2 folder as byte-level BPE whatever the folder holds, so that family needs the other one.
"""

from __future__ import annotations

from itertools import chain, islice, product
from typing import Any

from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

UNK, BOS, EOS, PAD = 0, 1, 2, 3
N_SPECIAL = 4

_SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]
_COMMON = "poem book company the a cat dog bla dust bites one another and you it is was of to in".split()
_SYLLABLES = ["".join(s) for s in product("bdfgklmnprstvz", "aeiou", "lmnrst")]
_SPACE = "Ġ"  # how byte-level BPE spells a space


def tokenizer_for(model_type: str, vocab_size: int, *, bos: bool = True) -> PreTrainedTokenizerFast:
    """The tokenizer that a saved folder of `model_type` gives back unchanged."""
    return bpe_tokenizer(vocab_size, bos=bos) if model_type == "qwen2" else word_tokenizer(vocab_size, bos=bos)


def word_tokenizer(vocab_size: int, *, bos: bool = True) -> PreTrainedTokenizerFast:
    """Tokenizer of `vocab_size` words. With `bos` it has a BOS token and puts it first, without it has none."""
    longer = map("".join, product(_SYLLABLES, repeat=2))
    vocab = list(islice(chain(_special(bos), _COMMON, _SYLLABLES, longer), vocab_size))
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(vocab)}, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)  # joins words with one space
    _put_bos_first(backend, bos)
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **_names(bos))


def bpe_tokenizer(vocab_size: int, *, bos: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE: the letters, a space, and merges towards the same words until the vocabulary is full."""
    vocab = [*_special(bos), _SPACE, *"abcdefghijklmnopqrstuvwxyz"]
    merges = []
    known = set(vocab)
    for left, right in (step for word in _COMMON + _SYLLABLES for step in _merge_steps(word)):
        if len(vocab) < vocab_size and left + right not in known and left in known:
            vocab.append(left + right)
            known.add(left + right)
            merges.append((left, right))
    tokenizer = Qwen2Tokenizer(vocab={t: i for i, t in enumerate(vocab)}, merges=merges, **_names(bos))
    _put_bos_first(tokenizer.backend_tokenizer, bos)
    return tokenizer


def _merge_steps(word: str) -> list[tuple[str, str]]:
    chain = [(word[:i], word[i]) for i in range(1, len(word))]
    return [*chain, (_SPACE, word)]


def _special(bos: bool) -> list[str]:
    special = list(_SPECIAL)
    if not bos:
        special[BOS] = "<unused>"  # ids stay the same with and without BOS
    return special


def _names(bos: bool) -> dict[str, Any]:
    names = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>", "name_or_path": "in-memory"}
    # TransformerLens asks the hub for a tokenizer that puts BOS first, unless this one says that it does
    return names | {"bos_token": "<s>", "add_bos_token": True} if bos else names


def _put_bos_first(backend: Tokenizer, bos: bool):
    if bos:
        backend.post_processor = TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)])
