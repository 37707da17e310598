"""`edgellm quantize`: a checkpoint with weights of 4 or 8 bits from one in float16, bfloat16 or float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import typer

from edgellm.commands.console import mebibytes, progress_display, write_note
from edgellm.commands.options import GPUOption
from edgellm.commands.table import argument, option, takes_options
from edgellm.configs import installed
from edgellm.engines.building.inputs import read_decoder_config
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.errors import at_place
from edgellm.engines.formats.small_files import PROMPT_BYTES, read_text
from edgellm.engines.formats.strict_formats import parse_json
from edgellm.engines.quantizer import quantizer
from edgellm.engines.quantizer.arithmetic import ARITHMETICS, open_arithmetic
from edgellm.engines.quantizer.layers import is_eagle_head
from edgellm.engines.quantizer.options import GROUP_SIZES, METHODS, QuantizationOptions, largest_group
from edgellm.errors import EdgeLLMError, RequestError
from edgellm.kernels.gpu import choose_gpu
from edgellm.kernels.user_paths import user_path
from edgellm.text.messages import checked_messages
from edgellm.text.tokenizer import Tokenizer


class QuantizeOptions(GPUOption):
    checkpoint: Path = argument("Hugging Face directory with float16, bfloat16 or float32 weights.", default=...)
    target: Path = argument("The checkpoint directory to make.", default=...)
    bits: int = option("Bits of a weight: 4, or 8 with a scale for each row.", default=4)
    group_size: int | None = option(
        "Columns that share a scale: 32, 64 or 128, with 4 bits alone [default: the largest that divides all rows]."
    )
    asymmetric: bool = option("Give each scale a zero point: better, and a little larger.")
    method: str | None = option(
        "awq scales columns by the activations; gptq lets columns make up for the errors of others, too; rtn rounds to "
        "nearest [default: awq; an EAGLE head: rtn].",
        metavar="|".join(METHODS),
    )
    calibration: Path | None = option(
        "Texts for the activations, like those the model will see: plain text, or a JSON object a line with "
        '"text" or "messages" [default: a small set of many kinds; rtn: none].',
        metavar="FILE",
    )
    backend: str = option(
        "What computes; auto: a GPU where there is one, else NumPy.", default=ARITHMETICS[0], choices=ARITHMETICS
    )
    force: bool = option("Replace an existing checkpoint.")
    restart: bool = option("Begin anew where an interrupted run has left layers.")


@takes_options
def quantize(given: QuantizeOptions) -> None:
    """Make a checkpoint with weights of 4 or 8 bits, to build from and for other programs (compressed-tensors).

    Example: edgellm quantize Llama-3.2-1B llama-int4 --group-size 64
    """
    choose_gpu(given.gpu)
    checkpoint, group_size, calibration = given.checkpoint, given.group_size, given.calibration
    quantizer.refuse_quantized(checkpoint)
    if group_size is None and given.bits == 4:
        largest = GROUP_SIZES[0]  # which is refused where nothing divides the columns, with what it does not
        group_size = largest_group(checkpoint) or largest
        if group_size < largest:
            write_note(f"Scales are shared by groups of {group_size}: {largest} does not divide every layer's columns.")
    with Checkpoint.open(checkpoint) as opened:
        is_head = is_eagle_head(opened)
    method = given.method or ("rtn" if is_head else METHODS[0])
    options = QuantizationOptions(given.bits, group_size, not given.asymmetric, method)
    texts: list[list[int]] = []
    if not is_head and (calibration is not None or options.method != "rtn"):
        config = read_decoder_config(checkpoint)
        entries = default_texts() if calibration is None else load_texts(calibration)
        texts = token_pieces(Tokenizer.from_directory(checkpoint, config.vocab_size), entries)
    arithmetic = open_arithmetic(given.backend)
    try:
        with closing(arithmetic), progress_display() as display:
            report = quantizer.quantize_checkpoint(
                checkpoint, given.target, options, texts, given.force, given.restart, display, arithmetic
            )
    except (KeyboardInterrupt, SystemExit):
        write_note("The layers that are done are kept: the same command goes on with the next.")
        raise
    typer.echo("\n".join(report_lines(report)))


#: A text, or a conversation.
Text = str | list[dict[str, Any]]


def default_texts() -> list[Text]:
    """Those of `configs/calibration.yaml`."""
    return installed("calibration")


def load_texts(path: Path) -> list[Text]:
    """Read a file: one plain text, or where it begins with "{" a JSON object a line with "text" or "messages". Raises
    RequestError that names file and line."""
    content = read_text(user_path(path), PROMPT_BYTES, RequestError, "the calibration file", takes_pipes=True)
    if not content.strip():
        raise RequestError(f"the calibration file {path} is empty: expected text like that which the model will see")
    if not content.lstrip().startswith("{"):
        return [content]
    lines = enumerate(content.splitlines(), 1)
    return [_from_object(line, f"{path}, line {number}") for number, line in lines if line.strip()]


def _from_object(line: str, place: str) -> Text:
    values = parse_json(line, place, RequestError)
    given = [key for key in ("text", "messages") if isinstance(values, dict) and key in values]
    if len(given) != 1:
        raise RequestError(f'{place}: expected an object with "text" or "messages", found {given or "neither"}')
    if given == ["messages"]:
        with at_place(place, RequestError):
            return checked_messages(values["messages"])
    if not isinstance(values["text"], str):
        raise RequestError(f"{place}: the text is {values['text']!r:.60}, expected text")
    return values["text"]


def token_pieces(tokenizer: Tokenizer, entries: list[Text]) -> list[list[int]]:
    """The token ids of texts, in pieces of at most `LONGEST_TEXT`, until there are enough; conversations by the chat
    template, where the model has one that takes them."""
    pieces: list[list[int]] = []
    left = 16_384  # of all texts together: their rows stay in memory
    for entry in entries:
        ids = tokenizer.encode(entry) if isinstance(entry, str) else _conversation_ids(tokenizer, entry)
        ids = ids[:left]
        left -= len(ids)
        pieces += [ids[start : start + quantizer.LONGEST_TEXT] for start in range(0, len(ids), quantizer.LONGEST_TEXT)]
    return pieces


def _conversation_ids(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[int]:
    if tokenizer.chat_template is not None:
        try:
            return tokenizer.encode_chat(messages, add_generation_prompt=False)
        except EdgeLLMError:  # some templates take no system message
            pass
    return tokenizer.encode("\n".join(str(message["content"]) for message in messages))


def report_lines(report: quantizer.QuantizationReport) -> Iterator[str]:
    options = report.options
    scales = f"groups of {options.group_size}" if options.group_size else "a scale for each row"
    resumed = f" ({report.resumed} of them were there)" if report.resumed else ""
    read = f", {report.tokens:,} tokens read" if report.tokens else ""
    yield f"{report.path}: int{options.bits}, {scales}, {'symmetric' if options.symmetric else 'zero points'}"
    yield f"  {'method':<10}{options.method}{read}"
    yield f"  {'layers':<10}{report.layers}{resumed}"
    if report.chosen:
        yield f"  {'experts':<10}{_chosen_experts(report.chosen)}"
    yield f"  {'weights':<10}{mebibytes(report.bytes_before)} before, {mebibytes(report.bytes_after)} now"
    yield f"  {'copied':<10}{', '.join(report.copied) or 'no other files'}"
    yield f"  {'time':<10}{report.seconds:.1f} s"


def _chosen_experts(chosen: Mapping[int, Sequence[int]]) -> str:
    """How often the tokens of the texts chose experts, and which they did not."""
    counts = sorted(count for layer in chosen.values() for count in layer)
    missed = {index: [expert for expert, count in enumerate(layer) if not count] for index, layer in chosen.items()}
    number = sum(map(len, missed.values()))
    median = counts[len(counts) // 2]
    said = f"each chosen by {counts[0]:,} to {counts[-1]:,} tokens, half of them by {median:,} or more"
    if not number:
        return said
    named = [f"layer {index}: {', '.join(map(str, found))}" for index, found in missed.items() if found]
    return f"{said}; {number:,} of {len(counts):,} by none, rounded to nearest ({'; '.join(named)})"
