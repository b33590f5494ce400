"""Dialogues of several turns: the paper's benchmark (LoopServe, section 4), and one that the recall model can answer."""
