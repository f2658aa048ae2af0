"""bertrain: text to training data, pre-training, evaluation and weights, on a CPU, a GPU or many."""

__version__ = "0.1.0"
