"""What a vision encoder looks like, whatever its family calls it."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field

from edgellm.engines.formats.strict_formats import ADDED_LATER, bounded, one_of
from edgellm.engines.model.config import LARGEST_DEPTH, LARGEST_MERGE
from edgellm.engines.model.limits import EngineShape

VISION_FAMILIES = (
    *("qwen2_5_vl", "qwen3_vl", "qwen3_5", "llava", "gemma3", "paligemma", "mistral3"),
    *("smolvlm", "lfm2_vl", "internvl", "gemma4", "minicpmv4_6"),
)
#: Those of square pictures whose patches are put in blocks of a token behind the tower.
BLOCKS_BEHIND = ("smolvlm", "internvl")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "quick_gelu")
#: Pixels in height and width of a patch; published encoders have up to 32.
LARGEST_PATCH = 256
#: Patches in height and width of a fixed image; published ones have up to 37.
LARGEST_IMAGE_SIDE = 256
#: Images up to this much longer than wide, or wider than long, fit an engine however their windows fall.
_LARGEST_ASPECT = 4


@dataclass(frozen=True)
class VisionConfig:
    """Dimensions and switches of a vision encoder and of what leads from it to the language model.

    `dtype` is the checkpoint's own. Sizes are in pixels (`patch_size`, `window_size`, `image_size`), patches
    (`spatial_merge_size`: so many by so many become one language token) or elements; `out_hidden_size` is the hidden
    size of the language model. `activation` and `projector_activation` are of `ACTIVATIONS`. A layer index names a
    layer's *input* in `feature_layers` (`num_layers` stands for the last layer's output), its *output* in
    `deepstack_layers`, as the families publish them.

    `tensor_prefix` and `projector_prefix` begin the checkpoint's tensor names. `image_token_id` marks an image's
    tokens; `vision_start_token_id` and `vision_end_token_id` stand around them, where the family has them.

    Qwen's and Pixtral's: `rope_theta`. Qwen2.5-VL's: `window_size`, and the `full_attention_layers` that have no
    windows; `tokens_per_second`, positions of a second of a video. Qwen3-VL's and Qwen3.5's:
    `num_position_embeddings`, a square table that is interpolated; `deepstack_layers` are Qwen3-VL's alone.
    LLaVA's, Gemma 3's and PaliGemma's: `image_size`, of the square image. LLaVA's: `class_token` (CLIP: class token,
    norm before the layers, no bias of the patches; else SigLIP: bias alone); `feature_layers`, whose hidden states are
    concatenated; `drops_first_row`, of each of them. LLaVA's and Pixtral's: `projector_bias`. Pixtral's (of Mistral 3)
    `norm_eps` is that of the norm behind its tower.

    SmolVLM's, LFM2-VL's and InternVL's: parts of pictures, each taken for itself; SmolVLM's and InternVL's of
    `image_size`. LFM2-VL's: `num_position_embeddings` as Qwen3-VL's, but resized as pictures are; `projector_size`, the
    width inside its projector; `projector_norm`. InternVL's: `class_token`; `attention_bias`; `qk_norm`, of all heads
    together; `rms_norms` in place of layer norms; `final_norm` behind the layers.

    MiniCPM-V 4.6's: `num_position_embeddings`, of which each patch has the nearest; `merging_layer`, behind which
    squares of four patches are merged.
    Gemma 4's: `rope_theta`; `num_position_embeddings` of columns, and as many of rows; `clipped`, linear layers whose
    inputs and outputs have bounds; `standardized`, tokens that a bias and a scale of each column are applied to.
    """

    family: str = field(metadata=one_of(VISION_FAMILIES))
    dtype: str
    hidden_size: int
    intermediate_size: int
    num_layers: int = field(metadata=bounded(LARGEST_DEPTH))
    num_heads: int
    in_channels: int = field(metadata=bounded(3))
    patch_size: int = field(metadata=bounded(LARGEST_PATCH))
    temporal_patch_size: int = field(metadata=bounded(LARGEST_MERGE))
    spatial_merge_size: int = field(metadata=bounded(LARGEST_MERGE))
    out_hidden_size: int
    activation: str = field(metadata=one_of(ACTIVATIONS))
    norm_eps: float
    image_token_id: int
    tensor_prefix: str
    projector_prefix: str
    vision_start_token_id: int | None = None
    vision_end_token_id: int | None = None
    rope_theta: float = 10000.0
    window_size: int | None = None
    full_attention_layers: tuple[int, ...] = ()
    num_position_embeddings: int | None = None
    deepstack_layers: tuple[int, ...] = ()
    image_size: int | None = None
    class_token: bool = False
    feature_layers: tuple[int, ...] = ()
    drops_first_row: bool = False
    projector_activation: str = field(default="gelu", metadata=one_of(ACTIVATIONS))
    projector_bias: bool = True
    projector_size: int | None = field(default=None, metadata=ADDED_LATER)
    projector_norm: bool = field(default=False, metadata=ADDED_LATER)
    attention_bias: bool = field(default=True, metadata=ADDED_LATER)
    qk_norm: bool = field(default=False, metadata=ADDED_LATER)
    rms_norms: bool = field(default=False, metadata=ADDED_LATER)
    final_norm: bool = field(default=False, metadata=ADDED_LATER)
    tokens_per_second: float = field(default=0.0, metadata=ADDED_LATER)
    clipped: bool = field(default=False, metadata=ADDED_LATER)
    standardized: bool = field(default=False, metadata=ADDED_LATER)
    merging_layer: int | None = field(default=None, metadata=ADDED_LATER)

    @property
    def head_dim(self) -> int:
        """D: elements of an attention head."""
        return self.hidden_size // self.num_heads

    @property
    def patch_elements(self) -> int:
        """Elements of a flattened patch: channels, (frames,) rows, columns."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merge_patches(self) -> int:
        """How many patches become one language token."""
        return self.spatial_merge_size**2

    @property
    def window_patches(self) -> int:
        """Patches of a full window; 1 without windows."""
        if self.window_size is None:
            return 1
        return (self.window_merged_side * self.spatial_merge_size) ** 2

    @property
    def window_merged_side(self) -> int:
        """Side of a window in language tokens; 0 without windows."""
        return (self.window_size or 0) // self.spatial_merge_size // self.patch_size

    def rows_for_patches(self, patches: int) -> int:
        """Rows of an engine that takes every image of up to so many patches, windows padded, that is not longer than
        `_LARGEST_ASPECT` times its width or the other way round."""
        tokens = -(-patches // self.merge_patches)
        if self.window_size is None:
            return tokens * self.merge_patches
        # Of h by w tokens, windows of side s cover less than (h + s) (w + s); h + w is largest at the largest aspect.
        edges = math.sqrt(tokens) * (math.sqrt(_LARGEST_ASPECT) + 1 / math.sqrt(_LARGEST_ASPECT))
        beyond = self.window_merged_side - 1
        covered = tokens + beyond * edges + beyond**2
        return math.ceil(covered * self.merge_patches / self.window_patches) * self.window_patches

    def patches_within(self, rows: int) -> int:
        """The most patches for which `rows_for_patches` is at most `rows`; at least those of one token."""
        if self.window_size is None:
            return rows
        tokens = range(1, rows // self.merge_patches + 1)
        count = bisect_right(tokens, rows, key=lambda one: self.rows_for_patches(one * self.merge_patches))
        return max(1, count) * self.merge_patches

    @property
    def image_side(self) -> int:
        """Side in patches of the square image; 0 where images are of any size."""
        return (self.image_size or 0) // self.patch_size

    @property
    def tower_rows(self) -> int:
        """Rows of the tower of a square image: the patches, and the class token before them."""
        return self.image_side**2 + self.class_token

    def token_count(self, grid: tuple[int, int, int]) -> int:
        """How many language tokens an image of (frames, height, width) in patches becomes."""
        if self.family == "llava":
            return self.tower_rows - self.drops_first_row
        return grid[0] * grid[1] * grid[2] // self.merge_patches

    @property
    def position_side(self) -> int:
        """Side of the square table of position embeddings; 0 where there is none to interpolate."""
        return round((self.num_position_embeddings or 0) ** 0.5)


def vision_inputs(config: VisionConfig, shape: EngineShape) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every input but the weights, by name.

    `patches` [1, R, elements], the image's first; for Qwen's and Gemma 4's `rotary_cos_sin` [1, R, D] and
    `attention_mask` [1, 1, 1, R] (which rows are patches); for Qwen2.5-VL `input_rows` [1, R] (which patch stands in
    each row), `window_mask` [windows, 1, 1, rows of a window] and `output_rows` [1, M] (which merged row is each
    token's); for Qwen3-VL, Qwen3.5, LFM2-VL, MiniCPM-V and Gemma 4 `position_embeddings` [1, R, H]; for MiniCPM-V
    `merged_mask` [1, 1, 1, R / 4] (which squares of four are patches); for SmolVLM and InternVL `block_rows` [1, R]
    (which patch stands in each row behind the tower). Masks are there if a layer reads them.
    """
    rows = shape.tokens
    inputs: dict[str, tuple[tuple[int, ...], str]] = {"patches": ((1, rows, config.patch_elements), "compute")}
    if config.family in BLOCKS_BEHIND:
        inputs["block_rows"] = ((1, rows), "int32")
    if config.image_side:
        return inputs
    if config.family == "minicpmv4_6":
        inputs["merged_mask"] = ((1, 1, 1, rows // 4), "bool")
    if config.family in ("lfm2_vl", "minicpmv4_6"):
        inputs["attention_mask"] = ((1, 1, 1, rows), "bool")
        inputs["position_embeddings"] = ((1, rows, config.hidden_size), "float32")
        return inputs
    inputs["rotary_cos_sin"] = ((1, rows, config.head_dim), "float32")
    full = len(config.full_attention_layers) if config.window_size else config.num_layers
    if full:
        inputs["attention_mask"] = ((1, 1, 1, rows), "bool")
    if full < config.num_layers:
        window = config.window_patches
        inputs["window_mask"] = ((rows // window, 1, 1, window), "bool")
    if config.family == "qwen2_5_vl":
        inputs["input_rows"] = ((1, rows), "int32")
        inputs["output_rows"] = ((1, embedding_rows(config, shape)), "int32")
    elif config.num_position_embeddings is not None:
        inputs["position_embeddings"] = ((1, rows, config.hidden_size), "float32")
    return inputs


def embedding_rows(config: VisionConfig, shape: EngineShape) -> int:
    """M: rows of the outputs; an image's tokens come first, what stands behind them is padding."""
    return config.token_count((1, 1, shape.tokens))


def vision_outputs(config: VisionConfig) -> tuple[str, ...]:
    """Names of the outputs, each [1, M, H of the language model] compute: embeddings, then deepstack features."""
    return ("image_embeddings", *(deepstack_name(place) for place in range(len(config.deepstack_layers))))


def deepstack_name(place: int) -> str:
    """The output with the features that are added after the language model's layer `place`."""
    return f"deepstack_features_{place}"
