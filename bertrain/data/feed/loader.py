"""The Loader: the steps of a run as batches, made ahead of time in a background thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from bertrain.base.errors import UserError
from bertrain.base.seeds import Words, derive
from bertrain.config.model_size import multiply_adds
from bertrain.config.settings import Settings
from bertrain.data.feed.assemble import assemble_batch, placeholder_block
from bertrain.data.feed.balance import Balance, Sizes, per_rank
from bertrain.data.feed.batching import Capacity, bin_capacity, choose_policy, step_rows, strata_of
from bertrain.data.feed.step_size import StepSize
from bertrain.data.formats.block import Block, draw_masks
from bertrain.data.formats.masking import Ints, MaskingRules, count_predictions
from bertrain.data.formats.source import DataSource
from bertrain.model.batch import Batch

EVALUATION_SEED = 12345  # evaluation masks are the same in every run, whatever its seed
EVALUATION_STEP = 1024  # examples dealt into bins together
MOST_STEPS_AHEAD, MOST_EXAMPLES_AHEAD = 8, 4096  # limits of `sizes_ahead`, which returns at least one step
Item = TypeVar("Item")


@dataclass(frozen=True)
class Step:
    """One optimizer step as one rank sees it. Counts are of the whole step, all ranks together."""

    number: int
    bins: list[Batch]  # the bins of this rank; empty where there are fewer bins than ranks
    balance: Balance
    num_tokens: int
    num_sequences: int
    num_predictions: int
    first_position: int
    places: list[Ints] = field(default_factory=list)
    """For each of `bins`, the places of its sequences among all sequences of the step, in the order of examples."""

    texts_per_example: int = 1

    @property
    def num_texts(self) -> int:
        return self.num_sequences * self.texts_per_example

    @property
    def num_bins(self) -> int:
        return self.balance.num_bins

    @property
    def next_position(self) -> int:
        """Where the next step begins; also the number of examples trained on after this one."""
        return self.first_position + self.num_sequences


class Loader:
    """Makes the steps of a run from a data set. The caller passes rank and world; ranks do not communicate."""

    def __init__(
        self, data: DataSource, settings: Settings, *, rank: int = 0, world: int = 1, pin_memory: bool = False
    ) -> None:
        check_data(data, settings)
        self.data, self.rank, self.world, self._pin_memory = data, rank, world, pin_memory
        self._settings = settings
        self._policy = choose_policy(
            settings.batch.policy, group_size=settings.batch.group_size, packing=settings.batch.packing
        )
        self._max_seq_length = settings.data.max_seq_length
        self._pad_id = data.vocabulary.id_of("[PAD]")
        self._mean_length = float(data.lengths.mean())
        self._masking = MaskingRules.of(
            data.vocabulary,
            max_predictions=settings.data.max_predictions,
            probability=settings.data.mask_probability,
            whole_word=settings.data.whole_word,
        )
        self.capacity = self._capacity(settings.batch.token_budget)
        self._strata: list[Ints] | None = None  # of batch.shares

    @cached_property
    def step_size(self) -> StepSize:
        part = training_examples(self.data, self._settings)
        num_tokens = int(self.data.example_lengths[part.start : part.stop].sum(dtype=np.int64))
        return StepSize.of(self._settings.batch, Fraction(num_tokens, len(part)))

    def step(self, number: int, position: int) -> Step:
        """Step `number`, whose first example is at `position` of the endless order."""
        return self._step(number, position, self._read)

    def rehearsal(self, number: int, position: int) -> Step:
        """A step of the same sizes that repeats one token; no example is read."""
        token, settings = self._masking.mask_id, self._settings
        return self._step(number, position, lambda rows, keys: placeholder_block(*self._sizes(rows), token, settings))

    def steps(self, number: int, position: int, stop: int, *, ahead: int = 2) -> Iterator[Step]:
        """Steps `number` .. `stop` - 1 in order, up to `ahead` of them made in the background."""

        def produce() -> Iterator[Step]:
            next_position = position
            for next_number in range(number, stop):
                step = self.step(next_number, next_position)
                next_position = step.next_position
                yield step

        return in_background(produce(), ahead)

    def evaluation(self, max_examples: int) -> Iterator[Batch]:
        """This rank's bins of an evaluation: evenly strided examples, masked the same way every time."""
        return (batch for _, batch in self.evaluation_bins(max_examples))

    def evaluation_bins(self, max_examples: int, at_once: int = EVALUATION_STEP) -> Iterator[tuple[Ints, Batch]]:
        """The same with the rows of each bin, in the order of its sequences; `at_once` are dealt into bins together."""
        total = len(self.data)
        count = min(max_examples or total, total)
        chosen = np.arange(count) * total // count
        key = derive(EVALUATION_SEED, "mask", "evaluation")
        number = 0
        for first in range(0, count, at_once):
            rows = chosen[first : first + at_once]
            for bin in self._deal(self._sizes(rows), self.capacity):
                if number % self.world == self.rank:
                    keys = np.full(len(bin), key, dtype=np.uint64)
                    yield rows[bin], self._batch(rows[bin], self._read(rows[bin], keys), dropout_seed=0)
                number += 1

    def sizes_ahead(self, position: int) -> list[Sizes]:
        """Lengths and predictions per example of the next few steps; no example is read."""
        found: list[Sizes] = []
        dealt = 0
        while not found or (len(found) < MOST_STEPS_AHEAD and dealt < MOST_EXAMPLES_AHEAD):
            _, rows = self._rows(position + dealt)
            found.append(self._sizes(rows))
            dealt += len(rows) // self.data.texts_per_example
        return found

    def balances(self, steps: list[Sizes], token_budget: int) -> list[Balance]:
        """The load of each rank in steps of these sizes, dealt into bins of `token_budget`."""
        capacity = self._capacity(token_budget)
        return [self._balance_of(self._deal(sizes, capacity), sizes, capacity) for sizes in steps]

    def _step(self, number: int, position: int, read: Callable[[Ints, Words], Block]) -> Step:
        epochs, rows = self._rows(position)
        seed = self._settings.train.seed
        mask_keys = np.zeros(len(rows), dtype=np.uint64)
        for epoch in np.unique(epochs):
            mask_keys[epochs == epoch] = derive(seed, "mask", int(epoch))
        lengths, predictions = sizes = self._sizes(rows)
        bins = self._deal(sizes, self.capacity)
        batches = []
        for index in range(self.rank, len(bins), self.world):
            own = bins[index]
            block = read(rows[own], mask_keys[own])
            batches.append(self._batch(rows[own], block, dropout_seed=derive(seed, "dropout", number, index)))
        return Step(
            number=number,
            bins=batches,
            balance=self._balance_of(bins, sizes, self.capacity),
            num_tokens=int(lengths.sum()),
            num_sequences=len(rows) // self.data.texts_per_example,
            num_predictions=int(predictions.sum()),
            first_position=position,
            places=bins[self.rank :: self.world],
            texts_per_example=self.data.texts_per_example,
        )

    def _rows(self, position: int) -> tuple[Ints, Ints]:
        """Epochs and rows of the step that begins at `position`."""
        part, texts = training_examples(self.data, self._settings), self.data.texts_per_example
        lengths_of_part = self.data.example_lengths[part.start : part.stop]
        if self._strata is None:
            self._strata = strata_of(lengths_of_part, self._settings)
        mean_length = self._mean_length * texts
        size = self.step_size.at(position)
        epochs, rows = step_rows(position, self._settings, lengths_of_part, mean_length, self._strata, size=size)
        rows += part.start
        return np.repeat(epochs, texts), (rows[:, None] * texts + np.arange(texts)).ravel()

    def _sizes(self, rows: Ints) -> Sizes:
        lengths = self.data.lengths[rows].astype(np.int64)
        if self.data.predictions is not None:
            return lengths, self.data.predictions[rows].astype(np.int64)
        return lengths, count_predictions(lengths, self._masking.max_predictions, self._masking.probability)

    def _capacity(self, token_budget: int) -> Capacity:
        data, capacity = self.data, bin_capacity(self._settings, self._mean_length, token_budget)
        if data.predictions is None:
            return capacity
        return replace(capacity, predictions=capacity_for_static_masks(data.lengths, data.predictions, capacity))

    def _deal(self, sizes: Sizes, capacity: Capacity) -> list[Ints]:
        return self._policy.deal(*sizes, capacity, self._max_seq_length)

    def _balance_of(self, bins: list[Ints], sizes: Sizes, capacity: Capacity) -> Balance:
        """The balance of a step whose bins hold these indices into its sizes."""
        of_bins = self._policy.measure(bins, *sizes, capacity, self._max_seq_length)
        tokens, attention, slots, _ = per_rank(of_bins, self.world).T
        work = multiply_adds(self._settings.model, tokens, attention, slots)
        return Balance(len(bins), tokens.tolist(), attention.tolist(), work.tolist())

    def _read(self, rows: Ints, mask_keys: Words) -> Block:
        block = self.data.read(rows)
        return block if block.masks is not None else draw_masks(block, rows, mask_keys, self._masking)

    def _batch(self, rows: Ints, block: Block, *, dropout_seed: int) -> Batch:
        batch = assemble_batch(
            block,
            policy=self._policy,
            shape=self._policy.shape_of(*self._sizes(rows), self.capacity, self._max_seq_length),
            max_seq_length=self._max_seq_length,
            pad_id=self._pad_id,
            dropout_seed=dropout_seed,
            num_segments=self._settings.model.num_segments,
        )
        return batch.pin_memory() if self._pin_memory else batch


