"""`quantdiff.calibrate`: one pass over the data, whatever the batches look like."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quantdiff import CalibrationTable, UsageError, calibrate
from quantdiff.analysis.profiling import profile_text
from quantdiff.calibration import TextWindows
from quantdiff.quantization import Scheme
from tests.calibration.test_table import EVERY
from tests.hooks.test_any_module import NanoGPT, make
from tests.tiny import VOCABULARY, tiny_diff_v2, tiny_diffllama, tiny_ids, tiny_llama

LENGTHS = (24, 9, 17, 24, 5, 12)
WINDOWS = [tiny_ids(1, n, seed=seed)[0] for seed, n in enumerate(LENGTHS)]


def windows(parts=WINDOWS):
    return TextWindows("words.txt", list(parts), 24, sum(map(len, parts)), has_bos=False)


def close(a, b):
    """The same ranges; a kernel may sum in another order for another batch."""
    for scheme in EVERY:
        for site in a.sites:
            for x, y in zip(a.range(scheme, site.name), b.range(scheme, site.name), strict=True):
                # The thresholds of entropy are 1/2048 apart, and two of them may be all but equal.
                tolerance = 2e-2 if scheme.range == "entropy" else 1e-4
                assert x == pytest.approx(y, rel=tolerance, abs=1e-6), scheme


@pytest.fixture(scope="module")
def model():
    return tiny_diffllama()


@pytest.fixture(scope="module")
def table(model):
    return calibrate(model, windows())


def test_counts_what_may_be_attended_once(table):
    pairs = sum(n * (n + 1) // 2 for n in LENGTHS)
    assert all((site.count == pairs).all() for site in table.sites)
    assert table.data["tokens"] == sum(LENGTHS)
    assert table.data["sequences"] == len(LENGTHS)
    assert table.data["sequence_length"] == 24
    assert table.data["source"] == "words.txt"
    assert table.data["fingerprint"] == windows().fingerprint
    assert table.model["layout"] == "halves"


def test_a_module_that_says_nothing_of_itself(tmp_path):
    class Plain(NanoGPT):
        def forward(self, input_ids, attention_mask):
            return super().forward(input_ids, is_causal=True)

    plain, text = make(Plain), windows([part % 50 for part in WINDOWS])
    with torch.no_grad():
        profile = profile_text(plain, text)
    calibrate(plain, text).save(tmp_path)
    table = CalibrationTable.load(tmp_path)
    assert table.model["name"] == table.model["family"] == profile.model["name"] == "Plain"
    for ours, theirs in zip(table.sites, profile.attention_logits.sites, strict=True):
        assert (ours.count == sum(n * (n + 1) // 2 for n in LENGTHS)).all()
        assert ours.max.tolist() == theirs.max.tolist()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("size", [2, 3, 6])
def test_padding_and_batch_size_change_nothing(model, table, side, size):
    batches = windows().batches(size, pad_token_id=7, padding_side=side)
    padded = calibrate(model, batches, source="words.txt")
    close(padded, table)
    assert padded.data["fingerprint"] == table.data["fingerprint"]
    assert padded.data["tokens"] == table.data["tokens"]


def test_the_order_of_the_batches_changes_nothing(model, table):
    close(calibrate(model, windows(WINDOWS[::-1])), table)


def test_the_first_part_is_about_three_quarters(table):
    total = sum(LENGTHS)
    ends = [sum(LENGTHS[:i]) for i in range(1, len(LENGTHS))]
    assert table.data["earlier_tokens"] == min(ends, key=lambda end: abs(end - 0.75 * total))
    for before, after in zip(table.earlier, table.sites, strict=True):
        assert (before.count < after.count).all()


@pytest.mark.parametrize("make", [tiny_llama, tiny_diffllama, tiny_diff_v2])
def test_every_layout(make):
    model = make()
    table = calibrate(model, windows())
    heads = {site.groups for site in table.sites}
    assert len(heads) == 1
    assert len(table.branches["model.layers.0.self_attn"]) == heads.pop()
    assert len(table.sites) == 2


def test_two_processes_merged_equal_one(tmp_path, model, table):
    torch.save(WINDOWS[3:], tmp_path / "second.pt")
    code = (
        "import sys, torch\n"
        "from quantdiff import calibrate\n"
        "from tests.calibration.test_calibrate import windows\n"
        "from tests.tiny import tiny_diffllama\n"
        "part = torch.load(sys.argv[1] + '.pt')\n"
        "calibrate(tiny_diffllama(), windows(part)).save(sys.argv[1])\n"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "second")],
                             cwd=Path(__file__).parents[2])  # fmt: skip
    calibrate(model, windows(WINDOWS[:3])).save(tmp_path / "first")  # this process is the other one
    assert other.wait(timeout=120) == 0
    first, second = (CalibrationTable.load(tmp_path / name) for name in ("first", "second"))
    merged = first.merge(second)
    for scheme in EVERY:
        for site in table.sites:
            for x, y in zip(merged.range(scheme, site.name), table.range(scheme, site.name),
                            strict=True):  # fmt: skip
                assert (x == y).all()
    assert merged.data["tokens"] == table.data["tokens"]


def test_progress_and_stop(model):
    told = []
    table = calibrate(model, windows(), progress=told.append, stop=lambda: len(told) == 2)
    assert told == [24, 9]
    assert table.partial
    assert table.data["tokens"] == 33
    assert table.data["fingerprint"] == windows(WINDOWS[:2]).fingerprint
    told.clear()
    assert not calibrate(model, windows(), progress=told.append).partial
    assert told == list(LENGTHS)


def test_leaves_the_model_alone(model):
    batch = {"input_ids": tiny_ids()}
    with torch.no_grad():
        before = model(**batch).logits
        calibrate(model, batch)
        assert torch.equal(model(**batch).logits, before)
    assert not model.model.layers[0].self_attn._forward_hooks


def test_a_plain_module_with_its_own_inputs():
    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.project = torch.nn.Linear(16, 48, bias=False)

        def forward(self, x):
            q, k, v = self.project(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v)  # (B, H, N, D)
            return out.transpose(1, 2).flatten(2)

    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(Attention() for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x)
            return x

    batches = [{"x": torch.randn(2, 6, 16)} for _ in range(3)]
    table = calibrate(Encoder(), batches, source="noise")
    assert [site.groups for site in table.sites] == [2, 2]
    assert all((site.count == 3 * 2 * 36).all() for site in table.sites)
    assert len(table.data["fingerprint"]) == 64


class TestRefusals:
    def test_no_batches(self, model):
        with pytest.raises(UsageError, match="no batch was given"):
            calibrate(model, [])

    def test_what_is_no_batch(self, model):
        with pytest.raises(UsageError, match="not a Tensor"):
            calibrate(model, [tiny_ids()])

    def test_windows_beyond_the_context(self, model):
        with pytest.raises(UsageError, match="beyond the model's context of 128"):
            calibrate(model, windows([tiny_ids(1, 130)[0]]))

    def test_tokens_outside_of_the_vocabulary(self, model):
        with pytest.raises(UsageError, match="outside the model's vocabulary"):
            calibrate(model, windows([torch.tensor([3, VOCABULARY])]))


def test_public_names_stay_what_they_are():
    import quantdiff.calibration

    for _ in range(2):
        assert callable(quantdiff.calibration.calibrate)
        assert quantdiff.calibrate is quantdiff.calibration.calibrate
        assert quantdiff.CalibrationTable is quantdiff.calibration.CalibrationTable
    assert Scheme("attention_logits", 4, "mse").static
