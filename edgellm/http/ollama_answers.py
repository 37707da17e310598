"""Answers as clients of ollama's API read them: JSON lines, and what there is to say about the model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from edgellm.engines.model.decoder import as_published, decoder_weights
from edgellm.http.answers import FINISH_REASONS, Piece, Writer, logprob_objects
from edgellm.http.errors import HTTPError
from edgellm.http.fields import ServedModel
from edgellm.http.ollama import OPTIONS
from edgellm.requests import Response
from edgellm.runtime import SpecDecodeRuntime
from edgellm.structure.reasoning import reasoning_marks
from edgellm.text.channels import harmony_ids
from edgellm.tool_calls.calls import ToolCallDelta, joined_deltas
from edgellm.tool_calls.values import is_object

_BILLION = 10**9


class GenerateWriter(Writer):
    """Writes answers of `/api/generate`."""

    media_type = "application/x-ndjson"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._deltas: list[ToolCallDelta] = []

    def whole(self, pieces: Sequence[Piece], responses: Sequence[Response]) -> dict[str, Any]:
        if not responses:
            return self._object(Piece()) | {"done": True, "done_reason": "load"}
        return self._object(pieces[0]) | self._ending(responses[0])

    def begin(self) -> Iterator[bytes]:
        return iter(())

    def piece(self, index: int, piece: Piece) -> Iterator[bytes]:
        self._deltas += piece.calls  # which are told as a whole
        if piece.reasoning or piece.content or piece.logprobs:
            yield _line(self._object(Piece(piece.reasoning, piece.content, piece.logprobs)) | {"done": False})

    def ended(self, index: int, response: Response) -> Iterator[bytes]:
        if self._deltas:
            yield _line(self._object(Piece(calls=joined_deltas(self._deltas))) | {"done": False})
        yield _line(self._object(Piece()) | self._ending(response))

    def failure(self, error: HTTPError) -> Iterator[bytes]:
        yield _line({"error": error.message})

    def _object(self, piece: Piece) -> dict[str, Any]:
        found = {"model": self._asked.model, "created_at": _time(datetime.now(timezone.utc)), **self._said(piece)}
        if piece.logprobs:
            found["logprobs"] = logprob_objects(self._tokenizer, piece.logprobs)
        return found

    def _said(self, piece: Piece) -> dict[str, Any]:
        return {"response": piece.content} | ({"thinking": piece.reasoning} if piece.reasoning else {})

    def _ending(self, response: Response) -> dict[str, Any]:
        """Why an answer ended, and what it took, in nanoseconds."""
        usage, timings = response.usage, response.timings
        reason = "length" if FINISH_REASONS.get(response.finish_reason) == "length" else "stop"
        error = response.tool_call_error
        return {
            "done": True,
            "done_reason": reason,
            "total_duration": round(timings.total_seconds * _BILLION),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": round(timings.prefill_seconds * _BILLION),
            "eval_count": usage.completion_tokens,
            "eval_duration": round(timings.decode_seconds * _BILLION),
            **({} if error is None else {"tool_call_error": error}),
        }


class ChatLineWriter(GenerateWriter):
    """Writes answers of `/api/chat`. A call that was cut is not told."""

    def _said(self, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.content}
        if piece.reasoning:
            message["thinking"] = piece.reasoning
        if calls := [call for call in piece.calls if is_object(call.arguments)]:
            message["tool_calls"] = [
                {"id": call.id, "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
                for call in calls
            ]
        return {"message": message}


def _line(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n").encode()


def _time(moment: datetime) -> str:
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def model_entry(model: ServedModel, name: str, runtime: SpecDecodeRuntime) -> dict[str, Any]:
    """What `/api/tags` tells of the model, or of an adapter under its own name."""
    directory = runtime.directory
    config, packed = directory.config, bool(directory.packed_names)
    details = {
        "parent_model": "" if name == model.name else model.name,
        "format": "safetensors" if all(each.endswith(".safetensors") for each in directory.weight_files) else "gguf",
        "family": config.family,
        "families": [config.family],
        "parameter_size": f"{_parameters(runtime) / 1e6:.1f}M",
        "quantization_level": "packed" if packed else directory.dtype,
    }
    written = (directory.path / "edgellm.json").stat().st_mtime
    return {
        "name": name,
        "model": name,
        "modified_at": _time(datetime.fromtimestamp(written, timezone.utc)),
        "size": sum(directory.files[each].size for each in directory.weight_files),
        "digest": directory.description_sha256,
        "details": details,
    }


def model_facts(model: ServedModel, name: str, runtime: SpecDecodeRuntime, context: int) -> dict[str, Any]:
    """What `/api/show` tells of it: its dimensions, its template, what it can do, and the server's own parameters."""
    entry, config, tokenizer = model_entry(model, name, runtime), runtime.directory.config, runtime.tokenizer
    can = {
        "embedding": config.is_embedding,
        "completion": not config.is_embedding,
        "vision": runtime.directory.vision is not None or "image" in config.media,
        "tools": "tools" in model.template_variables,
        "thinking": reasoning_marks(tokenizer) is not None or harmony_ids(tokenizer) is not None,
    }
    sizes = {
        "context_length": context,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "vocab_size": config.vocab_size,
    }
    known = {"general.architecture": config.family, "general.parameter_count": _parameters(runtime)}
    template, params = tokenizer.chat_template, model.params
    said = {name: getattr(params, called) for name, called in OPTIONS.items() if name != "stop"}
    return {
        "modified_at": entry["modified_at"],
        "details": entry["details"],
        "model_info": known | {f"{config.family}.{size}": value for size, value in sizes.items()},
        "template": "" if template is None else template.sources.get("default", ""),
        "parameters": "\n".join(f"{name} {value}" for name, value in said.items() if value is not None),
        "capabilities": [each for each, is_so in can.items() if is_so],
    }


def _parameters(runtime: SpecDecodeRuntime) -> int:
    return sum(math.prod(spec.shape) for spec in decoder_weights(as_published(runtime.directory.config)))
