"""Where LongBench's records come from, what is refused, and `sinkscope loopbench build`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hub_server import hub
from longbench_files import record, records, save

from sinkscope.app.cli import main
from sinkscope.bench.files import read_longbench
from sinkscope.bench.loopbench.prompts import TASKS, load_prompts
from sinkscope.errors import SinkscopeError
from sinkscope.models.load import open_tokenizer

BUNDLED = Path(__file__).parents[2] / "sinkscope/models/bundled"
NEWS = "multi_news"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return save(tmp_path / "data" / f"{NEWS}.jsonl", records(NEWS, [30, 60, 90]))


def packed(file: Path, path: Path, inside: str = "data/") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{inside}lcc.jsonl", "")
        archive.write(file, f"{inside}{file.name}")
    return path


def test_the_same_records_however_they_are_packed(tmp_path: Path, file: Path) -> None:
    want = read_longbench(NEWS, file)
    assert [r.id for r in want.records] == [f"{NEWS}-{i}" for i in range(3)]
    assert want.records[1].context == json.loads(file.read_text().splitlines()[1])["context"]
    assert want.records[1].answers == ("Ellen Varga",)
    (tmp_path / "archives").mkdir()
    archive = packed(file, tmp_path / "archives" / "data.zip")
    flat = packed(file, tmp_path / "any.name", inside="")
    for where in (file.parent, tmp_path, archive, archive.parent, flat):
        found = read_longbench(NEWS, where)
        assert (found.records, found.sha256) == (want.records, want.sha256)
        assert found.commit is None
    other = save(tmp_path / "e.jsonl", [record(f"{NEWS}_e", 0, "text of LongBench-E")])
    assert read_longbench(NEWS, other).records[0].context == "text of LongBench-E"


def test_from_the_hub(tmp_path: Path, file: Path) -> None:
    served = tmp_path / "served"
    (served / "parts").mkdir(parents=True)
    packed(file, served / "data.zip")
    shutil.copy(file, served / "parts" / file.name)
    want = read_longbench(NEWS, file)
    with hub(tmp_path / "cache") as server:
        commit = server.add("datasets/zai-org/LongBench", served)
        server.add("zai-org/LongBench", tmp_path / "data")  # a model of the same name is another repo
        for name in ("data.zip", f"parts/{NEWS}.jsonl"):
            found = read_longbench(NEWS, "hub", file=name)
            assert (found.records, found.sha256, found.commit) == (want.records, want.sha256, commit)
            assert found.name == f"zai-org/LongBench/{name}"
        assert server.fetched() == ["data.zip", f"parts/{NEWS}.jsonl"]
        with pytest.raises(SinkscopeError, match=r"the dataset zai-org/LongBench has no none\.zip: give --source"):
            read_longbench(NEWS, "hub", file="none.zip")
        with pytest.raises(SinkscopeError, match="there is no dataset 'me/mine'"):
            read_longbench(NEWS, "hub", repo="me/mine")
    with hub(tmp_path / "empty", offline=True), pytest.raises(SinkscopeError, match="give the path of a copy"):
        read_longbench(NEWS, "hub")


GOOD = record(NEWS, 0, "fine")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"input": "", "conte', r"line 2 is not JSON: give LongBench's multi_news\.jsonl"),
        ("[1, 2]", "line 2 is \\[1, 2\\], expected an object"),
        ({k: v for k, v in GOOD.items() if k != "context"}, "line 2: context is missing: give LongBench's"),
        ({k: v for k, v in GOOD.items() if k != "all_classes"}, "line 2: all_classes is missing"),
        ({**GOOD, "_id": 7}, "line 2: _id is 7, expected a string"),
        ({**GOOD, "all_classes": "x"}, "line 2: all_classes is 'x', expected a list"),
        ({**GOOD, "length": True}, "line 2: length is True, expected a number"),
        ({**GOOD, "dataset": "hotpotqa"}, "line 2 is of 'hotpotqa', expected multi_news"),
        ({**GOOD, "context": " \n"}, "line 2: the context is empty"),
        ({**GOOD, "answers": [1]}, "line 2: answers\\[0\\] is 1, expected a string"),
        (GOOD, r"line 2: _id 'multi_news-0' is that of .* line 1 too"),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_damaged_line_is_named(tmp_path: Path, line: Any, said: str, zipped: bool) -> None:
    path = save(tmp_path / f"{NEWS}.jsonl", [GOOD, line, record(NEWS, 2, "fine")])
    name = rf"{NEWS}\.jsonl "
    if zipped:
        path, name = packed(path, tmp_path / "data.zip"), rf"data/{NEWS}\.jsonl in data\.zip "
    with pytest.raises(SinkscopeError, match=name + said):
        read_longbench(NEWS, path)


def test_2wiki_needs_a_question_and_an_answer(tmp_path: Path) -> None:
    for i, changed in enumerate(({"answers": []}, {"input": " "})):
        path = save(tmp_path / f"{i}.jsonl", [record("2wikimqa", 0, "text", **changed)])
        with pytest.raises(SinkscopeError, match=r"line 1 has no question or no answer"):
            read_longbench("2wikimqa", path)


def test_files_of_something_else(tmp_path: Path, file: Path) -> None:
    cases: dict[str, tuple[bytes, str]] = {
        "empty.jsonl": (b"\n", "has no records of multi_news in it"),
        "latin.jsonl": (b"\xff\xfe{", "line 1 is not JSON"),
        "broken.zip": (b"PK\x03\x04 and so on", "cannot be read"),
        "text.zip": (b"no archive", "cannot be read"),
        "x.parquet": (b"PAR1", r"is a parquet file: .* convert it"),
    }
    whole = packed(file, tmp_path / "whole.zip").read_bytes()
    at = whole.index(b"multi_news.jsonl") + 60  # inside the packed bytes
    cases["flipped.zip"] = (whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :], "cannot be read|is not JSON")
    for name, (content, said) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SinkscopeError, match=said) as caught:
            read_longbench(NEWS, tmp_path / name)
        assert "\n" not in str(caught.value)
        assert name in str(caught.value)
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("lcc.jsonl", "")
    with pytest.raises(SinkscopeError, match=r"other\.zip has no multi_news\.jsonl in it"):
        read_longbench(NEWS, tmp_path / "other.zip")
    with pytest.raises(SinkscopeError, match=r"the folder empty has no multi_news\.jsonl"):
        (tmp_path / "empty").mkdir()
        read_longbench(NEWS, tmp_path / "empty")
    with pytest.raises(SinkscopeError, match="there is no file or folder"):
        read_longbench(NEWS, tmp_path / "nothing")


def test_half_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    line = json.dumps(GOOD).replace("fine", "a\\ud83d b")
    (found,) = read_longbench(NEWS, save(tmp_path / "s.jsonl", [line])).records
    assert found.context == "a? b"


def test_the_tokenizer_of_a_hub_model_comes_without_weights(tmp_path: Path) -> None:
    """The short names of the paper's models lead to their tokenizers."""
    with hub(tmp_path) as server:
        for repo in ("Qwen/Qwen3-1.7B", "meta-llama/Llama-3.2-1B"):
            server.add(repo, BUNDLED)
        for short in ("qwen3-1.7b", "llama-3.2-1b"):
            tokenizer, name = open_tokenizer(short)
            assert name == short
            assert tokenizer("def f")["input_ids"] == open_tokenizer("bundled")[0]("def f")["input_ids"]
        assert {"tokenizer.json", "config.json"} <= set(server.fetched())
        assert not [name for name in server.fetched() if "safetensors" in name]
    assert open_tokenizer(folder=BUNDLED)[1] == "bundled"


