"""Makes the golden files of `tests/goldens/video`: tiny models of Qwen's families that see videos, by transformers.

    python tools/goldens/make_video.py tests/goldens/video

Needs torch, torchvision and transformers (5.23 or later). Each folder is a checkpoint with its processor (weights are
only described, `tests/helpers/golden_files.py`) and `expected.safetensors`: the `token_ids` [T] that the processor
makes of the `PROMPT` of `synthetic_video.py`, their `positions` [3, T], of the float32 logits those [T, 3] at
`synthetic_sound.places`; every 31st of the `patches` of the video that is resized, by torchvision; which frames of the
`FILES` are taken (`sampled`, one file behind the other, `counts` of them), and the `sizes` of frames of `SIZES`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from golden_folders import VERSIONS, draw_tensors, whole, write_folders
from make_image_prompts import MODELS
from safetensors.torch import save_file
from synthetic_sound import places
from synthetic_video import FILES, PROMPT, RESIZED, SIZES, SPARSE, VIDEOS, image, video
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen3VLProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

_SPECIAL = [f"<|{name}|>" for name in ("im_start", "im_end", "vision_start", "image_pad", "vision_end", "video_pad")]
_IDS = {"vision_start_token_id": 258, "image_token_id": 259, "vision_end_token_id": 260, "video_token_id": 261}
_TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{%- if part.type == 'text' %}{{ part.text }}{% else %}<|vision_start|><|{{ part.type }}_pad|><|vision_end|>{% endif -%}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_processor(name: str) -> Any:
    """Bytes as tokens, and those of the family; pictures of Qwen2.5-VL are bounded one by one, else all of a video."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_SPECIAL)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    cut = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    images = Qwen2VLImageProcessor(**cut, size={"shortest_edge": 64, "longest_edge": 1024})
    is_first = name == "qwen2_5_vl"
    kind = Qwen2VLVideoProcessor if is_first else Qwen3VLVideoProcessor
    most = 1024 if is_first else 4096
    videos = kind(**cut, size={"shortest_edge": 64, "longest_edge": most}, cap_pixels_per_frame=False, fps=2)
    processor = Qwen2_5_VLProcessor if is_first else Qwen3VLProcessor
    return processor(images, fast, videos, chat_template=_TEMPLATE)


@torch.no_grad()
def make(name: str, directory: Path) -> None:
    """Write one checkpoint, its processor, and what transformers makes of both."""
    golden, processor = MODELS[name], make_processor(name)
    config = golden.config | _IDS | {"text_config": golden.config["text_config"] | {"vocab_size": 264}}
    config["text_config"] |= {"max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 257}
    if name == "qwen2_5_vl":
        config["vision_config"] = config["vision_config"] | {"tokens_per_second": 2}
    golden.model_class(golden.config_class(**config)).half().save_pretrained(directory)
    processor.save_pretrained(directory)
    draw_tensors(directory / "model.safetensors", 3838, 0.12 if name == "qwen3_5" else 0.3)
    with whole(directory) as complete:
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        model = golden.model_class.from_pretrained(complete, **options).eval()
    facts = [
        VideoMetadata(total_num_frames=count, fps=rate, frames_indices=list(range(count))) for count, *_, rate in VIDEOS
    ]
    inputs = processor(
        text=[PROMPT],
        images=[torch.from_numpy(image()).permute(2, 0, 1)],
        videos=[_channels_first(video(*sizes)) for *sizes, _ in VIDEOS],
        videos_kwargs={"video_metadata": facts, "do_sample_frames": False},
        return_tensors="pt",
    )
    seconds = {"second_per_grid_ts": inputs["second_per_grid_ts"]} if name == "qwen2_5_vl" else {}
    grids = inputs["image_grid_thw"], inputs["video_grid_thw"]
    positions, _ = model.model.get_rope_index(inputs["input_ids"], inputs["mm_token_type_ids"], *grids, **seconds)
    logits = model(**inputs).logits[0]
    sampled = [np.asarray(_sampled(processor.video_processor, *file)) for file in FILES]
    resized = processor.video_processor(
        videos=[_channels_first(video(*RESIZED[:3]))], do_sample_frames=False, return_tensors="pt"
    )
    expected = {
        "token_ids": inputs["input_ids"][0],
        "positions": positions[:, 0],
        "logits": logits.gather(1, torch.from_numpy(places(*logits.shape))),
        "patches": resized["pixel_values_videos"].flatten()[::SPARSE],
        "sampled": torch.from_numpy(np.concatenate(sampled).astype(np.int16)),
        "counts": torch.tensor([len(each) for each in sampled]),
        "sizes": torch.tensor([_size(processor.video_processor, *sizes) for sizes in SIZES]),
    }
    save_file(
        {key: each.contiguous().clone() for key, each in expected.items()}, directory / "expected.safetensors", VERSIONS
    )


def _channels_first(frames: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(frames).permute(0, 3, 1, 2)


def _sampled(videos: Any, total: int, rate: float) -> Any:
    return videos.sample_frames(VideoMetadata(total_num_frames=total, fps=rate), fps=2)


def _size(videos: Any, count: int, height: int, width: int) -> list[int]:
    """Height and width of frames; of a single one, which the processor of all frames refuses, as of two."""
    count = max(count, 2)
    grid = videos(
        videos=[torch.zeros((count, 3, height, width), dtype=torch.uint8)], do_sample_frames=False, return_tensors="pt"
    )["video_grid_thw"][0]
    return [4 * int(grid[1]), 4 * int(grid[2])]


if __name__ == "__main__":
    write_folders(__doc__, {name: partial(make, name) for name in ("qwen2_5_vl", "qwen3_vl", "qwen3_5")})
