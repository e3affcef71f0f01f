import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pandas.testing import assert_frame_equal

from quantdiff import UsageError
from quantdiff.analysis.report import read_table
from quantdiff.analysis.report.values import settled, write_tables

ROWS = 4
WHOLE = {
    f"{sign}int{bits}": st.integers(*bounds)
    for bits in (8, 16, 32, 64)
    for sign, bounds in (("", (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)), ("u", (0, 2**bits - 1)))
}
FLOATS = {f"float{bits}": st.floats(width=bits, allow_subnormal=True) for bits in (32, 64)}
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=6) | st.sampled_from(
    [
        "",
        "007",
        "NA",
        "nan",
        "None",
        "True",
        "1e5",
        'a"b',
        "a,b",
        "a\nb",
        "a\r\nb",
        "\r",
        " x ",
        "한",
    ]
)
NULLABLE = {name.replace("int", "Int").replace("u", "U"): v for name, v in WHOLE.items()}
KINDS = {
    **WHOLE,
    **FLOATS,
    "bool": st.booleans(),
    "str": st.none() | TEXT,
    "object": st.none() | TEXT,
    "string": st.none() | TEXT,
    "boolean": st.none() | st.booleans(),
    **{name: st.none() | values for name, values in NULLABLE.items()},
}


@st.composite
def frames(draw):
    """Columns of any of the dtypes, under any names."""
    kinds = draw(st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=5))
    names = draw(st.lists(TEXT.filter(bool), min_size=len(kinds), max_size=len(kinds), unique=True))
    rows = draw(st.integers(0, ROWS))
    return pd.DataFrame(
        {
            name: pd.Series(draw(st.lists(KINDS[kind], min_size=rows, max_size=rows)), dtype=kind)
            for name, kind in zip(names, kinds, strict=True)
        }
    )


def round_trip(frame, folder):
    write_tables({"table": frame}, folder)
    return read_table(folder / "table.csv")


@given(frames())
def test_a_table_reads_back_to_the_same_frame(tmp_path_factory, frame):
    found = round_trip(frame, tmp_path_factory.mktemp("frames"))
    assert_frame_equal(found, frame, check_exact=True)
    for name in frame.select_dtypes("float"):  # to the bit: the sign of zero too
        signs = [np.signbit(values[name].fillna(0)) for values in (found, frame)]
        assert np.array_equal(*signs)


def test_an_empty_string_is_not_missing(tmp_path):
    names = ["", None, "NA"]
    for other in ({}, {"n": [1, 2, 3]}):  # a line may be empty then
        found = round_trip(
            pd.DataFrame({"name": pd.Series(names, dtype=object), **other}), tmp_path
        )
        assert found["name"].tolist() == names


def test_objects_become_what_they_hold(tmp_path):
    frame = pd.DataFrame({
        "whole": [1, None, 3], "float": [1, 2.5, None], "bool": [True, None, False],
        "huge": [2**80, None, 1], "mixed": ["a", 1, None], "list": [[1, 2], (), None],
        "nothing": [None] * 3,
    }, dtype=object)  # fmt: skip
    found = round_trip(frame, tmp_path)
    dtypes = ["Int64", "float64", "boolean", "object", "object", "object", "object"]
    assert list(map(str, found.dtypes)) == dtypes
    assert found["whole"].tolist() == [1, pd.NA, 3]
    assert found["huge"].tolist() == [str(2**80), None, "1"]
    assert found["mixed"].tolist() == ["a", "1", None]
    assert found["list"].tolist() == ["[1, 2]", "()", None]
    assert_frame_equal(found, settled(frame))


def test_categories_and_an_index_are_no_matter(tmp_path):
    frame = pd.DataFrame({"c": pd.Categorical(["x", None]), "n": [1.5, 2.5]}, index=[7, 3])
    found = round_trip(frame, tmp_path)
    assert found["c"].tolist() == ["x", None]
    assert found.index.tolist() == [0, 1]


def test_pandas_reads_it_by_the_dtypes_beside_it(tmp_path):
    frame = pd.DataFrame({"id": ["007", "08"], "n": pd.array([1, None], "Int64"), "x": [0.5, 1e-9]})
    write_tables({"table": frame}, tmp_path)
    dtypes = json.loads((tmp_path / "dtypes.json").read_text())["table"]
    found = pd.read_csv(tmp_path / "table.csv", dtype=dtypes)
    assert_frame_equal(found, frame)


def test_a_lone_surrogate_does_not_break_a_file(tmp_path):
    found = round_trip(pd.DataFrame({"name": ["a\udc80b"]}, dtype=object), tmp_path)
    assert found["name"].tolist() == ["a?b"]


def test_what_is_no_table_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"x\.csv is missing"):
        read_table(tmp_path / "x.csv")
    (tmp_path / "x.csv").write_text("a\n1\n")
    with pytest.raises(UsageError, match=r"dtypes\.json is missing"):
        read_table(tmp_path / "x.csv")
    write_tables({"y": pd.DataFrame({"a": [1]})}, tmp_path)
    with pytest.raises(UsageError, match="cannot be read as a table of a report"):
        read_table(tmp_path / "x.csv")
    for content, message in (("a\nhello\n", "is broken"), ("b\n1\n", "other columns")):
        (tmp_path / "y.csv").write_text(content)
        with pytest.raises(UsageError, match=message):
            read_table(tmp_path / "y.csv")
