"""Small scripts, one per model, table or figure."""
