"""Stateless random numbers: permutations are permutations, words look random, seeds do not collide."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bertrain.base.seeds import combine, derive, mix, permute


@given(size=st.integers(1, 5000), key=st.integers(0, 2**62))
def test_permute_is_a_permutation(size: int, key: int) -> None:
    assert sorted(permute(np.arange(size), size, key).tolist()) == list(range(size))


@given(size=st.integers(2, 10**9), key=st.integers(0, 2**62), data=st.data())
def test_any_stretch_of_a_permutation_agrees_with_any_other(size: int, key: int, data: st.DataObject) -> None:
    """A large permutation is never made as a whole, so stretches of it must fit together."""
    first = data.draw(st.integers(0, size - 2))
    stretch = np.arange(first, min(first + 50, size))
    together = permute(stretch, size, key)
    assert len(set(together.tolist())) == len(stretch)
    assert together.max() < size
    assert [int(permute([position], size, key)[0]) for position in stretch[:5]] == together[:5].tolist()


def test_permutations_of_different_keys_are_unrelated() -> None:
    one, two = permute(np.arange(10000), 10000, 1), permute(np.arange(10000), 10000, 2)
    assert (one == two).sum() < 10
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.05
    assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < 0.05


def test_mix_flips_half_of_the_bits() -> None:
    words = np.arange(4096, dtype=np.uint64)
    for bit in range(64):
        flipped = mix(words) ^ mix(words ^ np.uint64(1 << bit))
        assert abs(np.bitwise_count(flipped).mean() - 32) < 0.5


def test_mix_is_the_published_function() -> None:
    """First outputs of SplitMix64 from the state 1234567, as its authors' implementation prints them."""
    state, outputs = 1234567, []
    for _ in range(2):
        outputs.append(int(mix(np.array([state], dtype=np.uint64))[0]))
        state = (state + 0x9E3779B97F4A7C15) % 2**64
    assert outputs == [6457827717110365317, 3203168211198807973]


def test_combine_depends_on_both_of_its_arguments() -> None:
    values = np.arange(1000)
    assert len(set(combine(1, values).tolist()) | set(combine(2, values).tolist())) == 2000


def test_derive_tells_paths_apart() -> None:
    paths = [(seed, use, number) for seed in range(5) for use in ("mask", "order") for number in range(100)]
    assert len({derive(*path) for path in paths}) == len(paths)
    assert derive(1, 23) != derive(12, 3)
    assert all(0 <= derive(*path) < 2**63 for path in paths)
