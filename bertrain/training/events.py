"""Callbacks of a run in training."""

from __future__ import annotations

from bertrain.config.settings import Settings
from bertrain.data.feed.loader import Loader
from bertrain.run.checkpoint import Progress
from bertrain.training.state import TrainState


class Events:
    """Called by the loop, on every rank at the same points; these do nothing."""

    def building(self, settings: Settings, state: TrainState, loader: Loader) -> None:
        """Called when settings, weights and data are ready, before anything is computed."""

    def starting(self) -> None:
        """Called before the first step, when everything is built and warmed up. No example has been used yet."""

    def evaluating(self, samples: int) -> None:
        """Called before an evaluation, with the number of examples so far."""

    def evaluated(self, samples: int, result: dict[str, float]) -> None:
        """Called after an evaluation, with its metrics."""

    def ended(self, progress: Progress, reason: str) -> None:
        """Called when the last step is done and evaluated, before it is saved."""
