"""Memory and time of a run, worked out before it starts."""
