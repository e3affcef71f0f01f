"""Short names of schemes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantdiff import Scheme, UsageError
from quantdiff.quantization import name_of, schemes

W8, W4 = (Scheme("weights", bits, granularity="channel") for bits in (8, 4))
A8 = Scheme("linear_inputs", 8, granularity="token")


def kv(bits, granularity="token", sites=("keys", "values")):
    return [Scheme(site, bits, granularity=granularity, symmetric=False) for site in sites]


EXPECTED = {
    "W8A8": [W8, A8],
    "W8A16": [W8],
    "W4A16": [W4],
    "W4A8": [W4, A8],
    "KV8": kv(8),
    "KV2g32": kv(2, "group:32"),
    "L4": [Scheme("attention_logits", 4)],
    "W4g64A16+KV4+L6": [
        Scheme("weights", 4, granularity="group:64"), *kv(4), Scheme("attention_logits", 6)
    ],
    "KV4r128": [replace(scheme, newest=128) for scheme in kv(4)],
    "K2g32r64+V4": [
        replace(scheme, newest=64) for scheme in kv(2, "group:32", ["keys"])
    ] + kv(4, sites=["values"]),
    "K4+V2": [*kv(4, sites=["keys"]), *kv(2, sites=["values"])],
    "P8+H8": [
        Scheme("attention_maps", 8, symmetric=False),
        Scheme("hidden_states", 8, granularity="token"),
    ],
    "W16A16+L16": [],
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_what_stands_behind_a_name(name):
    found = schemes(name)
    assert list(found) == EXPECTED[name]
    assert name_of(found) == ("fp" if not found else name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("W0A8", r"W0 in 'W0A8': bits are 2 to 8, or 16"),
        ("W8A9", r"A9 in 'W8A9': bits are 2 to 8"),
        ("Q4", "unknown short name 'Q4': write letters and bits"),
        ("W4+", "unknown short name 'W4\\+'"),
        ("", "unknown short name ''"),
        ("w8a8", "unknown short name 'w8a8'"),
        ("W8 A8", "unknown short name"),
        ("KV4+K8", "'KV4\\+K8' names keys twice"),
        ("L4g8", "L4 in 'L4g8': granularity of attention_logits is one of"),
        ("W4g0", "a group has a size"),
        ("W4r8", "W4 in 'W4r8': weights keep no newest tokens"),
        ("KV4r", "unknown short name"),
    ],
)
def test_what_is_none(name, words):
    with pytest.raises(UsageError, match=words) as error:
        schemes(name)
    assert "\n" not in str(error.value)


def test_layers_of_other_widths():
    mixed = [replace(W8, layers=(0, 2)), replace(W4, layers=(1,)), A8]
    assert name_of(mixed) == "W4-8A8"
    assert name_of([*mixed[:2]]) == "W4-8A16"


@given(st.text(alphabet="WAKVLPHgr+0248 6x", max_size=12))
def test_a_name_is_understood_or_refused(name):
    try:
        found = schemes(name)
    except UsageError:
        return
    if found:
        assert set(schemes(name_of(found))) == set(found)
    else:
        assert name_of(found) == "fp"
