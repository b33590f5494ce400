"""What `sinkscope loops --proxy` adds to a request, beside the same request of the server itself; and what it bears.

    python -m experiments.bench_proxy --out figures/bench_proxy.json [--rounds 9] [--requests 10000] [--streams 200]

On a machine that does other work, put `chrt -r 5` before the command, so that the three processes are not interrupted.

1. A server that answers at once, and the proxy before it, run in processes of their own.
2. Requests go to both in turn, on connections that are kept alive: whole answers, and streams of twenty events.
3. Then the load: requests in sequence, streams at once of which half loop, and clients that leave in the middle. Every
   answer is compared with what the server sent, up to the cut of one that loops; the memory of the proxy is read.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import httpx

from experiments.record import Row, earlier, write_record
from experiments.script import run
from experiments.timing import interleaved, interval, memory, seconds_of
from sinkscope.files.listen import listen
from tests.server_streams import chat_chunk

PATH = "/v1/chat/completions"
EVENTS = 20
TEXT = "the lamp was opened again and the river went on to a sea that nobody had seen before them".split()
LOOPS = "one more cup of tea"
PATIENCE = 300.0
"""Seconds for an answer."""


def words_of(number: int, count: int) -> list[str]:
    """The words of an honest answer, which differ by its number."""
    words: list[str] = []
    for place in range(count):
        words.append(f"{TEXT[(number * 7 + place * place) % len(TEXT)]}{number * 31 + place * 17}")
    return words


def events_of(asked: Row) -> list[bytes]:
    """The events of an answer, which loops if that is asked for."""
    words = words_of(asked["number"], asked["words"])
    if asked.get("loops"):
        words = words[: len(words) // 4] + (LOOPS.split() * len(words))[: len(words)]
    return [*(f"data: {json.dumps(chat_chunk(f'{word} '))}\n\n".encode() for word in words), b"data: [DONE]\n\n"]


async def fake_server(scope: Any, receive: Any, send: Any) -> None:
    """Answer as a server of models: what, the request says."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    asked: Row = json.loads(body)
    kind = "text/event-stream" if asked["stream"] else "application/json"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind.encode())]})
    if asked["stream"]:
        for part in events_of(asked):
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(asked.get("pause", 0))
        await send({"type": "http.response.body", "body": b""})
        return
    await send({"type": "http.response.body", "body": whole_answer(asked)})


def whole_answer(asked: Row) -> bytes:
    """An answer that is not streamed."""
    message = {"role": "assistant", "content": " ".join(words_of(asked["number"], asked["words"]))}
    return json.dumps({"model": "fake", "choices": [{"index": 0, "message": message}]}).encode()


