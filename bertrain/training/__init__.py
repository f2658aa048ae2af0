"""The training loop, the engines that compute a step, and evaluation."""
