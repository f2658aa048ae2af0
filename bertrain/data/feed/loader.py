"""Examples to batches: the steps of a run, dealt into bins, masked, laid out, made ready ahead of time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from bertrain.base.errors import UserError
from bertrain.base.seeds import derive
from bertrain.config.settings import Settings
from bertrain.data.feed.balance import Balance, Sizes, weigh
from bertrain.data.feed.batching import Capacity, capacity_for, choose_policy, step_by_sequences, step_by_tokens
from bertrain.data.formats.block import Block, Masks
from bertrain.data.formats.masking import Ints, MaskingRules, count_predictions, mask_tokens
from bertrain.data.formats.source import DataSource
from bertrain.model.batch import IGNORED, Batch

EVALUATION_SEED = 12345  # evaluation masks are the same in every run, whatever its seed
EVALUATION_STEP = 1024  # examples dealt into bins together
MOST_STEPS_AHEAD, MOST_EXAMPLES_AHEAD = 8, 4096  # that `sizes_ahead` looks at, but at least a step


@dataclass(frozen=True)
class Step:
    """One optimizer step as one rank sees it. Counts are of the whole step, all ranks together."""

    number: int
    bins: list[Batch]
    """The bins of this rank; none, where there are fewer bins than ranks."""
    balance: Balance
    num_tokens: int
    num_sequences: int
    num_predictions: int
    first_position: int

    @property
    def num_bins(self) -> int:
        return self.balance.num_bins

    @property
    def next_position(self) -> int:
        """Where the next step begins; also the number of examples trained on after this one."""
        return self.first_position + self.num_sequences


class Loader:
    """Makes the steps of a run from a data set. It is told its rank; it asks nobody."""

    def __init__(
        self, shards: DataSource, settings: Settings, *, rank: int = 0, world: int = 1, pin_memory: bool = False
    ) -> None:
        check_data(shards, settings)
        self.shards, self.rank, self.world, self._pin_memory = shards, rank, world, pin_memory
        self._settings = settings
        self._policy = choose_policy(
            settings.batch.policy, group_size=settings.batch.group_size, packing=settings.batch.packing
        )
        self._max_seq_length = settings.data.max_seq_length
        words = shards.vocabulary
        self._pad_id = words.id_of("[PAD]")
        self._mean_length = float(shards.lengths.mean())
        self._rules = MaskingRules(
            vocab_size=len(words.words),
            mask_id=words.id_of("[MASK]"),
            special_ids=(words.id_of("[CLS]"), words.id_of("[SEP]"), words.id_of("[PAD]")),
            max_predictions=settings.data.max_predictions,
            probability=settings.data.mask_probability,
            continues_word=words.continues_word if settings.data.whole_word else None,
        )
        self.capacity = self._capacity(settings.batch.token_budget)

    def _capacity(self, token_budget: int) -> Capacity:
        settings, shards = self._settings, self.shards
        capacity = capacity_for(
            token_budget,
            bin_sequences=settings.batch.bin_sequences,
            mean_length=self._max_seq_length if self._policy.pads_each else self._mean_length,
            max_predictions=settings.data.max_predictions,
            mask_probability=settings.data.mask_probability,
        )
        if shards.predictions is None:
            return capacity
        return replace(capacity, predictions=room_for_static_masks(shards.lengths, shards.predictions, capacity))

    def step(self, number: int, position: int) -> Step:
        """Step `number`, whose first example stands at `position` of the endless order."""
        return self._step(number, position, self.shards.read)

    def rehearsal(self, number: int, position: int) -> Step:
        """A step of the same sizes, with the same word over and over: nothing is read of the examples themselves."""
        return self._step(number, position, self._stand_in)

    def _stand_in(self, rows: Ints) -> Block:
        lengths, predictions = self._sizes(rows)
        word = self._rules.mask_id
        masks = None
        if self.shards.predictions is not None:
            first = np.cumsum(predictions) - predictions
            positions = np.arange(predictions.sum()) - np.repeat(first, predictions)
            masks = Masks(predictions, positions, np.full_like(positions, word))
        answers = None
        if (head := self._settings.model.head) != "pretrain":
            columns, kind = 2 if head == "span" else 1, np.float32 if head == "regress" else np.int64
            answers = np.zeros((len(rows), columns), dtype=kind)
        return Block(np.full(lengths.sum(), word), lengths, lengths // 2, np.zeros_like(lengths), masks, answers)

    def _step(self, number: int, position: int, read: Callable[[Ints], Block]) -> Step:
        epochs, rows = self._rows(position)
        seed = self._settings.train.seed
        mask_keys = np.zeros(len(rows), dtype=np.uint64)
        for epoch in np.unique(epochs):
            mask_keys[epochs == epoch] = derive(seed, "mask", int(epoch))
        lengths, predictions = sizes = self._sizes(rows)
        bins = self._deal(sizes, self.capacity)
        own = range(self.rank, len(bins), self.world)
        return Step(
            number=number,
            bins=[
                self._batch(rows[bins[i]], mask_keys[bins[i]], derive(seed, "dropout", number, i), read) for i in own
            ],
            balance=self._weigh(bins, sizes, self.capacity),
            num_tokens=int(lengths.sum()),
            num_sequences=len(rows),
            num_predictions=int(predictions.sum()),
            first_position=position,
        )

    def sizes_ahead(self, position: int) -> list[Sizes]:
        """Lengths and numbers of predictions of the next few steps; no example is read."""
        found: list[Sizes] = []
        dealt = 0
        while not found or (len(found) < MOST_STEPS_AHEAD and dealt < MOST_EXAMPLES_AHEAD):
            _, rows = self._rows(position + dealt)
            found.append(self._sizes(rows))
            dealt += len(rows)
        return found

    def balances(self, steps: list[Sizes], token_budget: int) -> list[Balance]:
        """How steps of these sizes would lie on the ranks, dealt into bins of `token_budget`."""
        capacity = self._capacity(token_budget)
        return [self._weigh(self._deal(sizes, capacity), sizes, capacity) for sizes in steps]

    def _rows(self, position: int) -> tuple[Ints, Ints]:
        """Epochs and rows of the step that begins at `position`."""
        batch, seed = self._settings.batch, self._settings.train.seed
        part = training_rows(self.shards, self._settings)
        if batch.sequences:
            epochs, rows = step_by_sequences(position, batch.sequences, len(part), seed)
        else:
            lengths_of_part = self.shards.lengths[part.start : part.stop]
            epochs, rows = step_by_tokens(position, batch.tokens, lengths_of_part, self._mean_length, seed)
        rows += part.start
        return epochs, rows

    def _deal(self, sizes: Sizes, capacity: Capacity) -> list[Ints]:
        return self._policy.deal(*sizes, capacity, self._max_seq_length)

    def _weigh(self, bins: list[Ints], sizes: Sizes, capacity: Capacity) -> Balance:
        return weigh(
            bins,
            *sizes,
            policy=self._policy,
            capacity=capacity,
            max_seq_length=self._max_seq_length,
            model=self._settings.model,
            ranks=self.world,
        )

    def steps(self, number: int, position: int, stop: int, *, ahead: int = 2) -> Iterator[Step]:
        """Steps `number` .. `stop` in order, up to `ahead` of them made in the background."""
        ready: queue.Queue[Step | BaseException] = queue.Queue(ahead)
        ended = threading.Event()

        def offer(item: Step | BaseException) -> None:
            while not ended.is_set():
                try:
                    ready.put(item, timeout=0.1)
                    return
                except queue.Full:
                    continue

        def produce() -> None:
            next_position = position
            try:
                for next_number in range(number, stop):
                    if ended.is_set():
                        return
                    step = self.step(next_number, next_position)
                    next_position = step.next_position
                    offer(step)
            except BaseException as error:  # handed to the consumer, which raises it
                offer(error)

        worker = threading.Thread(target=produce, name="bertrain-loader", daemon=True)
        worker.start()
        try:
            for _ in range(number, stop):
                item = ready.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            ended.set()
            worker.join()

    def evaluation(self, max_examples: int) -> Iterator[Batch]:
        """This rank's bins of an evaluation: evenly strided examples, masked the same way every time."""
        return (batch for _, batch in self.evaluation_bins(max_examples))

    def evaluation_bins(self, max_examples: int, at_once: int = EVALUATION_STEP) -> Iterator[tuple[Ints, Batch]]:
        """The same with the rows of each bin, in the order of its sequences; `at_once` are dealt into bins together."""
        total = len(self.shards)
        count = min(max_examples or total, total)
        chosen = np.arange(count) * total // count
        key = derive(EVALUATION_SEED, "mask", "evaluation")
        number = 0
        for first in range(0, count, at_once):
            rows = chosen[first : first + at_once]
            for bin in self._deal(self._sizes(rows), self.capacity):
                if number % self.world == self.rank:
                    keys = np.full(len(bin), key, dtype=np.uint64)
                    yield rows[bin], self._batch(rows[bin], keys, 0, self.shards.read)
                number += 1

    def _sizes(self, rows: Ints) -> Sizes:
        """Length and number of predictions of each row."""
        lengths = self.shards.lengths[rows].astype(np.int64)
        if self.shards.predictions is not None:
            return lengths, self.shards.predictions[rows].astype(np.int64)
        return lengths, count_predictions(lengths, self._rules.max_predictions, self._rules.probability)

    def _batch(self, rows: Ints, mask_keys: np.ndarray, dropout_seed: int, read: Callable[[Ints], Block]) -> Batch:
        lengths, predictions = self._sizes(rows)
        shape = self._policy.shape_of(lengths, predictions, self.capacity, self._max_seq_length)
        layout = self._policy.lay_out(lengths, shape.tokens, self._max_seq_length)
        num_slots = self._policy.num_slots(shape, self._max_seq_length)

        ends = np.cumsum(lengths)
        packed_starts = ends - lengths  # where each example begins when nothing lies between them
        block = read(rows)
        if block.masks is None:
            masked, chosen, labels = mask_tokens(block.tokens, packed_starts, lengths, rows, mask_keys, self._rules)
        else:
            masked, labels = block.tokens, block.masks.labels
            chosen = block.masks.positions + np.repeat(packed_starts, block.masks.counts)
        within = np.arange(len(masked)) - np.repeat(packed_starts, lengths)
        place = within + np.repeat(layout.starts, lengths)

        input_ids = np.full(shape.tokens, self._pad_id, dtype=np.int64)
        input_ids[place] = masked
        segment_ids = np.zeros(shape.tokens, dtype=np.int64)
        segment_ids[place] = within >= np.repeat(block.segment_b, lengths)
        boundaries = layout.boundaries
        sequence_lengths = np.diff(boundaries)
        position_ids = np.arange(shape.tokens) - np.repeat(boundaries[:-1], sequence_lengths)

        cu_seqlens = np.full(num_slots + 1, shape.tokens, dtype=np.int32)
        cu_seqlens[: len(boundaries)] = boundaries
        nsp_labels = np.full(num_slots, IGNORED, dtype=np.int64)
        nsp_labels[layout.slots] = block.is_random
        is_real = np.zeros(num_slots, dtype=bool)
        is_real[layout.slots] = True
        mlm_positions = np.zeros(shape.predictions, dtype=np.int64)
        mlm_positions[: len(chosen)] = place[chosen]
        mlm_labels = np.full(shape.predictions, IGNORED, dtype=np.int64)
        mlm_labels[: len(chosen)] = labels
        answers = None
        if block.answers is not None:
            answers = np.zeros((num_slots, block.answers.shape[1]), dtype=block.answers.dtype)
            answers[layout.slots] = block.answers
        batch = Batch(
            input_ids=torch.from_numpy(input_ids),
            segment_ids=torch.from_numpy(segment_ids),
            position_ids=torch.from_numpy(position_ids),
            cu_seqlens=torch.from_numpy(cu_seqlens),
            cls_positions=torch.from_numpy(np.minimum(cu_seqlens[:-1], shape.tokens - 1).astype(np.int64)),
            mlm_positions=torch.from_numpy(mlm_positions),
            mlm_labels=torch.from_numpy(mlm_labels),
            nsp_labels=torch.from_numpy(nsp_labels),
            is_real=torch.from_numpy(is_real),
            answers=None if answers is None else torch.from_numpy(answers),
            max_seqlen=self._max_seq_length,
            sequence_lengths=tuple(sequence_lengths.tolist()),
            dropout_seed=dropout_seed,
            num_tokens=len(masked),
            num_sequences=len(rows),
            num_predictions=len(chosen),
        )
        return batch.pin_memory() if self._pin_memory else batch


