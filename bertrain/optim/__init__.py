"""Optimizers over one flat buffer, gradient clipping and learning-rate schedules."""
