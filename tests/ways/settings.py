"""What surrounds a call: attention functions, wrappers, and what else runs; one row each."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
import transformers as tf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import sinkscope as ss

from .edits import LAYER, Draw
from .families import BOS, EOS, FAMILIES, HIDDEN, PAD, VOCAB, Family


def _own(*args: Any, **kwargs: Any) -> Any:
    return sdpa_attention_forward(*args, **kwargs)


def _dispatches(draw: Draw) -> bool:
    """Whether a family looks its attention function up."""
    return FAMILIES[draw["family"]].dispatches


HAS_NNSIGHT, HAS_PEFT = (find_spec(name) is not None for name in ("nnsight", "peft"))


@dataclass(frozen=True)
class Attention:
    """An attention function.

    Attributes:
        name: Its name in the configuration; None: what the model takes by itself.
        function: What the user registers under this name.
        mask: The function of its masks.
        fits: Draws to which it belongs.
    """

    name: str | None = None
    function: Callable[..., Any] | None = None
    mask: Callable[..., Any] | None = None
    fits: Callable[[Draw], bool] = _dispatches

    def register(self) -> None:
        """Tell transformers of it."""
        if self.function is not None:
            tf.AttentionInterface.register(self.name, self.function)
            tf.AttentionMaskInterface.register(self.name, self.mask)


ATTENTIONS = {
    "sdpa": Attention(fits=lambda draw: draw["family"] != "gpt_neo"),
    "eager": Attention("eager", fits=lambda draw: True),
    "own": Attention("ways_own", _own, sdpa_mask),
}


@dataclass(frozen=True)
class Wrapper:
    """What is around the model: what is called, and what is edited."""

    around: Callable[[nn.Module], Any]
    called: Callable[[Any], Callable[..., Any]] = lambda model: model
    fits: Callable[[Draw], bool] = lambda draw: True
    same_bits: bool = True


class Around(nn.Module):
    """Calls what is inside, and lends its attributes, as the wrappers of other libraries do."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        with contextlib.suppress(AttributeError):
            return super().__getattr__(name)
        return getattr(super().__getattr__("inner"), name)


def _lora(model: nn.Module) -> nn.Module:
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")).eval()


def _compiled(model: nn.Module) -> nn.Module:
    torch.compiler.reset()
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def _nnsight(model: nn.Module) -> Any:
    import nnsight

    return nnsight.LanguageModel(model, tokenizer=tokenizer())


def _offloaded(model: nn.Module) -> nn.Module:
    from accelerate import cpu_offload

    return cpu_offload(model, execution_device=next(model.parameters()).device)


def _traced(model: Any) -> Callable[..., Any]:
    """Calls of a model of nnsight."""

    def call(*args: Any, return_dict: bool = True, **kwargs: Any) -> Any:
        with model.trace(*args, **kwargs):
            logits = model.output.logits.save()
        return SimpleNamespace(logits=logits) if return_dict else (logits,)

    return call


@cache
def tokenizer() -> Any:
    """A word for each id."""
    words = {f"w{number}": number for number in range(VOCAB)}
    backend = Tokenizer(WordLevel(words, unk_token="w3"))
    backend.pre_tokenizer = WhitespaceSplit()
    special = {"bos_token": f"w{BOS}", "eos_token": f"w{EOS}", "pad_token": f"w{PAD}", "unk_token": "w3"}
    return tf.PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def tokenizer_of(model: Any) -> Any:
    """A real model's own, or a word for each id."""
    return getattr(model, "tokenizer", None) or tokenizer()


def _one_call(draw: Draw) -> bool:
    alone = draw["cache"] == "none" and draw["padding"] == "none" and draw["other"] == "nothing"
    return alone and HAS_NNSIGHT


WRAPPERS = {
    "bare": Wrapper(lambda model: model),
    "module": Wrapper(Around, fits=lambda draw: draw["cache"] != "generate"),
    # Two threads cannot run one offloaded model: accelerate takes a layer's weights away under the other.
    "offloaded": Wrapper(_offloaded, fits=lambda draw: draw["cache"] != "gradients" and draw["other"] == "nothing"),
    "lora": Wrapper(_lora, fits=lambda draw: HAS_PEFT),
    "compiled": Wrapper(_compiled, fits=lambda draw: draw["other"] == "nothing", same_bits=False),
    "nnsight": Wrapper(_nnsight, _traced, fits=_one_call),
}


