"""Documents to training examples, by parallel workers."""
