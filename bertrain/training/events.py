"""What happens in a run, told to whoever wants to know while it happens."""

from __future__ import annotations

from bertrain.config.settings import Settings
from bertrain.data.feed.loader import Loader
from bertrain.run.checkpoint import Progress
from bertrain.training.state import TrainState


class Events:
    """Called by the trainer on every rank at the same points; this one takes no notice of anything."""

    def building(self, settings: Settings, state: TrainState, loader: Loader) -> None:
        """Settings are what they will be, weights and data are there; nothing has been computed yet."""

    def starting(self) -> None:
        """Everything is built and warmed up, and the first step comes next. No example has been used yet."""

    def evaluating(self, samples: int) -> None:
        """An evaluation begins after so many examples."""

    def evaluated(self, samples: int, result: dict[str, float]) -> None:
        """It came to this."""

    def ended(self, progress: Progress, reason: str) -> None:
        """The last step is done and evaluated; what is left to do is to save."""
