"""A small tokenizer of words, built in memory: one word is one token, so a text reads back as its ids."""

from __future__ import annotations

from itertools import chain, islice, product

from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

UNK, BOS, EOS, PAD = 0, 1, 2, 3
N_SPECIAL = 4

_COMMON = "poem book company the a cat dog bla dust bites one another and you it is was of to in".split()
_SYLLABLES = ["".join(s) for s in product("bdfgklmnprstvz", "aeiou", "lmnrst")]


def word_tokenizer(vocab_size: int, *, bos: bool = True) -> PreTrainedTokenizerFast:
    """Tokenizer of `vocab_size` words. With `bos` it has a BOS token and puts it first, without it has none."""
    special = ["<unk>", "<s>" if bos else "<unused>", "</s>", "<pad>"]  # ids stay the same with and without BOS
    longer = map("".join, product(_SYLLABLES, repeat=2))
    vocab = islice(chain(special, _COMMON, _SYLLABLES, longer), vocab_size)
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(vocab)}, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)  # joins words with one space
    names = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>", "name_or_path": "in-memory"}
    if bos:
        backend.post_processor = TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)])
        # TransformerLens asks the hub for a tokenizer that puts BOS first, unless this one says that it does
        names |= {"bos_token": "<s>", "add_bos_token": True}
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **names)
