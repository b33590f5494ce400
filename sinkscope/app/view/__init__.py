"""A model on a text, explored in a page, a notebook or a browser: `sinkscope view`."""
