"""Which options of `model.generate` a caller may give, and which are refused, in one line each."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from transformers import GenerationConfig

from sinkscope.errors import SinkscopeError
from sinkscope.models.call_cache import CACHE_NAMES
from sinkscope.models.hooks import forward_parameters
from sinkscope.models.target import Target

_ONE_TEXT = "one text is written token by token, on a cache of its own"
_IDS = "the prompt says which tokens are read"
_TOKENS_ALONE = "tokens and text are returned, and nothing of each step"
_REASONS = {
    **dict.fromkeys(CACHE_NAMES, _ONE_TEXT),
    **dict.fromkeys(("cache_implementation", "prefill_chunk_size", "num_beams", "num_return_sequences"), _ONE_TEXT),
    **dict.fromkeys(("assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens"), _ONE_TEXT),
    **dict.fromkeys(("use_cache", "custom_generate"), _ONE_TEXT),
    **dict.fromkeys(("input_ids", "inputs", "inputs_embeds", "attention_mask"), _IDS),
    **dict.fromkeys(("output_scores", "output_logits", "output_attentions", "output_hidden_states"), _TOKENS_ALONE),
    "return_dict_in_generate": _TOKENS_ALONE,
    "generation_config": "settings are given one by one, such as eos_token_id=2",
    "max_length": "max_new_tokens says how long an answer may be",
}
"""Why an option of `generate` cannot be given, by its name."""
_DRAWING = (
    *("do_sample", "top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    "watermarking_config",
)
"""Options that change how transformers draws a token."""
_CHOOSING = ("logits_processor", "prefix_allowed_tokens_fn", "stopping_criteria", "stop_strings", "max_time")
"""Options that choose tokens or end a text."""


def check_generation_options(target: Target, options: Mapping[str, Any]) -> None:
    """Check the options for `model.generate` that a caller gives for one text.

    Args:
        target: The model.
        options: The options, by name.

    Raises:
        SinkscopeError: An option is unknown, is set by sinkscope itself, or its value is of the wrong kind.
    """
    for name, value in options.items():
        if name in _REASONS:
            raise SinkscopeError(f"{name}={value!r:.80}: {_REASONS[name]}; leave it out")
    known = {*inspect.signature(target.hf.generate).parameters, *GenerationConfig().to_dict(), "tokenizer"}
    known |= {*forward_parameters(type(target.hf))} | {*forward_parameters(type(target.base))}
    known -= {*_REASONS, "kwargs", "self"}
    for name in options:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else "options are those of model.generate"
            raise SinkscopeError(f"{name}=: generate has no such option; {hint}")
    for name in ("logits_processor", "stopping_criteria"):
        _check_list(name, options.get(name))
    function = options.get("prefix_allowed_tokens_fn")
    if function is not None and not callable(function):
        raise SinkscopeError(f"prefix_allowed_tokens_fn={function!r:.80}: give a function of the row and its ids")
    streamer = options.get("streamer")
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise SinkscopeError(f"streamer={streamer!r:.80}: give an object with put and end, such as a TextStreamer")


def _check_list(name: str, functions: Any) -> None:
    """Refuse anything but a list of functions."""
    if functions is None:
        return
    if not isinstance(functions, Iterable):
        raise SinkscopeError(f"{name}={functions!r:.80}: give a list, such as {name}=[...]")
    for function in functions:
        if not callable(function):
            raise SinkscopeError(f"{name}: {function!r:.80} is no function of ids and scores")


def check_not_drawing(options: Mapping[str, Any]) -> None:
    """Refuse options of transformers' own drawing, where `temperature` and `seed` say how tokens are drawn."""
    for name in _DRAWING:
        if name in options:
            raise SinkscopeError(
                f"{name}={options[name]!r:.80}: generate draws by temperature= and seed= alone; use Conversation.ask, "
                "or model.generate within `with edit.on(model)`"
            )


def check_not_choosing(options: Mapping[str, Any]) -> None:
    """Refuse options that choose tokens, where the answer is given."""
    for name in _CHOOSING:
        if options.get(name):
            raise SinkscopeError(f"{name}= has no effect where answer= says what is written: leave one of both out")
