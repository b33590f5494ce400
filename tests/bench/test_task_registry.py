"""Tasks by name: a task of this package, of another one, and a file of prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from refusals import refused

import sinkscope.bench.task as registry
from sinkscope.bench.record import Prompt, Turn
from sinkscope.bench.task import PromptFile, Size, Task, read_task, task_class
from sinkscope.bench.tasks.recall import Recall


def test_a_task_is_found_by_its_name(monkeypatch):
    monkeypatch.setattr(registry, "TASKS", dict(registry.TASKS))

    @dataclass(frozen=True, kw_only=True)
    class Echo(Task):
        """Says a word, and wants it back."""

        name: ClassVar[str] = "echo"
        words: Size = 2

        def prompts(self, target):
            return [Prompt(str(n), (Turn("again " * self.words, ("again",)),), "echo") for n in range(2)]

    assert read_task("echo:words=3") == Echo(words=3)
    assert task_class("echo") is Echo and task_class("recall") is Recall
    assert task_class("a name in old records") is PromptFile
    with refused("two tasks are called 'recall'"):

        class Other(Echo):
            name: ClassVar[str] = "recall"
