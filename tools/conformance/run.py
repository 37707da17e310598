"""Clients that people run, each at its pinned version in an environment of its own, ask a server of the shipped model.

    python tools/conformance/run.py [--environments DIR] [--only NAME ...] [--report FILE]

tests/http/clients.yaml has the versions. Environments are made anew, or kept in DIR and found there again. It prints a
table of what each client was asked to do, and ends with 1 where something does not pass.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import yaml

HERE = Path(__file__).parent
PINNED = yaml.safe_load((HERE.parents[1] / "tests" / "http" / "clients.yaml").read_text())
#: The file that has a client's scenarios, where they are not in the first one.
FILES = dict.fromkeys(("pydantic-ai", "openai-agents", "smolagents"), "agent_clients.py")
FILES["live-vlm-webui"] = "video_client.py"
#: Packages that clients of a server's interface ask through: the table has their versions, too.
UNDERNEATH = ("openai", "anthropic")
#: No client is to ask anyone but the server.
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1", "DO_NOT_TRACK": "1"}
SECONDS = 300


@dataclass(frozen=True)
class Outcome:
    """What came of a scenario; `wrong` is empty where it passes."""

    endpoint: str
    scenario: str
    wrong: str = ""


@contextmanager
def served() -> Iterator[str]:
    """The address of a server of the shipped model, which keeps answers."""
    command = [sys.executable, "-m", "edgellm", "serve", "--port", "0", "--backend", "numpy", "--keep-responses", "20"]
    environment = {**os.environ, "EDGELLM_CONFIG": os.devnull}
    with tempfile.NamedTemporaryFile("w+") as log:
        process = subprocess.Popen(command, stderr=log, env=environment)
        try:
            while "Ready:" not in (said := Path(log.name).read_text()):
                if process.poll() is not None:
                    raise SystemExit(f"the server has ended: {said}")
                time.sleep(0.1)
            yield re.findall(r"http://[^;\s]+", said)[0]
        finally:
            process.terminate()
            process.wait(60)


def installed(environment: Path, requirement: str) -> Path:
    """The Python of an environment that has a requirement; one that is there already is taken as it is."""
    python, mark = environment / "bin" / "python", environment / "requirement"
    if not mark.exists() or mark.read_text() != requirement:
        subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True)
        subprocess.run([python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", requirement], check=True)
        mark.write_text(requirement)
    return python


def versions(python: Path, requirement: str) -> str:
    """A client's version, and those of what it asks through."""
    code = "import importlib.metadata as m; print(*(f'{d.name}={d.version}' for d in m.distributions()))"
    listed = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    found = dict(each.split("=", 1) for each in listed)
    under = ", ".join(f"{name} {found[name]}" for name in UNDERNEATH if name in found)
    return requirement.partition("==")[2] + (f" ({under})" if under else "")


def asked_by_python(name: str, requirement: str, address: str, folder: Path) -> tuple[str, list[Outcome]]:
    """What a client in Python gets of the server: its versions, and the outcomes of its scenarios."""
    python = installed(folder / name, requirement)
    command = [python, HERE / FILES.get(name, "library_clients.py"), name, address]
    with tempfile.TemporaryDirectory() as elsewhere:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            cwd=elsewhere,
            env={**os.environ, **QUIET},
            check=False,
        )
    lines = [line.removeprefix("OUTCOME ") for line in done.stdout.splitlines() if line.startswith("OUTCOME ")]
    outcomes = [Outcome(**json.loads(line)) for line in lines]
    if done.returncode or not outcomes:
        outcomes.append(Outcome("", "run", f"exit code {done.returncode}: {done.stderr[-300:]}"))
    return versions(python, requirement), outcomes


def asked_by_node(name: str, requirement: str, address: str, folder: Path) -> tuple[str, list[Outcome]]:
    """The same of compatcanary, whose report has a status for each of its probes."""
    version = requirement.rpartition("@")[2]
    if shutil.which("npm") is None:
        return version, [Outcome("", "run", "npm is not installed")]
    home = folder / name
    subprocess.run(["npm", "install", "--silent", "--prefix", home, requirement], check=True)
    command = [home / "node_modules" / ".bin" / name, "scan", "--base-url", f"{address}/v1", "--model", "shipped"]
    done = subprocess.run([*command, "--format", "json"], capture_output=True, text=True, timeout=SECONDS, check=False)
    found = json.loads(done.stdout)["results"]
    wrong = {each["id"]: "" if each["status"] == "pass" else each["summary"] for each in found}
    return version, [Outcome(*key.split(".", 1), wrong[key]) for key in wrong]


def table(results: Mapping[str, tuple[str, list[Outcome]]]) -> str:
    """A row for each client and endpoint, and what does not pass."""
    lines = ["| Client | Version | Endpoint | Passes | Does not |", "|---|---|---|---|---|"]
    notes = []
    for name, (version, outcomes) in results.items():
        for endpoint in dict.fromkeys(each.endpoint for each in outcomes):
            row = [each for each in outcomes if each.endpoint == endpoint]
            passed, failed = ([each for each in row if bool(each.wrong) == is_wrong] for is_wrong in (False, True))
            cells = [", ".join(each.scenario for each in part) for part in (passed, failed)]
            lines.append(f"| {name} | {version} | {endpoint} | {cells[0]} | {cells[1]} |")
            notes += [f"- {name}, {endpoint}, {each.scenario}: {each.wrong}" for each in failed]
    return "\n".join([*lines, "", *notes])


def main() -> int:
    """Run what the command line names."""
    names = [*PINNED["python"], *PINNED["node"]]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, help="a folder that keeps the clients' environments")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--report", type=Path, help="a file for the table")
    given = parser.parse_args()
    results: dict[str, tuple[str, list[Outcome]]] = {}
    with tempfile.TemporaryDirectory() as scratch, served() as address:
        folder = (given.environments or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        for name in given.only:
            ask, requirements = (
                (asked_by_python, PINNED["python"]) if name in PINNED["python"] else (asked_by_node, PINNED["node"])
            )
            try:
                results[name] = ask(name, requirements[name], address, folder)
            except (subprocess.SubprocessError, OSError, ValueError) as error:  # as where it cannot be installed
                results[name] = re.split("==|@", requirements[name])[1], [Outcome("", "run", str(error)[:300])]
            wrong = [each for each in results[name][1] if each.wrong]
            print(
                f"{name}: {len(results[name][1]) - len(wrong)} pass, {len(wrong)} do not", file=sys.stderr, flush=True
            )
    text = table(results)
    print(text)
    if given.report is not None:
        where = f"{date.today()}, Python {platform.python_version()}, {os.cpu_count()} CPU cores"
        given.report.write_text(f"{where}: `python tools/conformance/run.py`\n\n{text}\n")
    return int(any(each.wrong for _, outcomes in results.values() for each in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
