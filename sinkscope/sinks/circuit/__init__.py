"""The circuit of each sink, from what marks its place to the heads that attend to it."""
