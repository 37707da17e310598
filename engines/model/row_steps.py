"""Steps that change columns of rows, each row by itself: Gemma 4's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from edgellm.engines.model.steps import READS, Norm, Step

#: The input [B, T, L P] compute with the embeddings that each token has for all L layers, which the host looks up.
TOKEN_ROWS = "token_rows"
#: The input [B, T, H] compute with the rows of sound that are added to the embeddings of a step's tokens.
SOUND_ROWS = "sound_rows"


@dataclass(frozen=True)
class TokenInputs(Step):
    """output = (value, each part of its columns normed, + scale * rows) / sqrt(2): what a token's own embeddings let
    through in each layer (Gemma 3n, Gemma 4)."""

    value: str = field(metadata=READS)
    rows: str = field(metadata=READS)
    norm: Norm
    scale: float
    gives: ClassVar[str] = "compute"
