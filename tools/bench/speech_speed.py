"""Speed of transcription: real-time factors with the shapes of Qwen3-ASR 1.7B, Voxtral Mini, Voxtral Realtime or
Gemma 4 E2B, whole and while somebody speaks.

    python tools/bench/speech_speed.py [--model gemma4] [--work DIRECTORY] [--output RESULTS.json] [--layers N]

Random weights in fp16 (Gemma 4 E2B: bf16), batch 1, noise of 60 seconds (`--seconds`; as a board 20), three tokens a
second (Voxtral Realtime: the 12.5 that it has, in a stream also those of the silence behind what is new; nothing is
drafted for it). Each model takes less than a minute, its weights included.
`whole_factor` is the time of `LLM.transcribe` by the sound's length, `stream_factor` that of `SpeechStream.hear` every
half second, each of whose calls writes five tokens anew and those of half a second more; medians of three sounds and
one stream, each new.
`encoder_ms` is the encoder of a whole sound, one window after the other, with its log-mel features; `features_ms` are
the host's time for its samples and digests, and the device's for its features, all within the first; `call_ms` are
calls of the stream: median and longest, after the first.
`drafted_factor` and `drafted_ms` are those of a stream that drafts from what it wrote before, as `edgellm transcribe
--every` does: the model says the same token always, so that all of it holds, new tokens among it (half a step a call
that speech would take, too).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parent))
from as_device import parse
from provenance import provenance, report
from random_checkpoint import SHAPES, write_checkpoint

from edgellm.drafting.config import DraftingConfig
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.families import FAMILIES
from edgellm.engines.families.audio_encoders import audio_config, audio_weights
from edgellm.engines.model.audio import AudioConfig
from edgellm.engines.model.limits import EngineLimits
from edgellm.llm import LLM
from edgellm.multimodal.log_mel import Sound
from edgellm.speech_stream import SpeechStream

RATE, TOKENS_A_SECOND, STEP, UNFIXED, PAUSE = 16000, 3, 0.5, 5, 2.0
#: Behind the bytes of the random model's tokenizer, the sound's first.
MARKERS = {
    "gemma4": ("<|audio|>", "<|audio>", "<audio|>"),
    "qwen3_asr": ("<|audio_pad|>", "<|audio_start|>", "<|audio_end|>"),
    "voxtral_realtime": ("[STREAMING_PAD]", "<s>"),
    "voxtral": ("[AUDIO]", "[BEGIN_AUDIO]", "<s>", "[INST]", "[/INST]", "[TRANSCRIBE]"),
}
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'audio' %}AUDIO"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if not (loop.last and continue_final_message) %}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def model_config(family: str, layers: int | None) -> tuple[dict[str, Any], AudioConfig]:
    """The config.json and the encoder; so many layers of each for a rehearsal. Encoders are those of defaults."""
    text, encoder = {
        "qwen3_asr": (SHAPES["qwen3-1.7b"] | {"model_type": "qwen3"}, {"output_dim": 2048}),
        "voxtral": ({"model_type": "llama"}, {}),  # its language model, too
        "voxtral_realtime": ({}, {}),
        "gemma4": (SHAPES["gemma4-e2b"], {}),
    }[family]
    if layers is not None:
        text = text | {"num_hidden_layers": layers}
        encoder["encoder_layers" if family == "qwen3_asr" else "num_hidden_layers"] = layers
        if family == "gemma4":
            text = text | {"layer_types": text["layer_types"][-layers:], "num_kv_shared_layers": 0}
    config = {
        "architectures": [FAMILIES[family].architecture],
        "model_type": family,
        "text_config": text,
        "audio_config": encoder,
        **{"audio_token_id": 256, "boa_token_id": 257, "eoa_token_id": 258},
        "torch_dtype": "float16",
        "tie_word_embeddings": family != "voxtral",
        "eos_token_id": 257,
    }
    return config, audio_config(config)


def write_model(directory: Path, config: dict[str, Any], audio: AudioConfig) -> None:
    """A checkpoint with a tokenizer that knows a sound's tokens, and a template that writes parts as they come."""
    write_checkpoint(directory, config, others=audio_weights(audio))
    (directory / "preprocessor_config.json").write_text('{"feature_size": 128}')
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    sound, *around = markers = MARKERS[audio.family]
    tokenizer.add_special_tokens(list(markers))
    with (directory / "model.safetensors").open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        places = json.loads(file.read(size))
        (final,) = (each for each in places if each.endswith("model.norm.weight"))
        first, end = places[final]["data_offsets"]
        file.seek(8 + size + first)
        file.write(bytes(end - first))  # logits of zeros, the likeliest of which is the first token's that may come
    # Behind the id 0 the host would read a step's logits, to know whether they are numbers.
    (directory / "generation_config.json").write_text('{"suppress_tokens": [0]}')
    template = TEMPLATE.replace("AUDIO", sound if audio.family == "gemma4" else sound.join(around[:2]))
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


def noise(seconds: float, seed: int) -> np.ndarray:
    """Samples that nobody heard before, the loudest first, so that windows stay as they are when more comes."""
    samples = np.random.default_rng(seed).standard_normal(round(seconds * RATE)).astype(np.float32) * np.float32(0.05)
    samples[:400] *= 10
    return samples


def is_written_beside(llm: LLM) -> bool:
    """Whether the sound says how many tokens are written, in no language that it takes."""
    return llm.directory.config.adds_sound


