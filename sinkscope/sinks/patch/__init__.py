"""A patch that repairs repetition, and what it costs."""
