"""Predict the [MASK] tokens of sentences: the quickest way to see what a model has learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from bertrain.base.errors import UserError
from bertrain.config.settings import BatchSettings, DataSettings, Settings, TaskSettings
from bertrain.data.feed.loader import Loader
from bertrain.data.formats.block import Block, Masks, flat_ranges
from bertrain.data.text.tokenizer import AnyTokenizer, tokenizer_of
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.model.batch import IGNORED
from bertrain.model.encoder import EncoderModel
from bertrain.tasks.data import TaskData
from bertrain.weights.source import build_model, read_weights

TOKENS_AT_ONCE = 2048  # of a bin


@dataclass(frozen=True)
class Guess:
    word: str
    probability: float


def fill_mask(source: str | Path, sentences: str | list[str], *, top: int = 5) -> list[list[list[Guess]]]:
    """The `top` guesses for each [MASK] of each sentence, by weights in any format that `show_weights` reads.

    Example: bertrain.fill_mask("runs/tiny", "the [MASK] of france")[0][0][0].word
    """
    filler = MaskFiller.open(source)
    return filler.fill(filler.encode([sentences] if isinstance(sentences, str) else sentences), top)


@dataclass(frozen=True)
class MaskFiller:
    """A model with an MLM head, on the CPU in fp32."""

    model: EncoderModel
    vocabulary: Vocabulary
    tokenizer: AnyTokenizer

    @staticmethod
    def open(source: str | Path, which: str = "newest") -> MaskFiller:
        weights = read_weights(source, which)
        if weights.vocabulary is None:
            cure = "put its vocab.txt there, or use `bertrain weights import --vocab FILE`"
            raise UserError("missing-vocabulary", f"{source} has no vocabulary; {cure}")
        if weights.settings.head != "pretrain":
            why = f"{source} is fine-tuned, without an MLM head"
            raise UserError("no-pretraining-head", f"{why}; use its initial weights")
        return MaskFiller(build_model(weights), weights.vocabulary, tokenizer_of(weights.vocabulary))

    def encode(self, sentences: Sequence[str]) -> Block:
        """The tokens of sentences, with the place of each [MASK]."""
        start, end, mask = map(self.vocabulary.id_of, ("[CLS]", "[SEP]", "[MASK]"))
        rows: list[list[int]] = []
        for sentence in sentences:
            *before, last = sentence.replace(self.vocabulary.words[mask], "[MASK]").split("[MASK]")
            # A mask stands for a word with the space before it.
            pieces = self.tokenizer.encode([*(part.rstrip() for part in before), last])
            if len(pieces) == 1:
                raise UserError("no-mask", f"there is no [MASK] in {sentence!r}")
            rows.append([start, *pieces[0], *(token for piece in pieces[1:] for token in (mask, *piece)), end])
            limit = self.model.settings.max_positions
            if len(rows[-1]) > limit:
                raise UserError(
                    "sentence-too-long", f"the sentence has {len(rows[-1])} tokens; the model reads {limit}"
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
        longest, num_words = self.model.settings.max_positions, len(self.vocabulary.words)
        settings = Settings(
            model=replace(self.model.settings, nsp=False),  # sentences are no pairs
            data=DataSettings(max_seq_length=longest),
            task=TaskSettings(name="fill-mask"),
            batch=BatchSettings(sequences=1, token_budget=max(TOKENS_AT_ONCE, longest)),
        )
        loader = Loader(TaskData(block, Path(), self.vocabulary, longest), settings)
        found: list[list[Guess]] = [[] for _ in range(len(block.masks.positions))]
        for rows, batch in loader.evaluation_bins(0, len(block)):
            logits = self.model(batch.without_padding()).mlm_logits[: batch.num_predictions, :num_words]
            probabilities, words = logits.softmax(-1).topk(min(top, num_words))
            places = flat_ranges(block.masks.offsets[rows], block.masks.counts[rows])
            for place, *row in zip(places, words.tolist(), probabilities.tolist(), strict=True):
                guesses = zip(*row, strict=True)
                found[place] = [Guess(self.tokenizer.decode(word), share) for word, share in guesses]
        stops = block.masks.offsets.tolist()
        return [found[first:stop] for first, stop in pairwise(stops)]