def run(tmp_path: Path, *words: str) -> int:
    base = {"--bench": "dc", "--source": str(tmp_path / "data"), "--out": str(tmp_path / "dc.jsonl")}
    given = dict(zip(words[::2], words[1::2], strict=True))
    return main(["loopbench", "build", *(word for pair in {**base, **given}.items() for word in pair)])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), r"give --model NAME or --tokenizer FOLDER \(neither was given\)"),
        (("--model", "bundled", "--tokenizer", str(BUNDLED)), "both were given"),
        (("--tokenizer", "no-such-folder"), "--tokenizer 'no-such-folder' is not a folder"),
        (("--tokenizer", str(Path(__file__).parent)), "tests has no tokenizer in it"),
        (("--tokenizer", str(BUNDLED), "--revision", "v2"), "revision 'v2' means nothing for --tokenizer"),
        (("--model", "no-such-model"), "unknown model 'no-such-model'"),
        (("--model", "bundled", "--bench", "cd"), "cd"),
        (("--model", "bundled", "--count", "0"), "0"),
        (("--model", "bundled", "--repo", "a/b"), "--repo and --file belong to --source hub"),
        (("--model", "bundled", "--out", "-"), "--out -: give the set a file of its own"),
        (("--model", "bundled", "--bench", "ri"), r"the folder data has no narrativeqa\.jsonl"),
        (("--model", "bundled", "--source", "nowhere"), "there is no file or folder 'nowhere'"),
        (("--model", "bundled", "--target-tokens", "100"), r"target_tokens=100: .* the form alone has \d+ tokens"),
    ],
)
def test_refused(
    tmp_path: Path, file: Path, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, *words) == 2
    out, err = capsys.readouterr()
    assert not out
    assert re.fullmatch(r"error: .*\n", err)
    assert re.search(said, err)
    assert {p.name for p in tmp_path.iterdir()} == {"data"}, "nothing is written"