@dataclass(frozen=True)
class Hooks:
    """Hooks of the user's own on layer 0: when they are registered, and when they are removed."""

    before: bool = False
    inside: bool = False
    leave: bool = False
    fits: Callable[[Draw], bool] = lambda draw: draw["wrapper"] not in ("nnsight", "compiled")

    @contextlib.contextmanager
    def around(self, model: nn.Module, family: Family, enter: Callable[[], Any]) -> Iterator[Any]:
        """The block, and the hooks around or inside it; without a block the same hooks act."""
        handles = _user_hooks(model, family) if self.before or self.leave else []
        try:
            with enter() as entered:
                if self.inside:
                    handles += _user_hooks(model, family)
                if self.leave:  # one is removed and comes back, as debuggers do
                    handles.pop().remove()
                    handles.append(family.block(model, 0).register_forward_hook(_shifted))
                yield entered
        finally:
            for handle in handles:
                handle.remove()


def _shifted(_module: nn.Module, _args: Any, output: Any) -> Any:
    """The user's own edit."""
    if isinstance(output, tuple):
        return (output[0] * 1.25, *output[1:])
    return output * 1.25


def _user_hooks(model: nn.Module, family: Family) -> list[Any]:
    block = family.block(model, LAYER)
    return [
        block.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True),
        block.register_forward_hook(lambda module, args, kwargs, output: None, with_kwargs=True),
        family.block(model, 0).register_forward_hook(_shifted),
    ]


HOOKS = {"none": Hooks(fits=lambda draw: True), "before": Hooks(before=True), "inside": Hooks(inside=True)}
HOOKS["changed inside"] = Hooks(leave=True)


@dataclass(frozen=True)
class Mode:
    """In which mode torch and the model are."""

    around: Callable[[torch.device], Any] = lambda device: contextlib.nullcontext()
    trains: bool = False
    fits: Callable[[Draw], bool] = lambda draw: True


def _in_one_thread(draw: Draw) -> bool:
    """Modes of torch are those of a thread."""
    threads = draw["other"] != "nothing"
    return not threads and draw["cache"] != "gradients"


def _autocasts(draw: Draw) -> bool:
    return _in_one_thread(draw) and draw["dtype"] == "float32" and draw["cache"] in ("none", "steps", "generate")


MODES = {
    "usual": Mode(),
    "inference": Mode(lambda device: torch.inference_mode(), fits=_in_one_thread),
    "autocast": Mode(lambda device: torch.autocast(device.type, torch.bfloat16), fits=_autocasts),
    "training": Mode(trains=True),
}


Beside = Callable[[Any, torch.Tensor, list[str]], Callable[[], Any]]


def _calls(waits: bool, model: nn.Module, ids: torch.Tensor, wrong: list[str]) -> Callable[[], Any]:
    """Bare calls, which are refused in a line while another thread is in a block, and plain otherwise.

    Or calls inside a block of this thread, which waits until no other thread is in one.
    """
    short = ids[:1, :9]
    with torch.no_grad():
        plain = model(input_ids=short).logits

    def call() -> None:
        try:
            with _nothing().on(model) if waits else contextlib.nullcontext():
                logits = model(input_ids=short).logits
        except ss.SinkscopeError as error:
            if waits or "one thread steers a model at a time" not in str(error):
                wrong.append(f"refused: {error}")
            time.sleep(0.001)
            return
        off = (logits - plain).abs().max()
        if logits.dtype == torch.float32 and off > 2e-3 * max(1.0, float(plain.std())):
            wrong.append(f"a call is edited by another thread's block: off by {float(off):.3g}")

    return call


def _traces(model: nn.Module, ids: torch.Tensor, wrong: list[str]) -> Callable[[], Any]:
    short = ids[:1, :9]

    def trace() -> None:
        shape = tuple(ss.trace(model, short, "blocks.0.hook_resid_post")["blocks.0.hook_resid_post"].shape)
        if shape != (*short.shape, HIDDEN):
            wrong.append(f"a trace of {tuple(short.shape)} has shape {shape}")

    return trace


@dataclass(frozen=True)
class Other:
    """What another thread does all the while."""

    beside: Beside | None = None
    fits: Callable[[Draw], bool] = lambda draw: True

    @contextlib.contextmanager
    def running(self, model: nn.Module, ids: torch.Tensor) -> Iterator[list[str]]:
        wrong: list[str] = []
        if self.beside is None:
            yield wrong
            return
        step, stop = self.beside(model, ids, wrong), threading.Event()

        def work() -> None:
            try:
                with torch.no_grad():
                    while not stop.is_set():
                        step()
            except Exception as error:
                wrong.append(f"{type(error).__name__}: {str(error).splitlines()[0][:90] if str(error) else ''}")

        thread = threading.Thread(target=work)
        thread.start()
        try:
            time.sleep(0.01)
            yield wrong
        finally:
            stop.set()
            thread.join()


def _nothing() -> Any:
    return ss.Add(torch.zeros(HIDDEN), "blocks.0.hook_resid_post")


OTHERS = {
    "nothing": Other(),
    "plain thread": Other(partial(_calls, False)),
    "thread that waits": Other(partial(_calls, True)),
    "thread with a trace": Other(_traces),
}
