"""Head layouts: who pairs with whom and reads what."""

import importlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantdiff.attention import LAYOUTS, layout
from quantdiff.attention.layouts import branches

NAMES = ("none", "adjacent", "halves", "adjacent_shared", "grouped:2", "grouped:4")


@st.composite
def counts(draw):
    """A layout with numbers of query and key-value heads that fit it."""
    name = draw(st.sampled_from(NAMES))
    group, kv = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    found = layout(name)
    if name == "none":
        return found, group * kv, kv
    if name == "adjacent_shared":
        return found, 2 * group * kv, kv
    return found, (found.ratio + 1) * group * kv, 2 * kv


@given(counts())
def test_the_maps_of_a_pair_read_the_same_values(case):
    found, heads, kv_heads = case
    if not found.differential:
        return
    values, keys = found.value_heads(heads, kv_heads), found.key_heads(heads, kv_heads)
    first, second = found.pairs(heads)
    for a, b in zip(first, second, strict=True):
        assert values[a] == values[b]
        assert (keys[a] == keys[b]) != found.own_keys
    found.check_pairs(heads, kv_heads, first, second)


@given(counts())
def test_every_head_is_computed_once_and_has_one_branch(case):
    found, heads, kv_heads = case
    computed = [head for call in found.calls(heads, kv_heads) for head in call.queries]
    assert sorted(computed) == list(range(heads))
    read = [head for call in found.calls(heads, kv_heads) for head in call.keys]
    assert sorted(read) == list(range(kv_heads))
    kinds = found.branches(heads)
    if found.differential:
        first, second = found.pairs(heads)
        assert [h for h in range(heads) if kinds[h] == 1] == sorted(first)
        assert [h for h in range(heads) if kinds[h] == 2] == sorted(set(second))
    else:
        assert set(kinds) == {None}


def test_the_published_models():
    # Official V1: 4 differential heads, 2 key-value heads of twice the width.
    v1 = layout("adjacent")
    assert v1.branches(8) == [1, 2] * 4
    assert v1.key_heads(8, 4) == [0, 1, 0, 1, 2, 3, 2, 3]
    assert v1.value_heads(8, 4) == [(0, 1)] * 4 + [(2, 3)] * 4
    # DiffLlama: keys repeated over groups, values chunked in halves and tiled.
    halves = layout("halves")
    assert halves.branches(8) == [1] * 4 + [2] * 4
    assert halves.key_heads(8, 4) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert halves.value_heads(8, 4) == [(0, 2), (0, 2), (1, 3), (1, 3)] * 2
    # V2: plain grouped queries.
    v2 = layout("adjacent_shared")
    assert v2.key_heads(8, 2) == [0] * 4 + [1] * 4
    assert v2.pairs(8) == ([0, 2, 4, 6], [1, 3, 5, 7])
    # Motif-2-12.7B: 40 query heads in 8 groups of 4 signal and 1 noise, 16 key-value heads.
    motif = layout("grouped:4")
    signal, noise = motif.pairs(40)
    assert len(signal) == 32
    assert noise[:8] == [4] * 4 + [9] * 4
    assert motif.key_heads(40, 16)[:10] == [0, 0, 0, 0, 1, 2, 2, 2, 2, 3]


def test_the_wrong_pairs_of_v2_are_refused():
    """First half and second half never share a key-value head unless there is only one."""
    v2 = layout("adjacent_shared")
    for kv_heads in (2, 4, 8):
        with pytest.raises(ValueError, match="heads 0 and 8 of 16 read different key and value"):
            v2.check_pairs(16, kv_heads, range(8), range(8, 16))
    v2.check_pairs(16, 1, range(8), range(8, 16))


@pytest.mark.parametrize(
    ("name", "heads", "kv_heads", "words"),
    [
        ("adjacent", 7, 2, "7 query heads do not form pairs"),
        ("halves", 7, 2, "7 query heads do not form pairs"),
        ("halves", 8, 1, "num_kv_heads = 1"),
        ("adjacent", 8, 6, "num_kv_heads = 6 does not divide"),
        ("adjacent_shared", 6, 2, "heads 2 and 3 of 6 read different"),
        ("adjacent_shared", 8, 3, "num_kv_heads = 3 does not divide 8 query heads"),
        ("grouped:4", 12, 2, "groups of 4 signal heads and one noise"),
        ("none", 8, 3, "num_kv_heads = 3"),
        ("none", 8, 0, "num_kv_heads is 1 or more"),
        ("none", 0, 1, "query heads is 1 or more"),
    ],
)
def test_counts_that_do_not_fit(name, heads, kv_heads, words):
    with pytest.raises(ValueError, match=words):
        layout(name).check(heads, kv_heads)


@pytest.mark.parametrize("name", ["", "grouped", "grouped:0", "grouped:x", "thirds"])
def test_an_unknown_layout(name):
    with pytest.raises(ValueError, match="unknown head layout"):
        layout(name)


def test_names_lead_back():
    for name in NAMES:
        assert str(layout(name)) == name
    assert set(LAYOUTS) < set(NAMES)
    assert branches("grouped:2", 6) == [1, 1, 2, 1, 1, 2]


def test_the_page_is_drawn_from_the_code(monkeypatch):
    root = Path(__file__).parents[2]
    monkeypatch.syspath_prepend(root / "scripts")
    script = importlib.import_module("draw_layouts")
    assert (root / "docs" / "layouts.md").read_text(encoding="utf-8") == script.page_text()
    for name, _, _ in script.CASES:
        assert (root / "docs" / "figures" / f"{script.stem(name)}.png").exists()
