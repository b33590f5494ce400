"""Whatever the numbers of a `find_sinks` result are, its sentences say no more than they carry."""

from __future__ import annotations

import re

from conclusion_kit import check_size
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_results import sample_find_sinks

from sinkscope.sinks.find.find import FindSinks
from sinkscope.sinks.find.members import CausalSet, Member
from sinkscope.sinks.find.places import Description, Rule, Scattered, TokenShare
from sinkscope.sinks.find.records import (
    AttentionSink,
    NormSpike,
    PlacedSpike,
    RepeatedToken,
    RepeatsNeeded,
    RepetitionSpike,
    SinkPosition,
    Stage,
)

SHARES = st.floats(0, 1, allow_nan=False)
MEMBERS = st.builds(Member, st.integers(0, 5), st.none() | st.integers(0, 3), st.integers(0, 4000))
SETS = st.builds(
    CausalSet,
    sites=st.lists(MEMBERS, min_size=1, max_size=14, unique=True).map(tuple),
    drop_sink_layer=SHARES,
    drop_last_layer=SHARES,
    drop_attention=st.none() | SHARES,
    heads_lost=st.none() | SHARES,
    control=SHARES,
)
FIRST = Rule("the first token", position=0)
SOME = Rule("some first tokens", position=0, tokens=(4, 5))
RULES = [
    FIRST,
    SOME,
    Rule("position 1 (any token)", position=1),
    Rule("'x' wherever it stands", tokens=(9,), token="x"),
]
PLACES = st.builds(
    Description,
    rules=st.lists(st.sampled_from(RULES), min_size=1, max_size=3, unique=True).map(tuple),
    coverage=st.sampled_from([1.0]) | st.floats(0.1, 1),
    precision=st.floats(0.9, 1),
    share=st.sampled_from([1.0]) | st.floats(0.2, 0.9),
)
SPIKES = st.builds(
    NormSpike,
    place=PLACES,
    positions=st.sampled_from([(0,), (0, 9), (1,)]),
    step_up=st.just((2,)),
    step_down=st.lists(st.integers(3, 5), max_size=2).map(tuple),
    ratio=st.floats(3, 900),
    runs=st.sampled_from([((2, 2),), ((2, 4),), ((1, 2), (4, 5))]),
    made_by=st.sampled_from(["MLP", None]),
    begun_by=st.sampled_from([None, "attention of layer 0"]),
)
PLACE = st.builds(
    SinkPosition, st.integers(0, 9), st.sampled_from(["", "x"]), SHARES, st.sampled_from([r.words for r in RULES])
)
ATTENTION = st.builds(
    AttentionSink,
    rate=SHARES,
    eps=st.just(0.3),
    place=PLACES,
    positions=st.lists(PLACE, min_size=1, max_size=3).map(tuple),
    layers_read=st.just(4),
    carried_by=st.sampled_from(["spike", "token embedding", "position", "key bias", None]),
    length=st.sampled_from([64, 512]),
    window=st.none() | st.integers(8, 60),
    learned_rate=st.sampled_from([0.0]) | SHARES,
)
FURTHER = st.builds(
    PlacedSpike,
    st.sampled_from([r.words for r in RULES]),
    st.integers(1, 9),
    st.sampled_from(["", "x"]),
    st.floats(3, 90),
    st.sampled_from(["MLP", "token embedding", None]),
    st.none() | SETS,
)
SCATTERED = st.sampled_from([Scattered(), Scattered(1, (TokenShare("y", 1.0),)), Scattered(3, (TokenShare("y", 0.6),))])
REPETITION = st.builds(RepetitionSpike, st.just("x"), st.integers(2, 900), SHARES, st.none() | SETS, st.just(()))


def repeats_of(counts: list[int | None], middle: float | None) -> RepeatsNeeded:
    tokens = tuple(RepeatedToken(f"t{number}", number, count) for number, count in enumerate(counts))
    return RepeatsNeeded(tokens, middle, counts.count(None), 1024)


