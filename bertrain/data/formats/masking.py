"""Dynamic masking: which tokens to predict, and what replaces them in the input.

Pure functions over a flat run of tokens. Every draw is a hash of (key, row, position), where the key is derived from
(seed, epoch): the masks of an example are new in each epoch and the same on every rank. The *number* of predictions
depends on the length alone, so every rank knows a step's total without reading the examples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bertrain.base.seeds import Words, combine, mix
from bertrain.data.text.vocabulary import Vocabulary

Ints = npt.NDArray[np.int64]

KEEP_SHARE, RANDOM_SHARE = 0.1, 0.1  # of the chosen tokens; the other 80 % become [MASK]


@dataclass(frozen=True)
class MaskingRules:
    vocab_size: int
    mask_id: int
    special_ids: tuple[int, ...]
    max_predictions: int
    probability: float
    continues_word: npt.NDArray[np.bool_] | None = None  # for whole-word masking: which word pieces continue a word

    @staticmethod
    def of(
        vocabulary: Vocabulary, *, max_predictions: int, probability: float, whole_word: bool = False
    ) -> MaskingRules:
        return MaskingRules(
            vocab_size=len(vocabulary.words),
            mask_id=vocabulary.id_of("[MASK]"),
            special_ids=special_ids(vocabulary),
            max_predictions=max_predictions,
            probability=probability,
            continues_word=vocabulary.continues_word if whole_word else None,
        )


def special_ids(vocabulary: Vocabulary) -> tuple[int, ...]:
    """The tokens that are never predicted."""
    return tuple(vocabulary.id_of(word) for word in ("[CLS]", "[SEP]", "[PAD]"))


def count_predictions(lengths: npt.ArrayLike, max_predictions: int, probability: float) -> Ints:
    """Predictions in an example of each length: min(max_predictions, max(1, round(probability * length)))."""
    rounded = np.rint(np.asarray(lengths) * probability).astype(np.int64)
    return np.clip(rounded, 1, max_predictions)


def mask_tokens(
    tokens: Ints, starts: Ints, lengths: Ints, rows: Ints, keys: Words, rules: MaskingRules
) -> tuple[Ints, Ints, Ints]:
    """Mask a flat run of examples; returns (masked tokens, positions, labels), positions ascending.

    `tokens` are the examples one after another, example i at starts[i] .. starts[i] + lengths[i]; `rows` are their
    row numbers in the data set and `keys` the 64-bit key of each example's draws. Special tokens are never chosen. In
    an example with fewer other tokens than predictions, all of them are chosen.
    """
    example = np.repeat(np.arange(len(lengths)), lengths)
    within = np.arange(len(tokens)) - np.repeat(starts, lengths)
    token_keys = mix(mix(keys ^ mix(rows.astype(np.uint64)))[example] ^ mix(within.astype(np.uint64)))

    candidates = np.flatnonzero(~np.isin(tokens, rules.special_ids))
    available = np.bincount(example[candidates], minlength=len(lengths))
    wanted = np.minimum(count_predictions(lengths, rules.max_predictions, rules.probability), available)
    if rules.continues_word is None:
        chosen = _choose_tokens(candidates, example[candidates], token_keys[candidates], available, wanted)
    else:
        chosen = _choose_words(tokens, candidates, example, token_keys, wanted, rules.continues_word)

    # token_keys decided the choice; a second hash decides the replacement, independent of it.
    replacement_keys = mix(token_keys[chosen])
    share = (replacement_keys >> np.uint64(32)).astype(np.float64) / 2.0**32
    random_words = combine(0, replacement_keys) % np.uint64(rules.vocab_size)
    labels = tokens[chosen]
    masked = tokens.copy()
    masked[chosen] = np.where(
        share < KEEP_SHARE,
        labels,
        np.where(share < KEEP_SHARE + RANDOM_SHARE, random_words.astype(np.int64), rules.mask_id),
    )
    return masked, chosen, labels


def _choose_tokens(candidates: Ints, example: Ints, keys: Words, available: Ints, wanted: Ints) -> Ints:
    """The `wanted[i]` candidates of each example i with the smallest keys: a draw without replacement."""
    # One sort by (example, key): 20 bits of the one above 44 bits of the other.
    order = np.argsort((example.astype(np.uint64) << np.uint64(44)) | (keys >> np.uint64(20)))
    first = np.cumsum(available) - available
    rank_in_example = np.arange(len(candidates)) - np.repeat(first, available)
    return np.sort(candidates[order[rank_in_example < np.repeat(wanted, available)]])


def _choose_words(
    tokens: Ints, candidates: Ints, example: Ints, keys: Words, wanted: Ints, continues_word: npt.NDArray[np.bool_]
) -> Ints:
    """Whole words in random order while they fit, then pieces of other words if the count is still short.

    The latter is rare (no word that is short enough is left) and keeps the number of predictions a function of the
    length.
    """
    begins = np.ones(len(candidates), dtype=bool)
    begins[1:] = ~(
        continues_word[tokens[candidates[1:]]]
        & (np.diff(candidates) == 1)
        & (example[candidates[1:]] == example[candidates[:-1]])
    )
    words = np.split(candidates, np.flatnonzero(begins)[1:])
    word_example = np.array([example[word[0]] for word in words], dtype=np.int64)
    order = np.lexsort((keys[[word[0] for word in words]], word_example))
    chosen: list[Ints] = []
    passed_over: dict[int, list[Ints]] = {}
    missing = wanted.copy()
    for word_number in order:
        word, owner = words[word_number], int(word_example[word_number])
        if len(word) <= missing[owner]:
            chosen.append(word)
            missing[owner] -= len(word)
        else:
            passed_over.setdefault(owner, []).append(word)
    for owner in np.flatnonzero(missing).tolist():
        for word in passed_over[owner]:
            piece = word[: missing[owner]]
            chosen.append(piece)
            missing[owner] -= len(piece)
    return np.sort(np.concatenate(chosen)) if chosen else candidates[:0]
