"""What llama.cpp's converter writes of tiny vision encoders and of an EAGLE-3 head: metadata, and digests of tensors.

    python tools/goldens/make_mmproj.py LLAMA_CPP tests/goldens/mmproj/converted.json

Needs torch, transformers and a source tree of llama.cpp; here that which llama-cpp-python 0.3.36 brings along in
`vendor/llama.cpp`. The models are `tests/goldens/image_prompts` and `tests/goldens/draft/eagle3`, drawn as tests draw
them. Of each file the keys `clip.*` (or those of the head), and for each tensor 8 digits of the SHA-256 of its type,
its shape and its bytes; `tests/helpers/gguf_encoders.py` writes the same.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))

from golden_files import golden_folder, pack

#: Folders of golden models, whose vision encoders are converted.
ENCODERS = ("qwen2_5_vl_old", "qwen3_vl", "qwen3_5")
_PREPROCESSOR = {"image_mean": [0.5, 0.25, 0.125], "image_std": [0.5, 0.75, 1.0]}


def converted(source: Path, target: Path, encoder: bool = True, **more: Any) -> Path:
    """The vision encoder of the checkpoint in a folder, or its texts, as the converter writes it in float16."""
    import gguf
    from conversion import ModelBase, get_model_class

    config = ModelBase.load_hparams(source, False)
    model = get_model_class(config["architectures"][0], mmproj=encoder)
    if not encoder:  # without a tokenizer, which these models do not have
        model.set_vocab = lambda self: None
    made = model(source, gguf.LlamaFileType.MOSTLY_F16, target, **more)
    if encoder:  # of encoders of two layers it does not know the name of the projector's second, "2"
        made.tensor_map = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, max(3, made.block_count))
    made.write()
    return target


def described(file: Path) -> dict[str, Any]:
    """The metadata of a file but for what all files have, and the digests of its tensors."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    beginnings = "clip.", "eagle3."
    tensors = {}
    for tensor in reader.tensors:
        shape = [int(each) for each in reversed(tensor.shape)]
        head = f"{tensor.tensor_type.name} {shape}".encode()
        tensors[tensor.name] = hashlib.sha256(head + tensor.data.tobytes()).hexdigest()[:8]
    return {"metadata": {key: value for key, value in keys.items() if key.startswith(beginnings)}, "tensors": tensors}


def main(source: Path, target: Path) -> None:
    """Convert all, and write what was found."""
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model in ENCODERS:
            checkpoint = shutil.copytree(golden_folder("image_prompts") / model, folder / model)
            (checkpoint / "preprocessor_config.json").write_text(json.dumps(_PREPROCESSOR))
            found[model] = described(converted(checkpoint, folder / f"{model}.gguf"))
        head = shutil.copytree(golden_folder("draft") / "eagle3", folder / "eagle3")
        base = shutil.copytree(golden_folder("draft") / "llama_base", folder / "base")
        file = converted(head, folder / "eagle3.gguf", False, target_model_dir=base)
        found["eagle3"] = described(file)
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(found, separators=(",", ":")).replace('},"', '},\n"') + "\n")
    pack(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
