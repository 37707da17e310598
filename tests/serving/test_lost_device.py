"""A device that fails: where it can be used still the process goes on, else it ends with an exit code of its own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from gpu_device import cuda_device
from http_server import ServerProcess, chat_body, read_to_end, wait_for
from linked_environment import first_in_path
from served_answers import LONG, SHORT, Answers, Pause, answer, check_before

from edgellm import LLM
from edgellm.asynchronous import AsyncLLM
from edgellm.commands.console import DEVICE_LOST
from edgellm.engines.backends.base import Engine
from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.errors import DeviceLostError, DeviceMemoryError, EngineError, KernelError
from edgellm.http.app import Service
from edgellm.http.fields import ServedModel
from edgellm.http.guard import Guard
from edgellm.kernels.errors import STICKY_ERRORS
from edgellm.kernels.launch import Kernel, KernelModule, Launch
from edgellm.opened_model import SHIPPED_MODEL

UNIT = Path(__file__).parents[2] / "docs" / "configurations" / "edgellm.service"

#: Kernels that do nothing, and that end as one with a fault does.
TEXT = 'extern "C" __global__ void nothing() {}\nextern "C" __global__ void fault() { asm("trap;"); }\n'
LAUNCHING = f"""
from edgellm.kernels.compiler import ModuleSource
from edgellm.kernels.launch import Kernel, KernelModule, Launch
source = ModuleSource("faults", ("faults.cu",), (), (), (("faults.cu", {TEXT!r}),))

def launch(name, device):
    Launch(KernelModule(device.gpu, device.stream), Kernel(source, name), (1, 1, 1), 1, 0, ())()
"""
#: What Python runs before a program, by backend: rounds fail from when the file LOST is there.
FAILING = {
    "numpy": """
import os
from edgellm.engines.backends.numpy_backend import NumpyEngine
from edgellm.errors import DeviceLostError
compute = NumpyEngine.enqueue

def enqueue(engine):
    if os.path.exists(os.environ["LOST"]):
        raise DeviceLostError.of(719)
    compute(engine)

NumpyEngine.enqueue = enqueue
""",
    "ranks": """
import os
from edgellm.engines.backends.ranks import Exchange
take = Exchange.all

def all_but_one(exchange, rank, turn, own):
    if rank == 1 and os.path.exists(os.environ["LOST"]):
        raise MemoryError()
    return take(exchange, rank, turn, own)

Exchange.all = all_but_one
""",
    "tensorrt": LAUNCHING
    + """
import os
from edgellm.serving.server import RequestServer
answer = RequestServer._round

def lost_round(server):
    if os.path.exists(os.environ["LOST"]):
        launch("fault", server._engine._open_runner().backend)
    answer(server)

RequestServer._round = lost_round
""",
}


def lose(monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    """Let prompts ("prefill"), or what follows them, fail as by a driver's error; the device is lost from then on."""
    lost = list[bool]()

    def fail(engine: Engine) -> None:
        if (engine.shape.phase == "prefill") == (phase == "prefill"):
            lost.append(True)
            raise KernelError("launching linear failed: an illegal memory access was encountered")

    check_before(monkeypatch, fail)
    monkeypatch.setattr(NumpyBackend, "lost", lambda backend: DeviceLostError.of(700) if lost else None)


