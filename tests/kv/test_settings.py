"""What makes no sense of policies, guards, monitors, shapes and conversations, refused in one line that names it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from kv_kit import shallow_of
from refusals import refused

import sinkscope as ss
from sinkscope.generation.conversation import Conversation
from sinkscope.kv.cache import CacheLayer
from sinkscope.sparse.attention import Scores
from sinkscope.sparse.shapes import AShape

CALLED = {one.__name__: one for one in (CacheLayer, Conversation)}
CALLED |= {"ss": ss, "llama": partial(shallow_of, "llama")}
REFUSED = {
    "ss.kv.StreamingLLM(budget=0)": "budget=0: expected a number of tokens from 1, or a fraction",
    "ss.kv.StreamingLLM(budget=1.5)": "up to 1.0",
    'ss.kv.StreamingLLM(budget="x")': "StreamingLLM: budget='x': expected a number",
    "ss.kv.StreamingLLM(budget=5, first=3, last=3)": "below the 6 tokens that are always kept",
    "ss.kv.SnapKV(budget=60, window=64)": "budget=60 is below the 64 tokens",
    "ss.kv.H2O(every=0)": "every=0",
    "ss.kv.SnapKV(kernel=4)": "odd kernel",
    "ss.kv.AdaKV(floor=1.5)": "floor=1.5",
    'ss.Progressive(every="prefill")': "Progressive: every='prefill': expected a whole number from 1",
    "ss.kv.H2O(budget=0.2, first=4).check_prompt(19)": "budget=0.2 of a prompt of 19 tokens, 3, is below the 4",
    "CacheLayer().crop(2)": "give minus the number of tokens to remove",
    "ss.kv.Observe(fn=print, last=0)": "last=0",
    "ss.LoopServe(alpha=0)": "alpha=0: expected a share above 0 and up to 1",
    'ss.LoopServe(variant="best")': "LoopServe: variant='best': expected 'bands' or 'faithful'",
    'ss.LoopServe(prefill="no")': "LoopServe: prefill='no': expected a valid boolean",
    "ss.LoopServe(prefill=False, decode=False)": "nothing would be done",
    'ss.LoopGuard(monitor={"warmup": 9})': "expected MonitorSettings(...) or PaperSettings(...)",
    "ss.Steer(penalty=0, temperature=0)": "does nothing: give LoopGuard(steer=None)",
    "ss.Steer(penalty=-1)": "penalty=-1: expected greater than or equal to 0",
    "ss.loops.Monitor().update(-1)": "the token is -1: expected a whole number from 0 to 2**32 - 1",
    "ss.loops.Monitor().update(1 << 32)": "the token is 4294967296: expected",
    "ss.loops.Monitor().update('a')": "the token is 'a': expected",
    "ss.loops.PaperSettings(votes=4)": "votes=4: expected less than or equal to 3",
    "ss.loops.PaperSettings(window=3)": "window is 3: expected greater than or equal to 4, the value of novelty_n",
    "ss.loops.compression_ratio([1, -2])": "the token is -2: expected a whole number",
    "ss.loops.tail_period([1, 1], repeats=1)": "at least 2 copies",
    "ss.loops.check([])": "cannot be checked",
    "ss.loops.check([[1], [2.5]])": "cannot be checked",
    "ss.loops.check([True, False])": "cannot be checked",
    'Conversation(llama(), None, chat="none")': "chat='none'",
    'Conversation(llama(), "loopserve")': "policy 'loopserve': expected one of",
    "Conversation(llama(), ss.LoopServe)": "is no intervention: give a policy, a patch or a guard, or",
    "Conversation(llama()).ask([5], answer=[])": "the answer: tokens[0]=[]: List should have at least 1 item",
    "Conversation(llama()).ask([5, 96])": "the prompt: tokens[0][1]=96: expected less than 96",
    "Conversation(llama()).ask(None)": "the prompt: tokens=None: expected a valid list",
    "Conversation(llama()).ask(5)": "tokens=5: expected a valid list",
    "Conversation(llama()).ask([5], max_new_tokens=0)": "max_new_tokens=0",
    "Conversation(llama()).ask([5], use_cache=False)": "use_cache=False: one text is written token by token",
    "Conversation(llama()).ask([5], num_beams=2)": "num_beams=2: one text is written",
    "Conversation(llama()).ask([5], prompt_lookup_num_tokens=3)": "prompt_lookup_num_tokens=3: one text is written",
}


@pytest.mark.parametrize(("call", "says"), REFUSED.items())
def test_wrong_policy_settings_are_refused(call, says):
    with refused(words=[says]):
        eval(call, CALLED)


@pytest.mark.parametrize(("percent", "prompt"), [(29, 100), (57, 100), (33, 4999), (10, 109)])
def test_a_share_of_a_prompt_is_the_same_number_everywhere(percent, prompt):
    """As whole numbers say: 0.29 of 100 tokens are 29, where floating point numbers make 28.999..."""
    share, want = percent / 100, percent * prompt // 100
    assert ss.kv.StreamingLLM(share).kept_of(prompt)[0] == ss.LoopGuard(share).retention(prompt).budget == want
    empty = Scores(torch.zeros(1, prompt, 1), torch.zeros(1, prompt, 1), 1.0)
    shape = AShape(budget=share).lines(empty, 0)
    assert shape.columns.sum() + shape.offsets.sum() == want
