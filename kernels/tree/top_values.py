"""The largest values of rows with their places, equal ones in order of place, in NumPy."""

from __future__ import annotations

import numpy as np

#: Each row is seen as this many parts, one below the other; few columns then hold all of the largest values.
_PARTS = 8


def largest(values: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Places and values [n, count] of the `count` largest of each row of `values` [n, V] float32, largest first.

    The lower place comes first among equals. Where V < count the rest is place 0 and value -inf. No NaN among them.
    """
    size, rows = values.shape[1], np.arange(values.shape[0])[:, None]
    if count == 1:
        places = values.argmax(axis=1)[:, None]
        return places, values[rows, places]
    if count > size:
        padding = (0, 0), (0, count - size)
        places, found = largest(values, size)
        return np.pad(places, padding), np.pad(found, padding, constant_values=-np.inf)
    places = _few_places(values, count) if size >= _PARTS * max(_PARTS, count) else None
    if places is None:
        places = _order(values, count)
        return places, values[rows, places]
    candidates = values[rows, places]
    order = _order(candidates, count)
    return places[rows, order], candidates[rows, order]


def _order(values: np.ndarray, count: int) -> np.ndarray:
    return np.argsort(-values, axis=1, kind="stable")[:, :count]


def _few_places(values: np.ndarray, count: int) -> np.ndarray | None:
    """Ascending places [n, m] among which each row's `count` largest are; None where ties make them too many.

    The `count` columns with the largest maxima hold the `count` largest values.
    """
    rows, size = values.shape
    width = size // _PARTS
    split = _PARTS * width
    rest = size - split
    maxima = values[:, :split].reshape(rows, _PARTS, width).max(axis=1)
    if rest:
        np.maximum(maxima[:, :rest], values[:, split:], out=maxima[:, :rest])
    bounds = np.partition(maxima, width - count, axis=1)[:, width - count]
    columns = np.nonzero(maxima >= bounds[:, None])[1]
    if columns.size != rows * count:
        return None
    starts = np.arange(0, split, width)
    places = (columns.reshape(rows, 1, count) + starts[:, None]).reshape(rows, _PARTS * count)
    if rest:
        places = np.concatenate((places, np.broadcast_to(np.arange(split, size), (rows, rest))), axis=1)
    return places
