"""generate: what is put together by hand, drawn tokens, and logits that are no numbers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch
from organisms import kept_loop, tiny_model
from refusals import refused
from transformers import StoppingCriteria

import sinkscope as ss
from experiments.papers.loopguard.dry import DRY
from sinkscope.errors import SinkscopeWarning
from sinkscope.generation.conversation import Conversation
from sinkscope.generation.generate import generate
from sinkscope.hooks.edit import SinkPatch
from sinkscope.kv import StreamingLLM
from sinkscope.loops import MonitorSettings
from sinkscope.loops.guard import LoopGuard

PROMPTS = ["poem poem book cat", "the dog", "a cat and you it is was of"]


def test_what_is_named_acts_on_each_prompt_as_if_it_were_put_together_by_hand():
    model, tokenizer = tiny_model("llama")
    model.generation_config.eos_token_id = None
    patch, settings = SinkPatch(sites=[(1, 3), (2, 0)]), {"tokenizer": tokenizer, "max_new_tokens": 14}
    got = generate(model, PROMPTS, patch=patch, policy="streaming:16", **settings)
    for prompt, one in zip(PROMPTS, got, strict=True):
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        with (patch | StreamingLLM(budget=16)).on(model) as run:
            out = model.generate(ids, max_new_tokens=14, do_sample=False)[0, ids.shape[1] :].tolist()
        assert (one.tokens, one.summary) == (out, run.summary())


def test_sampling_follows_the_seed_whatever_else_is_drawn():
    model, tokenizer = tiny_model("llama")

    def drawn(seed: int) -> list[int]:
        return generate(model, PROMPTS[0], tokenizer=tokenizer, temperature=1.0, max_new_tokens=12, seed=seed)[0].tokens

    one, other = drawn(1), drawn(2)
    with ThreadPoolExecutor(3) as pool:  # torch's own numbers are those of all threads
        assert list(pool.map(drawn, [1, 2] * 6)) == [one, other] * 6 and one != other


def test_a_model_with_nan_weights_is_refused_by_the_name_of_the_tensor():
    model, tokenizer = tiny_model("llama")
    weight = model.model.layers[1].mlp.up_proj.weight.data
    weight[3, 2] = torch.nan
    with refused("tensor model.layers.1.mlp.up_proj.weight holds values that are NaN or infinite"):
        generate(model, PROMPTS, guard=True, tokenizer=tokenizer, max_new_tokens=3)
    weight[3, 2] = 0
    with model.lm_head.register_forward_hook(lambda *_: torch.full((1, 1, 100), torch.nan)):
        with refused(r"the logits of .* are NaN or infinite after \d+ tokens, .* finite: load it with dtype=float32"):
            generate(model, PROMPTS, tokenizer=tokenizer, max_new_tokens=3)


class Only(StoppingCriteria):
    """Ends a text after some tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids, scores, **_):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


def test_options_of_the_model_are_taken():
    """Each as `model.generate` takes it, by `generate` and by a conversation."""
    model, tokenizer = tiny_model("llama")
    model.generation_config.eos_token_id = None
    prompt = [5, 17, 8]
    options = [
        {"logits_processor": [DRY()]},
        {"logits_processor": [lambda ids, scores: -scores]},
        {"prefix_allowed_tokens_fn": lambda row, ids: [40, 41 + ids.shape[0] % 2]},
        {"stopping_criteria": [Only(7)]},
        {"streamer": Mock()},
        {"repetition_penalty": 1.7},
        {"bad_words_ids": [[3]], "min_new_tokens": 2},
    ]
    for option in options:
        ids = torch.tensor([prompt])
        want = model.generate(ids, max_new_tokens=9, do_sample=False, **option)[0, 3:].tolist()
        (answer,) = generate(model, [prompt], tokenizer=tokenizer, max_new_tokens=9, **option)
        assert answer.tokens == want, option
        assert list(Conversation(model).ask(prompt, max_new_tokens=9, **option).ids) == want
    assert options[4]["streamer"].end.call_count == 3
    drawn = generate(
        model, [prompt], tokenizer=tokenizer, temperature=1.0, prefix_allowed_tokens_fn=lambda *_: [40, 41]
    )
    assert {*drawn[0].tokens} == {40, 41}, "what is allowed is drawn from"


def test_a_text_ends_at_a_string_by_the_tokenizer_of_the_model():
    model = ss.load("bundled")
    (whole,) = generate(model, "The first token", max_new_tokens=12)
    (stopped,) = generate(model, "The first token", max_new_tokens=12, stop_strings=whole.text.split()[2])
    assert whole.text.startswith(stopped.text) and len(stopped.tokens) < 12


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"logits_procesor": []}, "logits_procesor=: generate has no such option; did you mean logits_processor?"),
        ({"logits_processor": DRY()}, "give a list, such as logits_processor=[...]"),
        ({"stopping_criteria": ["a"]}, "stopping_criteria: 'a' is no function of ids and scores"),
        ({"streamer": print}, "give an object with put and end"),
        ({"prefix_allowed_tokens_fn": [1]}, "give a function of the row and its ids"),
        ({"num_beams": 3}, "num_beams=3: one text is written token by token"),
        ({"output_scores": True}, "tokens and text are returned"),
        ({"top_k": 5}, "top_k=5: generate draws by temperature= and seed= alone"),
    ],
)
def test_an_option_that_cannot_act_is_refused(option, says):
    model, tokenizer = tiny_model("llama")
    with refused(words=[says]):
        generate(model, [[5, 17, 8]], tokenizer=tokenizer, max_new_tokens=2, **option)
    if "top_k" not in option:
        with refused(words=[says]):
            Conversation(model).ask([5, 17, 8], max_new_tokens=2, **option)


def test_processors_have_no_effect_on_an_answer_that_is_given():
    with refused("logits_processor= has no effect where answer= says what is written"):
        Conversation(tiny_model("llama")[0]).ask([5], answer=[6, 7], logits_processor=[DRY()])


class Counter:
    """A processor that knows how many tokens it has seen, but not that some were taken back."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, ids, scores):
        self.count += 1
        return scores


def test_nothing_is_taken_back_behind_a_processor_that_keeps_a_state():
    """One that keeps none is called again with the text as it is."""
    o = kept_loop(period=12, reach=80)
    guard = LoopGuard(monitor=MonitorSettings(tail_beyond=0, cooldown=8))
    settings = {"tokenizer": o.tokenizer, "max_new_tokens": 90, "guard": guard}
    prompt = o.prompt(30)
    (want,) = generate(o.model, [prompt], **settings)
    (same,) = generate(o.model, [prompt], logits_processor=[lambda ids, scores: scores], **settings)
    assert want.events[0].data["taken_back"] > 0 and same.tokens == want.tokens
    counter = Counter()
    with pytest.warns(SinkscopeWarning, match="keeps a state between tokens"):
        (cut,) = generate(o.model, [prompt], logits_processor=[counter], **settings)
    assert cut.events and not any(event.data["taken_back"] for event in cut.events)
    assert counter.count == len(cut.tokens) == 90
