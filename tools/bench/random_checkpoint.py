"""Writes checkpoints with the shapes of published models and random weights, for measuring speed only.

python tools/bench/random_checkpoint.py BASE --draft HEAD
edgellm build BASE ENGINE_DIR --draft HEAD
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).parent))
from random_draft import write_draft

from edgellm.engines.families import decoder_config
from edgellm.engines.families.vision_config import read_vision_config
from edgellm.engines.families.vision_encoders import host_weights, vision_weights
from edgellm.engines.model.config import WeightSpec
from edgellm.engines.model.decoder import decoder_weights, token_table
from edgellm.engines.quantizer.written_layout import StoredTensor, StreamedTensor, quantization_config, write_tensors
from edgellm.kernels.quantization.packed_weight import WeightFormat

LAYERS = 16
LLAMA_3_2_1B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": True,
    "torch_dtype": "float16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}

_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_scaling": None, "rms_norm_eps": 1e-6}
#: By name, what a `config.json` says.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    "qwen3-32b": LLAMA_3_2_1B
    | _QWEN3
    | {
        "vocab_size": 151936,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
    },
    "qwen3-1.7b": LLAMA_3_2_1B
    | _QWEN3
    | {
        "vocab_size": 151936,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "attention_bias": False,
    },
    "llama-1b": LLAMA_3_2_1B,
    "smollm2-135m": LLAMA_3_2_1B
    | {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rope_scaling": None,
    },
    "llama-8b": LLAMA_3_2_1B
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    #: Three layers in four with the gated delta rule, and the head for multi-token prediction that ships with it.
    "qwen3.5-2b": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "hidden_act": "silu",
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "mtp_num_hidden_layers": 1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "eos_token_id": 1,
    },
    #: Short convolutions in ten of sixteen layers; its MLP is 8,192 wide.
    "lfm2-1.2b": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "vocab_size": 65536,
        "hidden_size": 2048,
        "block_ff_dim": 12288,
        "block_auto_adjust_ff_dim": True,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "conv_L_cache": 3,
        "conv_bias": False,
        "max_position_embeddings": 128000,
        "norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    #: Layer norms, an MLP without a gate, biases everywhere; a window in every layer.
    "starcoder2-3b": {
        "architectures": ["Starcoder2ForCausalLM"],
        "model_type": "starcoder2",
        "vocab_size": 49152,
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "num_hidden_layers": 30,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16384,
        "rope_theta": 999999.4420358813,
        "sliding_window": 4096,
        "torch_dtype": "float16",
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    #: Norms behind attention and MLP alone, and of query and key over all heads.
    "olmo2-1b": {
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        "vocab_size": 100352,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": 100257,
    },
    #: Windows of 512 tokens in five layers of six. Its makers' weights need bfloat16.
    "gemma4-e2b": {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
        "hidden_size": 1536,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 6144,
        "use_double_wide_mlp": True,
        "num_hidden_layers": 35,
        "num_kv_shared_layers": 20,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
        "sliding_window": 512,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    "gemma3-1b": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 32768,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16",
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
}

#: What published models' `config.json` say, by their names.
_TABLE = Path(__file__).parents[2] / "tests" / "goldens" / "published" / "configs.json.xz"
PUBLISHED: dict[str, dict[str, Any]] = {
    name: row["config"] for name, row in json.loads(lzma.decompress(_TABLE.read_bytes()))["published"].items()
}
#: Mixtures: a token goes through 8 of 128 experts (17 GB in int4), 4 of 32, 8 of 256, and 4 of 32 whose values go
#: beyond float16.
SHAPES |= {
    "qwen3-30b-a3b": PUBLISHED["Qwen3-30B-A3B"] | {"torch_dtype": "float16", "bos_token_id": 0, "eos_token_id": 1},
    "lfm2-8b-a1b": PUBLISHED["LFM2-8B-A1B"] | {"dtype": "float16"},
    "qwen3.5-35b-a3b": PUBLISHED["Qwen3.5-35B-A3B"]["text_config"]
    | {"architectures": ["Qwen3_5MoeForCausalLM"], "dtype": "float16", "tie_word_embeddings": False},
    "gpt-oss-20b": PUBLISHED["gpt-oss-20b"] | {"dtype": "bfloat16"},
}


def with_layers(config: dict[str, Any], layers: int | None) -> dict[str, Any]:
    """A `config.json` of so many layers, the first ones (None: as it is)."""
    found = config | {"num_hidden_layers": layers or config["num_hidden_layers"]}
    return found | ({"layer_types": config["layer_types"][:layers]} if "layer_types" in config else {})


#: With what its vision encoder needs; the preprocessor's settings beside it.
QWEN_2_5_VL_3B = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "torch_dtype": "float16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "image_token_id": 151655,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}
QWEN_2_5_VL_PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def checkpoint_in(work: Path, layers: int = LAYERS) -> Path:
    """The checkpoint in `work` with Llama-3.2-1B's shapes, of so many layers; written where it is not there yet."""
    checkpoint = work / ("checkpoint" if layers == LAYERS else f"checkpoint-{layers}")
    if not (checkpoint / "model.safetensors").exists():
        write_in_a_process(checkpoint, "--layers", str(layers))
    return checkpoint


