"""`quantdiff models` as a user runs it."""

import json

from quantdiff.models import known_names


def test_names_and_families_are_listed(run):
    code, out, _ = run("models")
    assert code == 0
    for word in (*known_names(), "diffllama", "MultiheadFlashDiff1", "halves", "by its config"):
        assert word in out


def test_json(run):
    content = json.loads(run("models", "--json")[1])
    assert content["names"] == list(known_names())
    assert content["families"]["model type"]["diffllama"] == "halves"
