"""Dynamic masking: exact counts, the 80/10/10 split, whole words, and independence of how a bin is made up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertrain.data.formats.masking import MaskingRules, count_predictions, mask_tokens

VOCAB, PAD, CLS, SEP, MASK, FIRST_WORD = 1000, 0, 2, 3, 4, 5


def rules(max_predictions: int = 20, whole_word: bool = False, vocab: int = VOCAB) -> MaskingRules:
    continues = np.zeros(vocab, dtype=bool)
    continues[vocab // 2 :] = True
    return MaskingRules(
        vocab_size=vocab,
        mask_id=MASK,
        special_ids=(CLS, SEP, PAD),
        max_predictions=max_predictions,
        probability=0.15,
        continues_word=continues if whole_word else None,
    )


def examples(lengths: list[int], seed: int = 0, vocab: int = VOCAB) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    made = []
    for length in lengths:
        tokens = draw.integers(FIRST_WORD, vocab, length)
        tokens[[0, length // 2, -1]] = CLS, SEP, SEP
        made.append(tokens)
    return made


def mask(made: list[np.ndarray], rows: list[int], the_rules: MaskingRules, key: int = 7) -> list[tuple]:
    """Mask a bin made of these examples; per example (masked tokens, positions within, labels)."""
    lengths = np.array([len(tokens) for tokens in made])
    starts = np.cumsum(lengths) - lengths
    masked, chosen, labels = mask_tokens(
        np.concatenate(made), starts, lengths, np.array(rows), np.full(len(made), key, dtype=np.uint64), the_rules
    )
    out = []
    for start, length in zip(starts, lengths, strict=True):
        here = (chosen >= start) & (chosen < start + length)
        out.append((masked[start : start + length], chosen[here] - start, labels[here]))
    return out


@pytest.mark.parametrize(
    ("length", "expected"), [(5, 1), (9, 1), (10, 2), (100, 15), (128, 19), (133, 20), (512, 20), (30, 4), (50, 8)]
)
def test_count_is_the_reference_formula(length: int, expected: int) -> None:
    assert count_predictions([length], 20, 0.15)[0] == min(20, max(1, round(0.15 * length))) == expected


@given(
    lengths=st.lists(st.integers(5, 128), min_size=1, max_size=20),
    seed=st.integers(0, 100),
    whole_word=st.booleans(),
)
def test_exact_count_distinct_positions_true_labels(lengths: list[int], seed: int, whole_word: bool) -> None:
    made = examples(lengths, seed)
    for tokens, (masked, positions, labels) in zip(
        made, mask(made, list(range(len(made))), rules(whole_word=whole_word)), strict=True
    ):
        assert len(positions) == count_predictions([len(tokens)], 20, 0.15)[0]
        assert len(set(positions.tolist())) == len(positions)
        assert (labels == tokens[positions]).all()
        assert not np.isin(tokens[positions], [CLS, SEP, PAD]).any()
        untouched = np.delete(np.arange(len(tokens)), positions)
        assert (masked[untouched] == tokens[untouched]).all()


def test_masks_do_not_depend_on_the_company_in_the_bin() -> None:
    made = examples([30, 64, 64, 100, 17])
    together = mask(made, [10, 11, 12, 13, 14], rules())
    for index in range(5):
        alone = mask([made[index]], [10 + index], rules())[0]
        for one, other in zip(alone, together[index], strict=True):
            assert (one == other).all()
    turned = mask(made[::-1], [14, 13, 12, 11, 10], rules())
    for one, other in zip(turned[::-1], together, strict=True):
        assert (one[0] == other[0]).all()


def test_masks_change_with_the_key_and_the_row() -> None:
    made = examples([100])
    first = mask(made, [1], rules(), key=1)[0][1]
    assert set(first) != set(mask(made, [1], rules(), key=2)[0][1])
    assert set(first) != set(mask(made, [2], rules(), key=1)[0][1])


def test_eighty_ten_ten_and_uniform_positions() -> None:
    vocab = 30000
    made = examples([128] * 4000, vocab=vocab)
    as_mask = kept = replaced = 0
    at_position = np.zeros(128)
    drawn_words = []
    for tokens, (masked, positions, labels) in zip(
        made, mask(made, list(range(4000)), rules(vocab=vocab)), strict=True
    ):
        at_position[positions] += 1
        as_mask += (masked[positions] == MASK).sum()
        kept += (masked[positions] == tokens[positions]).sum()
        other = (masked[positions] != MASK) & (masked[positions] != labels)
        replaced += other.sum()
        drawn_words += masked[positions][other].tolist()
    total = 4000 * 19
    for count, share in ((as_mask, 0.8), (kept, 0.1), (replaced, 0.1)):
        deviation = (share * (1 - share) / total) ** 0.5
        assert abs(count / total - share) < 5 * deviation + 1e-4  # a random word may be the old one, 1 in 30,000
    words = [position for position in range(128) if position not in (0, 64, 127)]
    expected = total / len(words)
    chi_square = ((at_position[words] - expected) ** 2 / expected).sum()
    assert chi_square < len(words) + 5 * (2 * len(words)) ** 0.5
    assert at_position[[0, 64, 127]].sum() == 0
    assert abs(np.mean(drawn_words) / vocab - 0.5) < 0.02
    assert np.max(drawn_words) > 0.99 * vocab


def test_whole_words_are_masked_whole() -> None:
    """Chosen pieces make up whole words, but for the one word at the most that completes the count."""
    made = examples([128] * 300, seed=3)
    broken = 0
    for tokens, (_, positions, _) in zip(made, mask(made, list(range(300)), rules(whole_word=True)), strict=True):
        chosen = np.zeros(128, dtype=bool)
        chosen[positions] = True
        is_word = ~np.isin(tokens, [CLS, SEP])
        continues = (tokens >= VOCAB // 2) & is_word & np.roll(is_word, 1)
        words = np.cumsum(~continues)
        states = [chosen[words == word] for word in np.unique(words[is_word])]
        broken += sum(bool(state.any() and not state.all()) for state in states)
    assert broken <= 3
