"""The table of going on, from answers that are written here."""

from __future__ import annotations

import json

from experiments.loopguard.go_on import distinct, loop_in, read, table


def stream(words: list[str], finish: str) -> bytes:
    """A chat's stream, a word an event."""
    events = [{"choices": [{"index": 0, "delta": {"content": word + " "}, "finish_reason": None}]} for word in words]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    return b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in events) + b"data: [DONE]\n\n"


LOOP = "The cat sat on the mat and looked at the moon. ".split() * 30


def test_a_loop_is_found_in_a_stream_and_another_text_has_none():
    healthy = [f"word{number}" for number in range(150)]
    assert loop_in(stream(LOOP, "length")) is not None and loop_in(stream(healthy, "stop")) is None
    assert read(stream(healthy, "stop"))["finish"] == "stop"
    assert distinct(" ".join(healthy)) == 1.0 and distinct(" ".join(LOOP)) < 0.1


def test_the_table_counts_answers_that_end_by_themselves():
    looping, healthy = " ".join(LOOP), " ".join(f"word{number}" for number in range(60))
    rows = []
    for finish in ("stop", "length", "stop"):
        gone_on = {"finish": finish, "text": healthy, "seams": [20], "about": {"dropped": 7}}
        alone = {"finish": "length", "text": looping}
        rows.append({"label": "a server", "loop": [40, 400], "alone": alone, "goes_on": gone_on, "seconds": 1.0})
        rows[-1]["proxy_seconds"] = 2.0
    (row,) = table(rows)
    assert (row["answers"], row["loops"], row["end_alone"], row["end_going_on"]) == (3, 3, 0, 2)
    assert row["distinct_going_on"] == 1.0 > row["distinct_alone"] and row["dropped"] == 21
