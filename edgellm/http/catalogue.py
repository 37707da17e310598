"""What there is to say about the model and its adapters, in the forms of OpenAI's, Anthropic's and ollama's clients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from edgellm.engines.model.decoder import as_published, decoder_weights
from edgellm.http.fields import ServedModel
from edgellm.http.ollama import OPTIONS, written_time
from edgellm.runtime import SpecDecodeRuntime
from edgellm.structure.reasoning import harmony_ids, reasoning_marks

#: When the model leaves the memory, which is never: clients of ollama write "Forever" where it is decades away.
_NEVER = datetime(2200, 1, 1, tzinfo=timezone.utc)


@dataclass(frozen=True)
class Catalogue:
    """An open model with its adapters, served since `created` (seconds since 1970) for `context` tokens."""

    model: ServedModel
    runtime: SpecDecodeRuntime
    context: int
    created: int

    def models(self) -> dict[str, Any]:
        """The list of `/v1/models`, whole."""
        names = self.model.names
        ends = {"first_id": names[0], "last_id": names[-1], "has_more": False}
        return {"object": "list", "data": [self.known(name) for name in names], **ends}

    def known(self, name: str) -> dict[str, Any]:
        """The object of `/v1/models/NAME`. Raises HTTPError."""
        parent = None if self.model.adapter_of(name) is None else self.model.name
        known = {"id": name, "object": "model", "created": self.created, "owned_by": "edgellm", "parent": parent}
        created = written_time(datetime.fromtimestamp(self.created, timezone.utc))
        known |= {"type": "model", "display_name": name, "created_at": created, "lifecycle": "active"}
        about = {} if self.model.description is None else {"description": self.model.description}
        return {**known, "max_model_len": self.context, "max_input_tokens": self.context, **about}

    def tags(self) -> dict[str, Any]:
        """The list of `/api/tags`."""
        return {"models": [self._entry(name) for name in self.model.names]}

    def running(self) -> dict[str, Any]:
        """The list of `/api/ps`: all there is, with the memory of the whole, the GPU's where there is one."""
        size = sum(self.runtime.planned_memory.values())
        memory = {"size": size, "size_vram": 0 if self.runtime.backend_name == "numpy" else size}
        loaded = memory | {"context_length": self.context, "expires_at": written_time(_NEVER)}
        return {"models": [self._entry(name) | loaded for name in self.model.names]}

    def _entry(self, name: str) -> dict[str, Any]:
        """What `/api/tags` tells of the model, or of an adapter under its own name."""
        directory = self.runtime.directory
        config, packed = directory.config, bool(directory.packed_names)
        is_safe = all(each.endswith(".safetensors") for each in directory.weight_files)
        details = {
            "parent_model": "" if name == self.model.name else self.model.name,
            "format": "safetensors" if is_safe else "gguf",
            "family": config.family,
            "families": [config.family],
            "parameter_size": f"{self._parameters() / 1e6:.1f}M",
            "quantization_level": "packed" if packed else directory.dtype,
        }
        written = (directory.path / "edgellm.json").stat().st_mtime
        return {
            "name": name,
            "model": name,
            "modified_at": written_time(datetime.fromtimestamp(written, timezone.utc)),
            "size": sum(directory.files[each].size for each in directory.weight_files),
            "digest": directory.description_sha256,
            "details": details,
        }

    def facts(self, name: str) -> dict[str, Any]:
        """What `/api/show` tells: dimensions, the template, what the model can do, and the server's own parameters."""
        entry, config, tokenizer = self._entry(name), self.runtime.directory.config, self.runtime.tokenizer
        can = {
            "embedding": config.is_embedding,
            "completion": not config.is_embedding,
            "vision": self.runtime.directory.vision is not None or "image" in config.media,
            "tools": "tools" in self.model.template_variables,
            "thinking": reasoning_marks(tokenizer) is not None or harmony_ids(tokenizer) is not None,
        }
        sizes = {
            "context_length": self.context,
            "embedding_length": config.hidden_size,
            "block_count": config.num_layers,
            "feed_forward_length": config.intermediate_size,
            "attention.head_count": config.num_heads,
            "attention.head_count_kv": config.num_kv_heads,
            "vocab_size": config.vocab_size,
        }
        known = {"general.architecture": config.family, "general.parameter_count": self._parameters()}
        template, params = tokenizer.chat_template, self.model.params
        said = {name: getattr(params, called) for name, called in OPTIONS.items() if name != "stop"}
        return {
            "modified_at": entry["modified_at"],
            "details": entry["details"],
            "model_info": known | {f"{config.family}.{size}": value for size, value in sizes.items()},
            "template": "" if template is None else template.sources.get("default", ""),
            "parameters": "\n".join(f"{name} {value}" for name, value in said.items() if value is not None),
            "capabilities": [each for each, is_so in can.items() if is_so],
        }

    def _parameters(self) -> int:
        return sum(math.prod(spec.shape) for spec in decoder_weights(as_published(self.runtime.directory.config)))
