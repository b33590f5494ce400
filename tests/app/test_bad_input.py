"""What a user may type wrong: one line on stderr that names the value and a way out, exit code 2, no file changed.

A row is a command line and what is said of it. `< FILE` gives standard input; all names are of files in `prepare`.
"""

from __future__ import annotations

import io
import json
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

from sinkscope.app.cli import main
from sinkscope.app.commands import COMMANDS
from sinkscope.files.plain import visible

pytestmark = pytest.mark.few_texts

STEERING = "\x1b[2J\u202etxt"
LONG = "x" * 5000
TYPED = [  # words that are no command or no option, and what does not go together
    ("find-sink", "No such command 'find-sink'. Did you mean 'find-sinks'? (see sinkscope --help)"),
    ("patch", "No such command 'patch'. (Did you mean one of: 'patch eval', 'patch make'?)"),
    ("patch mak --out x", "No such command 'patch mak'. (Did you mean one of: 'patch eval', 'patch make'?)"),
    ("xyz", "No such command 'xyz' (see"),
    ("find-sinks --modle x", "No such option '--modle'. (Did you mean one of: '--html', '--model'?) (see sinkscope"),
    ("find-sinks --json", "'--json' requires an argument"),
    ("find-sinks --explain=x", "'--explain' does not take a value"),
    ("find-sinks a b", "extra argument (b)"),
    ("find-sinks a --model b", "two models, a and b: give one"),
    ("models nothing", "no model's name contains 'nothing'"),
    ("models llama --check bundled", "llama has no effect with --check"),
    ("generate", "give a prompt as an argument, or --prompt-file FILE"),
    ("generate hi --prompt-file words.txt", "one of the two"),
    ("generate hi --seed 1", "--seed has no effect on greedy answers"),
    ("loops words.txt --first", "--first has no effect without --follow"),
    ("loops words.txt --port 9", "--host and --port have no effect without --proxy"),
    ("loops words.txt --proxy http://localhost:1", "FILE, --field, --fail-on, --follow, --format and"),
    ("loops words.txt --cut all --variant full", "--cut has no effect with --variant full"),
    ("loops words.txt empty --follow", "--follow watches one file"),
    ("loops --follow --html x.html", "--html and --csv write the check of a file"),
    *((f"{words} one two three --more", "--more") for words in COMMANDS),
]
FILES = [  # files that are read
    *((f"find-sinks --text {name}", "cannot read") for name in ("missing", "folder", "/proc/self/mem", "~nobody/x")),
    (f"find-sinks --text {LONG}", "file name too long"),
    (f"find-sinks --text '{STEERING}'", r"cannot read \x1b[2J\u202etxt: no such file"),
    ("find-sinks --text 'a\0b'", "embedded null byte"),
    ("find-sinks --text \udcff", r"cannot read \udcff: no such file"),
    ("find-sinks --text binary", "binary is not UTF-8 text"),
    ("find-sinks --text empty", "empty"),
    ("generate --prompt-file missing", "cannot read missing: no such file"),
    ("generate --prompt-file empty", "the prompt is empty"),
    ("generate --prompt-file - < binary", "standard input is not UTF-8 text"),
    ("generate hi --patch missing", "cannot read missing"),
    ("generate hi --patch words.txt", "words.txt is not a JSON file"),
    ("generate hi --patch brackets.json", "brackets.json is not a JSON file (it is nested too deeply)"),
    ("generate hi --patch other.json", "other.json"),
    ("generate hi --patch list.json", "list.json"),
    ("patch eval --patch binary", "binary is not UTF-8 text"),
    ("scan --against other.json", "other.json is not a result of sinkscope"),
    ("scan --against folder", "folder holds no card: give the card.json of a scan"),
    ("scan table folder", "folder holds no scans"),
    ("bench table folder", "give what --out was given"),
    ("bench table", "DIR..."),
    ("lines --data words.txt", "words.txt line 1 is not JSON"),
    ("report missing", "is no folder: give the folder"),
    ("report folder", "no results in folder: it should hold what --json or .save() wrote"),
    ("report", "DIR"),
]
WRITTEN = [  # files that would be written
    ("find-sinks --json folder", "folder is a folder"),
    ("find-sinks --json words.txt/x", "not a directory"),
    ("find-sinks --html /proc/x", "cannot write /proc/x"),
    (f"find-sinks --csv {LONG}", "file name too long"),
    ("find-sinks --html ''", "a file without a name is a folder"),
    ("find-sinks --json x --html ./x", "x is given for two outputs"),
    ("find-sinks --json - --csv -", "- is given for two outputs"),
    *((f"find-sinks --{kind} mine", "mine is there already and holds something") for kind in ("json", "html", "csv")),
    ("circuit --json found.json", "is there already and holds an output of kind find-sinks"),
    ("circuit --html found.html", "is there already and holds an output of kind find-sinks"),
    ("report reported --out found.html", "is there already and holds an output of kind find-sinks"),
    ("report reported --out folder", "is a folder: give the name of a file"),
    ("patch make --out words.txt/x", "not a directory"),
    ("scan --out folder", "folder holds other files"),
    ("bench --task text --methods full --out words.txt", "words.txt"),
]
NUMBERS = ("x", "''", "1,5", "\u00b9", "0x10", f"'{STEERING}'", LONG)
VALUES = [  # values of options
    *((f"find-sinks --max-repeats {value}", "is not a valid integer") for value in ("1.5", "nan", "1e400", *NUMBERS)),
    *((f"patch make --out new --limit {value}", "is not a valid float") for value in NUMBERS),
    ("generate hi --temperature nan", "temperature=nan: expected greater than or equal to 0"),
    ("generate hi --temperature inf", "temperature=inf: expected a number up to"),
    *((f"find-sinks --max-repeats {value}", "--max-repeats ") for value in (2**63, "1" + "0" * 400, "-" + "9" * 30, 0)),
    *((f"find-sinks --seed {value}", "--seed ") for value in (-1, 2**31)),
    *((f"{words} --pieces 0", "--pieces 0: expected") for words in ("patch make --out new", "precision")),
    ("attack --sequences -1", "--sequences -1: expected"),
    ("why --cuts 2", "--cuts 2: expected"),
    ("lines --etas 0", "--etas 0.0: expected a share above 0"),
    ("lines --length 8", "--length 8: expected 16 to"),
    ("lines --count 9999 --length 4000", "texts: give more of them"),
    ("bench --task text --methods full --batch-size 0", "batch_size=0: expected a whole number from 1"),
    ("view --port 65536", "port=65536: expected less than or equal to 65535"),
    ("check-cache full --tolerance nan", "tolerance=nan: expected"),
    ("attack --tokens ,", "--tokens ',': no name stands between the commas; give at least one"),
    ("barcode --heads five", "head 'five': expected a head such as L5.H3"),
    (f"barcode --heads '{STEERING}'", r"head '\x1b[2J\u202etxt': expected a head"),
    ("generate hi --policy lru", "policy 'lru': expected one of adakv, full, h2o"),
    ("generate hi --policy h2o:many", "budget='many': expected a number of tokens"),
    ("generate poem --model falcon --policy streaming:8 --guard", "'falcon' computes attention inside its modules"),
    ("bench --task nonsense --methods full", "'nonsense'"),
    ("bench --task text --methods ,", "give at least one"),
    ("loops words.txt --variant p1", "'--variant': 'p1' is not one of 'repeats', 'full'"),
    (f"repeat --quantity '{STEERING}'", r"'\x1b[2J\u202etxt' is not one of 'norm'"),
    (f"precision --schemes {LONG}", "is not one of 'a8-tensor'"),
    ("find-sinks --dtype nonsense", "dtype 'nonsense'"),
    ("find-sinks --device nonsense", "device 'nonsense'"),
    ("find-sinks --device cuda:9", "device 'cuda:9' is not there; this machine has cpu"),
    ("find-sinks nobos --revision v2", "revision 'v2' means nothing for the folder"),
    (
        "generate poem --model nobos --bos",
        "--bos: the tokenizer of this llama model has no BOS token; leave --bos out or",
    ),
    ("find-sinks nobos --max-repeats 99999", "but the context of"),
    ("generate --prompt-file long.txt --model nobos", "has 5000 tokens and"),
    ("check-cache nothing.here:at_all", "cannot be imported"),
    ("check-cache transformers:QuantizedCache", "needs backend="),
    ("check-cache tempfile:gettempdir", "gave a str"),
    ("check-cache torch", "is no policy and no module:function"),
]
MODELS = [  # streamed (find-sinks) and loaded whole (generate), a checkpoint is refused in the same words
    ("find-sinks --model ''", "the model name is empty; expected a short name, hub id org/name, folder or .gguf file"),
    ("find-sinks ./none", "there is no file or folder './none'; give an existing one"),
    ("find-sinks org/none", "config.json of org/none is not in the cache"),
    ("find-sinks llama-2-77b", "llama-2-77b"),
    ("find-sinks missing.gguf", "no file or folder 'missing.gguf'"),
    ("find-sinks binary", "binary"),
    (f"find-sinks '{STEERING}'", r"\x1b[2J\u202etxt"),
    ("find-sinks none.gguf", "none.gguf is cut off, or is no GGUF file: download it again"),
    ("find-sinks cut.gguf", "cut.gguf is cut off, or is no GGUF file: download it again"),
    ("generate poem --model zip", "zip"),
    ("barcode untold --max-new-tokens 5", "untold carries no tokenizer; pass tokenizer=AutoTokenizer"),
    ("find-sinks no-config", "no-config has no config.json; give the folder"),
    ("generate poem --model list-config", "config.json of list-config has no model_type, so"),
    ("find-sinks words", "field 'num_hidden_layers'"),
    (
        "generate poem --model no-layers",
        "no-layers has no layers (num_hidden_layers is 0 in its",
    ),
    *((words, "more-layers lacks ") for words in ("find-sinks more-layers", "generate poem --model more-layers")),
    *((words, "download both from one revision") for words in ("find-sinks narrow", "generate poem --model narrow")),
    ("find-sinks made-up", "'made-up', which transformers"),
    ("generate poem --model bert", "bert is another kind of model"),
    ("find-sinks classifier", "classifier is another kind of model"),
    ("generate poem --model deep-config", "config.json is not a JSON file (it is nested too deeply)"),
    *((words, "tensor model.norm.weight") for words in ("find-sinks nan", "generate poem --model nan")),
    ("find-sinks few-tokens", "has 100 tokens and the embedding 96"),
    ("generate poem --model no-tokenizer", "the tokenizer of no-tokenizer cannot be read"),
    *((words, "'made-up', which transformers") for words in ("find-sinks own-both", "generate poem --model own-both")),
    ("find-sinks own-tokens", "the tokenizer of own-tokens cannot be read, and code of its own is not run"),
    ("generate poem --model own-tokens", "the tokenizer of own-tokens cannot be read, and code of its own is not run"),
]
CHECKED = [  # what is checked for loops
    ("loops missing", "cannot read missing: no such file"),
    ("loops folder", "folder holds no file that ends in .txt"),
    ("loops empty", "empty is empty, or nothing in it is an output"),
    ("loops binary", "binary is not UTF-8 text"),
    ("loops no-gzip.gz", "cannot read no-gzip.gz"),
    ("loops blank.jsonl", "blank.jsonl is empty"),
    ("loops third.jsonl", "third.jsonl line 3 is no output of a model"),
    ("loops list.jsonl", "list.jsonl line 1 is no output of a model: expected an object"),
    ("loops other.json", "no field that is known holds an answer, there are mine: name yours by --field"),
    ("loops answer.jsonl --field b.c", "no field b.c: the line has text"),
    ("loops number.jsonl", "expected a string, or a list of tokens, and found 5"),
    ("loops tokens.jsonl", "tokens.jsonl line 1 is no output of a model: -2 is no token: expected a"),
    ("loops cut.json", "cut.json line 1 is no output of a model"),
    ("loops - --follow < empty", "standard input is empty"),
    ("loops - --follow < bytes", "standard input is not UTF-8 text"),
    ("loops - --follow < cut.sse", "standard input line 1 is no output of a model"),
    ("loops - --follow < failed.sse", "the server reports an error"),
]
CONTENT = {
    "folder/mine": "mine",
    "empty": "",
    "blank": " \n",
    "words.txt": "hello world, this is a text.\n" * 40,
    "long.txt": "poem " * 5000,
    "brackets.json": "[" * 10**6,
    "other.json": '{"mine": [1, 2, 3]}',
    "list.json": '[{"schema": 1, "kind": "sink-patch"}]',
    "mine": '{"mine": 1}',
    "none.gguf": "hello world",
    "no-gzip.gz": "nothing",
    "blank.jsonl": " \n\n",
    "third.jsonl": '\ufeff\n\n{"text": \n',  # some editors begin a file with a mark: it is no part of a line
    "list.jsonl": "[1, 2]\n",
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
    "own-both": ({"auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}, "model_type": "made-up"}, {}),
    "own-tokens": ({}, {}),
    "nan": ({}, {}),
    "few-tokens": ({}, {}),
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which all is typed; nothing in it may change."""
    here = tmp_path_factory.mktemp("typed")
    (here / "folder").mkdir()
    (here / "reported").mkdir()
    for name, text in CONTENT.items():
        (here / name).write_text(text)
    (here / "binary").write_bytes(bytes(range(256)) * 40)
    (here / "bytes").write_bytes(b"\xff\xfe\xfa bad")
    found = sample_find_sinks()
    found.save(here / "found.json")
    found.save(here / "reported/found.json")
    (here / "found.html").write_text(found.to_html())
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


def state(folder: Path) -> dict[Path, tuple[int, ...]]:
    """What is in a folder, and of each file when it was last written and how long it is."""
    state: dict[Path, tuple[int, ...]] = {}
    for path in folder.rglob("*"):
        at = path.stat()
        state[path] = () if path.is_dir() else (at.st_ino, at.st_mtime_ns, at.st_size)
    return state


@pytest.mark.parametrize(
    ("line", "says"), [*TYPED, *FILES, *WRITTEN, *VALUES, *MODELS, *CHECKED], ids=lambda text: ascii(text)[1:50]
)
def test_bad_input_is_refused_in_one_line(line, says, prepared, monkeypatch, refusal):
    monkeypatch.chdir(prepared)
    if ".gguf" in line:
        pytest.importorskip("gguf")
    typed, _, given = line.partition(" < ")
    if given:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(Path(given).read_bytes()), encoding="ascii"))
    said = refusal(shlex.split(typed))
    assert says in said and len(said) <= 690 and "unexpected error" not in said and visible(said) == said


@pytest.mark.parametrize("words", ["find-sinks own --max-repeats 3", "generate poem --model own --max-new-tokens 2"])
def test_code_in_a_checkpoint_is_not_run(words, prepared, monkeypatch):
    """Where transformers has the architecture, its class is used."""
    monkeypatch.chdir(prepared)
    assert main(words.split()) == 0 and not Path("ran").exists()
