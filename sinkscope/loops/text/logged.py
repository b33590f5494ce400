"""Answers in records: lines of logs and data sets, rows of tables, chats, and sessions of agents.

1. What servers send is read as such (`forms`).
2. A line that is a message counts if a model wrote it, and belongs to the conversation of the lines around it.
3. Of any other record the answers stand under the names that public formats give them (`answers_in`), and what was
   asked for beside them.
4. The turns of a conversation are one more text, whose copies are turns (`TURNS`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from sinkscope.files.chats import (
    ANSWERS,
    PROMPTS,
    REASONING,
    TEXT,
    Message,
    MessageText,
    is_item,
    message_of,
    messages_in,
    prompt_before,
    texts_in,
    unwrapped,
)
from sinkscope.loops.text.forms import Events
from sinkscope.loops.text.pieces import TURNS, Piece, on_one_line, pieces_of_output, pieces_of_texts

ASKING = frozenset((*PROMPTS, "system", "context", "tools", "functions", "target", "reference", "expected")) - {
    "messages"
}
"""Parts of names of fields that hold no answer."""
SEPARATE = ("resps", "turns", "generated_texts", "completions", "predictions")
"""Fields whose strings are answers, and not the tokens of one."""
_SESSIONS = ("session_id", "sessionId", "conversation_id", "conversationId", "thread_id", "chat_id", "trace_id")


class Answer(NamedTuple):
    """A whole answer in a record.

    Attributes:
        value: A text, a list of tokens, or the texts of a message.
        prompt: What was asked for.
        context: Of an answer that is a turn of a conversation: all that was said to the model before it; else None.
    """

    value: Any
    prompt: str = ""
    context: str | None = None

    @property
    def turn(self) -> str:
        """Return the turn as a text: what it says and calls, without reasoning."""
        return " ".join(part.text for part in self.value if part.channel == TEXT or part.channel.startswith("call"))


class Records:
    """The records of one input: answers, pieces of answers, or messages of one conversation.

    Args:
        by: Field by whose values answers are grouped; "prompt" is what was asked, wherever the record says it.
    """

    def __init__(self, by: str | None = None) -> None:
        self._events = Events()
        self._unknown = UnknownEvents()
        self._by = by
        self._talks: dict[str, list[Message]] = {}  # conversations in lines: messages since the last one of a model

    def pieces(self, data: Any, place: int, field: str | None = None, *, whole: bool = True) -> list[Piece]:
        """Return what a line of JSON, a row or an event adds to outputs.

        Args:
            data: The JSON.
            place: Number of the line.
            field: Where its answers are, as `at_field` takes it. None: in a form of servers, logs or data sets.
            whole: Whether every line has to add something; else it is an event, of which many add nothing.

        Raises:
            ValueError, TypeError, LookupError, AttributeError: It reports an error, or cannot be read.
        """
        if isinstance(data, str) and not whole:
            return self._unknown.pieces(data)
        if not isinstance(data, dict):
            raise ValueError("expected an object")
        pieces = self._pieces(data, place, field, whole)
        if self._by is not None:
            pieces = [piece._replace(group=group_of(data, self._by, piece.prompt)) for piece in pieces]
        return pieces

    def _pieces(self, data: dict[str, Any], place: int, field: str | None, whole: bool) -> list[Piece]:
        name = f"line {place}"
        if field is not None:
            return pieces_of_answers(at_field(data, field), name)
        if data.get("error") and not data.get("choices"):
            raise ValueError(f"the server reports an error, {on_one_line(str(data['error']), 200)}")
        pieces = self._events.pieces(data, place)
        if pieces is None and not whole:
            pieces = self._unknown.pieces(data)
        elif pieces:
            self._unknown.is_known = True
        if pieces is not None:
            return pieces
        message = message_of(data)
        if message is not None and is_message(unwrapped(data)):
            return self._turn(message, data, name)
        if self._talks and isinstance(data.get("type"), str):  # a line of a session that is no message
            return []
        return pieces_of_answers(answers_in(data, prompt=prompt_in(data)), name)

    def _turn(self, message: Message, data: Mapping[str, Any], name: str) -> list[Piece]:
        """A line with a message of a conversation."""
        key = next((str(data[field]) for field in _SESSIONS if data.get(field)), "")
        if data.get("isSidechain"):
            key += " aside"
        before = self._talks.setdefault(key, [])
        if message.role != "assistant" and message.role != "":
            before.append(message)
            return []
        is_step = unwrapped(data) is not data or "role" not in data
        if is_step and not any(part.text.strip() for part in message.texts):  # a reasoning that is hidden, say
            return []
        context = "\n".join(earlier.everything for earlier in before)
        answer = Answer(message.texts, prompt_before(before, len(before)), context)
        before.clear()
        talk = f"turns of {on_one_line(key)}" if key else "turns"
        return [*pieces_of_texts(answer.value, name, answer.prompt), _turn_piece(answer, talk)]


class UnknownEvents:
    """Events of a form that has no case: a stream with one text in each is taken for an answer in pieces.

    Where each text begins with all that came before, it is the whole answer so far.

    Attributes:
        is_known: Whether the stream has events of a known form; nothing else in it is then an answer.
    """

    def __init__(self) -> None:
        self.is_known = False
        self._before = ""  # the text before
        self._grows: bool | None = None

    def pieces(self, data: Any) -> list[Piece]:
        """Return the pieces in an event: a text, or an object that says nothing of its kind."""
        if self.is_known:
            return []
        answers: list[Answer] = []
        kind = data.get("type") or data.get("event") if isinstance(data, dict) else None
        if isinstance(data, str):
            answers = [Answer(data)]
        elif isinstance(kind, str) and any(word in kind.lower() for word in ("delta", "chunk")):
            answers = [Answer(tuple(_typed(data, kind.lower())))]
        elif isinstance(data, dict) and kind is None and not data.get("error"):
            with suppress(ValueError):
                answers = answers_in(data)
        pieces: list[Piece] = []
        if len(answers) == 1 and isinstance(answers[0].value, str):
            answers = [Answer((MessageText(TEXT, answers[0].value),))]
        for answer in answers[:1]:
            for part in answer.value if isinstance(answer.value, tuple) else ():
                text = self._new(part.text) if part.channel == TEXT else part.text
                pieces.append(Piece("stream 0", part.channel, text))
        return pieces

    def _new(self, text: str) -> str:
        """The new part of a text; the second text shows whether each text contains the one before."""
        before, self._before = self._before, text
        if self._grows is None and before and text != before:
            self._grows = text.startswith(before)
        return text[len(before) :] if self._grows and text.startswith(before) else text


def _typed(data: Mapping[str, Any], kind: str) -> list[MessageText]:
    """The texts of an event whose type names a piece and its channel."""
    if any(word in kind for word in ("audio", "image", "video", "signature", "citation", "annotation", "progress")):
        return []
    text: Any = next((data[name] for name in ("delta", "content", "text", "data") if data.get(name)), "")
    if isinstance(text, Mapping | list):
        return texts_in(text if isinstance(text, Mapping) else {"content": text})
    channel = TEXT
    if any(word in kind for word in ("reasoning", "thinking", "thought")):
        channel = REASONING
    elif any(word in kind for word in ("tool", "call", "argument", "input_json")):
        channel = "call 0"
    return [MessageText(channel, str(text))]


CONTENT = ("content", "parts", "text", "value", "utterance", "tool_calls", "output", "summary", "thinking")
"""Fields by which a record with an author is a message."""


def is_message(data: Any) -> bool:
    """Return whether a record with an author is a message, and not a record with a prompt and an answer."""
    has_content = any(name in data for name in CONTENT)
    is_item = isinstance(data.get("type"), str) and "role" not in data
    has_answer = any(data.get(name) for name in ("choices", "completion", "response", "answer", "generated_text"))
    has_content = has_content or isinstance(data.get("message"), str)
    return (has_content or is_item) and not has_answer


def _turn_piece(answer: Answer, talk: str) -> Piece:
    return Piece(talk, TURNS, f"{answer.turn}\n", context=answer.context or "")


def pieces_of_answers(answers: Sequence[Answer], name: str) -> list[Piece]:
    """Return the pieces of whole answers, of which each of several has a number in its name, and of their turns."""
    pieces: list[Piece] = []
    turns = [item for item in answers if item.context is not None]
    for number, answer in enumerate(answers, 1):
        own = name if len(answers) == 1 else f"{name} answer {number}"
        if isinstance(answer.value, tuple):
            pieces += pieces_of_texts(answer.value, own, answer.prompt)
        else:
            pieces += pieces_of_output(answer.value, own, answer.prompt)
    if len(turns) > 1:
        pieces += [_turn_piece(turn, f"{name} turns") for turn in turns]
        pieces.append(Piece(f"{name} turns", TURNS, ends=True))
    return pieces


def answers_of_chat(messages: Sequence[Message]) -> list[Answer]:
    """Return what a model wrote in a chat: by role; where no author is known as a model, what unknown ones wrote."""
    role = "assistant"
    if not any(each.role == role for each in messages):
        role = ""
    answers: list[Answer] = []
    last = 0
    for place, message in enumerate(messages):
        if message.role != role:
            continue
        context = "\n".join(each.everything for each in messages[last:place])
        answers.append(Answer(message.texts, prompt_before(messages, place), context))
        last = place + 1
    return answers


def answers_in(value: Any, field: str = "", prompt: str = "") -> list[Answer]:
    """Return the whole answers in a value.

    Args:
        value: What stands in a field.
        field: Name of the field.
        prompt: What was asked for beside it.

    Raises:
        ValueError: No field that is known holds one.
    """
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return _answers_in_list(value, field, prompt)
    if isinstance(value, list) and field in SEPARATE:
        return [Answer(item, prompt) for item in value]
    if not isinstance(value, dict):
        return [Answer(value, prompt)]
    if "mapping" in value:
        return answers_of_chat(messages_in(value) or [])
    message = message_of(value)
    if message is not None and is_message(unwrapped(value)):
        return [Answer(message.texts, prompt)]
    fields = _fields_of(value)
    for name in ANSWERS:
        if fields.get(name) not in (None, "", [], {}):
            return answers_in(fields[name], name, prompt)
    if fields.keys() & set(ANSWERS):
        return [Answer("", prompt)]
    return _answers_below(value, fields, prompt)


def _answers_in_list(values: list[Any], field: str, prompt: str) -> list[Answer]:
    """The answers in a list of records: a chat, the parts of one message, or answers."""
    messages = messages_in(values)
    if messages is not None and field not in ("content", "parts"):
        if all(message.role not in ("user", "system", "tool") for message in messages):
            return _of_one_turn(values, messages, prompt)
        return answers_of_chat(messages)
    if field in ("content", "parts") or _are_parts(values):  # of one message
        return [Answer(tuple(texts_in({"content": values})), prompt)]
    answers: list[Answer] = []
    for value in values:
        answers += answers_in(value, field, prompt)
    return answers


def _fields_of(value: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a record that may hold answers, also in small letters; of names with dots the last part."""
    fields: dict[str, Any] = {}
    for name, content in value.items():
        parts = str(name).split(".")
        if len(parts) == 1 or not _asks(str(name)):
            fields.setdefault(parts[-1], content)
            fields.setdefault(parts[-1].lower().replace(" ", "_"), content)
    return fields


