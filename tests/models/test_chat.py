"""Chat templates and BOS: what a text becomes before the model reads it, and that this is said."""

from __future__ import annotations

import copy
import warnings

import pytest
from organisms import organism
from organisms.tiny import tiny_model
from refusals import refused
from tokenizers.processors import TemplateProcessing

import sinkscope as ss
from sinkscope.errors import SinkscopeWarning
from sinkscope.measure import Setup
from sinkscope.models.text.chat import chat_text

CHAT = (
    "{% for m in messages %}<s> {{ m.role }} {{ m.content }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<s> assistant {% endif %}"
)
FORGETFUL = "{% for m in messages[-1:] %}<s> {{ m.role }} {{ m.content }} </s> {% endfor %}<s> assistant "
QUESTIONS = ["poem dog book", "and company cat", "and the rest"]
NOTE = "texts are put into the chat template of"


def chatty(template: str | None = CHAT):
    model, tokenizer = tiny_model("llama")
    tokenizer.chat_template = template
    return model, tokenizer


def notes_of(run) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SinkscopeWarning)
        run()
    return [str(one.message) for one in caught]


def test_a_text_becomes_a_message_where_there_is_a_template():
    """With one note; not if it is in a template already, if BOS is asked for, or if there is no template."""
    model, tokenizer = chatty()
    ids = tokenizer("<s> user poem dog book </s> <s> assistant", add_special_tokens=False)["input_ids"]

    def tokens(prompt, **options):
        return [one.tokens for one in ss.generate(model, prompt, tokenizer=tokenizer, max_new_tokens=6, **options)]

    with pytest.warns(SinkscopeWarning, match=NOTE):
        assert tokens("poem dog book") == tokens(ids)
    with pytest.warns(SinkscopeWarning, match=NOTE):
        assert tokens(["poem dog book", "cat"])[0] == tokens(ids)[0]
    assert notes_of(lambda: tokens("poem dog book", chat=True)) == []
    plain = tokenizer("poem dog book")["input_ids"]
    for quiet in ({"chat": False}, {"bos": True}):
        assert notes_of(lambda quiet=quiet: tokens("poem dog book", **quiet)) == []
        assert tokens("poem dog book", **quiet) == tokens([1, *plain[plain[0] == 1 :]] if "bos" in quiet else plain)
    assert not any(NOTE in note for note in notes_of(lambda: tokens("<s> user poem </s>")))
    with refused("bos=True with chat=True"):
        tokens("poem", bos=True, chat=True)
    tokenizer.chat_template = None
    assert notes_of(lambda: tokens("poem dog book")) == [] and tokens("poem dog book") == tokens(plain)
    with refused(r"has no chat template: read texts as they are, with chat=False \(--no-chat\)"):
        tokens("poem", chat=True)


BLOCKS = (
    "{% for m in messages %}<s> {{ m.role }} {% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% endif %}{% endfor %} </s> {% endfor %}{% if add_generation_prompt %}<s> assistant {% endif %}"
)
STRICT_BLOCKS = (
    "{% for m in messages %}<s> {{ m.role }} {{ m.content[0]['text'] + '' }} </s> {% endfor %}<s> assistant "
)


@pytest.mark.parametrize(
    "template", [BLOCKS, STRICT_BLOCKS, CHAT, CHAT.replace("m.content", "m.content | trim | upper")]
)
def test_a_template_that_expects_blocks_gets_them(template):
    _, tokenizer = chatty(template)
    if "upper" in template:
        with refused("the chat template of m leaves out what message 1 says: read texts as they are"):
            chat_text(tokenizer, [{"role": "user", "content": "poem"}], "m")
        return
    messages = [{"role": "user", "content": "poem\n dog"}, {"role": "assistant", "content": "cat"}]
    text = chat_text(tokenizer, [*messages, {"role": "user", "content": "book!"}], "m")
    assert text.split() == "<s> user poem dog </s> <s> assistant cat </s> <s> user book! </s> <s> assistant".split()


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("<s> assistant ", "leaves out what message 1 says"),
        ("{{ raise_exception('no system\n role') }}", r"failed \(.*no system"),
    ],
)
def test_a_template_that_says_nothing_is_refused_with_the_option_that_exists(template, says):
    model, tokenizer = chatty(template)
    for read in (ss.generate, lambda model, text, **more: ss.Conversation(model, **more).ask(text)):
        with refused(rf"the chat template of .* {says}.*: read texts as they are, with chat=False \(--no-chat\)"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SinkscopeWarning)
                read(model, "poem dog", tokenizer=tokenizer)
    assert ss.generate(model, "poem dog", tokenizer=tokenizer, chat=False, max_new_tokens=2)[0].tokens