def test_build_and_not_over_what_is_there(tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "bundled", "--count", "4", "--target-tokens", "380")
    assert run(tmp_path, *words) == 0
    out, err = capsys.readouterr()
    assert re.search(r"LoopBench-DC +4 prompts \(paper 300\)", out)
    assert re.search(r"tokens +mean 3[78]\d, paper 3,853; \d+ to \d+", out)
    assert "wrote dc.jsonl and dc.manifest.json" in err
    prompts = load_prompts(tmp_path / "dc.jsonl")
    tokenizer, _ = open_tokenizer("bundled")
    assert [p.tokens for p in prompts] == [len(tokenizer(p.prompt)["input_ids"]) for p in prompts]
    assert sum(p.tokens for p in prompts) / 4 == pytest.approx(380, abs=6)
    before = (tmp_path / "dc.jsonl").read_bytes()
    assert run(tmp_path, *words, "--seed", "1") == 2
    assert "dc.jsonl is there already: give another --out, or --force" in capsys.readouterr().err
    (tmp_path / "dc.jsonl").rename(tmp_path / "moved.jsonl")
    assert run(tmp_path, *words, "--seed", "1") == 2, "the manifest is kept as well"
    assert (
        main(
            [
                "loopbench",
                "build",
                "--bench",
                "dc",
                "--source",
                str(file),
                "--out",
                str(tmp_path / "dc.jsonl"),
                "--tokenizer",
                str(BUNDLED),
                "--count",
                "4",
                "--target-tokens",
                "380",
                "--force",
            ]
        )
        == 0
    )
    assert (tmp_path / "dc.jsonl").read_bytes() == before, "the same settings, however they were given"


def test_every_bench_has_a_task_and_help_loads_no_torch() -> None:
    assert TASKS == {"dc": "multi_news", "ri": "narrativeqa", "2wiki": "2wikimqa"}
    code = (
        "import sys; from sinkscope.app.cli import main; main(['loopbench', 'build', '--help'])\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == "[]\n"
    assert "LoopBench-DC" in done.stdout
