"""The user's own text: chats in the model's template, fields of data sets, and what is refused."""

from __future__ import annotations

import json

import pytest
from refusals import refused

import sinkscope as ss
from sinkscope.measure import Setup
from sinkscope.models.text.chat import own_text, text_records

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
CHATS = [
    {"messages": [{"role": "user", "content": f"Say {number}"}, {"role": "assistant", "content": f"It is {number}."}]}
    for number in range(60)
]


class Words:
    """A tokenizer of words with a chat template."""

    chat_template = TEMPLATE

    def apply_chat_template(self, messages, tokenize):
        assert tokenize is False
        if messages[0]["role"] == "system":
            raise ValueError("no system message")
        return "".join(f"<|{one['role']}|>{one['content']}<|end|>" for one in messages)

    def __call__(self, text, **_):
        return {"input_ids": text.split()}


def written(folder, name: str, rows) -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_chats_are_read_in_the_template_of_the_model(tmp_path):
    read, said = own_text(text_records(written(tmp_path, "chats.jsonl", CHATS)), Words(), "m")
    assert read.startswith("<|user|>Say 0<|end|><|assistant|>It is 0.<|end|>\n\n<|user|>Say 1<|end|>")
    assert not {*'{}[]"'} & {*read}
    assert said == "60 texts, 60 of them chats in the model's template"


def test_a_field_that_is_named_is_read_and_an_unknown_one_is_refused_with_those_that_are_there(tmp_path):
    rows = [{"label": f"a{number}", "abstract": f"Word {number} here"} for number in range(3)]
    path = written(tmp_path, "data.jsonl", rows)
    assert own_text(text_records(path, "abstract"), Words(), "m")[0] == "Word 0 here\n\nWord 1 here\n\nWord 2 here"
    with refused(r"holds no text that is known, there are label, abstract: .*field"):
        text_records(path, "summary")
    with refused(r"holds no text that is known, there are label, abstract: .*field"):
        text_records(path)


def test_json_under_the_name_of_a_text_and_a_field_of_a_text_are_refused(tmp_path):
    path = tmp_path / "chats.txt"
    path.write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    with refused(r"chats\.txt holds JSON: name it \.json or \.jsonl"):
        text_records(path)
    path.write_text("{curly words} stay prose.\nAnd so on.")
    (record,) = text_records(path)
    assert record.text.startswith("{curly")
    with refused("--field body: chats.txt is one text without fields"):
        text_records(path, "body")


def test_what_a_template_refuses_is_named_and_without_a_template_words_are_read(tmp_path):
    system = [{"messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]}]
    records = text_records(written(tmp_path, "s.jsonl", system))
    with refused(r"the chat template of m failed at record 1 \(no system message\): .*--field"):
        own_text(records, Words(), "m")
    plain = Words()
    plain.chat_template = None
    with pytest.warns(match="has no chat template"):
        assert own_text(records, plain, "m")[0] == "Be brief\n\nHi"


def test_a_result_says_what_was_read_and_two_files_of_one_content_are_compared(tmp_path, typed):
    rows = [
        {"text": f"Once upon a time there was a bird with {number} songs, and the bird sang."} for number in range(99)
    ]
    one, two = (written(tmp_path, name, rows) for name in ("a.jsonl", "b.jsonl"))
    setup = Setup.open(text=one)
    assert setup.text_said == "a.jsonl: 99 texts." and "songs" in setup.text
    assert setup.text_read == Setup.open(text=two).text_read
    printed = typed(f"lines --text {one} --count 2 --length 48")
    assert setup.text_said in printed.out
    with refused("no text is given whose field it is"):
        ss.lines(field="text")