@st.composite
def results(draw: st.DrawFn) -> FindSinks:
    spike = draw(st.none() | SPIKES)
    sets = []
    if spike is not None:
        sets = draw(st.lists(SETS, max_size=1))
    counts = draw(st.lists(st.none() | st.integers(1, 900), max_size=5))
    middle = next((float(count) for count in counts if count is not None and count > 1), None)
    return sample_find_sinks(
        norm_spike=spike,
        attention_sink=draw(st.none() | ATTENTION),
        causal_sets=tuple(sets),
        further_spikes=tuple(draw(st.lists(FURTHER, max_size=2))),
        scattered=draw(SCATTERED),
        stray_norms=draw(SCATTERED),
        repetition=draw(st.none() | REPETITION),
        lengths=draw(st.sampled_from([(64,), (64, 512)])),
        stages=tuple(draw(st.lists(st.builds(Stage, st.integers(0, 3), SHARES), max_size=3))),
        repeats=repeats_of(counts, middle),
        sink_layer=2 if sets else draw(st.none() | st.just(2)),
        layers_read=draw(st.sampled_from([4, 6])),
    )


def written(value) -> set[str]:
    """Every form in which a sentence may write the numbers of a result, of its strings, and how many there are."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return {str(len(value))}.union(*map(written, value))
    if isinstance(value, str):
        return set(re.findall(r"\d+", value))
    if isinstance(value, bool) or value is None:
        return set()
    assert isinstance(value, int | float)
    forms = {f"{value:.0%}", f"{value:.1%}", f"{value:.0f}", f"{value:.4g}", f"{value:g}", f"{value:,}", str(value)}
    return forms | {f"{-value:.1%}"}


def allowed(result: FindSinks) -> set[str]:
    repeats = result.repeats
    single = len(repeats.tokens) - len(repeats.at_once)
    sets = [*result.causal_sets, *(further.set for further in result.further_spikes)]
    if result.repetition is not None:
        sets.append(result.repetition.set)
    members = [len(each.sites) - most for each in sets if each is not None for most in (12, 5, 3, 1)]
    counts = {single, single - repeats.unreached, 2, 0, 32, *members}
    recorded = result.to_dict()
    return written([recorded["result"], recorded["model"]]) | {"1%", "5%", *(f"{count:,}" for count in counts)}


@settings(max_examples=40, deadline=None)
@given(results())
def test_every_number_and_every_name_stands_in_the_evidence(result):
    text = " ".join([result.conclusion(), *result.details()])
    assert not re.search(r"(?<![\w.,])1 (tokens|repetitions|layers|neurons|texts|heads)\b", text), text
    assert not re.search(r"\band [^ ,]+ (makes|amplifies)\b", text), text
    assert not re.search(r"\blayers (\d+) to \1\b", text), text
    assert "  " not in text and ".." not in text and "None" not in text.replace("None of", ""), text
    assert len(result.details()) <= 6
    plain = re.sub(r"L\d+\.(E\d+\.)?N\d+", "", text)
    numbers = re.findall(r"(?<![\w.,'])\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?%?", plain)
    unknown = {number.rstrip(",") for number in numbers} - allowed(result)
    assert not unknown, (unknown, text)
    conclusion = result.conclusion()
    check_size(conclusion)
    if "make" in conclusion or "amplif" in conclusion:
        named = set(re.findall(r"L\d+\.(?:E\d+\.)?N\d+", conclusion))
        sets = [*result.causal_sets, *(later.set for later in result.further_spikes if later.set is not None)]
        holding = [each for each in sets if each.drop_sink_layer >= max(0.5, each.control)]
        assert not named or any(named <= set(map(str, each.sites)) for each in holding), conclusion
    sink, spike = result.attention_sink, result.norm_spike
    few = "too few heads attend to any one position" in text.lower()
    assert few == (sink is None and not result.scattered.count), text
    if sink is not None and spike is not None:
        mine, its = spike.place.rules[0], sink.place.rules[0]
        is_elsewhere = mine != its and not (mine.position == its.position == 0)  # first tokens of all texts, or of some
        assert ("sink elsewhere" in conclusion) == is_elsewhere, conclusion
        if len(sink.place.rules) > 1:
            assert "that the heads attend to" not in conclusion, conclusion
        if is_elsewhere:
            assert "that the heads attend to" not in conclusion and its.words in conclusion, conclusion
        elif mine != FIRST and "make" in conclusion:
            assert mine.words in conclusion, conclusion
