"""How a server is asked to continue an answer, and which answers are continued.

1. The kind of server is given, or read from the owner or header in its answer to a request for its models.
2. A chat is continued by a final message of the assistant; some servers need two fields beside it, and where a server
   always begins a new message, its own template makes a prompt that is continued as a text.
3. The continuation is sampled, because a greedy model would write the same copies again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from sinkscope.errors import SinkscopeError
from sinkscope.files.plain import parse_json
from sinkscope.loops.text.pieces import UNREADABLE
from sinkscope.loops.text.reasoning import REASONING_MARKS, reasoning_end_in

ServerName = Literal["auto", "llama.cpp", "ollama", "vllm", "sglang", "lmstudio", "transformers", "other"]
OWNERS = {"llamacpp": "llama.cpp", "library": "ollama", "vllm": "vllm", "sglang": "sglang"}
"""What the lists of models of servers name as the owner."""
TEMPERATURE = 0.7
PENALTIES: dict[str, dict[str, Any]] = {
    "llama.cpp": {"dry_multiplier": 0.8},
    "vllm": {"repetition_penalty": 1.1},
    "sglang": {"frequency_penalty": 0.5},
    "transformers": {"frequency_penalty": 0.1},  # a repetition penalty of 1.1
}
"""A penalty where the server has one."""
CONTINUES = ("llama.cpp", "ollama", "vllm", "sglang", "lmstudio")
"""Servers that continue a final message of the assistant."""
FIELDS: dict[str, dict[str, Any]] = {
    "vllm": {"continue_final_message": True, "add_generation_prompt": False},
    "sglang": {"continue_final_message": True},
}
"""What a request needs beside such a message."""
NEVER = (
    "response_format",
    "logprobs",
    "top_logprobs",
    "grammar",
    "json_schema",
    "guided_json",
    "guided_regex",
    "format",
)
"""Fields of requests whose answers are never continued: schemas and probabilities."""
LIMITS = ("max_completion_tokens", "max_tokens", "n_predict")
_TEXT_FIELDS = ("model", "max_tokens", "temperature", "top_p", "stop", "seed", "stream")
"""Fields of a chat's request that one for a text has as well, in any server."""


@dataclass(frozen=True)
class Server:
    """A server behind a proxy, and how it continues.

    Attributes:
        name: Which server it is; "other" if nothing is known.
        template: Makes the prompt of a chat from its messages, by the model's own template; None without one.
        reasoning_end: What ends a reasoning; empty if unknown.
        opens_reasoning: Whether the chat template begins it, so that answers begin inside of one.
    """

    name: str = "other"
    template: Template | None = None
    reasoning_end: str = ""
    opens_reasoning: bool = False

    def note(self) -> str:
        """Return how it continues answers, in a line."""
        chat = (
            "ends chats that loop, because it is not known how this server continues them: give --server or --template"
        )
        if self.template is not None:
            chat = "continues chats by the template that was given"
        elif self.name in CONTINUES:
            chat = "continues chats by a final message of the assistant"
        elif self.name == "transformers":
            chat = "ends chats that loop, because this server begins a new message: give --template FOLDER"
        closes = f", and closes a reasoning by {self.reasoning_end}" if self.reasoning_end else ""
        return f"The server is {self.name}: the proxy {chat}{closes}."


@dataclass(frozen=True)
class Template:
    """A model's own chat template and tokenizer.

    Attributes:
        tokenizer: The tokenizer.
    """

    tokenizer: Any = field(repr=False)

    @classmethod
    def read(cls, folder: str) -> Template:
        """Read the template of a folder with a tokenizer.

        Raises:
            SinkscopeError: There is none, or transformers is missing.
        """
        try:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (ImportError, OSError, ValueError) as error:
            reason = str(error).splitlines()[0][:120]
            raise SinkscopeError(f"--template {folder}: {reason}; give a folder with a tokenizer") from None
        if not getattr(tokenizer, "chat_template", None):
            raise SinkscopeError(f"--template {folder}: it has no chat template; give the folder of the model")
        return cls(tokenizer)

    @property
    def reasoning_end(self) -> str:
        """Return what ends a reasoning in the template; empty if it has none."""
        return reasoning_end_in(str(self.tokenizer.chat_template))

    def prompt(self, messages: list[Any]) -> str:
        """Return the prompt of a chat, up to where the assistant writes; a BOS that the tokenizer adds is left out."""
        text = str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        bos = self.tokenizer.bos_token
        if bos and text.startswith(bos) and self.tokenizer("a")["input_ids"][:1] == [self.tokenizer.bos_token_id]:
            return text.removeprefix(bos)
        return text


def opens_reasoning(prompt: str) -> bool:
    """Return whether the prompt of a chat ends with what begins a reasoning."""
    return prompt.rstrip().endswith(tuple(REASONING_MARKS.values()))


