"""`edgellm serve`: the model for other programs, over HTTP as clients of OpenAI's API ask for it."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from edgellm.commands import options
from edgellm.commands.console import LogFormat, LogLevel, prepare_output, write_note
from edgellm.commands.descriptions import named_directories
from edgellm.commands.models import (
    chosen_adapters,
    chosen_drafting,
    described_directory,
    sampling_params,
    snapshot_path,
    tell_of_loss,
    with_cached_prompt,
)
from edgellm.commands.option_groups import ADAPTERS, DraftingOptions, with_option_groups
from edgellm.commands.settings import MOST_PREEMPTION_MIB, MOST_STATES_MIB, PREEMPTION_MIB, STATES_MIB, Settings
from edgellm.errors import EdgeLLMError, EngineError, MissingDependencyError, RequestError

if TYPE_CHECKING:
    from edgellm.http.app import Service
    from edgellm.http.connections import Server

_INTERRUPTED = 130
#: Files that the model and connections which are being turned away may have open beside those that are served.
_OTHER_FILES = 1024


@dataclass(frozen=True)
class ServerOptions:
    """Where the server listens, and who may ask it."""

    PANEL: ClassVar[str] = "Server"

    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on; 0.0.0.0 is every one.")
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 is any free one.")] = 8000
    model_name: Annotated[
        str | None,
        typer.Option("--model-name", metavar="NAME", help="What requests call the model [default: its directory]."),
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", metavar="KEY", help="Key that requests must have; other users see it (ps)."),
    ] = None
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", metavar="FILE", help="File with such keys, one a line.")
    ] = None
    allow_anyone: Annotated[
        bool, typer.Option("--allow-anyone", help="Answer other machines without a key.", show_default=False)
    ] = False
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host", metavar="NAME", help="Name under which the server is asked, too; may be repeated."
        ),
    ] = None
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-origin",
            metavar="URL",
            help="Let pages of another origin (https://name:port) ask; may be repeated.",
        ),
    ] = None

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


@dataclass(frozen=True)
class LimitOptions:
    """What the server takes at most."""

    PANEL: ClassVar[str] = "Limits"

    queue_limit: Annotated[
        int, typer.Option("--queue-limit", min=1, help="Requests that may wait; one more is answered with 429.")
    ] = 64
    preemption_mib: Annotated[
        int | None,
        typer.Option(
            "--preemption-mib",
            min=0,
            max=MOST_PREEMPTION_MIB,
            help="MiB of the host's memory for rows of answers that give way to more urgent ones "
            f"[default: {PREEMPTION_MIB}].",
        ),
    ] = None
    states_mib: Annotated[
        int | None,
        typer.Option(
            "--states-mib",
            min=0,
            max=MOST_STATES_MIB,
            help="MiB of the host's memory for recurrent states at places of texts, of models that have such "
            f"[default: {STATES_MIB}].",
        ),
    ] = None
    max_connections: Annotated[
        int, typer.Option("--max-connections", min=1, help="Connections at a time; more are closed.")
    ] = 256
    max_body_mib: Annotated[int, typer.Option("--max-body-mib", min=1, max=1024, help="MiB of a request.")] = 32
    max_images: Annotated[int, typer.Option("--max-images", min=0, help="Images of a request.")] = 16
    max_image_pixels: Annotated[
        int, typer.Option("--max-image-pixels", min=1, max=64_000_000, help="Pixels of an image.")
    ] = 16_000_000
    header_seconds: Annotated[
        float, typer.Option("--header-seconds", min=0.1, help="Time for a request's headers, from connecting on.")
    ] = 10.0
    body_seconds: Annotated[float, typer.Option("--body-seconds", min=0.1, help="Time for a request's body.")] = 60.0
    stall_seconds: Annotated[
        float, typer.Option("--stall-seconds", min=0.1, help="How long a client may take nothing of its answer.")
    ] = 30.0
    shutdown_seconds: Annotated[
        float, typer.Option("--shutdown-seconds", min=0.0, help="How long answers may go on after SIGTERM.")
    ] = 30.0


@dataclass(frozen=True)
class ServedAdapters:
    """LoRA adapters, each of which is a model's name."""

    PANEL: ClassVar[str] = ADAPTERS

    lora: options.Lora = None


