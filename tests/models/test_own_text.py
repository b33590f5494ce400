"""The user's own text: chats in the model's template, fields of data sets, and what is refused."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
from refusals import refused
from tokenizers.processors import TemplateProcessing

import sinkscope as ss
from sinkscope.files.texts import read_texts
from sinkscope.measure import Setup
from sinkscope.measure.setup import prompt_ids
from sinkscope.models.text.chat import own_text, text_records


class Words:
    """A tokenizer of words with a chat template, or without."""

    def __init__(self, chat_template: str | None = "a template"):
        self.chat_template = chat_template

    def apply_chat_template(self, messages, tokenize):
        if messages[0]["role"] == "system":
            raise ValueError("no system message")
        return "".join(f"<|{one['role']}|>{one['content']}<|end|>" for one in messages)


@pytest.fixture
def written(tmp_path):
    def write(rows, name: str = "a.jsonl") -> str:
        (tmp_path / name).write_text(rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / name)

    return write


def chat(*messages: str) -> dict:
    return {"messages": [dict(zip(("role", "content"), one.split(": "), strict=True)) for one in messages]}


CHATS = [chat("user: Say 0", "assistant: It is 0."), chat("user: Hi")]
DATA = [{"label": "a", "abstract": "Word 0 here"}, {"label": "b", "abstract": "Word 1"}]


def test_chats_are_read_in_the_template_of_the_model_and_fields_by_name(written):
    read, said = own_text(text_records(written(CHATS)), Words(), "m")
    assert read == "<|user|>Say 0<|end|><|assistant|>It is 0.<|end|>\n\n<|user|>Hi<|end|>"
    assert said == "2 texts, 2 of them chats in the model's template"
    assert own_text(text_records(written(DATA), "abstract"), Words(), "m") == ("Word 0 here\n\nWord 1", "2 texts")
    read, said = own_text(text_records(written(CHATS, "a.txt")), Words(None), "m")
    assert read.endswith("\n\nHi") and "without authors" in said
    assert text_records(written("{curly words} stay prose.\nAnd so on.", "a.txt"))[0][0]["content"].startswith("{curly")


@pytest.mark.parametrize(
    ("rows", "name", "field", "says"),
    [
        (DATA, "a.jsonl", None, "a.jsonl line 1: no field text, content or messages; its fields: label, abstract; na"),
        (DATA, "a.jsonl", "body", "a.jsonl line 1: no text or chat in the field 'body'; its fields: label, abstract"),
        ([{"text": "a"}, 5], "a.jsonl", None, "a.jsonl line 2=5: expected a text, a chat, or an object with one"),
        ('{\n  "text": 5}', "a.txt", None, "a.txt line 1 is not JSON: give JSON lines"),
        (
            [chat("system: Be brief")],
            "a.jsonl",
            None,
            r"failed \(no system message\): leave record 1 out, .*--field",
        ),
    ],
)
def test_what_is_no_text_is_refused(rows, name, field, says, written):
    with refused(says):
        own_text(text_records(written(rows, name), field), Words(), "m")


MESSAGES = [one["messages"] for one in CHATS]


@pytest.mark.parametrize(
    ("rows", "count"),
    [(CHATS, 2), (DATA, 2), (["One text", "and another"], 2), (MESSAGES, 2), (MESSAGES[0], 1)],
)
def test_a_json_array_has_a_record_for_each_member(rows, count, written):
    """But a list of messages is one chat."""
    field = "abstract" if rows is DATA else None
    records = text_records(written(json.dumps(rows, indent=1), "a.json"), field)
    assert len(records) == count and [*read_texts(written(json.dumps(rows), "b.json"), field)] == records
    assert records[0][0]["content"] in ("Say 0", "Word 0 here", "One text")


def test_a_result_says_what_was_read_and_two_files_of_one_content_are_compared(written, typed):
    rows = [{"text": f"Once upon a time there was a bird with {n} songs, and the bird sang."} for n in range(99)]
    setup = Setup.open(text=written(rows))
    said = setup.settings["text_said"]
    assert said == "a.jsonl: 99 texts." and "songs" in setup.text
    assert setup.text_read == Setup.open(text=written(rows, "b.jsonl")).text_read
    ids = setup.ids.flip(1)  # as another tokenizer reads it
    assert replace(setup, ids=ids).text_read != setup.text_read, "pieces of a text begin elsewhere"
    shipped = replace(setup, own_text=False)
    assert replace(shipped, ids=ids).text_read == shipped.text_read, "and documents where they begin"
    assert said in typed(f"lines --text {written(rows)} --count 2 --length 48").out
    with refused("no text is given whose field it is"):
        ss.lines(field="text")


def test_a_result_says_whether_its_bos_is_one_that_the_tokenizer_puts_there():
    model = ss.load()
    silent = copy.deepcopy(model.tokenizer)
    silent.backend_tokenizer.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    for tokenizer, is_added in ((model.tokenizer, False), (silent, True)):
        made = Setup.open(model, tokenizer=tokenizer).provenance()
        assert made.bos_added is is_added and made.first_ids[0] == silent.bos_token_id


BEFORE_CHATS = "{{ bos_token }}{% for m in messages %} {{ m.role }}: {{ m.content }}{% endfor %}"
BEFORE_MESSAGES = (
    "{% for m in messages %}{{ bos_token }} {{ m.role }}: {{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token }} assistant:{% endif %}"
)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("template", [BEFORE_CHATS, BEFORE_MESSAGES])
def test_a_template_that_begins_with_bos_gives_one(template, written):
    """As a server reads a chat; where BOS begins messages too, those of a row stay."""
    model = ss.load()
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.chat_template = template
    chats = [chat(f"user: Once upon a time there was a bird number {n}", "assistant: It sang") for n in range(99)]
    setup = Setup.open(model, tokenizer=tokenizer, text=written(chats))
    first = tokenizer.apply_chat_template(chats[0]["messages"], tokenize=False)
    whole = tokenizer(first, add_special_tokens=False)["input_ids"]
    assert setup.ids[0, : len(whole)].tolist() == whole
    at_begin, inside = setup.ids[:, :2] == setup.bos, setup.ids[:, 2:] == setup.bos
    assert at_begin.sum(1).tolist() == [1] * len(setup.ids)
    assert bool(inside.any()) == (template == BEFORE_MESSAGES)
    assert prompt_ids(setup, first) == whole
