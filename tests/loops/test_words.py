"""Where words begin: token ids beside the text they spell, and a guard whose seams stand between words."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import sinkscope as ss
from sinkscope.loops.guard.steer import BROKEN, Steering
from sinkscope.loops.guard.words import Words, words_of

TEXT = "Lily's friend won't go.\n\"Hello!\" Grandma said, und Ümläute: don't stop, don't stop"


def bundled():
    return ss.load().tokenizer


def sentencepiece():
    """Every character of the text alone, and some pieces, as SentencePiece writes them."""
    pieces = sorted({"▁", *TEXT.replace(" ", "▁"), "<unk>", "do", "st", "op", "▁do", "▁st"})
    merges = [("d", "o"), ("▁", "do"), ("s", "t"), ("▁", "st"), ("o", "p")]
    core = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


@pytest.mark.parametrize("tokenizer", [bundled(), sentencepiece()], ids=["bytes", "sentencepiece"])
def test_words_begin_where_the_text_says_it(tokenizer):
    words = words_of(tokenizer)
    encoded = tokenizer(TEXT, add_special_tokens=False, return_offsets_mapping=True)
    ids = encoded["input_ids"]
    assert words is not None and tokenizer.decode(ids).strip() == TEXT
    begun, before = [], -1
    for place, (start, _) in enumerate(encoded["offset_mapping"]):
        if start == before:  # the second byte of a letter
            continue
        before = start
        around = TEXT[max(0, start - 1) : start + 1]
        inside = len(around) == 2 and all(char.isalnum() or char == "'" for char in around)
        assert words.begins(ids, place) is not inside, (place, around)
        begun.append(not inside)
    assert any(begun[1:]) and not all(begun)


def test_a_tokenizer_without_marks_knows_no_words():
    core = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    assert words_of(PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")) is None
    assert words_of(None) is None and words_of(object()) is None


WORDS = Words(inside=frozenset({8, 9, 11}), left_open=frozenset({7, 8, 10}))  # 7 8 9 is a word, 10 11 another


def test_seams_are_where_the_next_word_begins():
    ids = [6, 7, 8, 9, 7, 8, 9, 5]
    assert [WORDS.seam(ids, place, 3) for place in range(8)] == [0, 1, 4, 4, 4, 7, 7, 7]
    assert WORDS.seam([7, 8, 8, 8, 8], 2, 1) is None


def test_a_word_that_has_begun_loses_nothing_and_no_other_takes_its_place():
    ids = [6, 7, 8, 9] * 3
    plain, steering = Steering(0.5, 99, 4), Steering(0.5, 99, 4, words=WORDS)
    assert set(plain.losses([*ids, 6, 7])) == {8} and steering.losses([*ids, 6, 7]) == {}
    assert steering.losses(ids) == plain.losses(ids) != {}, "6 begins a word"
    letters = [5, *[8] * 10]
    losses = Steering(0.5, 99, 0, words=WORDS).losses(letters)
    assert losses == Steering(0.5, 99, 0).losses(letters) != {}, "no word begins in it"
    logits = torch.zeros(12)
    logits[7], logits[10] = 2.0, 1.9
    steering.steer(logits, [*ids, 6], [2])
    lost = plain.losses([*ids, 6])[7]
    assert int(logits.argmax()) == 10 and logits[7] == 2.0 - lost and logits[2] == -lost
    follows = torch.zeros(12)
    steering.steer(follows, [*ids, 6, 10], [2])
    assert follows[8] == follows[9] == -BROKEN and follows[11] == 0, "the end of 7 8 9 does not follow 10"
    after = torch.zeros(12)
    steering.steer(after, [*ids, 6, 10, 11, 5], [2])
    assert not after.any(), "the next word is free"


def test_where_the_model_is_sure_a_word_of_the_text_takes_the_place_and_is_whole():
    ids = [6, 5, 7, 8, 9, 6, 5, 7, 8, 9, 6, 5]
    steering = Steering(3.0, 99, 2, words=WORDS)
    logits = torch.full((12,), -1.0)
    logits[7], logits[10], logits[5], logits[2] = 8.0, 1.0, 0.5, 0.4
    steering.steer(logits, ids, [2])
    assert int(logits.argmax()) == 5, "10 has never been a word alone"
    after = torch.zeros(12)
    steering.steer(after, [*ids, 7], [2])
    assert after[8] == -BROKEN and after[6] == 0, "nothing goes on with what took the place"
    assert WORDS.rest([7, 8, 9, 6, 7, 8, 5], 7) == {8, 9} and WORDS.rest([5, 8, 9, 5, 6], 5) == {8, 9}
    assert WORDS.whole(ids) == {5, 6}


def test_nothing_grows_out_of_the_word_before():
    """The likeliest token begins a word and loses: a token that would lengthen the word before loses more."""
    ids = [10, 6, 10, 6, 10, 6, 10]
    logits = torch.zeros(12)
    logits[6] = 1.0
    steering = Steering(0.5, 99, 0, words=WORDS)
    assert steering.losses(ids)[6] > 0
    steering.steer(logits, ids, [])
    assert logits[11] == -BROKEN and logits[5] == 0


def test_the_guards_seams_stand_between_words():
    """Before, the text was cut inside of "I'm"."""
    model = ss.load()
    prompt = "The dog was too small. Lily cried. Then Tom said,"
    told = ss.generate(model, prompt, guard=ss.LoopGuard(monitor={"tail_beyond": 0}), max_new_tokens=96)[0]
    words = words_of(model.tokenizer)
    assert told.events and words is not None
    for event in told.events:
        place = event.data["generated"] - event.data["taken_back"]
        assert event.data["taken_back"] and words.begins(told.tokens, place)
