"""Names as a reader should see them."""

import itertools

import pytest

from quantdiff.analysis.text import shorten, shorten_apart

LONG = "/scratch/of/somebody/runs/" + "x" * 30


class TestShortenedTogether:
    @pytest.mark.parametrize(
        "names",
        [
            [f"{LONG}/width-{n}/checkpoint-of-the-last-step" for n in range(12)],
            [f"{LONG}/{a}{'y' * 40}{b}/checkpoint-of-the-last-step"
             for a, b in itertools.product("ab", "cd")],
            ["x" * n for n in (50, 60, 70, 3)],
            [f"{'x' * 40}{n}{'x' * 40}" for n in range(3)] + [f"…xxx0{'x' * 40}"],
        ],
        ids=["in-one-place", "in-two-places", "in-length", "with-another-of-that-label"],
    )  # fmt: skip
    @pytest.mark.parametrize("length", [1, 12, 24, 40])
    def test_differ(self, names, length, request):
        short = shorten_apart(names, length)
        assert list(short) == names
        assert len(set(short.values())) == len(names)
        if length >= 24 and "another" not in request.node.name:
            assert max(map(len, short.values())) <= length

    def test_are_cut_as_one_is_where_that_tells_them_apart(self):
        names = ["a" * 50, "b" * 50, "c"]
        assert shorten_apart(names, 20) == {name: shorten(name, 20) for name in names}
