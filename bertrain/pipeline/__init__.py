"""`bertrain train`: text in, a trained model out, by the verbs below it."""
