"""Models that show what a cache loses: the recall model of the package, and tiny ones with a planted sink."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from itertools import cycle, islice
from typing import Any

import torch

from sinkscope.models.checkpoints.checkpoint import quiet
from sinkscope.opening.load import load

BOS = 1
"""Id of the token that begins the prompts of the tiny models."""
WINDOW = 16
"""Tokens that a layer with a window sees."""
QUESTIONS: tuple[str, ...] = (
    """<s> turn1 cat over then fact oscar table pearl . stone old over fact olga honey spoon . people came bird
    fact sara lemon feather . week small stayed fact igor coin harbor . field by of fact anna coin carpet .
    before looked the fact eva garden compass . cold sand cloud leaf as morning spring sun still ask oscar what
    was said answer table pearl .""",
    """<s> turn1 the turned road fact felix garden clock . rain under fish fact leo violin ring . was in it fact
    ruth shovel needle . and doctor winter fact paula engine carpet . closed was spring fact olga table basket .
    went cold snow fact bela onion plum . star snow spring slept station in carried over today ask leo what was
    said answer violin ring .""",
    """<s> turn1 neighbor remembered fish fact cesar iron garden . doctor closed never fact bruno feather bell .
    soon wind snow fact wanda cotton plum . it soon leaf fact hanna paper mirror . often all said fact rosa
    ribbon glove . said friend later fact david bell basket . turned carried neighbor people friend very looked
    listened river ask wanda what was said answer cotton plum .""",
    """<s> turn1 only driver of fact jonas shovel brush . as also on fact lotte apple shovel . horse was road fact
    lara glass flag . young driver found fact clara door shovel . stood stayed all fact hanna shovel paper .
    neighbor near had fact tamar copper flag . all cold winter field came horse opened what sailor ask clara
    what was said answer door shovel .""",
    """<s> turn1 forest summer it fact jonas copper candle . field street evening fact frida brush arrow . never
    cat station fact carla pearl hat . baker after sea fact nora bridge fiddle . driver what river fact ida
    letter hammer . soon river young fact xenia cup castle . village after boat a station cat said evening
    laughed ask xenia what was said answer cup castle .""",
)
"""Facts between filler words, a question for one of them, from the first to the last, and its answer of three tokens:
the prompts of the recall model, by seed."""
QUESTION = 65
"""Tokens of each up to the word before its answer."""
_FILLER = "the old road near a field was quiet and rain had come over many small houses by morning again"
VOCABULARY = 256
"""Tokens of the tiny models."""
_CONST, _FIRST = 0, 1  # residual dimensions: the same in every token, and of BOS alone
_PLANTED = 6.0  # their size beside embeddings of standard deviation 1
_SINK_LOGIT = 7.0  # of the planted sink, in nats before softmax, about
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "bos_token_id": BOS,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def _planted(family: str, **options: Any) -> Any:
    """A tiny random model in which heads attend to BOS, whose value is small.

    One residual dimension is the same in every token and one is BOS's; nothing is written to them. Queries read the
    former and keys the latter, on the slowest rotary pair.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **(_SIZES | options))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they are
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        embedding = model.get_input_embeddings().weight
        embedding.normal_()
        embedding[BOS] = 0
        embedding[:, _CONST], embedding[:, _FIRST] = _PLANTED, 0
        embedding[BOS, _FIRST] = _PLANTED
        for name, weight in model.named_parameters():
            if name.endswith("sinks"):
                weight.fill_(_SINK_LOGIT / 2)
            if weight.dim() == 2 and name.endswith(("q_proj.weight", "k_proj.weight")):
                reads = _CONST if "q_proj" in name else _FIRST
                weight[:, [_CONST, _FIRST]] = 0
                slowest = weight.view(-1, _SIZES["head_dim"], weight.shape[1])[:, _SIZES["head_dim"] // 2 - 1]
                slowest[:] = 0
                slowest[:, reads] = _strength()
            elif weight.dim() >= 2 and "embed" not in name and "lm_head" not in name and weight.shape[0] == 64:
                weight[[_CONST, _FIRST]] = 0
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "grouped": partial(_planted, "llama"),  # four query heads on two kv heads
    "windows": partial(_planted, "mistral", sliding_window=WINDOW),
    "sinks": partial(  # learned sink logits, a window in one of two layers
        _planted,
        "gpt_oss",
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "hybrid": partial(  # a convolution with a state in one of two layers
        _planted, "lfm2", layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False, conv_L_cache=3
    ),
    "recurrent": partial(  # a Gated DeltaNet, whose state sums up everything, in one of two layers
        _planted,
        "qwen3_next",
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        mlp_only_layers=[0, 1],
    ),
    "recall": partial(load, "recall", device="cpu", probe=False),
}
"""What makes each model of the kit."""


def kit_model(name: str, dtype: str = "float32") -> Any:
    """Return the model of that name, without gradients; the same one each time."""
    return _loaded(name, dtype)


def forget_models() -> None:
    """Let `kit_model` make new models, because something was left on one."""
    _loaded.cache_clear()


@cache
def _loaded(name: str, dtype: str) -> Any:
    model = MODELS[name]()
    model.generation_config.eos_token_id = None
    model = model.to(getattr(torch, dtype)).eval().requires_grad_(False)
    with quiet():  # a first pass reports which faster kernels are not installed
        model(torch.ones(1, 2, dtype=torch.long))
    return model


def _strength() -> float:
    """Of both planted weights: a query has about 4.9 after the norm in the constant, and BOS' key 5.7."""
    return (_SINK_LOGIT * _SIZES["head_dim"] ** 0.5 / (4.9 * 5.7)) ** 0.5


def kit_tokens(name: str, earlier: Sequence[int], count: int, seed: int, draw: int) -> list[int]:
    """Return tokens that follow others in a row.

    The first token of a tiny model is BOS, and the others are those that the row has not had for longest, in an order
    that is drawn. The recall model is asked a question, which more filler words make longer, and is given the answer.

    Args:
        name: The model.
        earlier: Ids of the row so far.
        count: Number of tokens.
        seed: Row i of a seed is row 0 of the seed i higher.
        draw: Another order.
    """
    if name == "recall":
        return _question(earlier, count, seed)
    last = {token: place for place, token in enumerate(earlier)}
    order = sorted(_shuffled(1000 * seed + draw), key=lambda token: last.get(token, -1))
    ids = list(islice(cycle(order), count))
    if not earlier:
        ids[0] = BOS
    return ids


@lru_cache(1 << 10)
def _shuffled(seed: int) -> tuple[int, ...]:
    """The ordinary tokens of a tiny model in a drawn order."""
    return tuple(random.Random(seed).sample(range(5, VOCABULARY), VOCABULARY - 5))


def _question(earlier: Sequence[int], count: int, seed: int) -> list[int]:
    """A question, or what follows the word before its answer, which is the last of the prompt."""
    vocabulary = kit_model("recall").tokenizer.get_vocab()
    script = [vocabulary[word] for word in QUESTIONS[seed].split()]
    if not earlier:
        filler = [vocabulary[word] for word in islice(cycle(_FILLER.split()), count - QUESTION)]
        return script[:2] + filler + script[2:QUESTION]
    answered = list(reversed(earlier)).index(script[QUESTION - 1])
    return script[QUESTION + answered :][:count]
