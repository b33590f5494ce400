"""Tables and figures of the LoopGuard paper, each made by a script of its own."""