@contextmanager
def started(words: Sequence[str]) -> Iterator[tuple[str, int]]:
    """The address that a process prints when it listens, and its number."""
    process = subprocess.Popen([sys.executable, "-m", *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[0].decode(), process.pid
    finally:
        process.terminate()
        process.wait()


def client_of(address: str) -> httpx.Client:
    """A connection that is kept alive."""
    return httpx.Client(base_url=address, timeout=PATIENCE, trust_env=False)


def milliseconds(client: httpx.Client, asked: Row, requests: int) -> float:
    """The median time of a request."""
    ask = partial(client.post, PATH, json=asked)
    return 1000 * statistics.median(seconds_of(ask, time.perf_counter)[0] for _ in range(requests))


def overhead(direct: str, proxied: str, rounds: int, requests: int) -> list[Row]:
    """What the proxy adds to a whole answer and to a stream, in milliseconds."""
    rows: list[Row] = []
    for kind in ("whole", "streamed"):
        asked = {"stream": kind == "streamed", "number": 3, "words": EVENTS}
        arms = {name: partial(milliseconds, client_of(address), asked, requests)
                for name, address in (("direct", direct), ("proxied", proxied))}  # fmt: skip
        times = interleaved(arms, rounds)
        added = [after - before for before, after in zip(times["direct"], times["proxied"], strict=True)]
        medians = {name: statistics.median(values) for name, values in times.items()}
        row: Row = {"answer": kind, **medians, "added": statistics.median(added), "interval": interval(added)}
        row["least"] = min(added)  # of a machine that does other work, too
        rows.append(row)
    return rows


def resident(process: int) -> float:
    """Megabytes that a process holds."""
    return (memory("VmRSS", process) or 0) / 2**20


def in_sequence(address: str, requests: int, process: int) -> Row:
    """Whole and streamed answers, one after the other, and the memory of the proxy on the way."""
    client, wrong, held, begin = client_of(address), 0, list[float](), time.perf_counter()
    for number in range(requests):
        asked = {"stream": number % 2 == 1, "number": number, "words": EVENTS}
        right = b"".join(events_of(asked)) if asked["stream"] else whole_answer(asked)
        wrong += client.post(PATH, json=asked).content != right
        if number % max(1, requests // 10) == 0:
            held.append(resident(process))
    held.append(resident(process))
    return {"requests": requests, "wrong": wrong, "seconds": time.perf_counter() - begin, "megabytes": held}


async def received(address: str, asked: Row, leaves: int | None = None) -> bytes:
    """The body of a streamed answer; the client leaves after so many bytes."""
    data = b""
    client = httpx.AsyncClient(timeout=PATIENCE, trust_env=False, verify=False)
    async with client, client.stream("POST", f"{address}{PATH}", json=asked) as answer:
        async for part in answer.aiter_raw():
            data += part
            if leaves is not None and len(data) > leaves:
                break
    return data


async def at_once(address: str, streams: int, words: int) -> Row:
    """Streams at once, half of which loop: the honest ones are whole, and the others are cut behind an event."""
    asked = [
        {"stream": True, "number": number, "words": words, "loops": number % 2 == 0, "pause": 0.002}
        for number in range(streams)
    ]
    begin = time.perf_counter()
    answers = await asyncio.gather(*(received(address, one) for one in asked))
    wrong = cut = 0
    for one, answer in zip(asked, answers, strict=True):
        sent = b"".join(events_of(one))
        if not one["loops"]:
            wrong += answer != sent
            continue
        last = answer.rfind(b'"finish_reason":"length"')
        begun = answer.rfind(b"data: ", 0, last)
        cut += last > 0
        wrong += last < 0 or not sent.startswith(answer[:begun].rstrip()) or not answer.endswith(b"data: [DONE]\n\n")
    return {
        "streams": streams,
        "loops": streams // 2,
        "cut": cut,
        "wrong": wrong,
        "seconds": time.perf_counter() - begin,
    }


async def left(address: str, kills: int, words: int) -> Row:
    """Clients leave in the middle; an answer behind them is whole."""
    asked = {"stream": True, "number": 5, "words": words, "pause": 0.002}
    await asyncio.gather(*(received(address, asked, 500 + 40 * number) for number in range(kills)))
    wrong = await received(address, {**asked, "pause": 0}) != b"".join(events_of(asked))
    return {"clients_that_left": kills, "wrong": int(wrong)}


def main(
    *,
    rounds: int = 9,
    per_round: int = 40,
    requests: int = 10_000,
    streams: int = 200,
    words: int = 400,
    kills: int = 50,
    only: Literal["all", "overhead", "load"] = "all",
    serve: bool = False,
    out: Path = Path("figures/bench_proxy.json"),
) -> None:
    """Make what the module describes.

    Args:
        rounds: Rounds in which the two take turns.
        per_round: Requests of each in a round.
        requests: Requests in sequence.
        streams: Streams at once.
        words: Words of each of them.
        kills: Clients that leave.
        only: What is measured; the rest stays as the file has it.
        serve: Be the server.
        out: The file.
    """
    if serve:
        listen(fake_server, "127.0.0.1", 0, partial(print, flush=True))
        return
    with ExitStack() as stack:
        direct, _ = stack.enter_context(started(["experiments.bench_proxy", "--serve"]))
        proxied, process = stack.enter_context(started(["sinkscope", "loops", "--proxy", direct, "--port", "0"]))
        made = earlier(out)
        if only in ("all", "overhead"):
            made["rows"] = overhead(direct, proxied, rounds, per_round)
        if only in ("all", "load"):
            made["load"] = {
                "in_sequence": in_sequence(proxied, requests, process),
                "at_once": asyncio.run(at_once(proxied, streams, words)),
                "left": asyncio.run(left(proxied, kills, words)),
                "megabytes": resident(process),
            }
    settings = {"rounds": rounds, "per_round": per_round, "words": words}
    write_record(out, "bench-proxy", made, settings)


if __name__ == "__main__":
    run(main)
