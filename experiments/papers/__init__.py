"""The three papers, artefact by artefact: what each asks, the command that answers it, and what it measured."""
