"""The run folder: checkpoints, metrics and telemetry. Training writes it, everything to its right reads it."""