def write_in_a_process(checkpoint: Path, *options: str) -> None:
    """Write a checkpoint, options as below; a child of this process would count what it held then as its own peak."""
    subprocess.run([sys.executable, __file__, checkpoint, *options], check=True)


def write_checkpoint(
    directory: Path,
    config: dict,
    seed: int = 0,
    preprocessor: dict | None = None,
    packed: WeightFormat | None = None,
    others: Sequence[WeightSpec] = (),
) -> None:
    """Write config, a byte-level tokenizer and normally distributed fp16 weights (standard deviation 0.02).

    A model with a `preprocessor` has a vision encoder. Linear layers before the head are `packed` where that is a
    format, symmetric integers of 4 bits: compressed-tensors' layout, evenly distributed codes. `others` are weights
    beside those of the language model.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if packed is not None:
        dense = ["lm_head", "re:.*visual.*", "re:.*mlp[.]gate$"]
        config = config | {"quantization_config": quantization_config(packed, dense)}
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    read = decoder_config(config)
    specs = [*decoder_weights(read), *token_table(read), *others]
    if preprocessor is not None:
        (directory / "preprocessor_config.json").write_text(json.dumps(preprocessor))
        vision = read_vision_config(config)
        specs += [*vision_weights(vision), *host_weights(vision)]
    # What need not reach the disk, which may take a minute.
    write_tensors(directory / "model.safetensors", random_tensors(specs, seed, packed), is_kept=False)


def random_tensors(
    specs: Sequence[WeightSpec], seed: int, packed: WeightFormat | None = None
) -> dict[str, StoredTensor | StreamedTensor]:
    """Normally distributed matrices and vectors of ones, fp16, by their names in a checkpoint; layers may be packed."""
    random = np.random.default_rng(seed)
    # One block of random values, begun anew for each tensor: drawing billions of normals would take minutes.
    block = (random.standard_normal(1 << 24) * 0.02).astype(np.float16)
    codes, tensors = random.integers(0, 256, 1 << 26, np.uint8), dict[str, StoredTensor | StreamedTensor]()
    for spec in specs:
        for name, shape in spec.parts:
            if packed is not None and len(shape) == 2 and ".layers." in name and ".mlp.gate." not in name:
                start = 4 * int(random.integers(0, (codes.size - math.prod(shape) // 2) // 4))
                own = packed_tensors(name.removesuffix(".weight"), shape, packed, codes[start:])
                tensors |= {each: StoredTensor(values.dtype.name, values) for each, values in own.items()}
            elif len(shape) == 1:
                tensors[name] = StoredTensor("float16", np.ones(shape, np.float16))
            else:
                begin = int(random.integers(0, block.size))
                tensors[name] = StreamedTensor("float16", shape, partial(_repeated, block, begin, math.prod(shape)))
    return tensors


def _repeated(block: np.ndarray, first: int, left: int) -> Iterator[np.ndarray]:
    """The bytes of so many elements: those of the block from the `first` on, again and again."""
    while left:
        piece = block[first : first + left]
        yield piece.view(np.uint8)
        first, left = 0, left - piece.size


def packed_tensors(
    module: str, shape: tuple[int, int], format: WeightFormat, drawn: np.ndarray
) -> dict[str, np.ndarray]:
    """Codes from 0 to 15, the first of those `drawn`, with one scale, which gives the layer the deviation of the dense
    ones."""
    rows, columns = shape
    words = drawn[: rows * columns // 2].view("<i4").reshape(rows, -1)
    scales = np.full((rows, format.groups(columns)), 0.02 / np.arange(16).std(), np.float16)
    tensors = {"weight_packed": words, "weight_scale": scales, "weight_shape": np.array(shape, np.int64)}
    return {f"{module}.{ending}": tensor for ending, tensor in tensors.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shapes", choices=list(SHAPES), default="llama-1b")
    parser.add_argument("--layers", type=int, help="instead of the published count")
    parser.add_argument("--weights", choices=("float16", "int4"), default="float16", help="int4: groups of 128")
    parser.add_argument("--draft", type=Path, help="where to write an EAGLE-3 head of matching shapes")
    arguments = parser.parse_args()
    base = with_layers(SHAPES[arguments.shapes], arguments.layers)
    int4 = WeightFormat("int4", 128, zeros=False, dtype="float16")
    write_checkpoint(arguments.directory, base, packed=int4 if arguments.weights == "int4" else None)
    if arguments.draft is not None:
        write_draft(arguments.draft, base)
