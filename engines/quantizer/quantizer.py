"""Quantizes a checkpoint, layer by layer: a run that was interrupted goes on where it stopped."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weight_files import INDEX_FILE, SINGLE_FILE
from edgellm.engines.checkpoints.weights import counted
from edgellm.engines.directories.description import DESCRIPTION_NAME
from edgellm.engines.directories.engine_directory import check_checkpoint_places, published_file_names
from edgellm.engines.errors import CheckpointError, UnsupportedModelError, explained
from edgellm.engines.families.embedding import checkpoint_decoder_config
from edgellm.engines.formats.digests import copy_published
from edgellm.engines.formats.safetensors_file import SafetensorsFile
from edgellm.engines.formats.staged_directory import StagedDirectory, check_space
from edgellm.engines.formats.strict_formats import JSONObject
from edgellm.engines.formats.tensors import ENCODER_PREFIXES, STORAGE
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.decoder import decoder_weights, unread_tensors
from edgellm.engines.model.program import Program
from edgellm.engines.quantization.config import quantization_settings
from edgellm.engines.quantizer import layers as model_layers
from edgellm.engines.quantizer import written_layout
from edgellm.engines.quantizer.arithmetic import NUMPY, Arithmetic
from edgellm.engines.quantizer.calibration import CalibrationRows, layer_program
from edgellm.engines.quantizer.feedback import quantize_in_turn
from edgellm.engines.quantizer.options import QuantizationOptions, check_groups, check_options, columns_of
from edgellm.engines.quantizer.scaling import expert_linears
from edgellm.engines.quantizer.statistics import InputStatistics
from edgellm.engines.quantizer.work_folder import WorkFolder, job_of
from edgellm.engines.quantizer.written_layout import StoredTensor
from edgellm.kernels.quantization.packed_weight import PackedWeight, WeightFormat

#: `progress(stage, done, total)`; stages are "layers" and "files".
Progress = Callable[[str, int, int], None]

#: Under which a file of a layer says how many tokens chose each expert.
EXPERTS_CHOSEN = "experts_chosen"
#: So many tokens of a calibration text are taken at once.
LONGEST_TEXT = 512
#: What is copied beside weights and config.json: endings and beginnings of names.
_COPIED_ENDINGS = (".json", ".jinja", ".txt", ".md", ".model", ".tiktoken")
_COPIED_BEGINNINGS = ("LICENSE", "NOTICE", "USE_POLICY")
_COPY_AGAIN = "Copy it from the checkpoint's source"


@dataclass
class QuantizationReport:
    """What was written: `layers` in all, of which `resumed` were there already; weights in bytes before and after;
    calibration `tokens`."""

    path: Path
    options: QuantizationOptions
    layers: int
    resumed: int
    bytes_before: int
    bytes_after: int
    tokens: int
    copied: Sequence[str] = field(default=())
    seconds: float = 0.0
    #: How many tokens of the texts chose each expert, by the layer's number.
    chosen: Mapping[int, Sequence[int]] = field(default_factory=dict)


def quantize_checkpoint(
    source: str | Path,
    target: str | Path,
    options: QuantizationOptions,
    texts: Sequence[Sequence[int]] = (),
    force: bool = False,
    restart: bool = False,
    progress: Progress | None = None,
    arithmetic: Arithmetic = NUMPY,
) -> QuantizationReport:
    """Quantize the linear layers of the language model, or the EAGLE head, in the directory `source` into the new
    directory `target`.

    `texts` are the token ids of calibration texts; only "rtn" needs none, and EAGLE heads take that alone. Embeddings,
    head, norms, vision encoder and `DENSE_PARTS` stay as published, but for scales. The target appears when it is
    complete; what was done of an interrupted run is kept in a hidden folder beside it and gone on with, or with
    `restart` thrown away. With `force` an existing checkpoint is replaced. `arithmetic` computes. Raises
    CheckpointError and UnsupportedModelError.
    """
    started, progress = time.perf_counter(), progress or (lambda stage, done, total: None)
    source, target = Path(source), Path(target)
    refuse_quantized(source)
    check_checkpoint_places(source, target, force)
    with Checkpoint.open(source) as checkpoint:
        is_head = model_layers.is_eagle_head(checkpoint)
        run = _Run(checkpoint, target, options, force, progress, arithmetic)
        advice = "" if is_head else ". The layers that were done are kept: give the command again to go on"
        with explained(f"{target} was not written", CheckpointError, advice, names_file=True):
            report = run.head() if is_head else run.model(texts, restart)
    report.seconds = time.perf_counter() - started
    return report


def refuse_quantized(source: Path) -> None:
    """CheckpointError for a directory whose `config.json` says that its weights are quantized already."""
    path = source / "config.json"
    if not path.is_file():
        return  # opening it says what is wrong
    key, settings = quantization_settings(JSONObject.read(path, CheckpointError, _COPY_AGAIN).values)
    if settings is not None:
        method = settings.get("quant_method") if isinstance(settings, dict) else None
        raise CheckpointError(
            f"{path}: by {key!r} the weights are quantized already"
            + (f" with the method {method!r:.60}" if isinstance(method, str) else "")
            + "; expected float16, bfloat16 or float32. Build from it as it is (edgellm build), or quantize the "
            "model's unquantized checkpoint"
        )


@dataclass(frozen=True)
class _Run:
    """One checkpoint on its way to a target; see `quantize_checkpoint`."""

    checkpoint: Checkpoint
    target: Path
    options: QuantizationOptions
    force: bool
    progress: Progress
    arithmetic: Arithmetic

    @cached_property
    def format(self) -> WeightFormat:
        """What weights become."""
        return self.options.format(self.checkpoint.dtype or "float16")

    def head(self) -> QuantizationReport:
        """An EAGLE head, which cannot be run without its base: its linear layers, each by itself."""
        checkpoint, options = self.checkpoint, self.options
        if options.method != "rtn":
            raise CheckpointError(
                f"{checkpoint.path} is an EAGLE head, whose inputs come from its base: the method {options.method!r} "
                "has no texts for it. Take --method rtn"
            )
        check_options(options, ())
        shapes = model_layers.head_shapes(checkpoint)
        check_groups({name: columns for name, (_, columns) in shapes.items()}, options)
        advance = counted(len(shapes), partial(self.progress, "layers"))
        advance(0)
        tensors = model_layers.packed_linears(checkpoint, shapes, self.format, lambda rows: advance(1), self.arithmetic)
        return self._assemble(shapes.keys(), ["lm_head"], tensors)

    def model(self, texts: Sequence[Sequence[int]], restart: bool) -> QuantizationReport:
        """A language model, layer by layer."""
        checkpoint, options = self.checkpoint, self.options
        check_options(options, texts)
        config = checkpoint_decoder_config(checkpoint)
        if config.layers_differ or (config.mixture is not None and config.mixture.latent_size):
            raise UnsupportedModelError(
                f"{checkpoint.path}: layers of {config.family} share rows, or have heads, embeddings, factors or "
                "widths of experts of their own, and cannot be quantized one by one. Take a checkpoint that was "
                "published packed, or another"
            )
        checkpoint.check(decoder_weights(config), unread_tensors(config))
        check_groups(columns_of(config), options)
        longest = min(LONGEST_TEXT, config.max_position_embeddings, config.sliding_window or LONGEST_TEXT)
        texts = [text[start : start + longest] for text in texts for start in range(0, len(text), longest)]
        check_space(self.target.parent, _total_bytes(checkpoint), CheckpointError, "the checkpoint")
        programs = [layer_program(config, index, 1) for index in range(config.num_layers)]
        done = {name for program in programs for spec in program.weights.values() for name, _ in spec.parts}
        with WorkFolder(self.target, job_of(checkpoint, asdict(options), texts), restart) as work:
            resumed = self._quantize_layers(config, programs, texts, work)
            layers = [work.layer(index) for index in range(config.num_layers)]
            report = self._assemble(done, _ignored(checkpoint, config), {}, layers)
            work.remove()
        return replace(report, layers=len(layers), resumed=resumed, tokens=sum(map(len, texts)))

    def _quantize_layers(
        self, config: DecoderConfig, programs: Sequence[Program], texts: Sequence[Sequence[int]], work: WorkFolder
    ) -> int:
        """Write every layer that is not done; how many were."""
        checkpoint, options, count = self.checkpoint, self.options, len(programs)
        due = [index for index in range(count) if not work.has(index)]
        advance, rows = counted(count, partial(self.progress, "layers")), None
        advance(count - len(due))
        if texts and due:
            observed = options.group_size, self.arithmetic, options.method == "gptq"
            rows = CalibrationRows(config, checkpoint, texts, *observed)
        for index in due if rows is None else range(due[-1] + 1):
            program = programs[index]
            weights = model_layers.layer_weights(checkpoint, program)
            if rows is not None and index not in due:
                rows.pass_layer(index, weights)
                continue
            seen = {} if rows is None else rows.observe_layer(index, weights)
            experts = [pair for step in program.mixtures for pair in expert_linears(step)]
            counts = [seen[linear.name].rows if linear.name in seen else 0 for linear, _ in experts]
            metadata = {EXPERTS_CHOSEN: json.dumps(counts)} if counts and seen else {}
            work.write(index, self._quantized(program, weights, seen), metadata)
            advance(1)
        return count - len(due)

    def _quantized(
        self, program: Program, weights: dict[str, np.ndarray], seen: dict[str, InputStatistics]
    ) -> dict[str, StoredTensor]:
        """The tensors of a layer, quantized; the `weights` are changed, and what was `seen` is let go of."""
        checkpoint, arithmetic, method = self.checkpoint, self.arithmetic, self.options.method
        dtypes = {spec.name: checkpoint.info(spec.parts[0][0]).dtype for spec in model_layers.layer_specs(program)}
        if method != "rtn":
            seen = model_layers.scale_layer(program, weights, seen, self.format, dtypes, arithmetic)

        def quantize(name: str, weight: np.ndarray) -> PackedWeight:
            if name not in seen:  # without texts, or an expert that none of them reached
                return arithmetic.quantize_rows(weight, self.format)
            if method == "gptq":
                return quantize_in_turn(weight, self.format, seen.pop(name), arithmetic)
            return arithmetic.quantize_rows(weight, self.format, seen[name].factors)

        return model_layers.layer_tensors(checkpoint, program, weights, quantize)

    def _assemble(
        self, done: Collection[str], ignored: list[str], tensors: dict[str, StoredTensor], layers: Sequence[Path] = ()
    ) -> QuantizationReport:
        """The directory: a file of `tensors` and of those of the checkpoint that are not `done`, one for each of the
        files `layers`, with an index of all, and the source's other files."""
        checkpoint = self.checkpoint
        others = {
            model_layers.published_name(name, info): StoredTensor(info.dtype, _elements(checkpoint, name))
            for name, info in checkpoint.tensors.items()
            if name not in done
        }
        names = written_layout.shard_names(len(layers) + 1) if layers else [SINGLE_FILE]
        weight_map: dict[str, str] = {}
        chosen: dict[int, list[int]] = {}
        size = 0
        with StagedDirectory(self.target) as staged:
            copied = _copy_others(checkpoint.path, staged.path)
            written_layout.write_tensors(staged.path / names[0], others | tensors)
            for layer, name in zip(layers, names[1:], strict=True):
                _link(layer, staged.path / name)
            for number, name in enumerate(names):
                file = SafetensorsFile(staged.path / name)
                if EXPERTS_CHOSEN in (file.metadata or {}):
                    chosen[number - 1] = json.loads(file.metadata[EXPERTS_CHOSEN])
                weight_map |= dict.fromkeys(file.tensors, name)
                size += sum(info.nbytes for info in file.tensors.values())
                file.close()
            if layers:
                written_layout.write_index(staged.path, weight_map, size)
            settings = {"quantization_config": written_layout.quantization_config(self.format, ignored)}
            written_layout.write_json(staged.path / "config.json", checkpoint.config | settings)
            staged.commit(self.force)
        sizes = _total_bytes(checkpoint), size
        return QuantizationReport(self.target, self.options, len(done), 0, *sizes, 0, copied, chosen=chosen)


