"""A model to load: its configuration, tokenizer, dtype and device, its kind of object, and what is refused."""
