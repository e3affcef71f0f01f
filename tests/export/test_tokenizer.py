"""The tokenizer of an exported folder is the source's, and the live one is as it was."""

import json

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

import quantdiff
from quantdiff.analysis.evaluation import Text
from quantdiff.analysis.exported import measuring
from quantdiff.export.sidecar import read_sidecar
from tests.tiny import tiny_llama, tiny_tokenizer

SETTINGS = ("padding_side", "truncation_side", "model_max_length", "pad_token", "bos_token")


def exported(tokenizer, folder, **options):
    quantdiff.export(tiny_llama(), tokenizer, folder, format="bf16", check=False, **options)
    return json.loads((folder / "tokenizer.json").read_text())


def test_it_cuts_no_text(tmp_path, caplog):
    """The passage has 64 tokens, which is no limit of the tokenizer's."""
    tokenizer = tiny_tokenizer()
    before = tokenizer.backend_tokenizer.to_str()
    content = exported(tokenizer, tmp_path / "out")
    assert content["truncation"] is None
    assert tokenizer.backend_tokenizer.to_str() == before
    assert "longer than" not in caplog.text
    alone = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert len(alone.encode("the " * 500).ids) > 500
    ids = read_sidecar(tmp_path / "out").content["passage"]["ids"]
    assert len(ids) == 64
    assert ids[0] == tokenizer.bos_token_id


@pytest.mark.parametrize("side", ["left", "right"])
def test_its_settings_are_the_sources(tmp_path, side):
    """Whatever was measured with it before."""
    first = tiny_tokenizer()
    first.padding_side = first.truncation_side = side
    first.backend_tokenizer.enable_truncation(100, direction=side)
    first.backend_tokenizer.enable_padding(pad_id=2, pad_token="<pad>", direction=side)
    first.save_pretrained(tmp_path / "source")
    source = AutoTokenizer.from_pretrained(tmp_path / "source")
    measure, _ = measuring(tiny_llama(), source, Text("corpus", 32, 16))
    content = exported(source, tmp_path / "out", measure=measure)
    assert content == json.loads((tmp_path / "source" / "tokenizer.json").read_text())
    assert content["truncation"]["max_length"] == 100
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert [getattr(again, name) for name in SETTINGS] == [
        getattr(source, name) for name in SETTINGS
    ]
    assert again.padding_side == again.truncation_side == side
