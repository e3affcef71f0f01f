import io

import pytest
from rich.console import Console

from quantdiff.analysis import (
    heading,
    profile_report,
    profile_table,
    published_table,
    worst_layers_table,
)
from quantdiff.analysis.text import number, shorten
from quantdiff.statistics import Top


def rendered(*tables, width=80):
    console = Console(width=width, file=io.StringIO(), color_system=None)
    for table in tables:
        console.print(table)
    return console.file.getvalue()


def rows(text):
    return [line.split() for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (318, "318.0"), (3608.64, "3608.6"), (10, "10.0"), (9.996, "10.0"), (5.4, "5.40"),
        (0.6, "0.600"), (0.00123456, "0.00123"), (1e-7, "1.00e-07"), (-22543.12, "-22543.1"),
        (3.2e38, "3.20e+38"), (0, "0"), (None, "–"), (float("nan"), "–"), (float("inf"), "inf"),
    ],
)  # fmt: skip
def test_numbers(value, text):
    assert number(value) == text


@pytest.mark.parametrize("length", range(1, 9))
def test_shortened_text_keeps_both_ends(length):
    short = shorten("abcdefgh", length)
    assert len(short) <= length
    assert short == "abcdefgh" if length == 8 else "…" in short


class TestProfileTable:
    def test_is_the_summary(self, profiles):
        profile = profiles["llama"]
        head, _, logits, hidden = rows(rendered(profile_table(profile)))
        assert head[1:] == ["top-1", "top-2", "top-3", "top-10", "top-100", "median"]
        summary = profile.summary()
        assert logits[:2] == ["attention", "logits"]
        assert hidden[:2] == ["hidden", "states"]
        assert logits[2:] == [number(value) for value in summary.loc["attention_logits"]]
        assert hidden[2:] == [number(value) for value in summary.loc["hidden_states"]]

    def test_unknown_numbers_are_dashes(self, profiles):
        *_, logits, _ = rows(rendered(profile_table(profiles["extremes"])))
        assert logits[-3:] == ["–", "–", "–"]
        assert "–" not in logits[:-3]


class TestWorstLayers:
    def test_names_place_and_spread(self, profiles):
        profile = profiles["diffllama"]
        table = rows(rendered(worst_layers_table(profile, 1)))
        at = table.index(
            ["layer", "head", "branch", "largest", "sequence", "query", "key", "std", "kurtosis"]
        )
        item = profile.attention_logits.top(1)[0]
        site = profile.attention_logits.sites[item.layer]
        assert table[at + 2] == [
            *map(str, (item.layer, item.head, item.branch)), number(item.value),
            *map(str, (item.sequence, item.query, item.key)),
            number(site.moments.std[item.head]), number(site.moments.kurtosis[item.head]),
        ]  # fmt: skip
        at = table.index(["layer", "largest", "sequence", "token", "channel", "std", "kurtosis"])
        item = profile.hidden_states.top(1)[0]
        site = profile.hidden_states.sites[item.layer]
        assert table[at + 2] == [
            str(item.layer), number(item.value), *map(str, (item.sequence, item.token)),
            str(item.channel), number(site.moments.std[0]), number(site.moments.kurtosis[0]),
        ]  # fmt: skip

    def test_largest_first(self, profiles):
        table = rows(rendered(worst_layers_table(profiles["llama"], 99)))
        values = [float(row[2]) for row in table if len(row) == 8 and row[0].isdigit()]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)

    def test_standard_heads_have_no_branch_column(self, profiles):
        assert "branch" not in rendered(worst_layers_table(profiles["llama"]))

    def test_dashes_where_only_the_extremes_are_known(self, profiles):
        profile = profiles["extremes"].copy()
        for site in profile.attention_logits.sites:
            site.top = Top(0, 5)
        text = rendered(worst_layers_table(profile, 1))
        assert rows(text)[3][-5:] == ["–"] * 5


class TestHeading:
    def test_tells_all_that_identifies_a_profile(self, profiles):
        profile = profiles["diffllama"].copy()
        profile.partial = True
        text = rendered(heading(profile), width=200)
        for word in (
            "DiffLlamaForCausalLM", "diffllama", "halves", "parameters", "float32", "random ids",
            "48 tokens", "2 sequences", "24", "partial",
        ):  # fmt: skip
            assert word in text
        assert "partial" not in rendered(heading(profiles["diffllama"]))
        assert "extremes" in rendered(heading(profiles["extremes"]))

    @pytest.mark.parametrize("name", ["[red]x", "[/]", "$x$", ":smile:", "한국어", "[bold"])
    def test_names_are_literal(self, renamed, name):
        assert rendered(heading(renamed(name))).startswith(f"{name} ")

    def test_a_name_is_one_line_that_can_be_encoded(self, renamed):
        text = rendered(heading(renamed("a\nb\udc80")))
        assert text.startswith("a�b� ")
        text.encode()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("model", ["llama", "diffllama", "extremes", "large"])
def test_nothing_is_wider_than_the_terminal_or_cut(profiles, model, width):
    profile = profiles["diffllama" if model == "large" else model].copy()
    if model == "large":
        profile.attention_logits.sites[1].max *= 1e4
        for site in profile.attention_logits.sites:
            site.top.coordinates[:, 2:] += 130_000
        for site in profile.hidden_states.sites:
            site.top.values[:] *= 1e4
    text = rendered(*profile_report(profile), published_table(), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


def test_published_table_is_the_paper_s():
    text = rendered(published_table())
    assert "2410.05258" in text
    lines = [" ".join(row) for row in rows(text)]
    assert "Transformer attention logits 318.0 308.2 304.9 284.7 251.5 5.4" in lines
    assert "DIFF hidden states 1688.2 1672.5 1672.1 1624.3 740.9 1.2" in lines


def test_numbers_are_aligned_to_the_right(profiles):
    lines = [
        line for line in rendered(profile_table(profiles["llama"])).splitlines() if line.strip()
    ]
    end = lines[0].index("top-1") + len("top-1")
    for line in lines[2:]:
        assert line[end - 1].isdigit()
        assert line[end] == " "