def found_server(url: str, name: ServerName, template: Template | None = None, reasoning_end: str = "") -> Server:
    """Return the server at an address.

    Args:
        url: Its address.
        name: Which it is; "auto" asks it for its models.
        template: The chat template that was given.
        reasoning_end: What ends a reasoning; empty: as the template says.
    """
    import httpx

    known: str = name
    opens = False
    if template is not None:
        opens = opens_reasoning(template.prompt([{"role": "user", "content": "?"}]))
    end = reasoning_end or ("" if template is None else template.reasoning_end)
    with httpx.Client(base_url=url.rstrip("/"), timeout=5, trust_env=False) as client:
        if name == "auto":
            known = "other"
            with suppress(httpx.HTTPError, *UNREADABLE):
                answer = client.get("/v1/models")
                owner = str(answer.json()["data"][0].get("owned_by", ""))
                is_llama = "llama.cpp" in answer.headers.get("server", "")
                known = "llama.cpp" if is_llama else OWNERS.get(owner, "other")
        if not end and known == "llama.cpp":
            with suppress(httpx.HTTPError, *UNREADABLE):
                end = reasoning_end_in(str(client.get("/props").json().get("chat_template", "")))
        if known == "llama.cpp" and template is None:
            with suppress(httpx.HTTPError, *UNREADABLE):
                asked = {"messages": [{"role": "user", "content": "?"}]}
                opens = opens_reasoning(str(client.post("/apply-template", json=asked).json()["prompt"]))
    return Server(known, template, end, opens)


@dataclass(frozen=True)
class Request:
    """A request whose answer may be continued.

    Attributes:
        path: Its path.
        body: Its body.
    """

    path: str
    body: Mapping[str, Any]

    @property
    def is_chat(self) -> bool:
        """Return whether it has messages."""
        return isinstance(self.body.get("messages"), list)

    @property
    def limit(self) -> int | None:
        """Return the most tokens of an answer; None without a limit."""
        options = self.body.get("options")
        values = [self.body.get(name) for name in LIMITS]
        if isinstance(options, dict):
            values.append(options.get("num_predict"))
        return next((value for value in values if type(value) is int and value > 0), None)

    def why_never(self) -> str:
        """Return why its answer is not continued; empty if it is."""
        if any(self.body.get(name) not in (None, False, {"type": "text"}) for name in NEVER):
            return "it asks for a schema or for probabilities"
        if any(type(self.body.get(name)) is int and self.body[name] > 1 for name in ("n", "best_of")):
            return "it asks for several choices"
        if not re.search(r"/(chat/completions|completions|completion|api/chat)$", self.path):
            return "its form is not continued"
        if not self.is_chat and not isinstance(self.body.get("prompt"), str):
            return "its prompt is no text"
        return ""


def request_of(path: str, content: bytes) -> Request | None:
    """Return the request in a body; None if it is none."""
    with suppress(*UNREADABLE):
        return Request(path, dict(parse_json(content)))
    return None


def assistant_text(text: str, reasoning: str, server: Server) -> str:
    """Return what the assistant has written as its model writes it.

    Args:
        text: Its text.
        reasoning: Its reasoning, if the server gives it apart; else this is empty.
        server: The server, and the marks of a reasoning.
    """
    end = server.reasoning_end
    begin = REASONING_MARKS.get(end, "")
    if reasoning and end:
        return f"{begin}\n{reasoning.strip()}\n{end}\n\n{text}"
    if server.opens_reasoning and begin and begin not in text:
        return f"{begin}\n{text.lstrip()}"
    return text


def continuation(server: Server, request: Request, written: str, tokens: int) -> tuple[str, bytes] | None:
    """Return the path and body of the request that continues an answer; None if the server cannot be asked.

    Args:
        server: The server.
        request: The first request.
        written: What the assistant has written (`assistant_text`).
        tokens: Number of tokens of that; they count towards the limit.
    """
    path, body = request.path, dict(request.body)
    left: int | None = None
    if request.limit is not None:
        left = request.limit - tokens
        if left < 1:
            return None
    if not request.is_chat:
        body["prompt"] = f"{body['prompt']}{written}"
    elif server.template is not None:
        path = path.replace("/chat/completions", "/completions")
        fields = {name: body[name] for name in _TEXT_FIELDS if name in body}
        prompt = server.template.prompt(list(body["messages"]))
        opens = REASONING_MARKS.get(server.reasoning_end, "")
        if opens and prompt.rstrip().endswith(opens):  # the template has opened the reasoning
            written = written.removeprefix(opens).lstrip("\n")
        stop = body.get("stop")
        body = {**fields, "prompt": f"{prompt}{written}", "stream": True}
        if stop is None and server.template.tokenizer.eos_token:
            body["stop"] = [server.template.tokenizer.eos_token]
    elif server.name in CONTINUES:
        messages = [*body["messages"]]
        if messages and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant":
            written = f"{messages.pop().get('content') or ''}{written}"
        body["messages"] = [*messages, {"role": "assistant", "content": written}]
        body |= FIELDS.get(server.name, {})
    else:
        return None
    return path, json.dumps(_sampled(server, body, left)).encode()


def _sampled(server: Server, body: dict[str, Any], left: int | None) -> dict[str, Any]:
    """A body that asks for sampling, a penalty and no more than the tokens that are left."""
    body = {**body, **PENALTIES.get(server.name, {})}
    options = body.get("options")
    if isinstance(options, dict) or (server.name == "ollama" and "options" not in body and "max_tokens" not in body):
        options = dict(options or {})
        options["temperature"] = max(TEMPERATURE, float(options.get("temperature") or 0))
        if left is not None:
            options["num_predict"] = left
        return {**body, "options": options}
    body["temperature"] = max(TEMPERATURE, float(body.get("temperature") or 0))
    if left is not None:
        name = next((name for name in LIMITS if name in body), "max_tokens")
        body[name] = left
    return body
