"""The user's own text: chats in the model's template, fields of data sets, and what is refused."""

from __future__ import annotations

import copy
import json

import pytest
from refusals import refused
from tokenizers.processors import TemplateProcessing

import sinkscope as ss
from sinkscope.measure import Setup
from sinkscope.models.text.chat import own_text, text_records

ASKED = {"role": "user", "content": "Say 0"}
CHATS = [{"messages": [ASKED, {"role": "assistant", "content": "It is 0."}]}] * 2


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
    def write(name: str, rows) -> str:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / name)

    return write


def test_chats_are_read_in_the_template_of_the_model(written):
    read, said = own_text(text_records(written("chats.jsonl", CHATS)), Words(), "m")
    assert read.startswith("<|user|>Say 0<|end|><|assistant|>It is 0.<|end|>\n\n<|user|>Say 0<|end|>")
    assert said == "2 texts, 2 of them chats in the model's template"


def test_a_field_that_is_named_is_read_and_an_unknown_one_is_refused_with_those_that_are_there(written):
    path = written("data.jsonl", [{"label": f"a{n}", "abstract": f"Word {n} here"} for n in range(3)])
    assert own_text(text_records(path, "abstract"), Words(), "m")[0] == "Word 0 here\n\nWord 1 here\n\nWord 2 here"
    for field in ("summary", None):
        with refused(r"holds no text that is known, there are label, abstract: .*field"):
            text_records(path, field)


def test_json_under_the_name_of_a_text_and_a_field_of_a_text_are_refused(written, tmp_path):
    with refused(r"chats\.txt holds JSON: name it \.json or \.jsonl"):
        text_records(written("chats.txt", CHATS))
    path = tmp_path / "prose.txt"
    path.write_text("{curly words} stay prose.\nAnd so on.")
    assert text_records(path)[0].text.startswith("{curly")
    with refused("--field body: prose.txt is one text without fields"):
        text_records(path, "body")


def test_what_a_template_refuses_is_named_and_without_a_template_words_are_read(written):
    system = [{"messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]}]
    records = text_records(written("s.jsonl", system))
    with refused(r"the chat template of m failed at record 1 \(no system message\): .*--field"):
        own_text(records, Words(), "m")
    with pytest.warns(match="has no chat template"):
        assert own_text(records, Words(None), "m")[0] == "Be brief\n\nHi"


def test_a_result_says_what_was_read_and_two_files_of_one_content_are_compared(written, typed):
    rows = [{"text": f"Once upon a time there was a bird with {n} songs, and the bird sang."} for n in range(99)]
    setup = Setup.open(text=written("a.jsonl", rows))
    assert setup.settings["text_said"] == "a.jsonl: 99 texts." and "songs" in setup.text
    assert setup.text_read == Setup.open(text=written("b.jsonl", rows)).text_read
    assert setup.settings["text_said"] in typed(f"lines --text {written('a.jsonl', rows)} --count 2 --length 48").out
    with refused("no text is given whose field it is"):
        ss.lines(field="text")


def test_a_result_says_whether_its_bos_is_one_that_the_tokenizer_puts_there():
    model = ss.load()
    silent = copy.deepcopy(model.tokenizer)
    silent.backend_tokenizer.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    for tokenizer, is_added in ((model.tokenizer, False), (silent, True)):
        made = Setup.open(model, tokenizer=tokenizer).provenance()
        assert made.bos and made.bos_added is is_added and made.first_ids[0] == silent.bos_token_id
