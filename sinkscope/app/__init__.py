"""The command line, the output of commands, pages, and the sink card."""
