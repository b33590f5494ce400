"""Dialogues of several turns: LoopServe's benchmark, and one that the recall model can answer."""
