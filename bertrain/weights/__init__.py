"""Other people's checkpoints, in and out."""
