"""Sites of a model that are read, and sites that are edited."""
