"""`edgellm serve`: the model over HTTP, for clients of OpenAI's, Anthropic's and ollama's APIs."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import socket
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from edgellm.commands import models, options
from edgellm.commands.console import write_note
from edgellm.commands.settings import Settings, chosen_settings
from edgellm.commands.table import Options, option, takes_options
from edgellm.errors import EdgeLLMError, EngineError, RequestError
from edgellm.structure.steps import try_apart

if TYPE_CHECKING:
    from edgellm.http.app import Service
    from edgellm.http.connections import Notifier, Server

#: Files that the model and connections which are being turned away may have open beside those that are served.
_OTHER_FILES = 1024


class ServerOptions(Options, panel="Server"):
    host: str = option("Address to listen on; 0.0.0.0 is every one.", default="127.0.0.1", metavar="ADDRESS")
    port: int = option("Port to listen on; 0 is any free one.", default=8000, least=0, most=65535)
    model_name: str | None = option("What requests call the model [default: its directory].", metavar="NAME")
    api_key: str | None = option("Key that requests must have; other users see it (ps).", metavar="KEY", is_free=True)
    api_key_file: Path | None = option("File with such keys, one a line.", metavar="FILE")
    allow_anyone: bool = option("Answer other machines without a key.")
    allowed_host: list[str] | None = option(
        "Name under which the server is asked, too; may be repeated.", metavar="NAME"
    )
    allowed_origin: list[str] | None = option(
        "Let pages of another origin (https://name:port) ask; may be repeated.", metavar="URL"
    )
    trusted_proxy: list[str] | None = option(
        "Proxy whose X-Forwarded-For is believed, or a network of such; may be repeated.", metavar="ADDRESS"
    )

    def keys(self) -> list[str]:
        """The keys that were given. Raises RequestError for what is none, typer.BadParameter where there is none though
        other machines can ask."""
        found = [] if self.api_key is None else [self.api_key]
        if self.api_key_file is not None:
            lines = map(str.strip, options.read_text_file(self.api_key_file, "--api-key-file").splitlines())
            given = [line for line in lines if line and not line.startswith("#")]
            if not given:
                raise RequestError(f"--api-key-file {self.api_key_file} has no key: expected one a line")
            found += given
        if any(not key.strip() or not key.isascii() or not key.isprintable() or " " in key for key in found):
            raise RequestError("a key is empty, or has spaces or characters beyond ASCII: headers cannot hold it")
        from edgellm.http.guard import is_loopback

        if not found and not self.allow_anyone and not is_loopback(self.host):
            raise typer.BadParameter(
                f"{self.host} is an address for other machines: give a key (--api-key-file FILE), or let anyone ask "
                "(--allow-anyone)",
                param_hint="--host",
            )
        return found


class LimitOptions(Options, panel="Limits"):
    queue_limit: int = option("Requests that may wait; one more is answered with 429.", default=64, least=1)
    max_connections: int = option("Connections at a time; more are closed.", default=256, least=1)
    max_body_mib: int = option("MiB of a request.", default=32, least=1, most=1024)
    max_images: int = option("Images of a request.", default=16, least=0)
    max_image_pixels: int = option("Pixels of an image.", default=16_000_000, least=1, most=64_000_000)
    header_seconds: float = option("Time for a request's headers, from connecting on.", default=10.0, least=0.1)
    body_seconds: float = option("Time for a request's body.", default=60.0, least=0.1)
    stall_seconds: float = option("How long a client may take nothing of its answer.", default=30.0, least=0.1)
    keep_responses: int = option(
        "Answers of /v1/responses that are kept to go on from; 0 keeps none.", default=0, least=0, metavar="N"
    )
    shutdown_seconds: float = option("How long answers may go on after SIGTERM.", default=30.0, least=0.0)


class ServeOptions(
    options.ModelOptions,
    ServerOptions,
    options.HostMemoryOptions,
    LimitOptions,
    options.PromptOptions,
    options.SystemCacheOptions,
    options.SamplingOptions,
    options.DraftingOptions,
    options.LoraOption,
    options.ComputingOptions,
    options.LogOptions,
):
    """All options of the command."""


@takes_options
def serve(given: ServeOptions) -> None:
    """Serve the model over HTTP, for clients of OpenAI's, Anthropic's and ollama's APIs, until SIGTERM or Ctrl-C.

    Sampling and the system prompt are those of requests that name none.

    Example: edgellm serve --port 8000
    """
    from edgellm.http.connections import handed_socket

    handed = handed_socket()
    if handed is not None:
        given.host, given.port = handed.getsockname()[:2]
    keys = given.keys()
    settings, tools, variables = models.with_cached_prompt(chosen_settings(given), given, None, {})
    if tools or variables:
        raise RequestError(
            f"the snapshot {settings.system_cache} is of a prompt with tools or template variables, which requests "
            "give: use one without"
        )
    _allow_files(given.max_connections)
    warnings.filterwarnings("ignore", module=r"PIL\..*")  # large images are refused by limits of their own
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    sys.setswitchinterval(0.001)  # then a thread that reads a request gives way to the model's and the loop
    ended_by = asyncio.run(_serve(replace(settings, adapter=None), given, keys, handed))
    if ended_by == signal.SIGINT:
        raise KeyboardInterrupt


async def _serve(
    settings: Settings, given: ServeOptions, keys: Sequence[str], handed: socket.socket | None
) -> int | None:
    """Listen, on the socket that was handed over if there is one, load the model, and answer until a signal comes,
    which is returned. Raises what the model fails with."""
    from edgellm.asynchronous import AsyncLLM
    from edgellm.http.app import Service
    from edgellm.http.connections import ConnectionLimits, Notifier, Server
    from edgellm.http.fields import ServedModel
    from edgellm.http.guard import Guard
    from edgellm.structure.trial import TrialProcess

    directory = models.described_directory(settings)
    model = ServedModel(
        given.model_name or directory.name,
        params=models.sampling_params(settings),
        system=settings.system,
        most_images=given.max_images,
        image_pixels=given.max_image_pixels,
        family=directory.config.family,
    )
    loras = models.chosen_adapters(settings, every_adapter=True)
    names = {*directory.adapters, *(loras or {})}
    if model.name in names:
        raise RequestError(f"{model.name!r} is the name of a LoRA adapter, too: name the model with --model-name")
    template = models.chosen_template(settings)
    llm = AsyncLLM(
        settings.model,
        **settings.computing,
        drafting=models.chosen_drafting(settings),
        adapters=loras,
        snapshots=[] if settings.system_cache is None else [settings.system_cache],
        preemption_budget=settings.preemption_mib << 20,
        state_budget=settings.states_mib << 20,
        queue_limit=given.queue_limit,
    )
    allowed = (given.allowed_host or (), given.allowed_origin or ())
    guard = Guard(given.host, *allowed, keys, given.trusted_proxy or ())
    service = Service(llm, model, guard, given.max_body_mib * 2**20, template, given.keep_responses)
    notifier = Notifier()

    async def finish() -> None:
        notifier.tell("STOPPING=1")
        await service.finish(given.shutdown_seconds)

    seconds = given.header_seconds, given.body_seconds, given.stall_seconds
    limits = ConnectionLimits(given.max_connections, *seconds)
    http = Server(service.app(), (given.host, given.port), limits, finish)
    counts = service.counts
    counts.connections, counts.closed_connections = lambda: len(http.server_state.connections), http.closed
    watching = asyncio.ensure_future(_watch(service, http, notifier))
    trials = TrialProcess()
    try_apart(trials.check)
    try:
        await http.serve(None if handed is None else [handed])
    finally:
        trials.close()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    if service.failure is not None:
        raise service.failure if isinstance(service.failure, EdgeLLMError) else EngineError(str(service.failure))
    if service.is_open:  # what is still being loaded ends with the process
        await llm.close()
    return http.ended_by


async def _watch(service: Service, http: Server, notifier: Notifier) -> None:
    """Say when the model is open, and end the server where it cannot be, or where its thread ends."""
    try:
        await http.listens.wait()
        places = " and ".join(f"http://{f'[{host}]' if ':' in host else host}:{port}" for host, port in http.addresses)
        write_note(f"Listening on {places}; loading the model.")
        await service.open()
        gc.collect()
        gc.freeze()  # no collection walks the model again: each took 30 ms, in which no other thread ran
        write_note(f"Ready: {', '.join(service.model.names)}.")
        notifier.tell("READY=1", f"STATUS=Serves {', '.join(service.model.names)}")
        failing = asyncio.ensure_future(service.wait_for_failure())
        silence = notifier.watchdog_seconds
        while not (await asyncio.wait({failing}, timeout=silence / 3 or None))[0]:
            if service.works(silence):
                notifier.tell("WATCHDOG=1")
    except Exception:
        pass  # which the service keeps
    http.should_exit = True


def _allow_files(connections: int) -> None:
    """Let the process have so many connections open. Raises RequestError where the system does not."""
    wanted = connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise RequestError(
            f"--max-connections {connections} needs {wanted} open files, of which the system allows {hard}: take "
            "fewer, or raise the limit (ulimit -n, LimitNOFILE= of systemd)"
        )
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