def _elements(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """A tensor as it is published, of whatever dtype: a view of its file."""
    info = checkpoint.info(name)
    dtype = STORAGE.get(info.dtype)
    data = checkpoint.raw_bytes(name)
    if dtype is None:
        dtype = np.dtype(f"u{data.size // max(1, int(np.prod(info.shape)))}") if data.size else np.dtype(np.uint8)
    return data.view(dtype).reshape(info.shape)


def _ignored(checkpoint: Checkpoint, config: DecoderConfig) -> list[str]:
    """The linear layers that stay as published: names, and patterns as compressed-tensors matches them."""
    published = [info.name for info in checkpoint.tensors.values()]
    parts = {prefix.split(".")[-2] for prefix in ENCODER_PREFIXES if any(name.startswith(prefix) for name in published)}
    heads = [prefix for prefix in unread_tensors(config) if any(name.startswith(prefix) for name in published)]
    patterns = [f"re:.*{part}[.].*" for part in sorted(parts)] + [f"re:^{re.escape(prefix)}.*" for prefix in heads]
    dense = [model_layers.DENSE_PATTERN] if any(name.endswith(model_layers.DENSE_PARTS) for name in published) else []
    return ["lm_head", *patterns, *dense, *model_layers.router_patterns(config)]


def _copy_others(source: Path, folder: Path) -> list[str]:
    """Copy what belongs to the checkpoint beside its weights; the names."""
    names = {
        path.name
        for path in source.iterdir()
        if path.is_file() and (path.suffix in _COPIED_ENDINGS or path.name.startswith(_COPIED_BEGINNINGS))
    }
    names |= set(published_file_names(source))
    copied = sorted(names - {INDEX_FILE, "config.json", DESCRIPTION_NAME})
    for name in copied:
        copy_published(source / name, folder / name)
    return copied


def _link(path: Path, target: Path) -> None:
    """The same file under another name; a copy where the file system has no such names."""
    with suppress(OSError):
        os.link(path, target)
        return
    shutil.copyfile(path, target)


def _total_bytes(checkpoint: Checkpoint) -> int:
    return sum(info.nbytes for info in checkpoint.tensors.values())
