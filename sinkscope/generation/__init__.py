"""How answers are generated: which token comes next, dialogues of several turns, and selection while decoding."""
