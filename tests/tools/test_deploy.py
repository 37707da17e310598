"""The images of `tools/deploy`, as far as they can be tried without building them: what they start, how they are
checked, what they are made of."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml
from http_server import ServerProcess, wait_for

DEPLOY = Path(__file__).parents[2] / "tools" / "deploy"
JETSON = DEPLOY / "jetson"
PROJECT = (DEPLOY.parents[1] / "pyproject.toml").read_text(encoding="utf-8")


def instruction(name: str) -> list[str]:
    """The list of words of an instruction of the image for PCs."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    (found,) = re.findall(rf"^{name}\b[^\[\n]*(\[.*\])$", text, re.MULTILINE)
    words: list[str] = json.loads(found)
    return words


def test_the_check_of_the_image_tells_a_server_that_is_ready(tmp_path: Path) -> None:
    """The image's own command and check, but for the model's, the key's and the port's places."""
    (tmp_path / "keys").write_text("k" * 32)
    program, *words = [*instruction("ENTRYPOINT"), *instruction("CMD")]
    assert program == "edgellm" and words[0] == "serve"
    places = {"/models/model": str(DEPLOY.parents[1] / "edgellm" / "shipped"), "8000": "0"}
    places["/run/secrets/keys"] = str(tmp_path / "keys")
    assert places.keys() <= set(words)
    server = ServerProcess(*(places.get(word, word) for word in words[1:]))
    check = [word.replace(":8000/", f":{server.port}/") for word in instruction("HEALTHCHECK")]
    check[0] = sys.executable
    try:
        wait_for(lambda: subprocess.run(check, capture_output=True, check=False).returncode == 0, 60)
    finally:
        server.process.kill()
        server.process.wait()
    failed = subprocess.run(check, capture_output=True, check=False)
    assert failed.returncode == 1 and b"refused" in failed.stderr


def test_the_image_is_sent_what_the_package_is_made_of() -> None:
    """And nothing beside: the user of the second stage is none with rights."""
    sent = re.findall(r"^!(.+)$", (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8"), re.MULTILINE)
    needed = set(re.findall(r'^"edgellm[.\w]*" = "(\w+)"$', PROJECT, re.MULTILINE))
    needed |= {"pyproject.toml", *re.findall(r'^readme = "(.+)"$', PROJECT, re.MULTILINE), "LICENSE"}
    assert set(sent) == needed
    last_stage = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").rpartition("\nFROM ")[2]
    assert re.search(r"^USER [1-9]\d*$", last_stage, re.MULTILINE) and "devel" not in last_stage


@pytest.mark.parametrize(("cuda", "extra"), [(12, "jetpack6"), (13, "gpu")])
def test_the_package_for_boards_takes_the_extra_of_their_cuda(
    cuda: int, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = yaml.safe_load((JETSON / "Dockerfile").read_text(encoding="utf-8").split("#---")[1].replace("# ", ""))
    assert all((JETSON / file).is_file() for file in (header["config"], *header["test"]))
    given = ModuleType("jetson_containers")
    given.CUDA_VERSION = SimpleNamespace(major=cuda)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jetson_containers", given)
    packages = runpy.run_path(str(JETSON / header["config"]), {"package": header})["package"]
    assert [each["build_args"]["EDGELLM_EXTRA"] for each in packages] == [extra, extra]
    assert [each["name"] for each in packages] == ["edgellm", "edgellm:builder"]
    assert f"\n{extra} = [\n" in PROJECT


def test_the_package_for_boards_installs_the_wheel_beside_it(tmp_path: Path) -> None:
    (tmp_path / "uv").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "uv").chmod(0o755)
    (tmp_path / "install.sh").write_bytes((JETSON / "install.sh").read_bytes())

    def install(**more: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "EDGELLM_EXTRA": "gpu", **more}
        return subprocess.run(
            ["bash", tmp_path / "install.sh"], env=environment, capture_output=True, text=True, check=False
        )

    assert install().returncode != 0
    wheel = tmp_path / "edgellm-0.1.0-py3-none-any.whl"
    wheel.touch()
    assert install().stdout == f"pip install {wheel}[gpu]\n"
    assert install(FORCE_BUILD="on").returncode != 0
    without = subprocess.run(["bash", JETSON / "build.sh"], env={}, capture_output=True, text=True, check=False)
    assert without.returncode == 1 and "no EDGELLM_REPOSITORY" in without.stdout


def test_the_package_for_boards_has_a_test_that_passes() -> None:
    found = subprocess.run([sys.executable, JETSON / "test.py"], capture_output=True, text=True, check=False)
    assert found.returncode == 0 and "front left" in found.stdout, found.stderr
