"""Examples to steps, steps to bins, bins to batches."""
