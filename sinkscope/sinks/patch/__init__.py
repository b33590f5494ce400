"""A patch that prevents sinks at repeated tokens, and what it costs."""
