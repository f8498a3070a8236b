"""`dspark serve`: what it refuses before it loads anything, and that it ends when told to."""

import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from dspark.cli import main


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--port", "70000"], "choose another --host or --port"),
        (["--max-waiting", "-1"], "--max-waiting must be 0 or more"),
        (["--method", "none", "--policy", "prefix"], "--policy is of no use"),
        (["--port", "0", "--model", "nothing"], "nothing"),
    ],
)
def test_what_is_refused(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *options]) == 2
    assert says in capsys.readouterr().err


def test_without_its_libraries(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("prometheus_client", "dspark.server.app", "dspark.server.metrics"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["serve"]) == 2
    assert "pip install 'dspark[serve]'" in capsys.readouterr().err


def test_it_serves_until_it_is_interrupted(tiny_model: Path) -> None:
    argv = [sys.executable, "-m", "dspark", "serve", "--port", "0", "--model", str(tiny_model)]
    process = subprocess.Popen([*argv, "--method", "none"], stderr=subprocess.PIPE, text=True)
    try:
        line = next(line for line in process.stderr if line.startswith("serving"))
        url = line.split(" at ")[1].split("/v1")[0]
        assert urllib.request.urlopen(f"{url}/health", timeout=60).status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