@with_option_groups
def serve(
    *,
    engine: options.ModelOptions,
    server: ServerOptions,
    limits: LimitOptions,
    prompting: options.PromptOptions,
    sampling: options.SamplingOptions,
    drafting: DraftingOptions,
    adapters: ServedAdapters,
    system_cache: options.SystemCache = None,
    computing: options.ComputingOptions,
    config: options.Config = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    debug: options.Debug = False,
) -> None:
    """Serve the model over HTTP, as clients of OpenAI's API ask for it, until SIGTERM or Ctrl-C.

    Sampling and the system prompt are those of requests that name none.

    Example: edgellm serve --port 8000
    """
    prepare_output()
    _require_packages()
    keys = server.keys()
    settings = options.chosen_settings(
        config,
        model=engine.chosen(),
        computing=computing,
        prompt=prompting,
        sampling=sampling,
        drafting=drafting,
        system_cache=system_cache,
    )
    settings, tools, variables = with_cached_prompt(
        settings, bool(system_cache) and not prompting.has_system_prompt, None, {}
    )
    if tools or variables:
        raise RequestError(
            f"the snapshot {settings.system_cache} is of a prompt with tools or template variables, which requests "
            "give: use one without"
        )
    settings = replace(settings, adapter=None, adapters=settings.adapters | named_directories(adapters.lora or ()))
    _allow_files(limits.max_connections)
    warnings.filterwarnings("ignore", module=r"PIL\..*")  # large images are refused by limits of their own
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    ended_by = asyncio.run(_serve(settings, server, limits, keys))
    if ended_by == signal.SIGINT:
        raise typer.Exit(_INTERRUPTED)


async def _serve(settings: Settings, server: ServerOptions, limits: LimitOptions, keys: Sequence[str]) -> int | None:
    """Listen, load the model, and answer until a signal comes, which is returned. Raises what the model fails with."""
    from edgellm.asynchronous import AsyncLLM
    from edgellm.http.app import Service
    from edgellm.http.connections import ConnectionLimits, Server
    from edgellm.http.fields import ServedModel
    from edgellm.http.guard import Guard
    from edgellm.text.template import ChatTemplate

    directory = described_directory(settings)
    model = ServedModel(
        server.model_name or directory.path.resolve().name,
        params=sampling_params(settings),
        system=settings.system,
        most_images=limits.max_images,
        image_pixels=limits.max_image_pixels,
    )
    loras = chosen_adapters(settings, every_adapter=True)
    names = {*directory.adapters, *(loras or {})}
    if model.name in names:
        raise RequestError(f"{model.name!r} is the name of a LoRA adapter, too: name the model with --model-name")
    template = None if settings.chat_template is None else ChatTemplate.from_file(settings.chat_template)
    draft = chosen_drafting(settings)
    tell_of_loss(draft)
    llm = AsyncLLM(
        settings.model,
        backend=settings.backend,
        kv_cache=settings.kv_cache,
        drafting=draft,
        adapters=loras,
        snapshots=[] if settings.system_cache is None else [snapshot_path(settings.system_cache)],
        preemption_budget=(settings.preemption_mib if limits.preemption_mib is None else limits.preemption_mib) << 20,
        state_budget=(settings.states_mib if limits.states_mib is None else limits.states_mib) << 20,
        queue_limit=limits.queue_limit,
    )
    guard = Guard.of(server.host, server.allowed_host or (), server.allowed_origin or (), keys)
    service = Service(llm, model, guard, limits.max_body_mib * 2**20, template)
    http = Server(
        service.app(),
        (server.host, server.port),
        ConnectionLimits(limits.max_connections, limits.header_seconds, limits.body_seconds, limits.stall_seconds),
        lambda: service.finish(limits.shutdown_seconds),
    )
    service.connections, service.closed_connections = lambda: len(http.server_state.connections), http.closed
    watching = asyncio.ensure_future(_watch(service, http))
    try:
        await http.serve()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        service.close()
    if service.failure is not None:
        raise service.failure if isinstance(service.failure, EdgeLLMError) else EngineError(str(service.failure))
    if service.is_open:  # what is still being loaded ends with the process
        await llm.close()
    return http.ended_by


async def _watch(service: Service, http: Server) -> None:
    """Say when the model is open, and end the server where it cannot be, or where its thread ends."""
    try:
        await http.listens.wait()
        places = " and ".join(f"http://{f'[{host}]' if ':' in host else host}:{port}" for host, port in http.addresses)
        write_note(f"Listening on {places}; loading the model.")
        await service.open()
        write_note(f"Ready: {', '.join(service.model.names)}.")
        await service.wait_for_failure()
    except Exception:
        pass  # which the service keeps
    http.should_exit = True


def _require_packages() -> None:
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f"edgellm serve needs Starlette and uvicorn, which do not load ({error}). Install them with pip install "
            "'.[serve]' in EdgeLLM's checkout, or with pip install 'starlette>=1.0' 'uvicorn>=0.50'"
        ) from error


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
