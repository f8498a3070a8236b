"""What Numba compiled is kept on disk, and not used any more once a source that went into it has changed."""

import subprocess
import sys
from pathlib import Path

import pytest

from dspark import compilation
from dspark.compilation import told_once

PROGRAM = """
import sys
from dspark import compilation
compilation.__file__ = sys.argv[1]
sys.path.insert(0, sys.argv[2])
from outer import outer
print(outer(1), outer.stats.cache_hits)
"""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package in which a kept function calls one of another file."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    (kernels / "inner.py").write_text("import numba\n@numba.njit\ndef inner(x):\n    return x + 1\n")
    imports = "from dspark.compilation import compiled\nfrom inner import inner\n"
    (kernels / "outer.py").write_text(imports + "@compiled\ndef outer(x):\n    return inner(x)\n")
    return kernels


def run(sources: Path) -> list[int]:
    """What the function gives, and how often it was found on disk, in a process of its own."""
    arguments = [sys.executable, "-c", PROGRAM, str(sources.parent / "compilation.py"), str(sources)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    value, hits = done.stdout.split(" ", 1)
    return [int(value), 0 if hits.strip() == "Counter()" else 1]


def test_a_change_in_what_a_function_calls_is_seen(sources: Path) -> None:
    assert run(sources) == [2, 0]
    assert run(sources) == [2, 1]
    inner = sources / "inner.py"
    inner.write_text(inner.read_text().replace("x + 1", "x + 7"))
    assert run(sources) == [8, 0]


def test_few_states_of_the_sources_are_kept(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "__file__", str(sources.parent / "compilation.py"))
    monkeypatch.setattr(compilation, "_key", compilation._key.__wrapped__)
    seen = []
    for n in range(compilation._KEPT + 3):
        (sources / "more.py").write_text(f"# {n}\n")
        directory = compilation._directory.__wrapped__()
        assert directory is not None
        seen.append(directory)
    left = [path for path in seen if path.is_dir()]
    assert len(set(seen)) == len(seen)
    assert len(left) == compilation._KEPT
    assert seen[-1] in left


def test_who_waits_is_told_once(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = sources.parent / "kept"
    directory.mkdir()
    monkeypatch.setattr(compilation, "_directory", lambda: directory)
    said: list[str] = []
    for name in ("kernels", "kernels", "schedule"):
        with told_once(name, f"compiling {name}", said.append):
            pass
    assert said == ["compiling kernels", "compiling schedule"]


def test_a_place_that_cannot_be_written_is_left_to_numba(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(file / "below"))
    assert compilation._directory.__wrapped__() is None
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
    monkeypatch.setattr(compilation, "_directory", lambda: None)
    said: list[str] = []
    for _ in range(2):
        with told_once("kernels", "compiling", said.append):
            pass
    assert said == ["compiling"]
