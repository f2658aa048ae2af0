"""Fine-tuning tasks: files to examples, model outputs to metrics and predictions. Knows nothing of training."""
