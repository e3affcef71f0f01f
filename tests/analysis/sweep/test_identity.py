import hashlib
import json

import pytest
import torch
from transformers import ByT5Tokenizer, CTRLTokenizer

from quantdiff import Scheme, calibrate
from quantdiff.analysis.sweep.identity import (
    cell_id,
    deciding_versions,
    model_fingerprint,
    table_fingerprint,
)
from quantdiff.calibration import CalibrationTable
from quantdiff.models import load
from tests.tiny import save_tiny, tiny_ids, tiny_llama, tiny_tokenizer

PARTS = {
    "model": "m", "device": "cpu", "evaluation": "perplexity", "data": "d",
    "settings": {"version": 1}, "schemes": [Scheme("attention_logits", 4)], "calibration": None,
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"model": "n"},
        {"device": "cuda"},
        {"evaluation": "divergence"},
        {"data": "e"},
        {"settings": {"version": 2}},
        {"schemes": []},
        {"schemes": [Scheme("attention_logits", 4, symmetric=False)]},
        {"schemes": [Scheme("attention_logits", 4, granularity="row")]},
        {"calibration": "c"},
        {"schemes": [Scheme("attention_logits", 4, heads=(0,))]},
        {"remedy": ("rotate", None)},
    ],
)
def test_every_part_decides(change):
    assert cell_id(**PARTS) == cell_id(**PARTS)
    assert cell_id(**PARTS | change) != cell_id(**PARTS)


def test_results_from_before_there_were_newest_tokens_heads_and_remedies_count():
    """A hash of a cell of the first version: without these entries it was made of the others."""
    scheme = Scheme("keys", 4)
    entries = (
        "site", "bits", "range", "granularity", "symmetric", "layers"
    )  # fmt: skip
    content = {name: PARTS[name] for name in PARTS if name != "schemes"} | {
        "schemes": [{name: getattr(scheme, name) for name in entries}],
        "versions": deciding_versions(),
    }
    before = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
    assert before.startswith(cell_id(**PARTS | {"schemes": [scheme]}))
    newer = [Scheme("keys", 4, newest=8)]
    assert not before.startswith(cell_id(**PARTS | {"schemes": newer}))


class TestModel:
    def test_a_copy_elsewhere_is_the_same_model(self, tmp_path):
        prints = set()
        for name in ("a", "b"):
            model, tokenizer = load(save_tiny(tmp_path / name), device="cpu")
            prints.add(model_fingerprint(model, tokenizer))
        prints.add(model_fingerprint(model.train(), tokenizer))
        assert len(prints) == 1

    def test_using_it_changes_nothing(self):
        model, tokenizer = tiny_llama(), tiny_tokenizer()
        before = model_fingerprint(model, tokenizer)
        model(tiny_ids())
        tokenizer(["the king", "the"], padding=True, truncation=True, max_length=3)
        assert model_fingerprint(model, tokenizer) == before

    def test_what_computes_decides(self):
        tokenizer = tiny_tokenizer()
        nudged, moved = tiny_llama(), tiny_llama()
        with torch.no_grad():
            nudged.model.layers[1].mlp.up_proj.weight[3, 3] *= 1 + 1e-6
        # The same tensors under each other's names.
        layers = moved.model.layers
        layers[0].mlp, layers[1].mlp = layers[1].mlp, layers[0].mlp
        eager = tiny_llama()
        eager.set_attn_implementation("eager")
        models = [
            tiny_llama(), nudged, moved, eager, tiny_llama().to(torch.bfloat16),
            tiny_llama(rope_theta=5e5), tiny_llama(tie_word_embeddings=True),
        ]  # fmt: skip
        prints = {model_fingerprint(model, tokenizer) for model in models}
        prints.add(model_fingerprint(tiny_llama(), tiny_tokenizer(bos=False)))
        assert len(prints) == len(models) + 1

    def test_dtypes_of_buffers_that_are_not_saved_decide(self, tmp_path):
        """Rotary frequencies stay in fp32 where a model is loaded in bf16."""
        model, tokenizer = load(save_tiny(tmp_path), device="cpu", dtype="bfloat16")
        converted = load(tmp_path, device="cpu", dtype="float32")[0].to(torch.bfloat16)
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32
        assert converted.model.rotary_emb.inv_freq.dtype == torch.bfloat16
        loaded = model_fingerprint(model, tokenizer)
        assert model_fingerprint(converted, tokenizer) != loaded
        for one in converted.modules():
            for name in one._non_persistent_buffers_set:
                setattr(one, name, getattr(one, name).float())
        assert model_fingerprint(converted, tokenizer) == loaded

    def test_tokenizers_without_a_backend_may_be_moved_but_not_changed(self, tmp_path):
        """Bytes without files, and merges that no vocabulary tells of."""
        model, words = tiny_llama(), {"<unk>": 0, "t@@": 1, "h@@": 2, "e</w>": 3, "he</w>": 4}
        prints = {}
        for name, merge in (("a", "h e</w>"), ("b", "h e</w>"), ("c", "t h")):
            folder = tmp_path / name
            ByT5Tokenizer().save_pretrained(folder / "bytes")
            bytes_ = ByT5Tokenizer.from_pretrained(folder / "bytes")
            (folder / "vocab.json").write_text(json.dumps(words))
            (folder / "merges.txt").write_text(f"#version: 0.2\n{merge}\n")
            merged = CTRLTokenizer.from_pretrained(folder)
            prints[name] = [model_fingerprint(model, one) for one in (bytes_, merged)]
        assert prints["a"] == prints["b"]
        assert [one == other for one, other in zip(prints["a"], prints["c"], strict=True)] == [
            True, False,
        ]  # fmt: skip

    def test_tied_tensors_are_tied(self):
        tied, untied = (tiny_llama(tie_word_embeddings=tie) for tie in (True, False))
        with torch.no_grad():
            untied.lm_head.weight.copy_(untied.model.embed_tokens.weight)
        tokenizer = tiny_tokenizer()
        assert model_fingerprint(tied, tokenizer) != model_fingerprint(untied, tokenizer)


def test_a_table_saved_and_loaded_is_the_same(tmp_path):
    model, batch = tiny_llama(), {"input_ids": tiny_ids()}
    table = calibrate(model, [batch])
    table.save(tmp_path)
    assert table_fingerprint(CalibrationTable.load(tmp_path)) == table_fingerprint(table)
    other = calibrate(model, [{"input_ids": tiny_ids(seed=1)}])
    assert table_fingerprint(other) != table_fingerprint(table)
