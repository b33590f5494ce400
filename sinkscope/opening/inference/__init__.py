"""An adapter that the names of a model propose, proved by edits, rows and sums."""