def room_for_static_masks(
    lengths: npt.NDArray[np.int32], predictions: npt.NDArray[np.int32], capacity: Capacity
) -> int:
    """Predictions that a bin must have room for when the rows bring their own.

    With p the share of tokens predicted in the whole data set, no row has more than p times its length and `excess`
    beyond; so no bin within the other two capacities can exceed this one, whatever rows it holds.
    """
    share = float(predictions.sum(dtype=np.int64)) / float(lengths.sum(dtype=np.int64))
    most = np.zeros(int(lengths.max()) + 1, dtype=np.int64)  # predictions of any row of each length
    np.maximum.at(most, lengths, predictions)
    excess = float((most - share * np.arange(len(most))).max())
    needed = int(share * capacity.tokens + excess * capacity.sequences) + 1
    return min(needed, capacity.sequences * max(1, int(predictions.max())))


def check_data(shards: DataSource, settings: Settings) -> None:
    """Refuse data that was not made for these settings."""
    words, limit = len(shards.vocabulary.words), settings.data.max_seq_length
    # Weights of others may have a few rows more than words; a task is read with the words that come with them.
    if words != settings.model.vocab_size and not (settings.task.name and words < settings.model.vocab_size):
        raise UserError(
            f"{shards.folder} was prepared with a vocabulary of {words} words, but model.vocab_size is "
            f"{settings.model.vocab_size}; prepare it with the model's vocabulary or set --model.vocab_size {words}"
        )
    longest = int(shards.lengths.max())
    if longest > limit:
        raise UserError(
            f"{shards.folder} holds an example of {longest} tokens, more than data.max_seq_length {limit}; "
            f"prepare it with --max-seq-length {limit} or set --data.max_seq_length {longest}"
        )
    if (
        settings.model.head == "pretrain"
        and settings.model.nsp
        and shards.read(np.array([0])).segment_b[0] == shards.lengths[0]
    ):
        raise UserError(
            f"{shards.folder} holds examples of one segment (--full-sentences), without a next sentence to tell; "
            "set --model.nsp false or prepare pairs"
        )


def training_rows(shards: DataSource, settings: Settings) -> range:
    """The rows that data.slice leaves to train on, of which there must be some."""
    rows = settings.data.rows(len(shards))
    if not rows:
        raise UserError(
            f"--data.slice {settings.data.slice} leaves no row of the {len(shards)} in {shards.folder}; make it wider"
        )
    return rows
