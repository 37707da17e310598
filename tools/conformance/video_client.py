"""Live VLM WebUI, which asks about frames of a video: its own server runs, and gets a file in place of a camera.

What is not here is the browser, and so the camera's way over WebRTC to that server. See run.py.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from scenarios import MODEL, TOYS, Server, main, refused, scenario

SECONDS = 60


def write_video(path: Path) -> None:
    """Sixty frames that show the shipped picture."""
    import av
    from PIL import Image

    with av.open(str(path), "w") as container, Image.open(TOYS) as picture:
        stream = container.add_stream("mpeg4", rate=30)
        stream.width, stream.height, stream.pix_fmt = *picture.size, "yuv420p"
        frame = av.VideoFrame.from_image(picture.convert("RGB"))
        for _ in range(60):
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


@asynccontextmanager
async def web_interface(server: Server) -> AsyncIterator[tuple[Any, str]]:
    """A session of aiohttp's, and the address of the web interface, which asks the server."""
    import aiohttp

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    program = str(Path(sys.executable).with_name("live-vlm-webui"))
    options = ["--host", "127.0.0.1", "--port", port, "--no-ssl", "--api-base", server.url, "--model", MODEL]
    process = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    root = f"http://127.0.0.1:{port}"
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(SECONDS)) as session:
            for _ in range(10 * SECONDS):
                try:
                    async with session.get(root):
                        break
                except aiohttp.ClientConnectionError:
                    assert process.poll() is None, "it has ended"
                    await asyncio.sleep(0.1)
            yield session, root
    finally:
        process.terminate()
        process.wait(20)


async def seen(session: Any, root: str, **changes: Any) -> str:
    """What it says of a video's frames, after messages of its page."""
    with tempfile.TemporaryDirectory() as folder:
        video = Path(folder) / "toys.mp4"
        write_video(video)
        async with session.ws_connect(f"{root}/ws?session_id=robot") as socket_of_page:
            for kind, values in changes.items():
                await socket_of_page.send_json({"type": kind, **values})
            async with session.post(
                f"{root}/api/rtsp/start", json={"rtsp_url": str(video), "session_id": "robot"}
            ) as started:
                assert started.status == 200, await started.text()
            # Not stopped: it closes a video that another thread of it may still read, and dies of that at times.
            return await asyncio.wait_for(first_answer(socket_of_page), SECONDS)


async def first_answer(socket_of_page: Any) -> str:
    """The first text of the model that the page is told."""
    while True:
        message = await socket_of_page.receive_json()
        if message["type"] == "vlm_response" and not message["text"].startswith("Initializing"):
            return str(message["text"])


@scenario("live-vlm-webui", "chat", "models")
async def models(server: Server) -> None:
    async with web_interface(server) as (session, root):
        answer = await session.get(f"{root}/models", params={"api_base": server.url})
        assert MODEL in await answer.text(), await answer.text()


@scenario("live-vlm-webui", "chat", "image")
async def image(server: Server) -> None:
    async with web_interface(server) as (session, root):
        prompt = {"prompt": "What do you see?", "max_tokens": 60}
        text = await seen(session, root, update_prompt=prompt)
        assert "I see" in text, text


@scenario("live-vlm-webui", "chat", "error")
async def error(server: Server) -> None:
    async with web_interface(server) as (session, root):
        refused(AssertionError(await seen(session, root, update_model={"model": "shiped"})), "did you mean shipped")


if __name__ == "__main__":
    main()
