"""Openings of stories, in families of different forms: rules are chosen on one family and reported on the others."""

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
"""The families on which remedies are compared."""
CHOOSING, LOOKED_AT_ONCE = "development", "held-out"
WORDS = {
    CHOOSING: (
        "Every night {name} dreamed of a {thing}. In the dream, the {thing}",
        "There was a {thing} at the end of the street. Nobody knew why. {name}",
        "It was {name}'s birthday. Grandma brought a big {thing} and",
        "{name} lost the {thing} in the snow. {other} helped to look for it. They looked",
        "The old {thing} was tired. It wanted to",
        '"I can do it!" said the little {thing}. But the {second}',
        "{name} wanted to paint a {thing}. First {name} painted",
        "A {thing} and a {second} lived together. Each morning, the {thing}",
        "When {name} opened the door, there was a {thing}! {name} was so",
        "In the garden, {name} counted the flowers: one, two,",
        "The {thing} was too small. {name} cried. Then {other} said,",
        "Mom told {name} a story about a {thing}. The story began:",
    ),
    LOOKED_AT_ONCE: (
        "Far away, on a green hill, a {thing} waited for {name}. It waited",
        "{name} and {other} built a {thing} from sand. The sea came and",
        "The {thing} could talk, but only to {name}. It always said",
        "On the bus, {name} sat next to a {thing}. The bus went",
        "At the market, {other} sold a {thing}, a {second} and",
        "{name} was afraid of the dark. The {thing} under the bed",
        "Dad fixed the {thing} with a hammer. Bang, bang,",
        "It was a race! The {thing} was fast, but the {second} was",
        "{other} made soup with a {thing}. {name} tasted it and",
        "One winter, the {thing} went to sleep. In spring, the {thing}",
        "{name} knocked at the door. Knock, knock! The {second} asked,",
        "The king had lost his {thing}. He asked {name}, and he asked {other}, and",
    ),
}
"""Forms on which LoopGuard's answer to a loop was chosen, and others that were looked at once."""


def openings(family: str, count: int, seed: int = 0) -> list[str]:
    """Different openings of a family, each of its forms in turn."""
    rng = random.Random(f"{family} {seed}")
    forms = (FORMS | WORDS)[family]
    texts: list[str] = []
    while len(texts) < count:
        name, other = rng.sample(NAMES, 2)
        thing, second = rng.sample(THINGS, 2)
        text = forms[len(texts) % len(forms)].format(name=name, other=other, thing=thing, second=second)
        if text not in texts:
            texts.append(text)
    return texts