def _asks(name: str) -> bool:
    """Whether the name of a field says that it holds what was asked for."""
    return not ASKING.isdisjoint(re.split(r"[._ -]", name.lower()))


def _answers_below(value: Mapping[str, Any], fields: Mapping[str, Any], prompt: str) -> list[Answer]:
    """The answers in the records that a record holds under names that are not known.

    Raises:
        ValueError: There are none.
    """
    answers: list[Answer] = []
    for name, content in fields.items():
        if _asks(name) or not isinstance(content, dict | list) or not content:
            continue
        for inner in content if isinstance(content, list) else [content]:
            if isinstance(inner, dict):
                with suppress(ValueError):
                    answers += answers_in(inner, name, prompt_in(inner) or prompt)
    if not answers:
        there = on_one_line(", ".join(map(str, value)), 200) or "nothing"
        raise ValueError(f"no field that is known holds an answer, there are {there}: name yours by --field")
    return answers


def _of_one_turn(value: list[Any], messages: Sequence[Message], prompt: str) -> list[Answer]:
    """Messages or items without a user's between: items of Responses are one answer, messages are one each."""
    if all(is_item(item) for item in value):
        texts = texts_in({"content": [{"type": "message", **item} for item in value]})
        return [Answer(tuple(texts), prompt)]
    return [Answer(message.texts, prompt) for message in messages]


