"""The words of the recall models."""

from __future__ import annotations

SPECIAL = tuple("<s> <unk> <pad> . fact ask answer unknown".split())
BOS, UNK, PAD, END, FACT, ASK, ANSWER, UNKNOWN = SPECIAL
"""`END` closes a chain of facts and ends an answer; `UNKNOWN` is the answer if nothing was stated."""
TURNS: tuple[str, ...] = tuple(f"turn{i}" for i in range(1, 17))
KEYS: tuple[str, ...] = tuple(
    """adam alba anna axel bela bruno carla cesar clara dana david diego edith elena emil erik eva felix fiona frida
    georg gina greta hanna hugo ida igor ines ivan jana jonas julia karl katya lara lena leo lotte luca maja marco
    maria mila nadia nils nina nora olaf olga oscar otto paula petra rosa ruth samir sara sofia tamar theo vera viktor
    wanda xenia""".split()
)
VALUES: tuple[str, ...] = tuple(
    """anchor apple arrow basket bell bottle bread bridge brush button cabin candle carpet castle chair clock coat
    coin compass copper cotton crown cup diamond door drum engine feather fiddle flag flute fork garden glass glove
    hammer harbor hat honey iron jacket kettle key lamp lantern lemon letter mirror needle onion paper pearl pencil
    pillow pipe plum ribbon ring rope saddle shovel spoon table violin""".split()
)
FILLER: tuple[str, ...] = tuple(
    """the a and of to in it was that had on at with for from by as but then there when while after before near over
    under again once more some few many each all both still just only even also very never always
    often soon later today morning evening night day week month summer winter spring autumn rain snow wind sun cloud
    river lake hill field forest road street town village house market station train boat horse dog cat bird fish tree
    leaf stone sand sea sky star moon people child friend neighbor farmer baker teacher doctor sailor driver walked
    stood looked waited talked laughed carried opened closed found left came went stayed turned began worked slept
    listened remembered old young small large quiet bright cold warm slow what said""".split()
)
QUESTION_END = ("what", "was", "said")
"""Follows the key in a question, so that heads that look a few places back see the key alone."""
GAP = 3  # smallest number of filler words between facts, and at both ends, for heads that look a few places back
