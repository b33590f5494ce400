"""The loop monitor in servers: what it does in a batch is what it does for each request alone."""

from __future__ import annotations

import json
import pickle
import re
import sys
from importlib import import_module
from random import Random
from types import SimpleNamespace
from unittest import mock

import pytest
import serving_kit as kit
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from repository import ROOT

from sinkscope.loops import MonitorSettings
from sinkscope.loops import servers as serving
from sinkscope.loops.servers import loop_row
from sinkscope.loops.servers.loop_row import ENVIRONMENT, LoopRow, ServingSettings

SEEDS = st.integers(0, 2**32)
FORCED = st.sampled_from([[], [10, 11, 12]])


@pytest.fixture(autouse=True)
def servers(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    kit.install(monkeypatch, kit.HOMES)


class Fussy:
    """A monitor that triggers by a hash of all tokens in their order: one token amiss, and it triggers elsewhere."""

    def __init__(self, settings=None):
        self.hash, self.last = 1, SimpleNamespace(step=0)

    def update(self, token: int) -> SimpleNamespace:
        assert token >= 0
        self.last.step += 1
        self.hash = (self.hash * 31 + token + 1) % 1_000_003
        return SimpleNamespace(trigger=self.hash % 11 == 0)


def alone(request: kit.Request) -> tuple[list[int], list[int]]:
    """What a request says, and where the processor acts, with one monitor of its own and no batch.

    Args:
        request: its log has, for each step, how many of its tokens could be read before.
    """
    tokens = json.loads((request.params.extra_args or {}).get("sinkscope", "{}")).get("tokens", [])
    monitor, begun, taken, read = Fussy(), 0, 0, 0
    said = []
    acted = []
    for visible in request.log:
        due = False
        for token in said[read:visible]:
            due |= monitor.update(token).trigger
        read = max(read, visible)
        if due and request.params.extra_args:
            begun, taken = len(said), taken + 1
        n, token = len(said) - begun, request.stream[len(said)]
        forces = taken == 1 and tokens
        if taken and (n < len(tokens) or not forces):
            acted.append(len(said))
            token = tokens[n] if forces else kit.END
        said.append(token)
    return said, acted


def requests(rng: Random, tokens: list[int]) -> list[kit.Request]:
    """Some with settings, some without; the script never says the tokens that are forced."""
    made = []
    for i in range(7):
        params = kit.SamplingParams(extra_args={"sinkscope": json.dumps({"tokens": tokens})} if i % 4 else None)
        stream = [rng.randrange(1, 10) for _ in range(rng.randint(20, 60))]
        made.append(kit.Request(stream, params, prompt=[rng.randrange(1, 10) for _ in range(rng.randint(2, 9))]))
    return made


def check(server, rng: Random, tokens: list[int]):
    asked = requests(rng, tokens)
    with mock.patch.object(loop_row, "Monitor", Fussy):
        kit.play(server, rng, asked)
    for request in asked:
        assert (request.output, request.edited) == alone(request)


@given(seed=SEEDS, tokens=FORCED)
def test_in_vllm_each_request_is_watched_as_if_alone(seed, tokens):
    """Recycled slots, rows in any order, requests that pause, chunked prompts."""
    check(kit.Slots(serving.VllmLoopProcessor), Random(seed), tokens)


@pytest.mark.parametrize("overlap", [False, True])
@given(seed=SEEDS, tokens=FORCED)
def test_in_sglang_each_request_is_watched_as_if_alone(seed, tokens, overlap):
    processor = serving.SglangLoopProcessor.from_str(serving.SglangLoopProcessor.to_str())
    check(kit.Overlapped(processor, overlap=overlap), Random(seed), tokens)


def test_drafts_are_left_alone():
    with refused("under speculative decoding"):
        serving.VllmLoopProcessor(SimpleNamespace(speculative_config=SimpleNamespace()), None)
    logits = torch.zeros(4, kit.VOCAB)
    assert torch.equal(serving.SglangLoopProcessor()(logits.clone(), [{}, {}]), logits)


def looping(count: int = 600) -> list[int]:
    return [1 + i % 8 for i in range(count)]


def test_what_the_server_forbids_stays_forbidden():
    """A grammar, or min_tokens, has taken the end token away: nothing is changed until it is back."""
    row = LoopRow(ServingSettings(), 2)
    with mock.patch.object(row, "_due", True):
        masked = torch.tensor([1.0, 0.5, -torch.inf])
        row.edit(masked, 5)
    assert masked.tolist() == [1.0, 0.5, -torch.inf]
    free = torch.tensor([1.0, 0.5, -3.0])
    row.edit(free, 6)
    assert free.tolist() == [-torch.inf, -torch.inf, -3.0]
    small = torch.tensor([1.0, 0.5])  # an end token that this vocabulary does not have
    row.edit(small, 7)
    assert small.tolist() == [1.0, 0.5]


REFUSED = {  # JSON of a request's settings
    '{"action": "stop"}': "action is 'stop', expected .*",
    '{"end": -1}': "end is -1",
    '{"tokens": [-1]}': "tokens\\[0\\] is -1",
    '{"monitor": {"window": "long"}}': "monitor.window is 'long', expected",
    f'{{"monitor": {{"window": {10**18}}}}}': "monitor.window is 10*: expected at most 1000000",
    f'{{"monitor": {{"window": {10**30}}}}}': "window is 10{30}: expected at most|sinkscope is .*: expected JSON",
    '{"monitor": {"tail_repeats": Infinity}}': "monitor.tail_repeats is inf: expected at most 1000000",
    '{"monitor": {"rule": "signals", "voters": ["p1"], "votes": 1}}': "pass p_max",
    '"stop"': "sinkscope is 'stop': expected JSON such as",
    "[1]": "expected JSON such as",
}


@pytest.mark.parametrize(("sent", "said"), REFUSED.items())
def test_bad_settings_are_refused_at_the_door(sent, said):
    for form in (sent, json.loads(sent)):
        params = kit.SamplingParams(extra_args={"sinkscope": form})
        with pytest.raises(ValueError, match=said):  # vLLM answers such a request with this message
            serving.VllmLoopProcessor.validate_params(params)
    server = kit.Overlapped(serving.SglangLoopProcessor())  # SGLang has no door: the request goes on unwatched
    request = kit.Request(looping(80), kit.SamplingParams(extra_args={"sinkscope": json.loads(sent)}))
    kit.play(server, Random(0), [request])
    assert request.edited == []


def test_probabilities_are_missed_only_where_they_would_vote():
    """Rule "repeats" asks no voters, and the paper's rule has two more: both are taken, and both stop a loop."""
    for monitor in ({"voters": ["p1"], "votes": 1}, vars(MonitorSettings.paper())):
        row = LoopRow(ServingSettings.of_request({"monitor": monitor}) or ServingSettings(), kit.END)
        row.feed(looping())
        assert row.busy(600)


def test_settings_of_the_environment_hold_for_requests_without_their_own(monkeypatch):
    assert ServingSettings.of_request(None) is None and ServingSettings.of_request(False) is None
    assert ServingSettings.of_request({}) == ServingSettings.of_request("{}") == ServingSettings()
    monkeypatch.setenv(ENVIRONMENT, '{"end": 9, "monitor": {"warmup": 7}}')
    usual, own = ServingSettings.of_request(None), ServingSettings.of_request('{"end": 5}')
    assert usual is not None and (usual.end, usual.monitor.warmup) == (9, 7)
    assert own is not None and (own.end, own.monitor.warmup) == (5, 7)
    assert ServingSettings.of_request("false") is None  # this request is not to be watched
    monkeypatch.setenv(ENVIRONMENT, "stop")
    with refused("SINKSCOPE_SERVING is 'stop': expected JSON such as"):
        ServingSettings.of_request(None)


def test_the_class_is_one_that_vllms_loader_takes():
    """The loader wants a subclass of its own interface under a name that it can import."""
    made = serving.VllmLoopProcessor
    assert issubclass(made, kit.SlotProcessor)
    assert pickle.loads(pickle.dumps(made)) is made is serving.VllmLoopProcessor
    assert made(None, None).add_request(0, kit.SamplingParams()) is False


@pytest.mark.parametrize("name", ["VllmLoopProcessor", "SglangLoopProcessor"])
def test_a_server_without_the_interface_by_that_name_is_told_in_a_line(monkeypatch, name):
    kit.install(monkeypatch, {home: {"Renamed": object} for home in kit.HOMES})
    for home in kit.HOMES:
        vars(sys.modules[home]).pop("LogitsProcessor", None)
    with pytest.raises(ImportError, match=r"Processor needs (vllm|sglang)\..*, which is not installed here"):
        getattr(serving, name)


def test_vllm_says_which_token_cut_a_request():
    """Its scheduler gives the id of a stop token as `stop_reason`, and no reason for the end token."""

    def params(sent):
        return SimpleNamespace(extra_args=sent, stop_token_ids=[7], all_stop_token_ids={2, 7})

    given = params({"sinkscope": '{"end": 99}'})
    serving.VllmLoopProcessor.validate_params(given)
    serving.VllmLoopProcessor.validate_params(given)
    assert given.stop_token_ids == [7, 99] and given.all_stop_token_ids == {2, 7, 99}
    for sent in (None, {"sinkscope": "{}"}, {"sinkscope": "false"}):
        plain = params(sent)
        serving.VllmLoopProcessor.validate_params(plain)
        assert plain.stop_token_ids == [7] and plain.all_stop_token_ids == {2, 7}


def test_the_page_says_what_runs(monkeypatch):
    """The Python of docs/serving.md, with a vLLM whose model loops."""
    monkeypatch.setattr(kit, "VOCAB", 151_700)
    answered = []

    def llm(model, logits_processors):
        module, _, name = logits_processors[0].partition(":")
        made = getattr(import_module(module), name)

        def generate(prompts, params):
            made.validate_params(params)
            request = kit.Request(looping(), params)
            kit.play(kit.Slots(made), Random(0), [request])
            answered.append(request)
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=request.output)])]

        return SimpleNamespace(generate=generate)

    kit.install(monkeypatch, {"vllm": {"LLM": llm, "SamplingParams": kit.SamplingParams}})
    page = (ROOT / "docs/serving.md").read_text()
    names = {}
    for source in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S):
        exec(compile(source, "docs/serving.md", "exec", dont_inherit=True), names)
    (request,) = answered
    said = request.output
    assert said.count(151668) == 1 and said[-1] == kit.END
    assert MonitorSettings().tail_shortest + 1 == said.index(151668) < len(said) - 1
    sent = names["body"]["sampling_params"]["custom_params"]
    serving.SglangLoopProcessor.from_str(names["body"]["custom_logit_processor"])
    (usual,) = re.findall(r"^SINKSCOPE_SERVING='(.*)' vllm serve", page, re.M)
    (posted,) = re.findall(r"-d '(.*?)'", page, re.S)
    (paper,) = re.findall(r"^export SINKSCOPE_SERVING='(.*)'$", page, re.M)
    texts = (sent["sinkscope"], usual, json.loads(posted)["vllm_xargs"]["sinkscope"], paper)
    read = [ServingSettings.of_request(text) for text in texts]
    assert None not in read and read[-1].monitor == MonitorSettings.paper()
