"""What moves the last digits of a sweep's results is recorded and told, and decides no cell."""

import json

import pytest
import torch

from quantdiff.analysis.sweep import SweepResults, sweep
from quantdiff.analysis.sweep.table import sweep_report
from quantdiff.quantization import Scheme, schemes
from tests.tiny import tiny_llama, tiny_tokenizer

MOVED = "rounding boundary"


class TestRequests:
    def test_each_that_computes_something_is_recorded(self, small, live, tmp_path):
        capability = torch.backends.cpu.get_cpu_capability()
        alone = {
            "command": "quantdiff sweep", "processors": [f"CPU with {capability}"],
            "threads": torch.get_num_threads(), "batch_size": 1,
        }  # fmt: skip
        options = {"command": "quantdiff sweep"}
        assert small([live], **options).record["requests"] == [alone]
        # Finished already: nothing was computed in batches of two.
        assert small([live], batch_size=2, **options).record["requests"] == [alone]
        results = small([live], bits=(16, 8), batch_size=2, **options)
        assert results.record["requests"] == [alone, alone | {"batch_size": 2}]
        assert SweepResults.load(tmp_path / "out").record == results.record

    def test_going_on_elsewhere_is_told_and_not_refused(self, small, live):
        notes = []
        small([live], note=notes.append)
        small([live], bits=(16, 8), note=notes.append)
        assert not [note for note in notes if MOVED in note]
        small([live], batch_size=2, note=notes.append)
        assert not [note for note in notes if MOVED in note]
        results = small([live], bits=(16, 6), batch_size=2, note=notes.append)
        (told,) = [note for note in notes if MOVED in note]
        assert told.index("batch size: 1") < told.index("new ones") < told.index("batch size: 2")
        assert results.missing == 0

    def test_of_an_earlier_version_nothing_is_known(self, small, live, tmp_path):
        small([live], command="a")
        path = tmp_path / "out" / "sweep.json"
        record = json.loads(path.read_text())
        del record["requests"]
        path.write_text(json.dumps(record))
        notes = []
        results = small([live], bits=(16, 8), command="b", note=notes.append)
        assert [note for note in notes if "not recorded" in note and MOVED in note]
        first, second = results.record["requests"]
        assert first == {"command": "a"}
        assert second["command"] == "b"


class TestBlocks:
    """In bf16 the model's own attention and quantized attention differ by more than a grid."""

    @pytest.mark.parametrize(
        ("dtype", "wanted", "evaluation", "told"),
        [
            (torch.bfloat16, [Scheme("attention_logits", 8)], "divergence", True),
            (torch.bfloat16, schemes("W8A8+KV8"), "divergence", True),
            (torch.bfloat16, schemes("W8A8"), "divergence", False),
            (torch.bfloat16, [Scheme("keys", 8)], "perplexity", False),
            (torch.float32, [Scheme("keys", 8)], "divergence", False),
        ],
    )
    def test_it_is_told_where_they_are_compared(
        self, text, tmp_path, dtype, wanted, evaluation, told
    ):
        models = [
            (tiny_llama(seed=seed).to(dtype), tiny_tokenizer(), name)
            for seed, name in enumerate(("one", "two"))
        ]
        notes = []
        options = {"text": text, "out": tmp_path, "note": notes.append}
        results = sweep(models, [(), wanted], [evaluation], **options)
        found = [note.partition(":")[0] for note in notes if "in blocks" in note]
        assert found == (["one", "two"] if told else [])
        captions = [getattr(part, "caption", None) for part in self.tables(results)]
        assert captions.count(None) == len(captions) - (2 if told else 0)  # KL and agreement
        assert all("bfloat16" in caption for caption in captions if caption)

    @staticmethod
    def tables(results):
        from rich.console import Console

        console = Console(width=200)
        parts = [part for part in sweep_report(results) if hasattr(part, "__rich_console__")]
        return [
            made
            for part in parts
            for made in part.__rich_console__(console, console.options)
            if hasattr(made, "columns") and len(made.columns)
        ]
