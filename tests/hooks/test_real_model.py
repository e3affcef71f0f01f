"""The recorder on real weights and real text against everything materialised."""

import pytest
import torch

from quantdiff import record
from quantdiff.calibration.text import text_windows
from quantdiff.statistics.storage import to_json
from tests.reference import Materialised, check_profile

pytestmark = pytest.mark.xdist_group("hooks_real_model")  # the reference is computed once


@pytest.fixture(scope="module")
def batch(smollm2):
    """Two windows of real text, the second shorter and padded on the right."""
    windows = text_windows("corpus", smollm2[1], tokens=400, seq_len=256)
    (batch,) = windows.batches(2, pad_token_id=0)
    return batch


@pytest.fixture(scope="module")
def expected(smollm2, batch):
    return Materialised(smollm2[0]).run([batch])


@pytest.mark.parametrize(
    ("attention", "compiled"),
    [("eager", True), ("sdpa", True), ("flex_attention", True), ("sdpa", False)],
)
def test_every_number_equals_the_materialised_one(smollm2, batch, expected, attention, compiled):
    model, _ = smollm2
    model.set_attn_implementation(attention)
    try:
        with torch.no_grad(), torch.compiler.set_stance("default"):
            before = model(**batch).logits
            with record(model, compiled=compiled) as recorder:
                during = model(**batch).logits
    finally:
        model.set_attn_implementation("sdpa")
    assert torch.equal(before, during)
    check_profile(to_json(recorder.profile()), expected)