def in_background(items: Iterator[Item], ahead: int) -> Iterator[Item]:
    """The items in order; a thread makes up to `ahead` of them in advance. Its exceptions are raised here."""
    end: Any = object()
    pool = ThreadPoolExecutor(1, "bertrain-loader")
    try:
        waiting = deque(pool.submit(next, items, end) for _ in range(ahead))
        while (item := waiting.popleft().result()) is not end:
            waiting.append(pool.submit(next, items, end))
            yield item
    finally:
        pool.shutdown(cancel_futures=True)


def capacity_for_static_masks(
    lengths: npt.NDArray[np.int32], predictions: npt.NDArray[np.int32], capacity: Capacity
) -> int:
    """The predictions that a bin must hold when the rows bring their own masks.

    With p the share of tokens predicted in the whole data set, no row has more than p times its length and `excess`
    beyond; so no bin within the other two capacities can exceed this one, whatever rows it holds.
    """
    share = float(predictions.sum(dtype=np.int64)) / float(lengths.sum(dtype=np.int64))
    most = np.zeros(int(lengths.max()) + 1, dtype=np.int64)  # predictions of any row of each length
    np.maximum.at(most, lengths, predictions)
    excess = float((most - share * np.arange(len(most))).max())
    needed = int(share * capacity.tokens + excess * capacity.sequences) + 1
    return min(needed, capacity.sequences * max(1, int(predictions.max())), capacity.tokens)


