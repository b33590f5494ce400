"""Calibration of the monitor: rates on texts whose repetitions are planted, and settings that can be read back."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from loop_texts import prose

from experiments.loopguard import calibrate as script
from experiments.loopguard.calibrate import calibrate
from sinkscope.app.cli import main
from sinkscope.errors import SinkscopeError
from sinkscope.loops import Monitor, MonitorSettings
from sinkscope.loops.streams import monitor_settings

RATE = 500.0


def _ruled(seed: int, blocks: int) -> tuple[list[int], list[int]]:
    """Tokens that do not repeat each other, with a ruler of one token in every 600; lengths of the rulers."""
    rng = random.Random(seed)
    ids = []
    lengths = [min(400, int(rng.expovariate(1 / 30))) for _ in range(blocks)]
    for length in lengths:
        ids += [rng.randrange(300) for _ in range(600 - length)] + [300 + rng.randrange(20)] * length
    return ids, lengths


def _alarms(ids: list[int], settings: MonitorSettings) -> int:
    monitor = Monitor(settings)
    steps = [step.step for step in (monitor.update(token, 1.0) for token in ids) if step.trigger]
    return sum(i == 0 or step - steps[i - 1] > settings.relapse for i, step in enumerate(steps))


@pytest.fixture(scope="module")
def made():
    fit, held = _ruled(1, 12), _ruled(2, 12)
    found = calibrate([fit[0], held[0]], RATE)
    assert (found.fitted, found.held_out) == (7200, 7200)
    return found, held[1]


def test_rates_are_those_of_the_planted_rulers(made):
    """A ruler is a false alarm of each rule that is as short as it: this counts them without a monitor."""
    found, lengths = made
    rates = {one.rule: one for one in found.rates}
    tail = found.monitor["tail_shortest"]
    assert rates["monitor, default"].alarms == sum(n >= 48 for n in lengths) > 1
    assert rates["monitor, recommended"].alarms == sum(n >= tail for n in lengths)
    for one in found.rates:
        assert one.per_million == pytest.approx(one.alarms / 0.0072) and one.per_million < one.at_most


def test_a_third_text_stays_within_what_was_promised(made):
    found, _ = made
    assert found.promised == RATE
    third, lengths = _ruled(3, 12)
    for base in (MonitorSettings(), MonitorSettings.paper()):
        assert _alarms(third, replace(base, **found.monitor)) / 0.0072 <= RATE
    assert _alarms(third, MonitorSettings()) == sum(n >= 48 for n in lengths)


def test_a_planted_loop_is_still_found(made):
    found, _ = made
    looping = [*_ruled(4, 2)[0], *[*range(400, 440)] * 20]
    settings = MonitorSettings(**found.monitor)
    steps = map(Monitor(settings).update, looping)
    hit = next(step for step in steps if step.trigger and step.step > 1200)
    assert hit.tail.period == 40 and hit.step - 1200 <= max(3 * 40, settings.tail_shortest) + 1


def test_thresholds_follow_the_vocabulary():
    """Of fewer different tokens ordinary text has fewer types in a window, so its threshold is lower."""
    rng = random.Random(0)
    small, large = ([[rng.randrange(size) for _ in range(4100)] for _ in range(2)] for size in (60, 3000))
    low, high = (calibrate(ids).monitor["theta_ttr"] for ids in (small, large))
    assert low <= 60 / 256 < 0.8 < high


def test_a_short_text_promises_only_what_it_can_show():
    """Without an alarm in n tokens, the 95 % limit is 3.0 / n."""
    ids = [random.Random(1).randrange(500) for _ in range(8400)]
    found = calibrate([ids], 1.0)
    assert found.promised == pytest.approx(2.9957e6 / found.fitted, rel=1e-3) and found.fitted + found.held_out == 8400
    with pytest.raises(SinkscopeError, match="has 5000 tokens: expected at least 8192"):
        calibrate([ids[:5000]])


def test_settings_are_written_and_read_back(tmp_path, capsys):
    text, out, odd = tmp_path / "ordinary.txt", tmp_path / "c.json", tmp_path / "odd.json"
    text.write_text(prose(4500))
    script.main(text, tokenizer="bundled", rate=1000, out=out)
    assert out.read_text().strip() in capsys.readouterr().out
    fit = calibrate(script.read_ids(text, "bundled"), 1000.0)
    assert vars(monitor_settings(str(out), "repeats")) == vars(MonitorSettings(**fit.monitor))
    looping = tmp_path / "loop.txt"
    looping.write_text(f"{prose(200)} {'so it goes ' * 40}")
    assert main(["loops", "--follow", str(looping), "--settings", str(out)]) == 3
    odd.write_text('{"tail_shortest": 5000}')
    assert main(["loops", "--follow", str(looping), "--settings", str(odd)]) == 0
    assert main(["loops", str(looping), "--settings", str(odd)]) == 0
    assert "is suspicious" in capsys.readouterr().out
    odd.write_text("[1]")
    assert main(["loops", str(looping), "--settings", str(odd)]) == 2
    assert "holds no settings" in capsys.readouterr().err
