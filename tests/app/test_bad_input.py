"""What a user may type wrong: one line on stderr that names the value and a way out, exit code 2, no file changed.

The rows stand in bad_input.txt; names in them are of files that `prepared` makes.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from checkpoints import checkpoint, spoiled
from gguf_file import write_gguf
from organisms import organism
from organisms.tiny import tiny_model
from organisms.tokens import word_tokenizer
from safetensors.torch import load_file, save_file
from sample_results import sample_find_sinks
from transformers import PreTrainedModel

from sinkscope.app.cli import main
from sinkscope.app.commands import COMMANDS
from sinkscope.files.plain import visible

pytestmark = pytest.mark.few_texts

TEXT = Path(__file__).with_name("bad_input.txt").read_text()
ROWS = re.findall("^(?!#)(.+) => (.+)$", TEXT, re.MULTILINE)
EARLY = re.findall("^(?!#)(.+) => ", TEXT.partition("# Refused before a model is opened\n")[2], re.MULTILINE)
LONG = "x" * 5000
CONTENT = {
    "folder/mine": "mine",
    "empty": "",
    "blank": " \n",
    "words.txt": "hello world, this is a text.\n" * 40,
    "long.txt": "poem " * 5000,
    "brackets.json": "[" * 10**6,
    "other.json": '{"mine": [1, 2, 3]}',
    "list.json": '[{"schema": 1, "kind": "sink-patch"}]',
    "mine": "mine",
    "none.gguf": "hello world",
    "blank.jsonl": " \n\n",
    "third.jsonl": '\ufeff\n\n{"text": \n',  # some editors begin a file with a mark: it is no part of a line
    "answer.jsonl": '{"text": "b"}\n',
    "number.jsonl": '{"text": 5}\n',
    "tokens.jsonl": '{"tokens": [1, -2]}\n',
    "cut.json": '{"messages": [',
    "cut.sse": 'data: {"choices": [\n\n',
    "failed.sse": 'data: {"error": {"message": "no such\\nmodel"}}\n\n',
}
SPOILED = {  # entries of config.json, and files in place of those of a checkpoint
    "no-config": ({}, {"config.json": None}),
    "list-config": ({}, {"config.json": "[1]"}),
    "deep-config": ({}, {"config.json": "[" * 10**6}),
    "words": ({"num_hidden_layers": "three"}, {}),
    "no-layers": ({"num_hidden_layers": 0}, {}),
    "more-layers": ({"num_hidden_layers": 5}, {}),
    "narrow": ({"intermediate_size": 48}, {}),
    "made-up": ({"model_type": "made-up"}, {}),
    "bert": ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, {}),
    "classifier": ({"architectures": ["LlamaForSequenceClassification"]}, {}),
    "no-tokenizer": ({}, {"tokenizer.json": "{}"}),
    "zip": ({}, {"model.safetensors": None, "pytorch_model.bin": "PK\3\4" + "x" * 900}),
    "own": ({"auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}}, {}),
    "unmapped": ({"model_type": "emu3_text_model"}, {}),
    "own-both": ({"auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}, "model_type": "made-up"}, {}),
    "own-tokens": ({}, {}),
    "nan": ({}, {}),
    "few-tokens": ({}, {}),
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which all is typed; nothing in it may change."""
    here = tmp_path_factory.mktemp("typed")
    for name in ("folder", "reported"):
        (here / name).mkdir()
    for name, text in CONTENT.items():
        (here / name).write_text(text)
    (here / "binary").write_bytes(bytes(range(256)) * 40)
    (here / "bytes").write_bytes(b"\xff\xfe\xfa bad")
    for name in ("found.json", "reported/found.json"):
        sample_find_sinks().save(here / name)
    (here / "found.html").write_text(sample_find_sinks().to_html())
    for name, (entries, files) in SPOILED.items():
        folder = spoiled(here / name, **entries)
        (folder / "own.py").write_text("open('ran', 'w')")
        for file, text in files.items():
            (folder / file).unlink(missing_ok=True)
            if text is not None:
                (folder / file).write_text(text)
    tensors = load_file(here / "nan/model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, here / "nan/model.safetensors", metadata={"format": "pt"})
    word_tokenizer(100).save_pretrained(here / "few-tokens")
    told = here / "own-tokens/tokenizer_config.json"
    own = {"auto_map": {"AutoTokenizer": ["own.T", "own.T"]}, "tokenizer_class": "T"}
    told.write_text(json.dumps(json.loads(told.read_text()) | own))
    tiny_model("qwen2")[0].save_pretrained(here / "untold")  # of no files, transformers makes a tokenizer without words
    organism("llama", 0, bos=False).save(here / "nobos")
    (here / "falcon").symlink_to(checkpoint("falcon"))
    if find_spec("gguf"):
        write_gguf(here / "whole.gguf", *tiny_model("llama"))
        (here / "cut.gguf").write_bytes((here / "whole.gguf").read_bytes()[:2000])
    before = state(here)
    yield here
    assert state(here) == before


def state(folder: Path) -> dict[Path, tuple[int, int]]:
    """Of each file in a folder, when it was last written and how long it is."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


@pytest.mark.parametrize(
    ("line", "says"), [*ROWS, *((f"{words} one two three --more", "--more") for words in COMMANDS)]
)
def test_bad_input_is_refused_in_one_line(line, says, prepared, monkeypatch, refusal):
    monkeypatch.chdir(prepared)
    if line in EARLY:
        monkeypatch.setattr(PreTrainedModel, "__init__", lambda *_, **__: pytest.fail("a model is opened"))
    if ".gguf" in line:
        pytest.importorskip("gguf")
    line, says = (text.encode().decode("unicode_escape").replace("{LONG}", LONG) for text in (line, says))
    typed, _, given = line.partition(" < ")
    if given:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(Path(given).read_bytes()), encoding="ascii"))
    said = refusal(shlex.split(typed))
    assert says in said and len(said) <= 690 and "unexpected error" not in said and visible(said) == said


@pytest.mark.parametrize("words", ["find-sinks own", "generate poem --model own --max-new-tokens 2"])
def test_code_in_a_checkpoint_is_not_run(words, prepared, monkeypatch):
    """Where transformers has the architecture, its class is used."""
    monkeypatch.chdir(prepared)
    assert main(words.split()) == 0 and not Path("ran").exists()
