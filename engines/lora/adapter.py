"""LoRA adapters (Hu et al. 2021) as PEFT saves them: a directory with `adapter_config.json` and safetensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgellm.engines.errors import AdapterError, CheckpointError
from edgellm.engines.formats.digests import current_digest, hash_bytes
from edgellm.engines.formats.safetensors_file import SafetensorsFile, TensorInfo
from edgellm.engines.formats.tensors import STORAGE, as_float32, encoder_prefix, language_model_name, value_and_place
from edgellm.engines.lora.config import CONFIG_NAME, LoraConfig
from edgellm.engines.model.adapted_projections import adapted_projections
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.decoder import decoder_weights, unread_tensors
from edgellm.engines.model.limits import LARGEST_LORA_RANK
from edgellm.kernels.sampling.twin import first_not_finite

WEIGHTS_NAME = "adapter_model.safetensors"
#: The files of an adapter.
ADAPTER_FILES = (CONFIG_NAME, WEIGHTS_NAME)

_PICKLED_NAME = "adapter_model.bin"
#: What PEFT puts before every name, and what begins the language model's own.
_WHOLE_MODEL, _LANGUAGE_MODEL = "base_model.model.", "model."
_TENSOR = re.compile(rf"{re.escape(_WHOLE_MODEL)}(.+)\.lora_([AB])\.weight")


@dataclass(frozen=True, eq=False)
class LoraPair:
    """The two matrices of one linear layer: `a` [r, K] and `b` [N, r] as published, in `dtype` (bfloat16 as uint16)."""

    a: np.ndarray
    b: np.ndarray
    dtypes: tuple[str, str]
    scale: float

    @property
    def rank(self) -> int:
        """r."""
        return self.a.shape[0]

    def matrices(self) -> tuple[np.ndarray, np.ndarray]:
        """`a` and `b` times the scale, float32."""
        a, b = (as_float32(values, dtype) for values, dtype in zip((self.a, self.b), self.dtypes, strict=True))
        with np.errstate(over="ignore"):  # who packs them refuses infinities
            return a, b * np.float32(self.scale)


@dataclass(frozen=True, eq=False)
class LoraAdapter:
    """An adapter in host memory. `pairs` by module, such as `model.layers.0.self_attn.q_proj`.

    `digest` is the SHA-256 of its files, 64 hexadecimal digits: what was computed with the adapter is bound to it.
    """

    path: Path
    pairs: Mapping[str, LoraPair]
    digest: str

    @property
    def rank(self) -> int:
        """The largest rank of a pair."""
        return max(pair.rank for pair in self.pairs.values())

    @property
    def nbytes(self) -> int:
        """Size of all matrices in bytes."""
        return sum(pair.a.nbytes + pair.b.nbytes for pair in self.pairs.values())

    @classmethod
    def read(cls, path: str | Path, config: DecoderConfig) -> LoraAdapter:
        """Read an adapter for a model of dimensions `config`.

        AdapterError lists everything that is wrong with it: settings that are not supported, tensors that are missing,
        unknown or of another shape than the settings and the model ask for, values that are not finite.
        """
        path = Path(path)
        _check_files(path)
        settings = LoraConfig.read(path)
        problems = list(settings.problems)
        try:
            file = SafetensorsFile(path / WEIGHTS_NAME)
        except CheckpointError as error:
            raise AdapterError(str(error)) from error
        try:
            pairs = _read_pairs(file, settings, config, problems)
        finally:
            file.close()
        if problems:
            listed = "\n".join(f"  {problem}" for problem in problems)
            raise AdapterError(
                f"{path} cannot be used as an adapter of this model ({len(problems)} problems):\n{listed}\n"
                "Take an adapter that was trained with PEFT for this very model."
            )
        return cls(path, pairs, adapter_digest({name: current_digest(path / name).sha256 for name in ADAPTER_FILES}))


def adapter_rank(path: str | Path) -> int:
    """The rank that engines need for an adapter, by its settings alone. Raises AdapterError."""
    _check_files(Path(path))
    config = LoraConfig.read(Path(path))
    return max(config.rank, *config.rank_pattern.values(), 1)


def adapter_digest(digests: Mapping[str, str]) -> str:
    """The digest of an adapter whose files, by name, have these SHA-256."""
    listed = "\n".join(f"{name} {digests[name]}" for name in ADAPTER_FILES)
    return hash_bytes(listed.encode())


def _check_files(path: Path) -> None:
    if not path.is_dir():
        found = "is a file" if path.exists() else "does not exist"
        raise AdapterError(f"{path} {found}: expected the directory of an adapter, with {' and '.join(ADAPTER_FILES)}")
    if (path / WEIGHTS_NAME).exists() or not (path / _PICKLED_NAME).exists():
        return
    raise AdapterError(
        f"{path} has its weights pickled ({_PICKLED_NAME}), which is not read. Convert them: edgellm convert "
        f"{path / _PICKLED_NAME} NEW_DIR, then name NEW_DIR/model.safetensors {WEIGHTS_NAME} and put {CONFIG_NAME} "
        "beside it"
    )


def _read_pairs(
    file: SafetensorsFile, settings: LoraConfig, config: DecoderConfig, problems: list[str]
) -> dict[str, LoraPair]:
    """The pairs that are right, by the modules' own names; what is not goes to `problems`.

    The settings match the names that the modules had in training.
    """
    sizes = {
        module: (rows, each.inputs)
        for each in adapted_projections(decoder_weights(config))
        for module, rows in each.modules
    }
    tensors = _language_tensors(file, settings, config, problems)
    trained = _names_in_training(tensors, sizes)
    own = {name: module for module, name in trained.items()}
    expected = {module: name for module, name in trained.items() if settings.adapts(name)}
    if not expected and not settings.problems:
        problems.append("'target_modules' matches no linear layer of the language model")
    found: dict[tuple[str, str], TensorInfo] = {}
    unread = unread_tensors(config)
    for name, info in tensors.items():
        match = _TENSOR.fullmatch(name)
        module = "" if match is None else own.get(match[1], "")
        if name.endswith(".bias"):
            problems.append(f"trained: {name!r:.120} {list(info.shape)}: biases of adapters are not supported")
        elif match is not None and language_model_name(match[1]).startswith(unread):
            continue  # of what a release of transformers made and never computed
        elif match is None or not module:
            problems.append(f"unknown: {name!r:.120} {list(info.shape)}")
        elif module in expected:
            found[module, match[2]] = info
        elif expected:
            problems.append(f"unexpected: {name} is not among the targets of {CONFIG_NAME}")
    pairs = {}
    for module, name in expected.items():
        rank, (rows, columns) = settings.rank_of(name), sizes[module]
        a, b = (
            _read_matrix(file, found.get((module, kind)), f"{name}.lora_{kind}", shape, problems)
            for kind, shape in (("A", (rank, columns)), ("B", (rows, rank)))
        )
        if rank > LARGEST_LORA_RANK:
            problems.append(f"{name} has the rank {rank}: expected at most {LARGEST_LORA_RANK}")
        elif a is not None and b is not None:
            pairs[module] = LoraPair(a[0], b[0], (a[1], b[1]), settings.scale_of(name))
    return pairs


def _language_tensors(
    file: SafetensorsFile, settings: LoraConfig, config: DecoderConfig, problems: list[str]
) -> dict[str, TensorInfo]:
    """The tensors but those for encoders, which are one problem together, and those for experts, another.

    What was trained with texts alone may have pairs for encoders that change nothing: each B is as it began, zeros.
    """
    tensors = file.tensors
    prefixes = {name: encoder_prefix(name.removeprefix(_WHOLE_MODEL)) for name in tensors}
    vision = [name for name, prefix in prefixes.items() if prefix]
    if any(not name.endswith(".lora_A.weight") and file.bytes_of(tensors[name]).any() for name in vision):
        modules = {name.removeprefix(_WHOLE_MODEL).split(".lora_")[0] for name in vision}
        exclude = settings.excluding({prefix for prefix in prefixes.values() if prefix})
        problems.append(
            f"it adapts {len(modules)} layers of encoders ({len(vision)} tensors, the first is "
            f"{vision[0]!r:.120}), but adapters are served for the language model alone: train it with "
            f"exclude_modules={exclude!r}"
        )
    parts = [".experts.", ".shared_expert", ".block_sparse_moe."]  # the last is Granite 3's
    parts += [".shared_mlp."] if config.mixture is not None else []  # Granite 4's
    experts = [name for name in tensors if any(part in name for part in parts)]
    if experts:
        problems.append(
            f"it adapts a mixture's experts ({len(experts)} tensors, the first is {experts[0]!r:.120}), but adapters "
            "are served for attention and MLPs alone: train it with other target_modules"
        )
    return {name: info for name, info in tensors.items() if not prefixes[name] and name not in experts}


def _names_in_training(tensors: Iterable[str], modules: Iterable[str]) -> dict[str, str]:
    """What each of the language model's modules was called in training, by its own name.

    Multimodal models put the language model's modules below others, in one way or another; the names of the tensors
    say in which. An adapter of the language model alone has its own names.
    """
    own, prefix = set(modules), _LANGUAGE_MODEL
    for name in tensors:
        match = _TENSOR.fullmatch(name)
        module = "" if match is None else language_model_name(match[1])
        if match is not None and module in own:
            prefix = match[1].removesuffix(module.removeprefix(_LANGUAGE_MODEL))
            break
    return {module: prefix + module.removeprefix(_LANGUAGE_MODEL) for module in modules}


def _read_matrix(
    file: SafetensorsFile, info: TensorInfo | None, what: str, shape: tuple[int, int], problems: list[str]
) -> tuple[np.ndarray, str] | None:
    """A copy of the tensor in its own dtype, or None where a problem was found."""
    if info is None:
        problems.append(f"missing: {what} {list(shape)}")
    elif info.shape != shape:
        problems.append(f"wrong shape: {what} is {list(info.shape)}, expected {list(shape)}")
    elif info.dtype not in STORAGE:
        problems.append(f"wrong dtype: {what} is {info.dtype}, expected one of {', '.join(STORAGE)}")
    else:
        values = file.bytes_of(info).view(STORAGE[info.dtype]).reshape(shape).copy()
        index = first_not_finite(values.reshape(-1))
        if index < 0:
            return values, info.dtype
        problems.append(f"not finite: {what} is {value_and_place(values, info.dtype, index)}")
    return None
