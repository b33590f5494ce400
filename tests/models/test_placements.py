"""Each call, wherever accelerate keeps the weights, beside the whole model."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from same_kit import differences, plain

import sinkscope as ss
from sinkscope.errors import SinkscopeError
from sinkscope.hooks.edit.base import Intervention
from sinkscope.kv.registry import policies

BUNDLED = Path(ss.__file__).parent / "models/bundled"
IDS = torch.tensor([[0, *range(40, 75)], [0, *[51] * 35]])
LAYERS = 6
SITES = ["blocks.*.hook_resid_post", "blocks.1.mlp.hook_post", "logits"]


@cache
def saved() -> tuple[TemporaryDirectory[str], Path]:
    """The model of the package in a folder of its own; it is removed with the first value."""
    kept = TemporaryDirectory(prefix="sinkscope-scale-")
    shutil.copytree(BUNDLED, Path(kept.name) / "m")
    return kept, Path(kept.name) / "m"


def whole() -> Any:
    return ss.load(saved()[1], device="cpu")


def one_device() -> Any:
    return ss.load(saved()[1], device_map={"": "cpu"})


def on_disk() -> Any:
    """The embedding, the unembedding, and every layer but the first on disk, that of the sink among them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = saved()[1]
    places = {f"model.layers.{layer}": "disk" if layer else "cpu" for layer in range(LAYERS)}
    places |= {"model.embed_tokens": "disk", "lm_head": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, device_map=places, offload_folder=folder.parent / "offload", dtype=torch.float32
    )
    model.tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.model.layers[LAYERS - 1].mlp.down_proj.weight.is_meta
    return model


def offloaded() -> Any:
    from accelerate import cpu_offload

    model = cpu_offload(whole(), execution_device=torch.device("cpu"))
    assert model.model.layers[0].mlp.down_proj.weight.is_meta
    return model


WHOLE = "whole"
PLACEMENTS: dict[str, Callable[[], Any]] = {
    WHOLE: whole,
    "`device_map`, one device": one_device,
    "`device_map`, parts on disk": on_disk,
    "`cpu_offload`": offloaded,
}
ACCELERATE = list(PLACEMENTS)[1:4]
MEASURED = ("find_sinks", "heads", "circuit", "repeat", "attack", "patch make", "barcode", "lines")


@torch.no_grad()
def under(edit: Intervention, model: Any) -> Any:
    """Logits of a prefill and of two more tokens under an edit, as on the CPU."""
    with edit.on(model):
        start = model(IDS, use_cache=True)
        parts = [start.logits]
        for at in (3, 4):  # one by one: policies act at a generated token
            parts.append(model(IDS[:, at : at + 1], past_key_values=start.past_key_values, use_cache=True).logits)
    return torch.cat(parts, 1)


def tokens(model: Any, **settings: Any) -> Any:
    return [made.tokens for made in ss.generate(model, "the sea and the sea and", max_new_tokens=24, **settings)]


def read(measure: Callable[..., Any], model: Any, **settings: Any) -> Any:
    return measure(model, **settings).to_dict()["result"]


def calls() -> dict[str, partial[Any]]:
    ramp = torch.linspace(-1, 1, 192)
    edits: dict[str, Intervention] = {
        "Ablate, neurons": ss.Ablate(layer=1, neurons=[338, 11]),
        "Ablate, heads": ss.Ablate(heads=[(1, 2)]),
        "Add": ss.Add(ramp, "blocks.1.hook_resid_post"),
        "SinkPatch": ss.SinkPatch(layer=1, neurons=[338, 11]),
        "Quantize": ss.Quantize(activations=8, kv=8, scale="tensor", neurons=["L1.N338"], positions="first"),
        "LoopServe": ss.LoopServe(12),
        "Full": ss.kv.Full(),
    }
    for name, policy in policies().items():
        if policy.__module__.startswith("sinkscope.") and name != "full":
            edits[f"policy {name}"] = ss.kv.make_policy(name, budget=12)
    found: dict[str, partial[Any]] = {
        "find_sinks": partial(read, ss.find_sinks, max_repeats=64),
        "heads": partial(read, ss.heads, count=2),
        "circuit": partial(read, ss.circuit, max_repeats=64),
        "repeat": partial(read, ss.repeat, max_repeats=24, ablate=True),
        "attack": partial(read, ss.attack, lengths=[4], sequences=4, prefix=""),
        "patch make": partial(read, ss.patch_make, max_repeats=300, pieces=2, length=16),
        "barcode": partial(read, ss.barcode, max_new_tokens=24, layers=[0]),
        "lines": partial(read, ss.lines, count=2, length=48, layers=[1]),
        "trace": partial(ss.trace, tokens=IDS, sites=SITES),
        "generate": tokens,
        "LoopGuard": partial(tokens, guard=ss.LoopGuard()),
    }
    for name, edit in edits.items():
        found[name] = partial(under, edit)
    return found


def outcome(call: Callable[[Any], Any], model: Any, wanted: Any) -> str:
    """Equal, refused, or what is wrong."""
    try:
        return "; ".join(differences(plain(wanted), plain(call(model)))) or "equal"
    except SinkscopeError as error:
        assert "\n" not in str(error)
        return "refused"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@cache
def model_at(place: str) -> Any:
    return PLACEMENTS[place]()


def cases() -> Iterator[Any]:
    for name in calls():
        for place in ACCELERATE:
            is_quick = name not in MEASURED and PLACEMENTS[place] is on_disk
            yield pytest.param(name, place, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.parametrize(("name", "place"), cases())
def test_a_call_gives_the_numbers_of_the_whole_model(name, place):
    call = calls()[name]
    assert outcome(call, model_at(place), call(model_at(WHOLE))) == "equal"


def test_the_page_has_the_table_of_what_the_cases_show():
    """All calls are equal in all places, or a case fails; the page names each of them."""
    page = (Path(__file__).parents[2] / "docs/scale.md").read_text(encoding="utf-8")
    head = f"| call | {' | '.join(ACCELERATE)} |"
    _, _, table = page.partition(head)
    rows = [line.strip("| ").split(" | ") for line in table.partition("\n\n")[0].splitlines()[2:]]
    assert [name for first, *_ in rows for name in first.split("; ")] == list(calls())
    assert all(cells == ["equal"] * len(ACCELERATE) for _, *cells in rows)
