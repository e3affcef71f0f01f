"""What is written for people: nothing in a name is taken for markup, and all of it is shown."""

import base64
import hashlib
import re

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from pandas.testing import assert_frame_equal

from quantdiff.analysis.report import (
    Figure,
    Prose,
    Report,
    Section,
    Table,
    Warned,
    html_of,
    read_table,
    write_report,
)
from quantdiff.analysis.report.latex import latex
from quantdiff.analysis.report.latex_text import latex_text
from quantdiff.analysis.report.markdown import markdown
from quantdiff.analysis.report.values import settled
from quantdiff.analysis.style import Page
from quantdiff.analysis.text import UNKNOWN, literal
from tests.analysis.report.reading import Read
from tests.analysis.report.sample import HOSTILE

TEXT = (
    st.text(max_size=20)
    | st.sampled_from(HOSTILE)
    | st.text("\\`*_[]{}<>|~$&#%^'\"-,! aé한", max_size=12)
)


def table_of(names):
    frame = pd.DataFrame({"name": pd.Series(names, dtype=object), "n": np.arange(len(names)) - 0.5})
    return Table("names", f"of {names[0]}", frame, caption=" ".join(names), heads={"n": names[0]})


def shown(names):
    return [
        [literal(name), str(n)] for name, n in zip(names, np.arange(len(names)) - 0.5, strict=True)
    ]


class TestMarkdown:
    @given(st.lists(TEXT, min_size=1, max_size=4))
    def test_a_reader_sees_every_cell_as_it_is(self, names):
        content = markdown(table_of(names))
        read = Read(MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(content))
        cells = [[" ".join(cell.split()) for cell in row] for row in read.rows]
        wanted = [["name", literal(names[0])], *shown(names)]
        assert cells == [[" ".join(cell.split()) for cell in row] for row in wanted]
        assert {name for name, _ in read.elements} <= {
            "p",
            "strong",
            "table",
            "thead",
            "tbody",
            "tr",
            "th",
            "td",
        }

    def test_numbers_stand_at_the_right_and_names_stay_readable(self):
        table = Table("t", "t", pd.DataFrame({"attention_logits": ["a_b"], "n": [1]}))
        assert "| attention_logits | n |\n| --- | ---: |\n| a_b | 1 |" in markdown(table)

    def test_what_is_published_says_so(self, report):
        table = next(table for table in report.tables if table.published)
        for text in (markdown(table), latex(table)):
            assert "(published, not measured here)" in text


class TestLatex:
    @given(TEXT)
    def test_no_letter_of_a_text_is_a_command(self, text):
        written = latex_text(literal(text))
        token = r"\\[a-zA-Z]+\{\}|\\[a-zA-Z]+ ?|\\[#$%&_{}]|\{\[\}|\{\]\}|\{\*\}|."
        tokens = re.findall(token, written, re.DOTALL)
        inside = re.sub(r"\\ensuremath\{[^{}]*(\{[^{}]*\})?\}", "", written)
        assert not {"#", "$", "%", "&", "~", "^", "_", "\\", "[", "]", "*", "<", ">"} & {
            *re.findall(token, inside, re.DOTALL)
        }
        depth = 0
        for one in tokens:
            depth += (one == "{") - (one == "}")
            assert depth >= 0
        assert depth == 0
        assert written.count(r"\ifdefined") == written.count(r"\else") == written.count(r"\fi{}")

    @given(st.text("abcXYZ0189 .:;?/()@=+", max_size=20))
    def test_plain_text_stays(self, text):
        assert latex_text(text) == text

    def test_signs_are_mathematics_and_other_letters_for_engines_that_know_them(self):
        assert latex_text("κ ±") == r"\ensuremath{\kappa} \ensuremath{\pm}"
        assert latex_text("‖w‖₂") == r"\ensuremath{\Vert}w\ensuremath{\Vert}\ensuremath{_{2}}"
        assert latex_text("a한국b") == r"a\ifdefined\Umathchar 한국\else ??\fi{}b"
        assert latex_text("---") == "-{}-{}-"

    @given(st.lists(TEXT, min_size=1, max_size=4))
    def test_every_row_has_its_cells(self, names):
        lines = latex(table_of(names)).splitlines()
        rows = [line for line in lines if line.endswith(r" \\")]
        assert len(rows) == len(names) + 1
        assert all(len(re.findall(r"(?<!\\)&", row)) == 1 for row in rows)
        assert rows[1].endswith(r"& \ensuremath{-}0.5 \\")
        assert [line.strip() for line in lines].count(r"\begin{tabular}{lr}") == 1

    def test_the_frame_of_a_table(self, written):
        text = (written / "tables" / "outliers.tex").read_text()
        marks = [
            r"\begin{table}", r"\caption{", r"\label{tab:outliers}", r"\begin{tabular}{llrrrrrrr}",
            r"\toprule", r"\midrule", r"\bottomrule", r"\end{tabular}", r"\end{table}",
        ]  # fmt: skip
        assert [text.count(mark) for mark in marks] == [1] * len(marks)
        places = [text.index(mark) for mark in marks]
        assert places == sorted(places)


