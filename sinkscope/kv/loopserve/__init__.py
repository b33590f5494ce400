"""LoopServe: sparse attention over a new turn's prompt, and a cache of which decoding reads a chosen part."""
