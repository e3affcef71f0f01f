"""Code and libraries that a model's fingerprint depends on beside the versions of all results."""

import hashlib
import importlib
import json
import runpy
import sys

import pytest
import torch
import transformers
from optimum.quanto import qint8, quantize
from torch import nn
from transformers import BitsAndBytesConfig

from quantdiff.analysis.sweep.identity import model_fingerprint
from quantdiff.analysis.sweep.own_code import own_code, quantizer_versions
from quantdiff.models import load
from tests.tiny import save_tiny, tiny_diff_v2, tiny_diffllama, tiny_llama, tiny_tokenizer

REMOTE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

class OddConfig(LlamaConfig):
    model_type = "odd"

class OddForCausalLM(LlamaForCausalLM):
    config_class = OddConfig
    LAMBDA = 0.8
"""
HELPED = """
from torch import nn
{imported}

class Layer(nn.Linear):
    def forward(self, x):
        from . import late
        return {called}(super().forward(x))
"""

SCRIPT = """
from torch import nn
from quantdiff.analysis.sweep.own_code import own_code

class Layer(nn.Linear):
    def forward(self, x):
        return {factor} * super().forward(x)

found, bits = own_code([Layer(2, 2)]), {asked}
"""


@pytest.mark.parametrize("build", [tiny_llama, tiny_diffllama, tiny_diff_v2])
def test_models_of_installed_code_have_nothing_more(build):
    model = build()
    assert own_code([*model.modules(), tiny_tokenizer()]) == []
    assert quantizer_versions(model) == {}


def test_results_from_before_code_counted_count():
    """A fingerprint of the first version, which was made of class, tokenizer and tensors alone."""

    def as_json(content):
        return json.dumps(content, sort_keys=True, default=str).encode()

    layer = nn.Linear(3, 2)
    digest = hashlib.sha256(as_json({"class": "Linear", "attention": None, "config": None}))
    digest.update(as_json(["object", None, None, {}, {}]))
    for name in ("bias", "weight"):
        value = getattr(layer, name).detach()
        told = {"name": name, "as": name, "shape": list(value.shape), "dtype": "torch.float32"}
        digest.update(as_json(told))
        digest.update(value.numpy().tobytes())
    assert model_fingerprint(layer, object()) == digest.hexdigest()


def test_code_that_a_checkpoint_brings(tmp_path, monkeypatch):
    modules = tmp_path / "modules"
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(modules))
    prints = {}
    for name, edit in (("a", ""), ("copy", ""), ("edited", "    LAMBDA = 0.7\n")):
        folder = save_tiny(tmp_path / name)
        (folder / "odd.py").write_text(REMOTE + edit)
        path = folder / "config.json"
        code = {"AutoConfig": "odd.OddConfig", "AutoModelForCausalLM": "odd.OddForCausalLM"}
        about = {"model_type": "odd", "architectures": ["OddForCausalLM"], "auto_map": code}
        path.write_text(json.dumps(json.loads(path.read_text()) | about))
        prints[name] = model_fingerprint(*load(folder, device="cpu", trust_remote_code=True))
    assert prints["copy"] == prints["a"]
    assert prints["edited"] != prints["a"]


@pytest.mark.parametrize(
    ("imported", "called", "files"),
    [
        ("from . import helping", "helping.scaled", 2),
        ("from .helping import scaled", "scaled", 2),
        ("import own_layers.helping", "own_layers.helping.scaled", 3),  # with that of the package
        ("try:\n    from ....far import x\nexcept ImportError:\n    from .helping import *",
         "scaled", 2),
    ],
)  # fmt: skip
def test_what_own_code_imports_counts_and_what_lies_beside_it_does_not(
    imported, called, files, tmp_path, monkeypatch
):
    found = {}
    for name, factor, beside in (("mine", 2, 0), ("moved", 2, 1), ("changed", 3, 0)):
        package = tmp_path / name / "own_layers"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "layer.py").write_text(HELPED.format(imported=imported, called=called))
        (package / "helping.py").write_text(f"def scaled(x):\n    return {factor} * x\n")
        (package / "training.py").write_text(f"RATE = {beside}\n")
        (package / "late.py").write_text("")
        with monkeypatch.context() as patch:
            patch.syspath_prepend(package.parent)
            importlib.import_module("own_layers.training")
            layer = importlib.import_module("own_layers.layer").Layer(2, 2)
            found[name] = own_code([layer])
            layer(torch.ones(1, 2))
            assert own_code([layer]) == found[name]
        for known in [known for known in sys.modules if known.partition(".")[0] == "own_layers"]:
            del sys.modules[known]
    assert len(found["mine"]) == files
    assert found["moved"] == found["mine"]
    assert set(found["changed"]) & set(found["mine"])
    assert found["changed"] != found["mine"]


def test_of_a_script_the_methods_of_its_classes_count(tmp_path):
    found = {}
    for name, factor, asked in (("first", 2, 4), ("asks_for_more", 2, 3), ("changed", 3, 4)):
        script = tmp_path / f"{name}.py"
        script.write_text(SCRIPT.format(factor=factor, asked=asked))
        found[name] = runpy.run_path(str(script), run_name="__main__")["found"]
    assert len(found["first"]) == 1
    assert found["first"] == found["asks_for_more"] != found["changed"]


@pytest.mark.parametrize(
    ("settings", "distribution"),
    [
        (BitsAndBytesConfig(load_in_8bit=True), "bitsandbytes"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "quanto"}, "optimum-quanto"),
        ({"quant_method": "gptq"}, "gptqmodel"),
    ],
)
def test_another_version_of_what_a_checkpoint_was_quantized_with(
    settings, distribution, tmp_path, monkeypatch
):
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    model.config.quantization_config = settings
    before = model_fingerprint(model, tokenizer)
    assert model_fingerprint(model, tokenizer) == before
    about = tmp_path / f"{distribution.replace('-', '_')}-99.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 99.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert quantizer_versions(model) == {distribution: "99.0"}
    assert model_fingerprint(model, tokenizer) != before


def test_quantized_modules_tell_their_library_without_a_config():
    model = tiny_llama()
    assert quantizer_versions(model) == {}
    quantize(model, weights=qint8)
    assert list(quantizer_versions(model)) == ["optimum-quanto"]
    assert own_code(model.modules()) == []
    assert all(torch.is_floating_point(p) for p in model.model.norm.parameters())
