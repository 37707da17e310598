"""The table: plain, wooden, checked or speckled, with flat papers and crumbs on it that are no objects."""

from typing import Any

import numpy as np

# Table tops, chosen apart from the objects' colours or paler than they are.
TOPS = np.array(
    [
        (0.78, 0.68, 0.54),
        (0.66, 0.52, 0.38),
        (0.86, 0.82, 0.74),
        (0.72, 0.76, 0.80),
        (0.58, 0.64, 0.70),
        (0.70, 0.76, 0.68),
        (0.82, 0.74, 0.76),
        (0.36, 0.38, 0.44),
        (0.88, 0.88, 0.90),
        (0.50, 0.44, 0.40),
    ],
    np.float32,
)
PAPERS = 2
CRUMBS = 7


def _grid(arrays: Any, side: int) -> tuple[Any, Any]:
    """Coordinates [1, 1, side] and [1, side, 1] from 0 to 1."""
    steps = (arrays.floats(np.arange(side)) + 0.5) / side
    return steps[None, None, :], steps[None, :, None]


def table(count: int, arrays: Any, side: int) -> Any:
    """Table tops [3, B, side, side], 0 to 1."""
    xp = arrays.xp
    x, y = _grid(arrays, side)
    random = arrays.uniform(16, count)[..., None, None]
    chosen = (random[0, :, 0, 0] * len(TOPS)) // 1
    tops = arrays.floats(TOPS)[chosen.astype(np.int64) if isinstance(chosen, np.ndarray) else chosen.long()]
    tops = xp.clip(tops + arrays.normal(count, 3) * 0.035, 0.1, 0.95)
    colour = xp.stack([tops[:, channel][:, None, None] + 0 * (x + y) for channel in range(3)], 0)
    turn = random[1] * 3.1416
    along, across = x * xp.cos(turn) + y * xp.sin(turn), y * xp.cos(turn) - x * xp.sin(turn)
    frequency = 6 + 26 * random[2]
    wood = xp.sin(frequency * across + 2.5 * xp.sin(5 * along + 6 * random[3]) * random[4])
    checks = xp.sin(frequency * 1.2 * along) * xp.sin(frequency * 1.2 * across)
    checks = xp.clip(checks * 8, -1, 1)
    style = random[5]
    strength = 0.02 + 0.07 * random[6]
    texture = wood * (style < 0.4) + checks * ((style >= 0.4) & (style < 0.6))
    colour = colour * (1 + strength * texture)
    paper = arrays.uniform(PAPERS, 9, count)[..., None, None]
    for number in range(PAPERS):
        p = paper[number]
        angle = p[0] * 3.1416
        u = (x - p[1]) * xp.cos(angle) + (y - p[2]) * xp.sin(angle)
        v = (y - p[2]) * xp.cos(angle) - (x - p[1]) * xp.sin(angle)
        inside = xp.maximum(abs(u) - 0.08 - 0.22 * p[3], abs(v) - 0.06 - 0.16 * p[4])
        alpha = xp.clip(0.5 - inside * side, 0, 1) * (p[5] < 0.3) * 0.55
        level = 0.45 + 0.45 * p[6]
        colour = xp.stack([colour[c] + (level + 0.12 * (p[6 + c] - 0.5) - colour[c]) * alpha for c in range(3)], 0)
    crumb = arrays.uniform(CRUMBS, 7, count)[..., None, None]
    for number in range(CRUMBS):
        p = crumb[number]
        reach = ((x - p[0]) ** 2 + (y - p[1]) ** 2) ** 0.5
        alpha = xp.clip(0.5 + (0.004 + 0.013 * p[2] - reach) * side, 0, 1) * (p[3] < 0.45)
        colour = xp.stack([colour[c] + (p[4 + c] * 0.8 - colour[c]) * alpha * 0.8 for c in range(3)], 0)
    return colour
