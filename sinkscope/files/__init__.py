"""Files that are written whole, records, results, run folders and jobs; nothing here knows a model."""
