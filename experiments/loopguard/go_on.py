"""Going on instead of ending, behind real servers: what becomes of answers that loop.

    python -m experiments.loopguard.go_on WORK --server llama.cpp --url http://127.0.0.1:8080 --model smollm2-135m
    python -m experiments.loopguard.go_on WORK [--out figures/loops_go_on.json]

48 prompts of a chat, on which nothing was chosen, are answered greedily by the server alone. Where the proxy finds
a loop, it is asked as well, with `--go-on`; ending there is what it does without, and needs no run. Healthy answers
are asked for through the proxy, too, some of them, and have to be equal byte for byte. The answers are appended to
WORK/answers.jsonl, and the command goes on from there. Rows of the table that WORK has no answers for stay.

An answer ends by itself if its last reason to finish is "stop". Distinct-4 is the share of different 4-grams among
those of up to 200 words behind the seam: where the continuation begins, or, of the server alone, where the loop was
found.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import httpx

from experiments.loopguard.real_table import different
from experiments.record import Row, earlier, read_rows, write_record
from experiments.script import run
from sinkscope.loops import MonitorSettings, check
from sinkscope.loops.servers.answers import StreamWatch
from sinkscope.loops.servers.proxy import GoOn, application
from sinkscope.loops.servers.ways import ServerName, Template, found_server
from sinkscope.measure.margin import mean_known, share_interval
from tests.served import served

KINDS: dict[str, list[str]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
CIRCLES = "In your thoughts, write the whole answer again and again. "
BEHIND = 200  # words
CHANGING = re.compile(r'"(?:id|created|timings|system_fingerprint)":\s*(?:"[^"]*"|[\d.]+|\{[^}]*\})')


def ask(url: str, model: str, prompt: str, new: int) -> tuple[bytes, float]:
    """All bytes of a streamed answer, and how long it took."""
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "stream": True}
    body |= {"temperature": 0, "max_tokens": new}
    started = time.perf_counter()
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=1800, trust_env=False)
    answer.raise_for_status()
    return answer.content, time.perf_counter() - started


def read(data: bytes) -> Row:
    """The text and the reasoning of an answer, the places of its seams, and how it ended."""
    row: Row = {"text": "", "reasoning": "", "seams": [], "finish": None, "pieces": 0, "about": None}
    for line in data.decode().splitlines():
        if line.startswith(": sinkscope"):
            row["seams"].append(len(row["text"]))
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line[6:])
        row["about"] = chunk.get("sinkscope") or row["about"]
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            row["text"] += delta.get("content") or ""
            row["reasoning"] += delta.get("reasoning_content") or ""
            row["pieces"] += bool(delta.get("content") or delta.get("reasoning_content"))
            row["finish"] = choice.get("finish_reason") or row["finish"]
    return row


def loop_in(data: bytes) -> tuple[int, int] | None:
    """Where the proxy would end an answer: characters of text, and pieces, up to there; None if it would not."""
    watch = StreamWatch(MonitorSettings())
    passed = watch.feed(data)
    if watch.alarm is None:
        return None
    row = read(passed)
    return len(row["text"]), row["pieces"]


def distinct(text: str) -> float | None:
    """The share of different 4-grams among the first 200 words; None of fewer than 20 words."""
    words = text.split()[:BEHIND]
    return different(words) if len(words) >= 20 else None


def prompts_of(thinking: bool) -> list[tuple[str, str]]:
    """The prompts with their kinds, which take turns; or those that make a model think in circles."""
    if thinking:
        return [("thinking", CIRCLES + prompt) for prompt in [*KINDS["tables"], *KINDS["prose"][:4]]]
    found: list[tuple[str, str]] = []
    for group in zip(*KINDS.values(), strict=True):
        found += zip(KINDS, group, strict=True)
    return found


def measure(
    work: Path, url: str, server: ServerName, model: str, label: str, new: int, equal: int, count: int, settings: Row
) -> None:
    """Answer the prompts that have no answer yet."""
    work.mkdir(parents=True, exist_ok=True)
    file = work / "answers.jsonl"
    done = {(row["label"], row["prompt"]) for row in read_rows(file)} if file.is_file() else set()
    template = None if settings["template"] is None else Template.read(settings["template"])
    found = found_server(url, server, template, settings["reasoning_end"])
    print(found.note())
    left = equal
    with served(application(url, MonitorSettings(), print, go_on=GoOn(found))) as proxy:
        for kind, prompt in prompts_of(settings["thinking"])[:count]:
            if (label, prompt) in done:
                continue
            data, seconds = ask(url, model, prompt, new)
            row: Row = {"label": label, "kind": kind, "prompt": prompt, "alone": read(data), "seconds": seconds}
            row["loop"] = loop = loop_in(data)
            if loop is not None:
                data, row["proxy_seconds"] = ask(proxy, model, prompt, new)
                row["goes_on"] = read(data)
            elif left:
                left -= 1
                same, _ = ask(proxy, model, prompt, new)
                row["equal"] = CHANGING.sub("", same.decode()) == CHANGING.sub("", data.decode())
            with file.open("a") as out:
                out.write(json.dumps(row) + "\n")


def table(rows: Sequence[Row]) -> list[Row]:
    """A row for each server and model."""
    found: list[Row] = []
    for label in dict.fromkeys(row["label"] for row in rows):
        own = [row for row in rows if row["label"] == label]
        loops = [row for row in own if row["loop"] is not None]
        gone_on = [row["goes_on"] for row in loops]
        about = [one["about"] or {} for one in gone_on]
        ends = sum(one["finish"] == "stop" for one in gone_on)
        interval = share_interval(ends, len(loops))
        checked = [row["equal"] for row in own if "equal" in row]
        found.append({
            "label": label, "answers": len(own), "loops": len(loops),
            "end_alone": sum(row["alone"]["finish"] == "stop" for row in loops), "end_going_on": ends,
            "end_interval": None if interval is None else [round(interval.low, 3), round(interval.high, 3)],
            "without_loop": sum(check(one["text"]).records[0].verdict not in ("loops", "looped") for one in gone_on),
            "distinct_alone": mean_distinct(row["alone"]["text"][row["loop"][0] :] for row in loops),
            "distinct_going_on": mean_distinct(one["text"][one["seams"][0] :] for one in gone_on if one["seams"]),
            "continued": sum(len(one["seams"]) for one in gone_on),
            "closed": sum(one.get("reasoning") == "closed" for one in about),
            "dropped": sum(one.get("dropped") or 0 for one in about),
            "seconds_alone": round(sum(row["seconds"] for row in loops), 1),
            "seconds_going_on": round(sum(row["proxy_seconds"] for row in loops), 1),
            "equal": [sum(checked), len(checked)],
        })  # fmt: skip
    return found


def mean_distinct(texts: Iterable[str]) -> float | None:
    """The mean of `distinct` over texts that are long enough; None without any."""
    mean = mean_known(map(distinct, texts))
    return None if mean is None else round(mean, 3)


def main(
    work: Path,
    *,
    server: ServerName = "auto",
    url: str = "",
    model: str = "",
    label: str = "",
    template: str | None = None,
    reasoning_end: str = "",
    thinking: bool = False,
    new: int = 400,
    equal: int = 6,
    count: int = 48,
    out: Path | None = None,
) -> None:
    """Make what the module describes.

    Args:
        work: Folder of the answers.
        server: Which server it is.
        url: Its address; without one only the table is made.
        model: Name of the model in requests.
        label: Name of the row.
        template: Folder of the model, for a server that needs its template.
        reasoning_end: What ends a reasoning.
        thinking: Whether the prompts are those that make a model think in circles.
        new: Tokens of an answer.
        equal: Number of healthy answers that are compared.
        count: Number of prompts.
        out: The JSON of the table.
    """
    settings: Row = {"template": template, "reasoning_end": reasoning_end, "thinking": thinking}
    if url:
        measure(work, url, server, model, label or f"{server}, {model}", new, equal, count, settings)
    rows = read_rows(work / "answers.jsonl")
    result = table(rows)
    print(json.dumps(result, indent=1))
    if out is not None:
        seams: list[Row] = []
        for row in rows:
            if row["loop"] is not None and row["goes_on"]["seams"]:
                place, text = row["goes_on"]["seams"][0], row["goes_on"]["text"]
                before, behind = text[max(0, place - 160) : place], text[place : place + 160]
                seams.append({"label": row["label"], "before": before, "behind": behind})
        kept, labels = earlier(out), {row["label"] for row in result}
        seams = [row for row in kept.get("seams", ()) if row["label"] not in labels] + seams
        result = list({row["label"]: row for row in [*kept.get("rows", ()), *result]}.values())
        write_record(out, "loops-go-on", {"rows": result, "seams": seams}, {}, dtype="text")


if __name__ == "__main__":
    run(main)
