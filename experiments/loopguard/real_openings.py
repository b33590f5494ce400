"""Openings of prose, dialogue, code and tables that real models continue; every second one is for choosing."""

from __future__ import annotations

PROSE = (
    "Once upon a time there was a miller who",
    "The history of glass begins",
    "My favourite thing about autumn is",
    "In this paper, we study",
    "The best way to bake bread at home is",
    "Breaking news: a large ship has",
    "I think that the meaning of work is",
    "She opened the old door and",
    "The river rises in the mountains and flows",
    "The results of the survey show that",
    "A healthy breakfast should",
    "In the year 1945, the city",
    "The theory of evolution states that",
    "Dear Sir or Madam, I am writing to",
    "The main advantage of trains over cars is that",
    "On the first day of the journey, the crew",
    "Many people believe that sleep",
    "The museum was founded in",
    "It was a dark night, and the lighthouse keeper",
    "To understand how a clock works, one must",
    "The committee has decided that",
    "Bees are important because",
    "When the war ended, the soldiers",
    "There are three reasons why children should learn music. First,",
)
DIALOGUE = (
    "Anna: How was your weekend?\nBen:",
    "Teacher: Who can tell me what a prime number is?\nStudent:",
    "User: My printer does not work. What should I do?\nAssistant:",
    "Doctor: What brings you here today?\nPatient:",
    '"Where have you been?" asked the captain. "',
    "Q: What is the capital of Australia?\nA:",
    "Interviewer: Why did you become a painter?\nPainter:",
    "Customer: I would like to return these shoes.\nClerk:",
    "User: Tell me a joke about cats.\nAssistant:",
    '"I do not believe you," said Maria. "You',
    "Mother: Have you done your homework?\nSon:",
    "Q: How do plants make food?\nA:",
    "User: Give me some advice for a job interview.\nAssistant:",
    "Tom: Shall we go to the cinema or stay at home?\nLucy:",
    "Judge: Please tell the court what you saw.\nWitness:",
    "User: Explain what an atom is to a child.\nAssistant:",
    '"This is the last time," the old man said. "',
    "Waiter: Are you ready to order?\nGuest:",
    "Q: Why is the sky blue?\nA:",
    "Coach: You played very well today.\nPlayer:",
    "User: Write a list of ten fruits.\nAssistant: 1.",
    "Tourist: Excuse me, how do I get to the station?\nPoliceman:",
    "Robot: I have finished my task.\nEngineer:",
    "User: Summarise the story of Romeo and Juliet.\nAssistant:",
)
CODE = (
    "def main():\n    ",
    "import os\n\ndef list_files(folder):\n    ",
    "class Stack:\n    def __init__(self):\n        ",
    "def fibonacci(n):\n    if n == 0:\n        return 0\n",
    "# Sort a list of numbers\nnumbers = [",
    "for (int i = 0; i < n; i++) {\n    ",
    "<html>\n<head>\n<title>",
    "SELECT name, price FROM",
    "function add(a, b) {\n  return a + b;\n}\n\nfunction",
    "#include <stdio.h>\n\nint main() {\n    ",
    "def test_addition():\n    assert add(1, 2) == 3\n",
    "import numpy as np\n\nx = np.array([",
    '{\n  "name": "example",\n  "version": "1.0.0",\n  "',
    "#!/bin/bash\n\nfor file in *.txt; do\n",
    "public class Person {\n    private String name;\n",
    "try:\n    value = int(text)\nexcept ValueError:\n    ",
    "def is_even(n):\n    return n % 2 == 0\n\ndef is_odd(n):\n",
    ".button {\n  color: white;\n  ",
    "import unittest\n\nclass TestParser(unittest.TestCase):\n",
    "const items = [1, 2, 3];\nitems.forEach(",
    "def read_csv(path):\n    rows = []\n    with open(path) as file:\n",
    "switch (day) {\n  case 1:\n    ",
    "# Compute the mean and the variance\ndef mean(values):\n",
    "while True:\n    line = input()\n    if ",
)
TABLES = (
    "| name | age | city |\n|---|---|---|\n| Anna | 31 |",
    "date,temperature,rain\n2021-01-01,3,0\n2021-01-02,",
    "Item\tPrice\nApples\t2.50\nBread\t",
    "1. Mercury\n2. Venus\n3.",
    "id,name,score\n1,Smith,88\n2,Jones,75\n3,",
    "| country | capital |\n|---|---|\n| France | Paris |\n| Spain |",
    "Monday: 9:00 - 17:00\nTuesday:",
    "Year Population\n1900 1,650\n1910 1,750\n1920",
    "x = 1, y = 2\nx = 2, y = 4\nx = 3,",
    "Ingredients:\n- 2 cups of flour\n- 1 cup of",
    "| planet | mass | moons |\n|---|---|---|\n| Earth | 1.0 |",
    "H 1 1.008\nHe 2 4.003\nLi 3",
    "product;quantity;price\npen;10;1.20\nbook;",
    "Name: John Smith\nAge: 45\nOccupation:",
    "January 31\nFebruary 28\nMarch",
    "a | b | a and b\n0 | 0 | 0\n0 | 1 |",
    "Team A 3 - 1 Team B\nTeam C 2 - 2 Team D\nTeam E",
    "| step | loss |\n|---|---|\n| 100 | 2.31 |\n| 200 |",
    "08:00 Breakfast\n09:00 Meeting\n10:00",
    "timestamp,level,message\n12:00:01,INFO,started\n12:00:02,",
    "1 x 7 = 7\n2 x 7 = 14\n3 x 7 =",
    "City, Country, Population\nTokyo, Japan, 37 million\nDelhi,",
    "- [ ] buy milk\n- [ ] call the bank\n- [",
    "Chapter 1: The Beginning\nChapter 2:",
)
KINDS: dict[str, tuple[str, ...]] = {"prose": PROSE, "dialogue": DIALOGUE, "code": CODE, "tables": TABLES}
HALVES = ("choose", "report")


def openings_of(half: str, count: int = 12) -> list[tuple[str, str]]:
    """The openings of a half, so many of each kind, with their kinds; the halves take turns within each kind."""
    found: list[tuple[str, str]] = []
    for kind, texts in KINDS.items():
        for text in texts[HALVES.index(half) :: len(HALVES)][:count]:
            found.append((kind, text))
    return found
