"""Dialogues of several turns: LoopServe's benchmark, and one for the recall model."""