def has_pairs(data: DataSource) -> bool:
    """Whether its examples are pairs of segments; either all are, or none."""
    return bool(data.read(np.array([0])).segment_b[0] < data.lengths[0])


def check_data(data: DataSource, settings: Settings) -> None:
    words, limit = len(data.vocabulary.words), settings.data.max_seq_length
    # Pretrained weights may have more embeddings than their vocabulary has words; a task uses the weights' vocabulary.
    if words != settings.model.vocab_size and not (settings.task.name and words < settings.model.vocab_size):
        sizes = f"{data.folder} has a vocabulary of {words} words, but model.vocab_size is {settings.model.vocab_size}"
        cure = "prepare the data with the model's vocabulary, or leave --model.vocab_size out"
        raise UserError("vocabulary-size", f"{sizes}; {cure}")
    longest = int(data.lengths.max())
    if longest > limit:
        what = f"{data.folder} has an example of {longest} tokens, more than data.max_seq_length {limit}"
        cure = f"prepare the data with --max-seq-length {limit}, or set --data.max_seq_length {longest}"
        raise UserError("example-too-long", f"{what}; {cure}")
    predicts_next = settings.model.head == "pretrain" and settings.model.nsp
    if predicts_next and not has_pairs(data):
        cure = "set --model.nsp false, or prepare it without --full-sentences"
        raise UserError("no-next-sentence", f"{data.folder} has examples of one segment, not pairs; {cure}")


def check_shares(data: DataSource, settings: Settings) -> None:
    """Refuse training data without the lengths that batch.shares asks for."""
    part = training_examples(data, settings)
    strata_of(data.example_lengths[part.start : part.stop], settings)


def training_examples(data: DataSource, settings: Settings) -> range:
    """The examples that data.slice selects for training; there must be at least one."""
    rows = settings.data.rows(data.num_examples)
    if not rows:
        chosen = settings.data.slice
        raise UserError(
            "empty-slice",
            f"--data.slice {chosen} selects none of the {data.num_examples} rows in {data.folder}; widen it",
        )
    return rows
