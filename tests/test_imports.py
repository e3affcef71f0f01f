"""Imports run one way, are quick, and need no extra."""

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

import quantdiff.analysis
import quantdiff.calibration

ROOT = Path(quantdiff.__file__).parent
FOLDERS = {
    "attention": ROOT / "attention",
    "statistics": ROOT / "statistics",
    "models": ROOT / "models",
    "hooks": ROOT / "hooks",
    "quantization": ROOT / "quantization",
    "export": ROOT / "export",
    "calibration": Path(quantdiff.calibration.__file__).parent,
    "analysis": Path(quantdiff.analysis.__file__).parent,
    "cli": ROOT / "cli",
}
COMMON = {"errors", "files", "lazy", "versions"}
CORE = {"attention", "models", "statistics", "hooks"}
ALLOWED = {
    "attention": set(),
    "statistics": set(),
    "models": {"attention"},
    "hooks": {"attention", "models", "statistics"},
    "quantization": CORE,
    "export": CORE | {"quantization"},
    "calibration": CORE | {"quantization"},
    "analysis": CORE | {"quantization", "export", "calibration"},
    "cli": CORE | {"quantization", "export", "calibration", "analysis"},
}


def imported(path):
    """Names of the parts of quantdiff that a file imports, at its top or inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "quantdiff":
                names = [f"quantdiff.{alias.name}" for alias in node.names]
        for name in names:
            if name.startswith("quantdiff."):
                yield name.split(".")[1]


@pytest.mark.parametrize("part", FOLDERS)
def test_imports_run_one_way(part):
    files = list(FOLDERS[part].rglob("*.py"))
    assert files
    for path in files:
        beyond = set(imported(path)) - ALLOWED[part] - COMMON - {part}
        assert not beyond, f"{path.name} imports {beyond}"


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_importing_quantdiff_loads_nothing_heavy():
    heavy = ("torch", "transformers", "pandas", "seaborn")
    code = f"import sys, quantdiff; print([name for name in {heavy} if name in sys.modules])"
    assert run(code).stdout.strip() == "[]"
    begin = time.perf_counter()
    run("import quantdiff")
    # A bound of the issue, far above what it takes; it fails only if something heavy crept in.
    assert time.perf_counter() - begin < 2


def test_works_without_any_extra():
    extras = ("datasets", "lm_eval", "compressed_tensors", "gguf", "gptqmodel", "flash_attn")
    block = f"import sys; sys.modules.update(dict.fromkeys({extras}))"
    code = (
        block
        + """
import torch, quantdiff
from quantdiff.statistics.profile import Profile
import quantdiff.cli, quantdiff.analysis.figures, quantdiff.analysis.tables
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16,
    num_hidden_layers=1, num_attention_heads=2)).eval()
with torch.no_grad(), quantdiff.record(model) as recorder:
    model(input_ids=torch.arange(8)[None])
print(recorder.profile().data["tokens"])
try:
    from quantdiff.calibration.text import read_documents
    next(iter(read_documents("hub:some/set")))
except quantdiff.MissingExtraError as error:
    print(error)
"""
    )
    result = run(code)
    assert result.stdout.startswith("8\n"), result.stderr
    assert "pip install 'quantdiff[eval]'" in result.stdout
