"""How repeated tokens become sinks, and what follows."""
