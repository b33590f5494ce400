"""What every test runs under: checked shapes, few threads, no network, no colour."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Generator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from shape_checks import install

CACHE = tempfile.mkdtemp(prefix="sinkscope-cache-")  # what tests keep is not what users keep
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)
os.environ.update(  # before anything that reads them is imported
    XDG_CACHE_HOME=CACHE,
    HF_HUB_OFFLINE="1",  # a test that means to download says so, against a server of its own
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="disabled",
    NO_COLOR="1",
    PYTHONPATH=os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])),
)
os.environ.pop("FORCE_COLOR", None)
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):  # compiled once, and not by every worker and every child
    sys.dont_write_bytecode = False
gc.disable()  # what is imported makes no garbage; see pytest_collection_finish
settings.register_profile("sinkscope", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("sinkscope")
install("sinkscope")

# A bare GPU machine has none of these: there, tests that come to need one are skipped, and all others have to pass.
MISSING = {name for name in ("transformer_lens", "nnsight", "gguf") if find_spec(name) is None}


def needed(error: BaseException | None) -> str | None:
    """The missing library for which an error was raised, at once or as the reason of another error; None: none."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in MISSING:
            return error.name
        error = error.__cause__ or error.__context__
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Generator[None, Any, pytest.TestReport]:
    """A test that fails because it, or what prepares it, needs a library that this machine does not have is skipped."""
    report = yield
    if report.failed and (name := needed(call.excinfo.value)) is not None:
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"{name} is not installed")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, None, None]:
    """One text of each kind is surveyed where a test says so; a slow one reads all."""
    with pytest.MonkeyPatch.context() as patch:
        if item.get_closest_marker("few_texts") and not item.get_closest_marker("slow"):
            patch.setattr("sinkscope.sinks.spikes.survey.SURVEYED", 4)
        return (yield)


# Files whose few tests take long: they are handed out first, so that no worker is left with one of them at the end.
FIRST = (
    "test_mutants.py",
    "test_net.py",
    "test_faults.py",
    "test_surroundings.py",
    "test_measurements.py",
    "test_spikes.py",
    "test_planted.py",
    "test_families.py",
    "test_shards.py",
    "test_package.py",
    "test_generate.py",
    "test_docs.py",
    "test_types.py",
    "test_view_page.py",
    "test_view.py",
    "test_packings.py",
    "test_why.py",
    "test_check_cache.py",
    "test_policies.py",
    "test_marking_heads.py",
    "test_training.py",
    "test_placements.py",
    "test_not_finite.py",
    "test_mask.py",
    "test_layouts.py",
    "test_bad_input.py",
    "test_attack.py",
    "test_patching.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]):
    """Slow tests and notebooks may take longer than the time limit of the settings; what takes long comes first."""
    count = Counter(item.path for item in items)
    place = {name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: (place.get(item.path.name, len(FIRST)), -count[item.path]))
    for item in items:
        if item.get_closest_marker("slow") or not isinstance(item, pytest.Function):
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(3600))


def pytest_collection_finish():
    """Garbage is looked for among what the tests make, and not again and again among a million imported objects."""
    import torch

    torch.set_num_threads(1)  # the models are tiny: threads cost more than they bring
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


def pytest_sessionfinish():
    """What is left goes with the process: pytest looks through it five times for errors of finalizers otherwise."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_start():
    """Every test starts from the same random numbers and unspent checks, whichever ran before it."""
    import torch

    torch.default_generator.manual_seed(0)  # `torch.manual_seed` keeps the stack of each call for a GPU to come
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Type a command that ends with this code; what it prints."""
    from sinkscope.app.cli import main

    def run(words: str | list[str], code: int = 0):
        capsys.readouterr()
        assert main(words.split() if isinstance(words, str) else words) == code
        return capsys.readouterr()

    return run


@pytest.fixture
def refusal(typed: Callable[..., Any]) -> Callable[..., str]:
    """Type a command that must be refused: in one line, and before anything is printed or written; what it says."""

    def run(words: str | list[str]) -> str:
        before = sorted(os.listdir())
        out, err = typed(words, 2)
        assert (out, err[:7], err.count("\n")) == ("", "error: ", 1) and sorted(os.listdir()) == before, (
            words,
            out,
            err,
        )
        return err[7:].strip()

    return run


@pytest.fixture
def model():
    """A random Llama of two layers."""
    from kv_kit import shallow_of

    return shallow_of("llama")
