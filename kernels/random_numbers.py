"""Philox4x32-10, a counter-based random number generator: a number depends on its counter and key alone.

J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import numpy as np

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)  # of words 0 and 2
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)
_LOW_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)
_ROUNDS = 10


def philox_4x32(counter: tuple[np.ndarray | int, ...], key: tuple[np.ndarray | int, np.ndarray | int]) -> np.ndarray:
    """Four random words for each counter: uint32 [n, 4].

    `counter` is four words and `key` two, each an integer array [n] or one integer for all. Words are taken modulo
    2^32.
    """
    count = max(np.size(word) for word in (*counter, *key))
    # Words 0 and 2 are multiplied, words 1 and 3 are mixed in; both pairs are [2, n] so that a round is five calls.
    multiplied = np.empty((2, count), np.uint64)
    mixed = np.empty((2, count), np.uint64)
    for pair, row, word in ((multiplied, 0, 0), (mixed, 0, 1), (multiplied, 1, 2), (mixed, 1, 3)):
        pair[row] = np.bitwise_and(counter[word], 0xFFFFFFFF)
    keys = np.empty((2, max(np.size(word) for word in key)), np.uint64)
    for row, half in enumerate(key):
        keys[row] = np.bitwise_and(half, 0xFFFFFFFF)
    products = np.empty_like(multiplied)
    for number in range(_ROUNDS):
        if number:
            np.add(keys, _KEY_STEPS, out=keys)
            np.bitwise_and(keys, _LOW_WORD, out=keys)
        np.multiply(multiplied, _MULTIPLIERS, out=products)
        np.bitwise_xor(mixed, keys, out=mixed)
        np.right_shift(products, _WORD_BITS, out=multiplied)
        multiplied = multiplied[::-1]
        np.bitwise_xor(multiplied, mixed, out=multiplied)
        np.bitwise_and(products, _LOW_WORD, out=mixed)
        mixed = mixed[::-1]
    words = np.empty((count, 4), np.uint32)
    words[:, 0::2] = multiplied.T
    words[:, 1::2] = mixed.T
    return words
