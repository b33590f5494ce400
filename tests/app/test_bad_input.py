"""What a user may type wrong: one line on stderr that names the value and a way out, exit code 2, no file left."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import spoiled
from covering import each_other
from gguf_file import write_gguf
from organisms import organism
from organisms.tiny import tiny_model
from organisms.tokens import word_tokenizer
from safetensors.torch import load_file, save_file

from sinkscope.app.cli import main


@pytest.fixture
def error(refusal, tmp_path, monkeypatch):
    """Type a command in an empty folder, which must be refused; what it says."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return lambda *words: refusal([*words])


@pytest.fixture(scope="module")
def nobos(tmp_path_factory):
    """The folder of a model whose tokenizer has no BOS token; it is only read."""
    return organism("llama", 0, bos=False).save(tmp_path_factory.mktemp("saved") / "nobos")


def _nan(folder: Path):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _written(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


SPOILED = [  # entries of config.json, or what is done to the folder; what is said of it
    (lambda folder: (folder / "config.json").unlink(), ("m has no config.json", "give the folder")),
    (_written("config.json", "[1]"), ("config.json of m has no model_type", "give one")),
    ({"num_hidden_layers": "three"}, ("num_hidden_layers", "got str (value: 'three')", "config.json")),
    ({"num_hidden_layers": 0}, ("m has no layers (num_hidden_layers is 0", "give a model")),
    ({"num_hidden_layers": 5}, ("m lacks ", "tensors")),
    ({"intermediate_size": 48}, ("m", "download both from one revision")),
    ({"model_type": "made-up"}, ("'made-up', which transformers", "install a version that does")),
    ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, ("m is another kind", "llama-2-7b or")),
    ({"architectures": ["LlamaForSequenceClassification"]}, ("m is another kind", "llama-2-7b")),
    (_written("config.json", "[" * 10**6), ("config.json is not a JSON file (it is nested too deeply)",)),
    (_nan, ("tensor model.norm.weight", "NaN", "download")),
    (word_tokenizer(100).save_pretrained, ("has 100 tokens and the embedding 96", "use the")),
    (_written("tokenizer.json", "{}"), ("tokenizer of m cannot be read", "download its files again")),
]


@pytest.mark.parametrize(("command", "spoiling"), each_other(["find-sinks", "generate"], SPOILED))
def test_a_spoiled_model_folder_is_refused_in_one_line(error, tmp_path, spoiling, command):
    """Streamed (find-sinks) and loaded whole (generate), a checkpoint is refused in the same words."""
    change, says = spoiling
    folder = spoiled(tmp_path / "m", **(change if isinstance(change, dict) else {}))
    if not isinstance(change, dict):
        change(folder)
    message = error(*command_on(command, folder))
    assert all(words in message for words in says), message


def command_on(command: str, folder: Path) -> list[str]:
    prompt = folder.parent / "p.txt"
    prompt.write_text("poem book")
    more = ["--max-repeats", "3"] if command == "find-sinks" else ["--prompt-file", str(prompt)]
    return [command, "--model", str(folder), *more]


def test_weights_without_a_tokenizer_are_refused(error, tmp_path):
    """For some families transformers makes a tokenizer of no files, and that knows no token."""
    tiny_model("qwen2")[0].save_pretrained(tmp_path / "m")
    message = error("barcode", "--model", str(tmp_path / "m"), "--max-new-tokens", "5")
    assert "m carries no tokenizer" in message and "put the tokenizer's files beside the weights" in message


@pytest.mark.parametrize(
    ("command", "own"),
    each_other(["find-sinks", "generate"], ["tokenizer", "model", "both"]),
)
def test_code_in_a_checkpoint_is_not_run(error, tmp_path, command, own):
    """Where transformers has the architecture, its class is used; what would need code of the folder is refused."""
    folder = spoiled(tmp_path / "m", auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"})
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    words = command_on(command, folder)
    if own == "both":
        (folder / "config.json").write_text((folder / "config.json").read_text().replace('"llama"', '"made-up"'))
        assert "'made-up', which transformers" in error(*words)
    elif own == "tokenizer":
        file = folder / "tokenizer_config.json"
        entries = {"auto_map": {"AutoTokenizer": ["own.T", "own.T"]}, "tokenizer_class": "T"}
        file.write_text(json.dumps(json.loads(file.read_text()) | entries))
        message = error(*words)
        assert "the tokenizer of m cannot be read, and code of its own is not run" in message
    else:
        assert main(words) == 0
    assert not (tmp_path / "ran").exists()


def test_a_file_that_is_no_gguf_is_refused(error, tmp_path):
    pytest.importorskip("gguf")
    whole = tmp_path / "whole.gguf"
    write_gguf(whole, *tiny_model("llama"))
    (tmp_path / "cut.gguf").write_bytes(whole.read_bytes()[:2000])
    (tmp_path / "none.gguf").write_bytes(b"hello world")
    for name in ("none", "cut"):
        message = error("find-sinks", "--model", str(tmp_path / f"{name}.gguf"))
        assert f"{name}.gguf is cut off, or is no GGUF file: download it again" in message


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("find-sinks --model ", ("the model name is empty", "hub id org/name")),
        ("find-sinks --model ./none", ("no file or folder './none'", "give an existing one")),
        ("find-sinks --model org/none", ("config.json of org/none is not in the cache", "give a folder")),
        ("attack --tokens ,", ("--tokens ','", "give at least one")),
        ("find-sinks --bos", ("--bos: the tokenizer", "use --no-bos")),
        ("find-sinks --max-repeats 99999", ("--max-repeats 99999 and", "but the context of", "there is room for")),
        ("find-sinks --device cuda:9", ("device 'cuda:9' is not there", "this machine has cpu")),
        ("find-sinks --revision v2", ("revision 'v2' means nothing for the folder", "hub ids")),
        ("generate --prompt-file {}/long.txt", ("has 5000 tokens and", "shorten the prompt")),
        ("generate poem --bos", ("--bos: the tokenizer of this llama model has no BOS token", "use --no-bos")),
    ],
)
def test_what_cannot_be_measured_or_continued_is_refused(error, nobos, tmp_path, words, says):
    (tmp_path / "long.txt").write_text("poem " * 5000)
    model = [] if "--model" in words else ["--model", str(nobos)]
    message = error(*words.format(tmp_path).split(" "), *model)
    assert all(part in message for part in says), message
