"""A model opened: by name, folder or file, or as the user holds it, with its adapter."""