class TestPage:
    def test_a_page_is_whole_and_asks_for_nothing(self, report, written):
        content = (written / "report.html").read_text()
        read = Read(content)
        assert [image["src"][:22] for image in read.named("img")] == [
            "data:image/png;base64,"
        ] * len(report.figures)
        assert [link["href"] for link in read.named("link")] == ["data:,"]
        assert [*read.named("script"), *read.named("style")] == [{}, {}]
        assert not any(
            name.startswith("on") or name in ("style", "srcset", "action", "background")
            for _, attributes in read.elements
            for name in attributes
        )
        for link in read.named("a"):
            assert re.fullmatch(r"#[a-z0-9-]+|(tables|figures)/[a-z0-9-]+\.[a-z]+", link["href"])

    def test_only_its_own_script_and_style_may_run(self, written):
        content = (written / "report.html").read_text()
        policy = next(
            meta["content"] for meta in Read(content).named("meta") if "http-equiv" in meta
        )
        assert policy.startswith("default-src 'none'; img-src data:; ")
        for name in ("script", "style"):
            inside = re.search(rf"<{name}>(.*?)</{name}>", content, re.DOTALL)[1]
            digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
            assert f"{name}-src 'sha256-{digest}'" in policy

    def test_links_lead_to_sections_and_files_that_are_there(self, written):
        read = Read((written / "report.html").read_text())
        ids = [attributes["id"] for _, attributes in read.elements if "id" in attributes]
        assert len(ids) == len(set(ids))
        for link in (link["href"] for link in read.named("a")):
            assert link[1:] in ids if link.startswith("#") else (written / link).is_file()

    def test_hostile_names_are_shown_as_they_are(self, report, written):
        read = Read((written / "report.html").read_text())
        rows = {tuple(row) for row in read.rows}
        table = next(table for table in report.tables if table.key == "named")
        for path in table.frame["path"]:
            assert any(row[0] == path for row in rows)
        alts = [image["alt"] for image in read.named("img")]
        assert f"{HOSTILE[3]} as heat map" in alts
        assert f"Names such as {HOSTILE[0]}" in "".join(read.text)

    def test_numbers_carry_what_they_are_sorted_by(self, report):
        table = next(table for table in report.tables if table.key == "outliers")
        read = Read(html_of([table]))
        cells = [c for c in read.named("td") if c.get("class") == "n"]
        wanted = table.frame.select_dtypes("number").to_numpy().ravel()
        found = [float(cell.get("data-value", "nan")) for cell in cells]
        assert np.array_equal(found, wanted, equal_nan=True)

    def test_missing_values_are_a_dash_whatever_shows_the_others(self):
        frame = pd.DataFrame(
            {"x": [None, 1.0], "s": [None, "a"], "n": pd.array([None, 1], "Int64")}
        )
        show = dict.fromkeys(frame, lambda value: f"<{value}>")
        assert Read(html_of([Table("t", "t", frame, shown=show)])).rows[1:] == [
            [UNKNOWN] * 3,
            ["<1.0>", "<a>", "<1>"],
        ]

    @given(TEXT, TEXT)
    def test_a_fragment_shows_any_text(self, name, told):
        read = Read(html_of([Prose(told), Warned(told), table_of([name])]))
        assert read.rows[1][0] == literal(name)
        assert "script" not in {element for element, _ in read.elements}


class TestFiles:
    def test_all_files_are_named_and_there(self, report, tmp_path):
        folder = tmp_path / "new" / "folder"
        files = write_report(report, folder)
        assert files[0] == folder / "report.html"
        there = {path for path in folder.rglob("*") if path.is_file()}
        assert sorted(there) == sorted(files)
        names = {path.relative_to(folder).as_posix() for path in files}
        for table in report.tables:
            assert {f"tables/{table.key}.{suffix}" for suffix in ("csv", "md", "tex")} <= names
        for figure in report.figures:
            assert {f"figures/{figure.key}.{suffix}" for suffix in ("csv", "png", "svg")} <= names

    def test_numbers_of_tables_and_figures_read_back(self, report, written):
        for kind, parts in (("tables", report.tables), ("figures", report.figures)):
            for part in parts:
                found = read_table(written / kind / f"{part.key}.csv")
                assert_frame_equal(found, settled(part.frame), check_exact=True)

    def test_an_empty_report_is_a_page(self, tmp_path):
        write_report(Report("Nothing", ()), tmp_path)
        assert "Nothing" in Read((tmp_path / "report.html").read_text()).text


class TestContent:
    @pytest.mark.parametrize("key", ["", "A", "a b", "../a", "a--b", "한"])
    def test_keys_are_names_of_files(self, key):
        with pytest.raises(ValueError, match="is no key"):
            Table(key, "t", pd.DataFrame({"a": [1]}))
        with pytest.raises(ValueError, match="is no key"):
            Section(key, "t", ())

    def test_keys_and_columns_are_unique(self):
        table = Table("a", "t", pd.DataFrame({"a": [1]}))
        with pytest.raises(ValueError, match="stands for two things"):
            Report("r", (Section("s", "s", (table, table)),))
        with pytest.raises(ValueError, match="stands for two things"):
            Table("a", "t", pd.DataFrame([[1, 2]], columns=["a", "a"]))

    @pytest.mark.parametrize("columns", [[16, 8], [], [""]])
    def test_columns_are_named(self, columns):
        with pytest.raises(ValueError, match="must be named by strings"):
            Table("a", "t", pd.DataFrame(columns=columns))

    def test_what_is_shown_is_a_column(self):
        with pytest.raises(ValueError, match="has no column 'b'"):
            Table("a", "t", pd.DataFrame({"a": [1]}), heads={"b": "B"})

    def test_a_figure_is_checked_too(self):
        with pytest.raises(ValueError, match="is no key"):
            Figure("../x", "t", Page(1, 1), pd.DataFrame({"a": [1]}))
