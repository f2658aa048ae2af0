"""`bertrain train`: text in, a trained model out, by the commands below it."""
