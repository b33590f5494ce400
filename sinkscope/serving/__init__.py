"""Generation under interventions, and a proxy that ends answers which loop in front of any server."""
