"""The size of each step: always the same, or growing over the first tokens of a run (`batch.ramp_tokens`).

The size depends only on where a step begins in the endless order of examples, so it is the same on every rank and in
a resumed run. The tokens before a position are estimated as the number of examples times their mean length.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from bertrain.config.settings import BatchSettings


@dataclass(frozen=True)
class StepSize:
    """Sizes in sequences, or in tokens where `batch.tokens` measures a step."""

    full: int
    first: int
    ramp: int
    """Sequences or tokens over which steps grow from `first` to `full`; 0: all are full."""
    per_example: Fraction
    """The size of an example in the unit of a step: 1 sequence, or its mean tokens."""

    @staticmethod
    def of(batch: BatchSettings, mean_length: Fraction) -> StepSize:
        """The sizes by these settings, on examples of `mean_length` tokens."""
        if batch.sequences:
            return StepSize(batch.sequences, batch.ramp_from, int(batch.ramp_tokens / mean_length), Fraction(1))
        return StepSize(batch.tokens, batch.ramp_from, batch.ramp_tokens, mean_length)

    def at(self, position: int) -> int:
        """The size of the step that begins at `position`."""
        return self._after(int(position * self.per_example))

    def examples_in(self, steps: int, position: int = 0) -> float:
        """About how many examples the next `steps` steps have; exact where sequences measure a step."""
        start = done = int(position * self.per_example)
        while steps and done < self.ramp:
            done += self._after(done)
            steps -= 1
        return float((done - start + steps * self.full) / self.per_example)

    def full_steps(self, steps: int) -> float:
        """How many steps of full size have as many examples as the first `steps` of a run."""
        return self.examples_in(steps) * float(self.per_example) / self.full if self.ramp else steps

    def steps_for(self, examples: float, position: int = 0) -> float:
        """The inverse of `examples_in`: about how many steps the next `examples` make."""
        done = int(position * self.per_example)
        end, steps = done + examples * float(self.per_example), 0
        while done < min(self.ramp, end):
            if (size := self._after(done)) > end - done:
                return steps + (end - done) / size
            done += size
            steps += 1
        return steps + (end - done) / self.full

    def _after(self, done: int) -> int:
        """The size of the next step after `done` sequences or tokens."""
        return self.full if done >= self.ramp else self.first + (self.full - self.first) * done // self.ramp
