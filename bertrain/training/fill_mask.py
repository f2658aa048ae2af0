"""Predict the [MASK] tokens of sentences: the quickest way to see what a model has learned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from bertrain.base.errors import UserError
from bertrain.config.choices import Device
from bertrain.config.settings import BatchSettings, DataSettings, Settings, TaskSettings, TrainSettings
from bertrain.data.feed.loader import Loader
from bertrain.data.formats.block import Block, Masks, flat_ranges
from bertrain.data.text.tokenizer import AnyTokenizer, tokenizer_of
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.model.batch import IGNORED
from bertrain.ranks.parallel import Ranks
from bertrain.tasks.data import TaskData
from bertrain.training.engine import Predictor
from bertrain.training.evaluate import load_predictor
from bertrain.training.task_evaluator import TOKENS_AT_ONCE
from bertrain.weights.source import NEWEST, read_weights, vocabulary_of


@dataclass(frozen=True)
class Guess:
    word: str
    probability: float


def fill_mask(
    source: str | Path,
    sentences: str | list[str],
    *,
    top: int = 5,
    device: Device = "auto",
) -> list[list[list[Guess]]]:
    """The `top` guesses for each [MASK] of each sentence, by weights in any format that `show_weights` reads.

    Example: bertrain.fill_mask("runs/tiny", "the [MASK] of france")[0][0][0].word
    """
    with open_filler(source, device=device) as filler:
        return filler.fill(filler.encode([sentences] if isinstance(sentences, str) else sentences), top)


@contextmanager
def open_filler(
    source: str | Path,
    which: str = NEWEST,
    *,
    device: Device = "auto",
    hang_timeout: str = TrainSettings.hang_timeout,
) -> Iterator[MaskFiller]:
    """The model with an MLM head of `source`, in fp32 on a device."""
    weights = read_weights(source, which)
    vocabulary = vocabulary_of(weights, source)
    if weights.settings.head != "pretrain":
        why = f"{source} is fine-tuned and has no MLM head"
        raise UserError("no-pretraining-head", f"{why}; use the weights that it was fine-tuned from")
    longest = weights.settings.max_positions
    settings = Settings(
        model=replace(weights.settings, nsp=False),  # sentences are no pairs
        data=DataSettings(max_seq_length=longest),
        task=TaskSettings(name="fill-mask"),
        train=TrainSettings(device=device, precision="fp32", hang_timeout=hang_timeout),
    )
    with load_predictor(weights, settings) as (predict, ranks):
        budget = max(TOKENS_AT_ONCE[ranks.device.type], longest)
        settings = replace(settings, batch=BatchSettings(sequences=1, token_budget=budget))
        yield MaskFiller(settings, vocabulary, tokenizer_of(vocabulary), predict, ranks)


@dataclass(frozen=True)
class MaskFiller:
    """A model with an MLM head, ready on its device."""

    settings: Settings
    vocabulary: Vocabulary
    tokenizer: AnyTokenizer
    predict: Predictor
    ranks: Ranks

    def encode(self, sentences: Sequence[str]) -> Block:
        """The tokens of sentences, with the place of each [MASK]."""
        start, end, mask = map(self.vocabulary.id_of, ("[CLS]", "[SEP]", "[MASK]"))
        rows: list[list[int]] = []
        for sentence in sentences:
            *before, last = sentence.replace(self.vocabulary.words[mask], "[MASK]").split("[MASK]")
            # A mask stands for a word with the space before it.
            pieces = self.tokenizer.encode([*(part.rstrip() for part in before), last])
            if len(pieces) == 1:
                raise UserError(
                    "no-mask", f"there is no [MASK] in {sentence!r}; write [MASK] where a word is to be predicted"
                )
            rows.append([start, *pieces[0], *(token for piece in pieces[1:] for token in (mask, *piece)), end])
            limit = self.settings.data.max_seq_length
            if len(rows[-1]) > limit:
                raise UserError(
                    "sentence-too-long", f"the sentence has {len(rows[-1])} tokens; the model reads {limit}: shorten it"
                )
        lengths = np.array([len(row) for row in rows])
        places = [np.flatnonzero(np.array(row) == mask) for row in rows]
        counts = np.array([len(found) for found in places])
        masks = Masks(counts, np.concatenate(places), np.full(counts.sum(), IGNORED))
        return Block(np.concatenate(rows), lengths, lengths, np.zeros_like(lengths), masks)

    @torch.no_grad()
    def fill(self, block: Block, top: int) -> list[list[list[Guess]]]:
        """The `top` guesses for each [MASK] of each row, computed in bins of several rows."""
        assert block.masks is not None
        num_words, device = len(self.vocabulary.words), self.ranks.device
        data = TaskData(block, Path(), self.vocabulary, self.settings.data.max_seq_length)
        loader = Loader(data, self.settings)
        found: list[list[Guess]] = [[] for _ in range(len(block.masks.positions))]
        for rows, batch in loader.evaluation_bins(0, len(block)):
            self.ranks.heartbeat.move()
            batch = batch.without_padding() if device.type == "cpu" else batch.to(device)
            logits = self.predict(batch).mlm_logits
            assert logits is not None
            logits = logits[: batch.num_predictions, :num_words].float()
            probabilities, words = logits.softmax(-1).topk(min(top, num_words))
            places = flat_ranges(block.masks.offsets[rows], block.masks.counts[rows])
            for place, *row in zip(places, words.tolist(), probabilities.tolist(), strict=True):
                guesses = zip(*row, strict=True)
                found[place] = [Guess(self.tokenizer.decode(word), share) for word, share in guesses]
        stops = block.masks.offsets.tolist()
        return [found[first:stop] for first, stop in pairwise(stops)]