def test_the_codes_are_those_that_cuda_s_documentation_gives_up() -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    words = ("must be terminated and relaunched", "cannot be used anymore, and must be destroyed")
    said = {int(each): " ".join((each.__doc__ or "").split()) for each in driver.CUresult}
    if not said[700].startswith("While executing a kernel"):
        pytest.skip("this release of cuda-bindings has no documentation of the codes")
    given_up = {code for code, text in said.items() if any(each in text for each in words)}
    known = {code: name for code, name in STICKY_ERRORS.items() if code in said}  # an older release has fewer
    assert given_up == known.keys() - {214, 220, 709}
    assert {code: driver.CUresult(code).name for code in known} == known


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_an_error_that_the_device_survives_ends_its_requests_alone(
    served: LLM, alone: Answers, paused: Pause, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """A prompt's is its own request's; a step's, of all that it computes."""
    requests, expected = alone
    left = [1]

    def fail_once(engine: Engine) -> None:
        if engine.shape.phase == phase and left:
            left.pop()
            raise MemoryError("cuMemAlloc failed: out of memory")

    with paused(served):
        first = [served.stream("x", LONG) for _ in range(4)]
        waiting = [served.submit(request) for request in requests[:4]]
        check_before(monkeypatch, fail_once)
    outcomes = [each.request_state.outcome() for each in first if each.request_state.wait(20)]
    failed = [each for each in outcomes if isinstance(each, EngineError)]
    assert len(failed) == {"prefill": 1, "decode": 4}[phase] and not left
    assert {str(each) for each in failed} == {
        "the engine failed while it computed this answer: MemoryError: cuMemAlloc failed: out of memory"
    }
    assert [answer(each.result()) for each in waiting] == expected[:4]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_lost_device_ends_everything(
    serving_engines: Path, paused: Pause, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    with LLM(serving_engines, backend="numpy", drafting=None) as served:
        with paused(served):
            generations = [served.stream("x", LONG) for _ in range(6)]
            lose(monkeypatch, phase)
        for generation in generations:
            with pytest.raises(DeviceLostError, match=r"CUDA_ERROR_ILLEGAL_ADDRESS.*start it anew") as caught:
                generation.result(10)
        assert isinstance(caught.value.__cause__.__cause__, KernelError)
        served._thread.closed.result(10)
        with pytest.raises(DeviceLostError):
            served.generate("x", SHORT)


def test_a_server_whose_device_is_lost_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> None:
        service = Service(AsyncLLM(SHIPPED_MODEL, backend="numpy"), ServedModel("shipped"), Guard())
        await service.open()
        watching = asyncio.ensure_future(service.wait_for_failure())
        lose(monkeypatch, "decode")
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(service.app()), base_url="http://localhost"
        ) as client:
            for _ in range(2):
                found = await client.post("/v1/chat/completions", json=chat_body())
                assert (found.status_code, found.json()["error"]["code"]) == (503, "failed")
                assert "CUDA_ERROR_ILLEGAL_ADDRESS" in found.json()["error"]["message"]
            await watching
            health = await client.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "failed"
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in health.json()["error"] and not service.works(9)
        assert isinstance(service.failure, DeviceLostError)

    asyncio.run(ask())


@pytest.mark.parametrize("failing", ["numpy", "ranks", pytest.param("tensorrt", marks=pytest.mark.gpu)])
def test_the_process_ends_with_an_exit_code_of_its_own(tmp_path: Path, failing: str) -> None:
    """What streams ends with an error, what waits is told that another server may know, and systemd starts it anew. So
    where one of several fails in the midst of a sum."""
    (tmp_path / "sitecustomize.py").write_text(FAILING[failing])
    backend, gpus = ("numpy", 2) if failing == "ranks" else (failing, 1)
    reason = "rank 1 of 2 failed: MemoryError. " if failing == "ranks" else "the GPU has failed (CUDA_ERROR_"
    lost = tmp_path / "lost"
    environment = first_in_path(tmp_path) | {"LOST": str(lost)}
    server = ServerProcess("--backend", backend, "--gpus", str(gpus), environment=environment, forked=False)
    try:
        server.wait_until_ready()
        fields = {"ignore_eos": True, "max_tokens": 700}
        if backend == "numpy":  # a GPU has answered before anything is seen
            streaming = server.stream(**fields)
            begun = streaming.recv(100)
        waiting = server.stream(**fields)
        wait_for(lambda: backend != "numpy" or server.metric("requests_waiting") == 1)
        lost.touch()
        if backend == "numpy":
            said = begun + read_to_end(streaming)
            assert b'"error"' in said and reason.encode() in said
        else:
            waiting = server.stream(**fields)
        assert read_to_end(waiting).startswith(b"HTTP/1.1 503")
        assert server.process.wait(20) == DEVICE_LOST
        wait_for(lambda: f"error: {reason}" in server.said)
    finally:
        server.process.kill()
        server.process.wait()
    assert f"RestartForceExitStatus={DEVICE_LOST}\n" in UNIT.read_text()


@pytest.mark.parametrize(
    ("command", "stdin"), [(["generate", "hello"], None), (["chat"], "hello\nWhere is the red cup?\n")]
)
def test_commands_end_with_it_too(
    edgellm: Any, monkeypatch: pytest.MonkeyPatch, command: list[str], stdin: str | None
) -> None:
    lose(monkeypatch, "decode")
    code, out, err = edgellm(*command, "--backend", "numpy", stdin=stdin)
    assert code == DEVICE_LOST and err.count("error: the GPU has failed (CUDA_ERROR_ILLEGAL_ADDRESS)") == 1, err
    assert "red cup" not in out


@pytest.mark.gpu
def test_what_a_gpu_refuses_leaves_it_usable() -> None:
    """An allocation larger than the card, launches that the driver refuses, and a capture that cannot be."""
    from edgellm.kernels.compiler import ModuleSource

    source = ModuleSource("faults", ("faults.cu",), (), (), (("faults.cu", TEXT),))
    with cuda_device() as device:
        module = KernelModule(device.gpu, device.stream)
        array = device.zeros((4,), "int32")

        def is_usable() -> bool:
            device._cuda.memset_d32_async(array.pointer, 7, array.size, device.stream)
            return device.lost() is None and device.download(array).tolist() == [7] * 4

        with pytest.raises(DeviceMemoryError, match="Allocating"):
            device.empty((2 * device.free_memory()[1],), "uint8")
        assert is_usable()
        for name, value in (("sharedMemBytes", module.shared_limit + 1), ("blockDimX", 4096)):
            launch = Launch(module, Kernel(source, "nothing"), (1, 1, 1), 1, 0, ())
            launch()
            setattr(launch._config, name, value)
            with pytest.raises(KernelError, match="launching nothing failed"):
                launch()
            assert is_usable()
        step = device.stream.synchronize  # which no capture takes
        assert device.capture(step, "a step") is step
        assert is_usable()
        module.close()


@pytest.mark.gpu
def test_a_kernel_that_traps_loses_the_gpu() -> None:
    """In a process of its own, which can compute nothing more."""
    program = LAUNCHING + (
        "from edgellm.engines.backends.cuda_device import CudaDevice\n"
        "device = CudaDevice()\n"
        "launch('nothing', device)\n"
        "assert device.lost() is None\n"
        "launch('fault', device)\n"
        "print([str(device.lost()) for _ in range(2)], flush=True)\n"
        "import os\n"
        "os._exit(0)\n"
    )
    found = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert found.returncode == 0 and found.stdout.count("the GPU has failed (CUDA_ERROR_") == 2, found.stderr
