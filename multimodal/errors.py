"""Errors of images and what is made of them."""

from edgellm.engines.errors import EdgeLLMError

__all__ = ["ImageError"]


class ImageError(EdgeLLMError):
    """An image cannot be read, exceeds a limit, does not suit the model, or does not match the prompt's markers."""
