"""Tiny models of each family, and exports of them without the new process of a verification."""

import pytest
import torch

import quantdiff
from tests.tiny import tiny_diff_v2, tiny_diffllama, tiny_llama, tiny_tokenizer

MODELS = {"llama": tiny_llama, "diffllama": tiny_diffllama, "diff_v2": tiny_diff_v2}


@pytest.fixture(autouse=True)
def _one_thread():
    """Tensors of these sizes wait for one another's threads longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def save(tmp_path):
    """Export a model into a new folder, unverified; returns the folder."""

    def save(model, format_="bf16", name="out", **options):
        settings = {"check": False} | options
        quantdiff.export(model, tiny_tokenizer(), tmp_path / name, format=format_, **settings)
        return tmp_path / name

    return save
