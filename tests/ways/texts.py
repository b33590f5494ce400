"""What a user lets a model write: the tokens or their logits come back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

import sinkscope as ss
from experiments.papers.loopguard.dry import DRY

from .calls import NEW, Use
from .edits import EDITS
from .families import PAD, model_of
from .settings import tokenizer_of

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "chunked": {"prefill_chunk_size": 7},
    "assistant": {"num_assistant_tokens": 3},
    "static": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "drawn": {"do_sample": True, "temperature": 0.9, "top_k": 20},
    "dry": {"logits_processor": [DRY(multiplier=4.0, allowed_length=1)]},
    "second text": {"guidance_scale": 1.5},
}
ASSISTED = ("lookup", "assistant")
BY_TOKENS = ("beams", *ASSISTED)
"""Options with which the logits of steps are not those of the rows."""
ROW_ALONE = ("greedy", "no cache", "dry", *ASSISTED)
"""Options under which a row says the same alone."""
AS_GREEDY = ("no cache", "static", *ASSISTED)
"""Options which say the same as none."""


def generate(use: Use) -> Tensor:
    option = use.draw["options"]
    settings = {"max_new_tokens": NEW, "return_dict_in_generate": True, "do_sample": False, **OPTIONS[option]}
    settings["output_logits"] = option not in BY_TOKENS
    if option == "assistant":
        settings["assistant_model"] = model_of("llama", ends=use.draw["ends"])
    settings |= use.layout.told(0, use.length, None)
    with use.inside():
        torch.manual_seed(7)
        output = use.model.generate(input_ids=use.ids, attention_mask=use.mask, **settings)
    if option in BY_TOKENS:
        return output.sequences[:, use.length :]
    return torch.stack(output.logits, 1)


def _went_on(use: Use, ids: Tensor, mask: Tensor, cache: Any) -> Any:
    """What `generate` writes behind these ids, into this cache."""
    mask = torch.cat([mask, torch.ones_like(ids[:, mask.shape[1] :])], 1)
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    return use.model.generate(input_ids=ids, attention_mask=mask, past_key_values=cache, output_logits=True, **settings)


def turns(use: Use) -> Tensor:
    """Two turns of `generate` with one cache."""
    cache = use.cache()
    with use.inside():
        first = _went_on(use, use.ids[:, : use.prompt], use.mask[:, : use.prompt], cache)
        ids = torch.cat([first.sequences, use.ids[:, use.prompt :]], 1)
        read = torch.cat([use.mask[:, : use.prompt], torch.ones_like(first.sequences[:, use.prompt :])], 1)
        second = _went_on(use, ids, torch.cat([read, use.mask[:, use.prompt :]], 1), cache)
    return torch.stack([*first.logits, *second.logits], 1)


def looping(use: Use) -> Tensor:
    """What is generated while a guard cuts the cache; right is the plain model under masks (`replayed`)."""
    settings = {"max_new_tokens": 24, "eos_token_id": None, "do_sample": False}
    with use.inside() as runs:
        output = use.model.generate(
            input_ids=use.ids,
            attention_mask=use.mask,
            return_dict_in_generate=True,
            output_logits=True,
            **settings,
        )
    logits = torch.stack(output.logits, 1)
    events = [event for run in runs or () for event in run.events if event.kind == "guard"]
    return logits - replayed(use, output.sequences, events)


def replayed(use: Use, ids: Tensor, events: Sequence[Any]) -> Tensor:
    """Logits of each new token by the plain model, row by row, where what a guard had cut before is masked."""
    found: list[Tensor] = []
    for number in range(len(ids)):
        new = torch.ones_like(ids[number, use.length :])
        row = ids[number, torch.cat([use.mask[number], new]).bool()]
        sees = torch.ones(len(row), len(row), dtype=torch.bool, device=row.device).tril()
        for event in events:
            if event.row == number:
                stays = torch.zeros(event.position + 1, dtype=torch.bool, device=row.device)
                for start, stop in event.data["kept"]:
                    stays[start:stop] = True
                sees[event.position + 1 :, : event.position + 1] &= stays
        places = torch.arange(len(row), device=row.device)[None]
        hidden = torch.where(sees, 0.0, torch.finfo(torch.float32).min)
        output = use.model(input_ids=row[None], attention_mask=hidden[None, None], position_ids=places, use_cache=False)
        found.append(output.logits[:, -25:-1])
    return torch.cat(found)


def steered(use: Use) -> Tensor:
    """What is written while a guard cuts and steers."""
    with use.inside():
        output = use.model.generate(
            input_ids=use.ids, attention_mask=use.mask, max_new_tokens=60, eos_token_id=None, do_sample=False
        )
    return output[:, use.length :]


def ss_generate(use: Use) -> Tensor:
    """What `ss.generate` writes after prompts of different lengths, which plain transformers reads one by one."""
    rows = [row[real].tolist() for row, real in zip(use.ids, use.mask.bool(), strict=True)]
    new = 60 if EDITS[use.draw["edit"]].steers else NEW
    if use.edits is None:
        written = []
        for row in rows:
            ids = torch.tensor([row], device=use.ids.device)
            settings = {"max_new_tokens": new, "do_sample": False, "pad_token_id": PAD}
            output = use.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
            written.append(output[0, len(row) :].tolist())
    else:
        found = ss.generate(
            use.model,
            rows,
            interventions=joined(use.edits),
            max_new_tokens=new,
            tokenizer=tokenizer_of(use.model),
        )
        written = [one.tokens for one in found]
    wide = torch.full((len(rows), new), -1)
    for number, tokens in enumerate(written):
        wide[number, : len(tokens)] = torch.tensor(tokens)
    return wide


def joined(edits: Sequence[Any]) -> Any:
    """Several interventions as one."""
    return reduce(or_, edits) if edits else None


def conversation(use: Use) -> Tensor:
    """Two turns, which plain transformers reads as one text each."""
    prompts, said = [use.ids[0, : use.prompt].tolist(), use.ids[0, use.prompt :].tolist()], []
    chat = None
    if use.edits is not None:
        chat = ss.Conversation(use.model, joined(use.edits), tokenizer=tokenizer_of(use.model), chat=False)
    text: list[int] = []
    for prompt in prompts:
        if chat is not None:
            said.append(list(chat.ask(prompt, max_new_tokens=4).ids))
            continue
        ids = torch.tensor([text + prompt], device=use.ids.device)
        settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": PAD}
        output = use.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
        said.append(output[0, ids.shape[1] :].tolist())
        text = output[0].tolist()
    wide = torch.full((2, 4), -1)
    for number, tokens in enumerate(said):
        wide[number, : len(tokens)] = torch.tensor(tokens)
    return wide
