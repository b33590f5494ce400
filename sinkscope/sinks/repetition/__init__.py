"""How repeated tokens become sinks, and the consequences."""