def _are_parts(value: list[Any]) -> bool:
    """Whether a list holds the parts of one message."""
    kinds = ("text", "output_text", "thinking", "reasoning", "tool_use", "refusal")
    return all(isinstance(part, dict) and part.get("type") in kinds for part in value)


def prompt_in(value: Any) -> str:
    """Return what was asked for in a record, as far as a field that is known says it."""
    if isinstance(value, str):
        return value
    messages = messages_in(value)
    if messages is not None:
        return prompt_before(messages, len(messages))
    if isinstance(value, dict):
        fields = {str(name).lower(): field for name, field in value.items()}
        return " ".join(text for text in (prompt_in(fields[name]) for name in PROMPTS if fields.get(name)) if text)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return " ".join(value)
    return ""


def at_field(data: Any, path: str) -> list[Answer]:
    """Return the answers in a field of a line.

    Args:
        data: The line.
        path: Names of fields with dots between, and numbers of items: "response.choices", "turns.1".

    Raises:
        ValueError: There is no such field; the message says which there are.
    """
    if isinstance(data, dict) and path in data:  # a column may have a dot in its name
        return answers_in(data[path], path, prompt_in(data))
    value, place = data, "the line"
    for name in path.split("."):
        there: dict[str, Any] = {}
        if isinstance(value, dict | list):
            there = dict(value) if isinstance(value, dict) else {str(number): item for number, item in enumerate(value)}
        if name not in there:
            raise ValueError(f"no field {path}: {place} has {on_one_line(', '.join(there) or 'no fields', 200)}")
        value, place = there[name], name
    return answers_in(value, place, prompt_in(data))


def group_of(data: Any, by: str, prompt: str = "") -> str:
    """Return the value of a field as a text on one line; of "prompt" what was asked, where no field has that name."""
    value = data
    for name in [by] if isinstance(data, dict) and by in data else by.split("."):
        if isinstance(value, list) and name.isdigit() and int(name) < len(value):
            value = value[int(name)]
        else:
            value = value.get(name) if isinstance(value, dict) else None
    if by == "prompt" and not isinstance(value, str):
        value = prompt or prompt_in(data)
    return "" if value is None else on_one_line(value if isinstance(value, str) else str(value))


def answer_column(columns: Sequence[str]) -> str | None:
    """Return the column of a table that holds answers, or the messages of chats; None if no name says it."""
    by_name = {column.lower().replace(" ", "_"): column for column in columns}
    if by_name.keys() & {"role", "from"} and by_name.keys() & {"content", "text", "value"}:
        return ""  # each row is a message
    for name in ANSWERS:
        if name in by_name:
            return by_name[name]
    return columns[0] if len(columns) == 1 else None
