"""What `edgellm doctor --full` finds: its checks, when they fail, and its report."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from command_line import Edgellm

from edgellm.commands import doctor as commands
from edgellm.device import limits
from edgellm.device import proof as proofs
from edgellm.device.forecast import BOARDS, board_of
from edgellm.device.limits import DeviceLimits
from edgellm.device.proof import compared_tokens, largest, made_by, proof, with_earlier
from edgellm.errors import MissingDependencyError
from edgellm.kernels.gpu import GPU, find_gpu

TOKENS = [f"tokens, {weights}, {kind}" for weights in ("as shipped", "packed") for kind in ("plain", "drafted")]


def gpu(capability: str, multiprocessors: int, gigabytes: float) -> GPU:
    return GPU("", capability, (13, 0), int(gigabytes * 1e9), capability, multiprocessors, 163 << 10, False, False)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (gpu("sm_87", 16, 65.9), "orin"),
        (gpu("sm_87", 8, 16.3), "orin-nx"),
        (gpu("sm_87", 8, 7.99), "orin-nano"),
        (gpu("sm_110", 20, 131.9), "thor"),
        (gpu("sm_87", 14, 32.9), None),
        (gpu("sm_90", 132, 150.0), None),
    ],
)
def test_a_board_is_known_by_its_gpu(found: GPU, expected: str | None) -> None:
    assert board_of(found) == (None if expected is None else BOARDS[expected])


def led(margins: list[float]) -> np.ndarray:
    """Logits [tokens, 3] whose two likeliest are so far apart, and the largest 10."""
    return np.array([[10.0, 10.0 - each, -10.0] for each in margins], np.float32)


def test_tokens_part_where_numpy_was_sure_or_was_not() -> None:
    logits = [led([5, 5, 5]), led([5, 0.05, 5]), led([5, 5, 0.3])]
    found = compared_tokens([[1, 2, 3]] * 3, [[1, 2, 3], [1, 9, 9], [1, 2, 9]], logits, 0.01)
    assert (found["tokens"], found["equal"], found["close"]) == (9, 3 + 1 + 2, 1)
    assert found["allowed_margin"] == pytest.approx(0.1)
    assert found["faults"] == [{"answer": 2, "token": 2, "margin": pytest.approx(0.3)}]
    check = with_earlier("tokens", [[1]], found, None)
    assert check["ok"] is False and "1 answer parting where its margin is below 0.1" in check["text"]
    assert "answer 3 PARTS at token 3 (margin 0.3)" in check["text"]


def test_digests_are_compared_where_the_same_release_and_architecture_made_them() -> None:
    compared = compared_tokens([[1, 2]], [[1, 2]], [led([5, 5])], 0.01)
    first = with_earlier("tokens", [[1, 2]], compared, None)
    assert first["ok"] and first["same_as_earlier"] is None
    earlier = {"made_by": made_by(), "checks": [first]}
    assert with_earlier("tokens", [[1, 2]], compared, earlier)["same_as_earlier"] is True
    other = with_earlier("tokens", [[1, 3]], compared, earlier)
    assert other["ok"] is other["same_as_earlier"] is False and "OTHERS than in the earlier report" in other["text"]
    less = with_earlier("tokens", [[1, 3]], compared, earlier | {"checks": []})
    assert less["same_as_earlier"] is None and less["text"].endswith("; the earlier report left them out")
    foreign = with_earlier("tokens", [[1, 3]], compared, earlier | {"made_by": {"release": "0"}})
    assert foreign["ok"] and foreign["same_as_earlier"] is None
    assert "another release or architecture" in foreign["text"]


def test_the_largest_allocation_is_found_by_trying() -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= 500

    assert largest(640, fits) == 500 and tried == sorted(tried, reverse=True) and max(tried) < 640
    assert largest(640, lambda size: False) == 0


def test_less_than_half_of_what_a_board_should_read_is_a_fault() -> None:
    fine, slow = (proofs._share("read bandwidth", found, 100.0, "GB/s", "a board") for found in (60.0, 40.0))
    assert fine["ok"] and not slow["ok"]
    assert slow["text"] == "read bandwidth: 40 GB/s, 40% of 100 by a board: TOO LITTLE"
    assert proofs._share("read bandwidth", 40.0, None, "GB/s", "")["ok"]


def test_a_board_is_judged_by_its_bandwidth_and_by_its_clock_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = DeviceLimits(150.0, 20.0, 16, 0.65)
    monkeypatch.setattr(limits, "measured_limits", lambda: measured)
    monkeypatch.setattr(proofs, "sensor_facts", lambda: {"power_mode": "15W"})
    read, arithmetic, clocks = proofs._speed_checks(gpu("sm_87", 16, 65.9))
    assert read["text"] == "read bandwidth: 150 GB/s, 73% of 204.8 by Jetson AGX Orin 64GB"
    assert arithmetic["expected"] == pytest.approx(2 * 1024 * 16 * 0.65e9 / 1e12)
    assert arithmetic["text"].endswith("94% of 21.3 by the board at 0.65 GHz of 1.3") and arithmetic["ok"]
    assert clocks["text"] == "clocks and power: power mode 15W" and clocks["power_mode"] == "15W"
    monkeypatch.setattr(limits, "memory_bandwidth", lambda: 4917.0)
    read, arithmetic, _ = proofs._speed_checks(gpu("sm_90", 132, 150.0))
    assert not read["ok"] and "3% of 4917 by its memory's clock and bus: TOO LITTLE" in read["text"]
    assert arithmetic["ok"] and "what it should be is not known" in arithmetic["text"]


def test_nothing_is_begun_when_the_time_is_over() -> None:
    found = list(proof(seconds=-1.0))
    assert len(found) == 5 and all(each["ok"] is None and "left out" in each["text"] for each in found)


def lack(*arguments: object) -> None:
    raise MissingDependencyError("NVRTC is missing")


def test_a_part_that_fails_is_a_fault_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(proofs, "_token_checks", fail)
    monkeypatch.setattr(proofs, "_speed_checks", lack)
    monkeypatch.setattr(tempfile, "tempdir", "nowhere")  # as on a disk that is full
    monkeypatch.setattr(proofs, "find_gpu", lambda: None)
    found = list(proof())
    failed = {each["name"]: each["text"] for each in found if each["ok"] is False}
    assert set(failed) == {"tokens", "snapshot", "packed tokens"}
    assert failed["tokens"] == "tokens: FAILED, RuntimeError: out of memory"
    assert all("FileNotFoundError" in failed[name] for name in ("snapshot", "packed tokens"))
    others = {each["name"]: each for each in found if each["ok"] is None}
    assert set(others) == {"speed", "largest allocation"}
    assert others["speed"]["text"] == "speed: left out, NVRTC is missing"


def doctor(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edgellm", "doctor", "--full", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(find_gpu() is not None, reason="a GPU is present")
@pytest.mark.parametrize("packs", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_report_without_a_gpu(edgellm: Edgellm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packs: bool) -> None:
    """Packing the model takes half of the time."""
    if not packs:
        monkeypatch.setattr(proofs, "_packed", lack)
    monkeypatch.setattr(commands, "proof", partial(proof, seconds=600.0))  # whatever else this machine does
    monkeypatch.setattr(proofs, "_TOKENS", 8)
    code, out, err = edgellm("doctor", "--full", "--json")
    assert (code, err) == (0, "")
    said = json.loads(out)
    checks = {each["name"]: each for each in said["checks"]}
    assert said["ok"] and said["made_by"] == made_by()
    assert packs or checks["packed tokens"]["text"] == "packed tokens: left out, NVRTC is missing"
    for name in TOKENS if packs else TOKENS[:2]:
        assert checks[name]["ok"] and checks[name]["equal"] == checks[name]["tokens"] == 24
    assert checks["snapshot"]["ok"] and checks["snapshot"]["reused"] > 0
    for name in ("read bandwidth", "largest allocation"):
        assert checks[name]["ok"] is None and "no GPU" in checks[name]["text"]
    checks[TOKENS[0]]["digest"] = "0" * 64
    (tmp_path / "report.json").write_text(json.dumps(said))
    for name in ("_packed", "_snapshot_check"):  # which take as long again
        monkeypatch.setattr(proofs, name, lack)
    monkeypatch.setattr(commands, "_self_checks", lambda directory: [])
    code, out, _ = edgellm("doctor", "--full", "--against", tmp_path / "report.json")
    assert code == 1 and "no GPU: NumPy with itself" in out
    assert "tokens, as shipped, plain: 24 of 24 equal NumPy's, OTHERS than in the earlier report" in out
    assert "tokens, as shipped, drafted: 24 of 24 equal NumPy's, the same as in the earlier report" in out


def test_what_is_no_report_is_refused(edgellm: Edgellm, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"checks": []}')
    code, _, err = edgellm("doctor", "--full", "--against", tmp_path / "other.json")
    assert code == 1 and "is no report of edgellm doctor --full --json" in " ".join(err.split())
    code, _, err = edgellm("doctor", "--against", tmp_path / "other.json")
    assert code == 2 and "--full" in err


@pytest.mark.gpu
@pytest.mark.alone
def test_a_gpu_proves_itself() -> None:
    result = doctor("--json")
    said = json.loads(result.stdout)
    print("\n".join(each["text"] for each in said["checks"]))
    assert result.returncode == 0, result.stdout
    checks = {each["name"]: each for each in said["checks"]}
    assert all(checks[name]["ok"] for name in [*TOKENS, "snapshot", "read bandwidth", "arithmetic of mma.sync"])
    assert 0.5 < checks["read bandwidth"].get("share", 1.0) < 1.03
    assert 0 < checks["largest allocation"]["bytes"] < checks["largest allocation"]["free_bytes"]
