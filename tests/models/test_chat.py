"""Chat templates and BOS: what a text becomes before the model reads it, and that this is said."""

from __future__ import annotations

import copy
import re
import warnings

import pytest
from organisms.tiny import tiny_model
from refusals import refused

import sinkscope as ss
from sinkscope.errors import SinkscopeWarning
from sinkscope.models.text import plain_ids
from sinkscope.models.text.chat import chat_ids

CHAT = (
    "{% for m in messages %}<s> {{ m.role }} {{ m.content }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<s> assistant {% endif %}"
)
REWRITES = CHAT.replace("m.content", "m.content if m.role == 'user' else 'cat'")
NOTE = "texts are put into the chat template of"


def chatty(template: str | None = CHAT):
    model, tokenizer = tiny_model("llama")
    tokenizer.chat_template = template
    return model, tokenizer


def test_a_text_becomes_a_message_where_there_is_a_template():
    """With a note; not if it is in a template already, or if there is no template."""
    model, tokenizer = chatty()
    ids = tokenizer("<s> user poem dog book </s> <s> assistant", add_special_tokens=False)["input_ids"]
    plain = tokenizer("poem dog book")["input_ids"]

    def read(prompt, **options):
        """The first tokens that are generated, and whether there is a note."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", SinkscopeWarning)
            found = ss.generate(model, prompt, tokenizer=tokenizer, max_new_tokens=6, **options)[0].tokens
        return found, any(NOTE in str(one.message) for one in caught)

    in_template, as_it_is = read(ids)[0], read(plain)[0]
    assert read(["poem dog book", "cat"]) == (in_template, True)
    assert read("poem dog book", chat=True) == (in_template, False)
    assert read("poem dog book", chat=False) == (as_it_is, False)
    assert not read("<s> user poem </s>")[1]
    tokenizer.chat_template = None
    assert read("poem dog book") == (as_it_is, False)
    with refused(r"chat_template is not set.*: read texts as they are, with chat=False \(--no-chat\)"):
        read("poem", chat=True)


@pytest.mark.filterwarnings(f"ignore:{NOTE}")
@pytest.mark.parametrize(
    ("template", "says"),
    [
        (CHAT.replace("m.content", "m.content | upper"), "leaves out what message 1 says"),
        ("{{ raise_exception('no system\n role') }}", r"failed \(.*no system"),
    ],
)
def test_a_template_that_says_nothing_is_refused_with_the_option_that_exists(template, says):
    model, tokenizer = chatty(template)
    for read in (ss.generate, lambda model, text, **more: ss.Conversation(model, **more).ask(text)):
        with refused(rf"the chat template of .* {says}.*: read texts as they are, with chat=False \(--no-chat\)"):
            read(model, "poem dog", tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("trim", "answer", "end"),
    [("", "Ġthe Ġc at", "</s>"), ("", "Ġ t h e Ċ", "</s>"), (" | trim", "Ġ t h e Ċ", "</s>"), ("", "Ġ t h e </s>", "")],
)
def test_a_turn_goes_on_from_an_answer_in_other_tokens_than_the_tokenizer_would_make(trim, answer, end):
    """A model may write a word in pieces, end by itself, and write a newline that the template trims."""
    model = ss.load()
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<s>{{ m.role }}:{{ m.content TRIM }}</s>{% endfor %}<s>assistant:"
    ).replace("TRIM", trim)
    chat = ss.Conversation(model, tokenizer=tokenizer, chat=True)
    chat.ask("Hello.", answer=tokenizer.convert_tokens_to_ids(answer.split()))
    expected = tokenizer(f"{end}<s>user:Go on.</s><s>assistant:", add_special_tokens=False)["input_ids"]
    assert list(chat.ask("Go on.", max_new_tokens=2).prompt) == expected


def test_what_a_template_writes_anew_is_refused_and_changes_nothing():
    model, tokenizer = chatty(REWRITES)
    chat = ss.Conversation(model, tokenizer=tokenizer, chat=True)
    first = chat.ask("poem dog", max_new_tokens=3)
    with refused(r"does not go on from the \d+ tokens so far, because .* give chat=False"):
        chat.ask("book")
    assert chat.turns == [first]


def test_no_pattern_grows_with_the_conversation(monkeypatch):
    """What a model wrote in other tokens is found by its letters, whatever white space is between them."""
    tokenizer = copy.deepcopy(ss.load().tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}assistant:"
    lengths, match = list[int](), re.match
    monkeypatch.setattr(re, "match", lambda pattern, *more: lengths.append(len(pattern)) or match(pattern, *more))
    asked, answered = "what is the time and the place " * 40, " the c at"
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    messages.append({"role": "user", "content": "go on"})
    before = plain_ids(tokenizer, f"user:{asked}\nassistant:")
    before += tokenizer.convert_tokens_to_ids(["Ġ", "t", "h", "e", "Ġ", "c", "Ġat"])
    ids = chat_ids(tokenizer, messages, "tiny", before)
    assert tokenizer.decode(ids) == "\nuser:go on\nassistant:"
    messages[0] = {"role": "user", "content": asked.replace("what", "where", 1)}
    with refused("does not go on from the"):
        chat_ids(tokenizer, messages, "tiny", before)
    assert max(lengths, default=0) < 100
