"""Shapes as signed distances, written for NumPy and PyTorch alike (`xp` is either namespace).

A shape is a function (xp, x, y) -> distance: negative inside, in units of the object's frame, where x grows to the
right, y downwards, and an object fills about [-1, 1] in both. Distances need only be right near the outline.
"""

import math
from collections.abc import Callable

Shape = Callable


def ellipse(cx: float, cy: float, rx: float, ry: float) -> Shape:
    """An ellipse of radii rx, ry."""
    return lambda xp, x, y: ((((x - cx) / rx) ** 2 + ((y - cy) / ry) ** 2 + 1e-9) ** 0.5 - 1) * min(rx, ry)


def box(cx: float, cy: float, half_width: float, half_height: float, radius: float = 0.03) -> Shape:
    """A rectangle with rounded corners."""

    def distance(xp, x, y):
        u, v = abs(x - cx) - (half_width - radius), abs(y - cy) - (half_height - radius)
        outside = (xp.clip(u, 0, None) ** 2 + xp.clip(v, 0, None) ** 2 + 1e-9) ** 0.5
        return outside + xp.clip(xp.maximum(u, v), None, 0) - radius

    return distance


def polygon(*points: tuple[float, float]) -> Shape:
    """A convex polygon; corners clockwise as seen (y grows downwards)."""
    edges = []
    for (x0, y0), (x1, y1) in zip(points, points[1:] + points[:1], strict=True):
        length = math.hypot(x1 - x0, y1 - y0)
        edges.append(((y1 - y0) / length, -(x1 - x0) / length, x0, y0))

    def distance(xp, x, y):
        result = None
        for normal_x, normal_y, x0, y0 in edges:
            side = (x - x0) * normal_x + (y - y0) * normal_y
            result = side if result is None else xp.maximum(result, side)
        return result

    return distance


def line(x0: float, y0: float, x1: float, y1: float, half_width: float) -> Shape:
    """A segment with round ends."""
    dx, dy = x1 - x0, y1 - y0
    squared = dx * dx + dy * dy

    def distance(xp, x, y):
        along = xp.clip(((x - x0) * dx + (y - y0) * dy) / squared, 0, 1)
        return ((x - x0 - along * dx) ** 2 + (y - y0 - along * dy) ** 2 + 1e-9) ** 0.5 - half_width

    return distance


def ring(cx: float, cy: float, rx: float, ry: float, half_width: float) -> Shape:
    """The outline of an ellipse."""
    inner = ellipse(cx, cy, rx, ry)
    return lambda xp, x, y: abs(inner(xp, x, y)) - half_width


def petals(cx: float, cy: float, radius: float, depth: float, count: int, sharpness: float = 1.0) -> Shape:
    """A disc whose radius waves `count` times around; `sharpness` above 1 makes the waves square, as a gear's teeth."""

    def distance(xp, x, y):
        u, v = x - cx, y - cy
        wave = xp.clip(xp.cos(count * xp.arctan2(v, u)) * sharpness, -1, 1)
        return ((u**2 + v**2 + 1e-9) ** 0.5 - (radius + depth * wave)) * 0.75

    return distance


def upper(shape: Shape, y: float) -> Shape:
    """The part of a shape above a height."""
    return lambda xp, px, py: xp.maximum(shape(xp, px, py), py - y)


def lower(shape: Shape, y: float) -> Shape:
    """The part of a shape below a height."""
    return lambda xp, px, py: xp.maximum(shape(xp, px, py), y - py)


def both(first: Shape, second: Shape) -> Shape:
    """Where two shapes overlap."""
    return lambda xp, x, y: xp.maximum(first(xp, x, y), second(xp, x, y))


def either(*shapes: Shape) -> Shape:
    """The union of shapes."""

    def distance(xp, x, y):
        result = shapes[0](xp, x, y)
        for shape in shapes[1:]:
            result = xp.minimum(result, shape(xp, x, y))
        return result

    return distance


def without(shape: Shape, hole: Shape) -> Shape:
    """A shape with a hole through which the table is seen."""
    return lambda xp, x, y: xp.maximum(shape(xp, x, y), -hole(xp, x, y))


def waved(shape: Shape, height: float, turns: float) -> Shape:
    """A shape whose points move up and down along x, as cloth in the wind."""
    return lambda xp, x, y: shape(xp, x, y + height * xp.sin(turns * x))
