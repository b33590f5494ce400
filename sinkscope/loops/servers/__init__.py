"""A proxy before servers of models, and how it ends their streams; loads no torch."""
