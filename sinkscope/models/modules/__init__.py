"""Where the parts of a model are, and what their weights say."""