@pytest.mark.parametrize(("answers", "said"), [("recompute", True), ("keep", False)])
def test_turns_read_what_the_template_of_the_whole_conversation_gives(answers, said):
    model, tokenizer = chatty()
    chat = ss.Conversation(model, tokenizer=tokenizer, answers=answers)
    messages = []
    for number, question in enumerate(QUESTIONS):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SinkscopeWarning)
            turn = chat.ask(question, answer="time and word") if said else chat.ask(question, max_new_tokens=5)
        messages.append({"role": "user", "content": question})
        whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        expected = tokenizer(whole, add_special_tokens=False)["input_ids"]
        assert chat.ids[: len(expected)] == expected and turn.prompt_tokens == len(expected)
        assert number == 0 or len(turn.prompt) < len(expected)
        messages.append({"role": "assistant", "content": "time and word" if said else turn.text})
    branch = copy.copy(chat)
    branch.ask("company", max_new_tokens=2)
    assert chat.ask("company", max_new_tokens=2).ids == branch.turns[-1].ids


@pytest.mark.parametrize("trim", ["", " | trim"])
@pytest.mark.parametrize(("answer", "end"), [("Ġthe Ġc at", "</s>"), ("Ġ t h e Ċ", "</s>"), ("Ġ t h e </s>", "")])
def test_a_turn_goes_on_from_an_answer_in_other_tokens_than_the_tokenizer_would_make(answer, end, trim):
    """A model may write a word in pieces, end by itself, and write a newline that the template trims."""
    model = ss.load()
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<s>{{ m.role }}:{{ m.content TRIM }}</s>{% endfor %}<s>assistant:"
    ).replace("TRIM", trim)
    chat = ss.Conversation(model, tokenizer=tokenizer, chat=True)
    chat.ask("Hello.", answer=tokenizer.convert_tokens_to_ids(answer.split()))
    turn = chat.ask("Go on.", max_new_tokens=2)
    assert (
        list(turn.prompt) == tokenizer(f"{end}<s>user:Go on.</s><s>assistant:", add_special_tokens=False)["input_ids"]
    )


def test_what_a_template_writes_anew_is_refused_and_changes_nothing():
    model, tokenizer = chatty(FORGETFUL)
    chat = ss.Conversation(model, tokenizer=tokenizer, chat=True)
    first = chat.ask("poem dog", max_new_tokens=3)
    with refused(r"does not go on from the \d+ tokens so far, because .* give chat=False"):
        chat.ask("book")
    assert chat.turns == [first]
    plain = ss.Conversation(model, tokenizer=tokenizer, chat=False)
    assert list(plain.ask("poem dog", max_new_tokens=3).prompt) == tokenizer("poem dog")["input_ids"]


@pytest.mark.parametrize("adds", [True, False])
def test_a_result_says_whether_its_bos_is_one_that_the_tokenizer_puts_there(adds, tmp_path):
    o = organism("llama", 2)
    tokenizer = copy.deepcopy(o.tokenizer)
    if not adds:  # it has one, and puts it nowhere
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    text = " ".join(o.tokenizer.decode([token]) for token in o.natural(4, 64)[:, 1:].flatten().tolist())
    file = tmp_path / "text.txt"
    file.write_text(text, encoding="utf-8")
    setup = Setup.open(o.model, tokenizer=tokenizer, text=file)
    made = setup.provenance()
    assert made.bos and made.bos_added is not adds
    assert made.first_ids == tuple(setup.ids[0, :4].tolist()) and made.first_ids[0] == tokenizer.bos_token_id
