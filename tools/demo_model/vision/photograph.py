"""From a drawn scene to a picture as a camera gives it: the robot's own gripper, light, blur, noise, whole steps."""

from typing import Any

import numpy as np


def gripper(pictures: Any, arrays: Any, side: int, share: float = 0.15) -> Any:
    """A thin arm that reaches from the right or left edge into a share of the pictures [3, B, side, side]."""
    xp, count = arrays.xp, pictures.shape[1]
    steps = (arrays.floats(np.arange(side)) + 0.5) / side
    x, y = steps[None, None, :], steps[None, :, None]
    random = arrays.uniform(7, count)[..., None, None]
    start_x = xp.clip((random[0] - 0.5) * 1e6, 0, 1)
    start_y, end_y = random[1], random[2]
    end_x = start_x + (1 - 2 * start_x) * (0.15 + 0.4 * random[3])
    dx, dy = end_x - start_x, end_y - start_y
    along = xp.clip(((x - start_x) * dx + (y - start_y) * dy) / (dx * dx + dy * dy + 1e-6), 0, 1)
    reach = ((x - start_x - along * dx) ** 2 + (y - start_y - along * dy) ** 2) ** 0.5
    width = 0.010 + 0.014 * random[4]
    alpha = xp.clip(0.5 + (width - reach) * side, 0, 1) * (random[5] < share)
    level = 0.25 + 0.35 * random[6]
    tone = level * (1.15 - 0.5 * reach / width)
    return pictures + (xp.clip(tone, 0, 1) - pictures) * alpha


def _blurred(xp: Any, pictures: Any, amount: Any) -> Any:
    """Each pixel with its neighbours above, below and beside; amount 0 to 0.2 a neighbour."""
    padded = xp.concatenate((pictures[..., :1], pictures, pictures[..., -1:]), -1)
    pictures = pictures * (1 - 2 * amount) + (padded[..., :-2] + padded[..., 2:]) * amount
    padded = xp.concatenate((pictures[..., :1, :], pictures, pictures[..., -1:, :]), -2)
    return pictures * (1 - 2 * amount) + (padded[..., :-2, :] + padded[..., 2:, :]) * amount


def developed(pictures: Any, light: Any, arrays: Any, side: int, plain: bool) -> Any:
    """Light that falls off to one side, exposure, tint, blur and noise; [3, B, S, S] to [B, 3, S, S] in 0 to 255."""
    xp, count = arrays.xp, pictures.shape[1]
    steps = (arrays.floats(np.arange(side)) + 0.5) / side - 0.5
    random = arrays.uniform(8, count)[..., None, None]
    slope = (light[:, None, None] * steps[None, None, :] + (random[0] - 0.5) * steps[None, :, None]) * 0.5 * random[1]
    exposure = 0.84 + 0.3 * random[2] + slope
    tint = 1 + (arrays.uniform(3, count)[..., None, None] - 0.5) * 0.09
    pictures = pictures * exposure * tint
    if not plain:
        pictures = _blurred(xp, pictures, 0.2 * random[3] * (random[4] < 0.6))
        pictures = pictures + arrays.normal(*pictures.shape) * (0.035 * random[5] * random[5] + 0.003)
    steps_of_grey = xp.floor(xp.clip(pictures, 0, 1) * 255 + 0.5)
    return xp.stack((steps_of_grey[0], steps_of_grey[1], steps_of_grey[2]), 1)
