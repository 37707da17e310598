"""Embedding models: decoders whose checkpoint says how the hidden states of a text become one vector.

They are published as sentence-transformers writes them: `modules.json` lists what a text goes through, a transformer,
a pooling and perhaps a normalization, and the folder of the pooling says which one it is.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.errors import CheckpointError, UnsupportedModelError
from edgellm.engines.families import decoder_config
from edgellm.engines.formats.small_files import CONFIG_BYTES, read_file
from edgellm.engines.formats.strict_formats import JSONObject, as_json, parse_json
from edgellm.engines.model.config import POOLINGS, DecoderConfig
from edgellm.engines.model.decoder import HEAD

#: What a text goes through, and the pooling among it; as each file says them for the last token.
MODULES_FILE, POOLING_FILE = "modules.json", "1_Pooling/config.json"
#: The prompts that it was trained with, by their names.
PROMPTS_FILE = "config_sentence_transformers.json"
MODULES = [{"path": "", "type": "Transformer"}, {"path": "1_Pooling", "type": "Pooling"}]
LAST_TOKEN = {"pooling_mode": "lasttoken"}
#: Families of which embedding models were compared with transformers.
_FAMILIES = ("qwen3",)
#: The modules by the last part of their types, in their order, with their folders (None: whichever).
_KNOWN = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": None}
#: What `config.json` of such a model may not say, as its tokens would see others than they do here.
_OTHERWISE = {"auto_map": None, "is_causal": True, "use_bidirectional_attention": False}


def checkpoint_decoder_config(checkpoint: Checkpoint) -> DecoderConfig:
    """The dimensions of a checkpoint's decoder, of an embedding model with its pooling: it may have no head, whatever
    its `config.json` says. Raises UnsupportedModelError and CheckpointError as `decoder_config` and `read_pooling`."""
    pooling, published = read_pooling(checkpoint.path), checkpoint.config
    if pooling == POOLINGS[0]:
        return decoder_config(published, checkpoint.generation_config, dtype=checkpoint.dtype)
    for key, usual in _OTHERWISE.items():
        if published.get(key) not in (None, usual):
            found = f"config.json has {key} {as_json(published[key])}"
            raise UnsupportedModelError(
                f"{checkpoint.path}: {found}, so its tokens may see later ones; supported are embedding models whose "
                "tokens see earlier ones alone"
            )
    names = published.get("architectures")
    if isinstance(names, list) and len(names) == 1 and str(names[0]).endswith("Model"):
        names = [f"{str(names[0]).removesuffix('Model')}ForCausalLM"]  # the same without a head
    config = decoder_config(published | {"architectures": names}, checkpoint.generation_config, dtype=checkpoint.dtype)
    if config.family not in _FAMILIES:
        raise UnsupportedModelError(
            f"{checkpoint.path} is an embedding model ({MODULES_FILE}) of the family {config.family}, supported are "
            f"those of {', '.join(_FAMILIES)}, such as Qwen3-Embedding"
        )
    tied = config.tie_word_embeddings or not checkpoint.has_weight(HEAD)
    return replace(config, pooling=pooling, feature_layers=(config.num_layers,), tie_word_embeddings=tied)


def read_pooling(path: Path) -> str:
    """Which of `POOLINGS` the files of a checkpoint say; none without `modules.json`.

    Raises UnsupportedModelError, which names it, for another pooling or a further module, and CheckpointError for files
    that are missing or say nothing.
    """
    file = path / MODULES_FILE
    if not file.exists():
        return POOLINGS[0]
    modules = parse_json(read_file(file, CONFIG_BYTES, CheckpointError), str(file), CheckpointError)
    found: list[str] = []
    for each in modules if isinstance(modules, list) else [None]:
        module = each if isinstance(each, dict) else {}
        kind = str(module.get("type")).rpartition(".")[2]
        if kind not in _KNOWN or _KNOWN[kind] not in (None, module.get("path")):
            raise UnsupportedModelError(
                f"{file} has {as_json(each)}; supported are a Transformer in the folder itself, a Pooling in "
                f"{_KNOWN['Pooling']} and a Normalize"
            )
        found.append(kind)
    if found not in (["Transformer", "Pooling"], list(_KNOWN)):
        raise UnsupportedModelError(f"{file} has {as_json(found)}, expected {', '.join(_KNOWN)} in this order")
    values = JSONObject.read(path / POOLING_FILE, CheckpointError, "Copy it from the checkpoint's source").values
    # By one name or, in earlier releases, by a switch for each.
    switches = [key for key, is_on in values.items() if key.startswith("pooling_mode_") and is_on is True]
    asked = values.get("pooling_mode", " and ".join(key.removeprefix("pooling_mode_") for key in switches))
    if asked != LAST_TOKEN["pooling_mode"]:
        raise UnsupportedModelError(
            f"{path / POOLING_FILE}: the pooling is {as_json(asked)}; supported is {LAST_TOKEN['pooling_mode']}, the "
            "hidden state of the last token"
        )
    return POOLINGS[1]
