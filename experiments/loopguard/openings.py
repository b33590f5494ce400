"""Openings of stories, in families of different forms, on which remedies are compared."""

from __future__ import annotations

import random

NAMES = ("Ben", "Mia", "Tom", "Lily", "Sam", "Anna", "Max", "Sara", "Tim", "Lucy", "Jack", "Nina", "Leo", "Emma")
THINGS = ("ball", "bird", "cat", "box", "tree", "dog", "boat", "hat", "frog", "star", "cake", "duck", "key", "train")
FORMS = {
    "actions": (
        "{name} ran and ran and ran. The {thing}",
        "{name} threw the {thing} up, and it came down. {name} threw it up, and",
        "Every day {name} went to look at the {thing}. On Monday",
        "The {thing} jumped up and down, up and down,",
    ),
    "scenes": (
        "Once there was a small house near a lake. In the house lived {name}, who had a {thing}. It was raining.",
        "{name} was sad because the {thing} was broken. Mom was at work, and {other} was at school. At last,",
        "It was night and the stars were out. The {thing} was asleep. Then there was a loud noise.",
        "{other} did not like to share. One morning {name} came with a {thing}. {other} looked at it and",
    ),
    "letters": (
        "Dear {name}, today I saw a {thing} and a {second}. It",
        "Dear Mom, the {thing} is here. {name} says",
        "Hello {name}! I have a new {thing}. Do you",
        "Thank you for the {thing}, {other}. Now I can",
    ),
    "directions": (
        "To make a {thing}, first take a {second} and",
        "Look at the {thing}! Do not",
        "Here is how to find a {thing}. First, {name} must",
        "The rule of the game was that the {thing} must not",
    ),
}


def openings(family: str, count: int) -> list[str]:
    """Different openings of a family, each of its forms in turn."""
    rng = random.Random(f"{family} 0")
    forms = FORMS[family]
    texts: list[str] = []
    while len(texts) < count:
        name, other = rng.sample(NAMES, 2)
        thing, second = rng.sample(THINGS, 2)
        text = forms[len(texts) % len(forms)].format(name=name, other=other, thing=thing, second=second)
        if text not in texts:
            texts.append(text)
    return texts
