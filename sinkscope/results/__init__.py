"""How results appear to people: names and counts in words, tables, figures, options of commands, and the console."""
