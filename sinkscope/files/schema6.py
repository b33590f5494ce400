"""Files of schema 6, which had English names where schema 7 has keys: their tables and names are mapped to keys here.

Every kind whose fields changed has a function, from the `result` of a file to that of schema 7. What a file does not
hold stays absent.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from typing import Any

Data = dict[str, Any]

_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
_NEURON = re.compile(r"L(\d+)(?:\.E(\d+))?\.N(\d+)")
_HEAD = re.compile(r"L\d+\.H\d+")

CAUSES = {"its token": "token", "alone": "alone", "id 0": "id_0"}
TAKEN = {"place, another token": "token", "place, sees 4 more": "alone", "place, 32 later": "id_0"}
SEES_ONE_OTHER = "sees 1 other, drawn"
PURPOSES = {
    "intact": "intact",
    "hidden in all layers": "hidden_everywhere",
    "hidden": "hidden",
    "value zero": "value_zero",
    "mean value": "value_mean",
    "most attended key hidden": "other_hidden",
}
ROLES = {"another spike": "other spike"}
MARKING = {"tokens": "none", "all heads": "all", "fewest heads": "fewest", "random heads": "random"}
READINGS = {
    "norm of copies": "norm",
    "attention to copies": "attention",
    "one more copy": "next",
    "change of the perplexity": "perplexity",
}
FILLED = {"one copy": "one_copy", "other tokens": "others"}
OUTCOMES = ("repaired", "not repaired")
NO_EQUAL = "no set of other neurons writes as much"
"""The note of a control that wrote less than the needed neurons."""


def upgraded(kind: str, result: Data) -> Data:
    """Return the result of a file of schema 6 as schema 7 has it.

    Args:
        kind: The kind that the file states.
        result: Its `result`.
    """
    convert = CONVERTED.get(kind)
    return result if convert is None else convert(result)


# --- keys ---


def neuron(name: str) -> Data:
    """Return the key of a neuron: L1.N338, or L3.E2.N7 in a mixture."""
    found = _NEURON.fullmatch(name)
    assert found is not None
    layer, expert, number = found.groups()
    return {"layer": int(layer), "expert": None if expert is None else int(expert), "neuron": int(number)}


def component(name: str) -> Data:
    """Return the key of a component: "mlp 11", "embedding"."""
    kind, _, layer = name.partition(" ")
    return {"kind": kind, "layer": int(layer) if layer else None}


def part(name: str) -> Data:
    """Return the key of a neuron, a head or a component."""
    if _NEURON.fullmatch(name):
        return neuron(name)
    return head(name) if _HEAD.fullmatch(name) else component(name)


def place(words: str) -> Data:
    """Return the key of a place from its words."""
    tokens = [ast.literal_eval(quoted) for quoted in _QUOTED.findall(words)]
    position = re.search(r"position (\d+)", words)
    kind = "tokens"
    if words == "the first token":
        kind = "first_token"
    elif "(most often" in words:
        kind = "some_first_tokens" if words.startswith("some first tokens") else "other_positions"
        tokens = []
    elif position is not None:
        kind = "position"
    elif words.startswith("the first"):
        kind = "first_of_tokens"
    return {"kind": kind, "tokens": tokens, "position": None if position is None else int(position[1])}


def number_of(value: float | None, kind: str) -> Data | None:
    """Return a number without a margin."""
    return None if value is None else {"value": value, "margin": None, "by_text": [], "kind": kind}


def row_of(table: Iterable[Data], name: str) -> Data | None:
    """Return the row of a name; None if the table has none."""
    return next((row for row in table if row["name"] == name), None)


# --- find-sinks and why-sink ---


def find_sinks(result: Data) -> Data:
    """Return a result of `find_sinks` or `why_sink`."""
    upgraded = {name: value for name, value in result.items() if name not in ("spikes", "attention", "marking")}
    upgraded["spikes"] = [spike(old) for old in result["spikes"]]
    upgraded["attention"] = []
    for row in result["attention"]:
        if row["table"] == "norm":
            upgraded["largest"] = largest(row)
        else:
            upgraded["attention"].append({"key": attended(row), **row["numbers"]})
    if "marking" in result:
        upgraded["marking"] = marking(result["marking"])
    return upgraded


def attended(row: Data) -> Data:
    """Return what the heads of a row attend to."""
    if row["name"] == "sink rate":
        return {"kind": "sink_rate", "place": None}
    if row["name"] == "learned sink logits":
        return {"kind": "learned_sink_logits", "place": None}
    kind = "place" if row["table"] == "attention" else "place_without_spike"
    return {"kind": kind, "place": place(row["name"])}


def largest(row: Data) -> Data:
    """Return the largest norm; its token and layer stood in a note."""
    note = re.fullmatch(r"at (.*) after layer (\d+)", row["note"], re.DOTALL)
    assert note is not None
    return {"token": ast.literal_eval(note[1]), "layer": int(note[2]), **row["numbers"]}


def head(name: str) -> Data:
    """Return the key of a head."""
    layer, number = name.removeprefix("L").split(".H")
    return {"layer": int(layer), "head": int(number)}


def marking(rows: list[Data]) -> list[Data]:
    """Return the rows of heads that mark first tokens."""
    upgraded: list[Data] = []
    for row in rows:
        key: Data = {"kind": "head", "head": None}
        if row["name"] in MARKING:
            key["kind"] = MARKING[row["name"]]
        else:
            key["head"] = head(row["name"])
        numbers = dict(row["numbers"])
        if "heads" in numbers:
            numbers["count"] = numbers.pop("heads")
        named = [head(name) for name in _HEAD.findall(row["note"])]
        upgraded.append({"key": key, "marking": named, **numbers})
    return upgraded


def spike(old: Data) -> Data:
    """Return a spike, whose rows become tables."""
    tables: dict[str, list[Data]] = {}
    for row in old["rows"]:
        tables.setdefault(row["table"], []).append(row)
    new = {name: value for name, value in old.items() if name not in ("rows", "place")}
    new["place"] = {**old["place"], "key": place(old["place"]["words"])}
    new["needed"] = [part(name) for name in old["needed"]]
    new["size"] = {}
    for row in tables["spike"]:  # its norms, what is left without the needed parts, the heads that read it
        new["size"] |= row["numbers"]
    new["writers"] = [writer(row) for row in tables.get("writers", ())]
    for name in ("components", "erasers"):
        new[name] = [{"key": component(row["name"]), **row["numbers"]} for row in tables.get(name, ())]
    new["effects"] = effects(new["needed"], tables)
    new["marks"] = [mark(row) for row in tables.get("marks", ())]
    new["conditions"] = [{"key": condition(row["name"]), **row["numbers"]} for row in tables.get("conditions", ())]
    new["constant"] = constancy(tables.get("constant", []))
    new["purpose"] = purpose([*tables.get("purpose", ()), *tables.get("purpose, controls", ())])
    return new


def writer(row: Data) -> Data:
    """Return the row of a neuron that writes a spike."""
    return {"key": neuron(row["name"]), "role": ROLES.get(row["note"], row["note"]), **row["numbers"]}


def mark(row: Data) -> Data:
    """Return the row of components that mark a place."""
    return {"key": [component(name) for name in row["name"].split(" and ")], **row["numbers"]}


def effects(needed: list[Data], tables: dict[str, list[Data]]) -> list[Data]:
    """Return what the needed parts do, each part alone, the place hidden, and the controls."""
    old = tables.get("effects", [])
    if not old:
        return []
    new: list[Data] = [{"key": edit("intact"), "left": number_of(1.0, "share")}]
    at_place = row_of(old, "at place")
    if at_place is not None:
        intact = at_place["numbers"].get("intact")
        if intact is not None:
            new[0]["heads"] = intact
        new.append({"key": edit("needed"), "parts": needed, **at_place["numbers"]})
    everywhere = row_of(old, "everywhere")
    if everywhere is not None:
        new.append({"key": edit("needed", everywhere=True), "parts": needed, **everywhere["numbers"]})
    for row in tables.get("alone", ()):
        new.append({"key": edit("part", alone=neuron(row["name"])), **row["numbers"]})
    hidden = row_of(old, "hidden")
    if hidden is not None:
        since = re.search(r"from layer (\d+) on", hidden["note"])
        layer = None if since is None else int(since[1])
        new.append({"key": edit("hidden"), "since": layer, **hidden["numbers"]})
    for row in tables.get("controls", ()):
        done = "busiest" if row["name"] == "busiest" else "random"
        if row["note"] == NO_EQUAL:
            done = "as_many"
        new.append({"key": edit(done, everywhere="size" in row["numbers"]), **row["numbers"]})
    return new


def edit(done: str, *, everywhere: bool = False, alone: Data | None = None) -> Data:
    """Return the key of an edit."""
    return {"done": done, "everywhere": everywhere, "part": alone}


def condition(name: str) -> Data:
    """Return the key of a condition."""
    key: Data = {"causes": [], "at_place": name in TAKEN, "one_other": name == SEES_ONE_OTHER}
    if name in TAKEN:
        key["causes"] = [TAKEN[name]]
    elif name != SEES_ONE_OTHER:
        key["causes"] = [CAUSES[word] for word in name.split(", ") if word in CAUSES]
    return key


def constancy(rows: list[Data]) -> list[Data]:
    """Return how constant the place is; the layers of all rows stood in the note of the first."""
    new: list[Data] = []
    readers = since = beside = 0
    for row in rows:
        numbers = re.findall(r"\d+", row["note"])
        if len(numbers) == 3:
            readers, since, beside = map(int, numbers)
        new.append({"key": row["name"], "readers": readers, "since": since, "beside": beside, **row["numbers"]})
    return new


def purpose(rows: list[Data]) -> list[Data]:
    """Return what attention to the place is for."""
    new: list[Data] = []
    for row in rows:
        since = re.search(r"from layer (\d+) on", row["note"])
        other = re.search(r"position (\d+)", row["note"])
        new.append(
            {
                "key": PURPOSES[row["name"]],
                "since": None if since is None else int(since[1]),
                "other": None if other is None else int(other[1]),
                **row["numbers"],
            }
        )
    return new


# --- why-loop ---


def why_loop(result: Data) -> Data:
    """Return a result of `why_loop`, whose rows were called "goes on without copies"."""
    tried: list[Data] = []
    for row in result["tried"]:
        cause = row["name"].removeprefix("goes on without ").replace("sink, from the start", "sink_from_start")
        tried.append({"key": cause, "control": None, **row["numbers"]})
    return {**result, "tried": tried}


# --- check-cache ---


def check_cache(result: Data) -> Data:
    """Return a result of `check_cache`, whose checks were called by their words; what was seen was a sentence."""
    checks: list[Data] = []
    for row in result["checks"]:
        check = {name: value for name, value in row.items() if name not in ("check", "evicted")}
        check["key"] = row["check"].replace(" ", "_")
        check["evicted"] = number_of(float(row["evicted"]), "count")
        check["reason"] = row["seen"]
        checks.append(check)
    return {**result, "checks": checks}


# --- attack ---


def attack(result: Data) -> Data:
    """Return a result of `attack`: a row had its control beside it, and now each is a row."""
    upgraded = {name: value for name, value in result.items() if name not in ("clusters", "attempts")}
    served, every, none, *heads = result["clusters"]
    shares = {"all": every["numbers"]["share"], "marking": served["numbers"]["share"], "none": none["numbers"]["share"]}
    if served["numbers"].get("control") is not None:
        shares["another"] = served["numbers"]["control"]
    upgraded["having"] = [{"key": kept, "share": share} for kept, share in shares.items()]
    upgraded["clusters"] = [{"key": head(row["name"]), **row["numbers"]} for row in heads]
    upgraded["attempts"] = []
    for number, row in enumerate(result["attempts"]):  # intact, then patched
        for sequences, name in (("one_cluster", "share"), ("random", "control")):
            key = {"sequences": sequences, "patched": bool(number)}
            upgraded["attempts"].append({"key": key, "share": row["numbers"][name], "sequences": None})
    return upgraded


# --- patch ---


def patch(result: Data) -> Data:
    """Return a result of `patch`; its control were as many random neurons, whose names are not known."""
    proof: list[Data] = []
    for row in result["proof"]:
        layers = [int(number) for number in re.findall(r"\d+", row["about"])]
        new: Data = {"key": READINGS[row["name"]], "layers": None, "words": row["texts"], **row["numbers"]}
        if layers:
            new["layers"] = [layers[0], layers[-1]]
        new["outcome"] = row["note"] if row["note"] in OUTCOMES else "nothing to do"
        if new["key"] == "perplexity":
            new["outcome"] = None
            new["perplexity"] = number_of(row["numbers"].get("perplexity", {}).get("value"), "number")
        proof.append(new)
    return {**result, "proof": proof, "control": None}


# --- repeat ---


def repeat(result: Data) -> Data:
    """Return a result of `repeat`; the controls of an effect were rows beside it."""
    effects: list[Data] = []
    spikes: list[list[int]] = []
    for row in result["effects"]:
        layers = [int(number) for number in re.findall(r"\d+", row["about"])]
        spike_layers = [layers[0], layers[-1]] if layers else None
        key = FILLED.get(row["name"], "copies")
        effects.append({"key": key, "layers": spike_layers, "share": row["numbers"]["share"]})
        if spike_layers is not None and spike_layers not in spikes:
            spikes.append(spike_layers)
    return {**result, "effects": effects, "spikes": spikes, "below_again": None}


# --- compare and view ---


def comparison(result: Data) -> Data:
    """Return a result of `compare`; the verdict of a row was its table."""
    compared: list[Data] = []
    for other in result["results"]:
        rows: list[Data] = []
        for row in other["rows"]:
            numbers = row["numbers"]
            key = {"about": row["about"], "row": row["name"], "column": ""}
            kind = numbers["before"]["kind"] if numbers else "word"
            words = None if numbers else row["note"]
            rows.append({"key": key, "verdict": row["table"], "kind": kind, "words": words, **numbers})
        compared.append({**other, "rows": rows})
    return {**result, "results": compared}


def view(result: Data) -> Data:
    """Return a view, whose circuit had cards."""
    circuit: list[Data] = []
    for entry in result["circuit"]:
        new = {name: value for name, value in entry.items() if name != "card"}
        circuit.append({**new, "found": spike(entry["found"]), "lines": entry["card"]["rows"]})
    return {**result, "circuit": circuit}


# --- the card of a scan ---


def sink_card(result: Data) -> Data:
    """Return a card, whose parts had all rows; now they are in the files beside it, and a part has its findings."""
    parts: list[Data] = []
    for part in result["parts"]:
        new = {name: value for name, value in part.items() if name not in ("rows", "cards")}
        new["headlines"] = []
        for row in part["rows"]:
            control = row["numbers"].get("control")
            found = row["numbers"].get("share", row["numbers"].get("value"))
            if control is not None and found is not None:
                words = {"found": f"{found['value']:.3g}", "control": f"{control['value']:.3g} ({row['note']})"}
                new["headlines"].append({"subject": row["name"], "verdict": "no control", **words})
        parts.append(new)
    return {**result, "parts": parts}


CONVERTED: dict[str, Callable[[Data], Data]] = {
    "find-sinks": find_sinks,
    "why-sink": find_sinks,
    "why-loop": why_loop,
    "repeat": repeat,
    "compare": comparison,
    "view": view,
    "patch": patch,
    "sink-card": sink_card,
    "attack": attack,
    "check-cache": check_cache,
}
"""The kinds whose fields changed."""