def whole(llm: LLM, seconds: float, seed: int) -> float:
    """Seconds of a transcription."""
    samples, count = noise(seconds, seed), round(TOKENS_A_SECOND * seconds)
    asked: dict[str, Any] = {} if is_written_beside(llm) else {"language": "en", "max_tokens": count}
    began = time.perf_counter()
    found = llm.transcribe((samples, RATE), ignore_eos=True, **asked)
    spent, written = time.perf_counter() - began, found.response.usage.completion_tokens
    assert written == count if asked else written > count
    return spent


def stream_calls(llm: LLM, seconds: float, seed: int) -> list[float]:
    """Seconds of each call of a stream but the first; what is said is as long as speech would be."""
    samples, step, spans, said = noise(seconds, seed), round(STEP * RATE), [], 0
    language = None if is_written_beside(llm) else "en"
    stream = SpeechStream(llm, RATE, language, unfixed=UNFIXED, ignore_eos=True)
    for first in range(0, len(samples), step):
        # What is kept is not written again; a stream that keeps nothing yet adds what it has said.
        known = max(0, said - UNFIXED) or said
        if language is not None:
            stream._options["max_tokens"] = max(1, int(TOKENS_A_SECOND * (first + step) / RATE) - known)
        began = time.perf_counter()
        found = stream.hear(samples[first : first + step])
        spans.append(time.perf_counter() - began)
        assert len(set(found.text)) == 1 and len(found.text) > said - 1, found
        said = len(found.text)
    return spans[1:]


def features_seconds(llm: LLM, seconds: float, seed: int) -> tuple[float, float]:
    """Seconds of the host and of the device for the features of a sound that was not heard before, in parts that are
    measured one batch after the other; on NumPy both are the host's."""
    assert llm._runtime._media is not None
    encoder: Any = llm._runtime._media.encoder("audio")
    samples, began = noise(seconds, seed), time.perf_counter()
    piece = Sound(RATE, samples).prepared(encoder.mel, encoder.config)
    host = time.perf_counter() - began

    def measure(runtime: Any) -> float:
        started = encoder._backend.timestamp()
        features, most = encoder._features, encoder._features._room
        for first in range(0, len(piece.parts), most):
            features._slots_of(piece.parts[first : first + most])
        return encoder._backend.timestamp().seconds() - started.seconds()

    return host, llm.call(measure).result()


def main() -> None:
    """Make what is missing, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edgellm-bench")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--model", default="qwen3_asr", choices=sorted(MARKERS))
    parser.add_argument("--layers", type=int, help="of both models, for a rehearsal")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--backend", default="tensorrt", choices=("tensorrt", "numpy"))
    arguments = parse(parser)
    config, audio = model_config(arguments.model, arguments.layers)
    seconds = arguments.seconds or (60.0 if arguments.measured_as is None else 20.0)
    name = f"{audio.family}_{audio.num_layers}"
    checkpoint, engines = arguments.work / name, arguments.work / f"{name}_engines"
    began = time.perf_counter()
    if not (checkpoint / "tokenizer_config.json").exists():
        write_model(checkpoint, config, audio)
    limits = EngineLimits(max_batch=1, prefill_chunk=512, kv_capacity=2048 if audio.family == "gemma4" else 1280)
    dtype = "bfloat16" if audio.family == "gemma4" else "float16"
    build_engine_directory(checkpoint, engines, limits, [], dtype, weights="link", force=True)
    results: dict[str, Any] = {**provenance(), "sound_seconds": seconds, "making_seconds": time.perf_counter() - began}
    began = time.perf_counter()
    with LLM(engines, backend=arguments.backend, drafting=None) as llm:
        results["opening_seconds"] = time.perf_counter() - began
        time.sleep(PAUSE)
        for seed in (0, 11):  # what is slow the first time; an encoder's seconds count with the next sound
            whole(llm, min(seconds, 20 * STEP), seed)
        before = llm.metrics()["speech"]["seconds"]
        spans = [whole(llm, seconds, seed) for seed in (1, 2, 3)]
        encoder = (llm.metrics()["speech"]["seconds"] - before) / len(spans)
        features = zip(*(features_seconds(llm, seconds, seed) for seed in (4, 5, 6)), strict=True)
        stream_calls(llm, min(seconds, 3 * STEP), 7)
        calls = stream_calls(llm, seconds, 8)
        ways = {"stream_factor": calls}
        if not is_written_beside(llm):
            llm.use_drafting(DraftingConfig(kind="suffix"))
            time.sleep(PAUSE)  # what is put off until nobody waits
            stream_calls(llm, min(seconds, 20 * STEP), 9)  # what rounds take is learned
            ways["drafted_factor"] = stream_calls(llm, seconds, 10)
            results["drafted_rounds"] = getattr(llm.drafting_report, "rounds", None)
    results["whole_factor"] = round(statistics.median(spans) / seconds, 5)
    results |= {name: round(sum(each) / seconds, 5) for name, each in ways.items()}
    results["encoder_ms"] = round(encoder * 1000, 2)
    results["features_ms"] = [round(statistics.median(each) * 1000, 2) for each in features]
    for name, each in zip(("call_ms", "drafted_ms"), ways.values(), strict=False):
        results[name] = [round(seconds * 1000, 2) for seconds in (statistics.median(each), max(each))]
    report(results, arguments.output)


if __name__ == "__main__":
    main()
