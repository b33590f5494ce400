"""The sinks of a model in four steps: survey, spikes, writers, needs; then what marks a place, and copies of a token."""
