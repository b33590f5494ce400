"""Published results, measured again by their own protocols."""
