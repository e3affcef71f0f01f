"""Tables and figure of the channels and tokens that hold the large values."""

import re

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from quantdiff import UsageError
from quantdiff.analysis import figure_data, plot, profile_report, save_figures
from quantdiff.analysis.channels import channels_tables
from tests.analysis.conftest import recorded
from tests.tiny import tiny_diffllama, tiny_llama

EVERY = ("linear_inputs", "keys", "values", "hidden_states")


@pytest.fixture(scope="module")
def profile():
    return recorded(tiny_diffllama(num_hidden_layers=3), sites=EVERY)


def rendered(*parts, width=80):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for part in parts:
        console.print(part)
    return console.export_text()


def test_tables_name_the_largest_of_each_kind(profile):
    tables = channels_tables(profile, n=3)
    assert len(tables) == len(EVERY)
    for kind, table in zip(EVERY, tables, strict=True):
        part = getattr(profile, kind)
        rows = [line.split() for line in rendered(table).splitlines() if re.match(r" +\d", line)]
        assert len(rows) == 3
        first = part.top(1)[0]
        row = list(rows[0])
        assert row[0] == str(first.layer)
        if kind == "linear_inputs":
            assert row.pop(1) == first.module.rpartition(".")[2]
        elif part.heads:
            assert row.pop(1) == str(first.head)
        assert float(row[1]) == pytest.approx(first.value, rel=5e-3)
        assert row[3:5] == [str(first.token), str(first.channel)]
        largest = [float(line[2 if kind != "hidden_states" else 1]) for line in rows]
        assert largest == sorted(largest, reverse=True)


@pytest.mark.parametrize("sites", [("keys",), EVERY])
@pytest.mark.parametrize("detail", ["full", "extremes"])
def test_the_report_fits_a_terminal(sites, detail):
    profile = recorded(tiny_llama(), sites=sites, detail=detail)
    for site in profile.keys.sites:  # places and values as long as they get
        site.top.coordinates[:, 3:] += 130_000
        site.top.values[:] *= 1e4
        site.max *= 1e4
        site.channels.max *= 1e4
    text = rendered(*profile_report(profile))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "linear inputs" in text or len(sites) == 1


def test_modules_of_one_name_in_a_layer_are_told_apart():
    profile = recorded(tiny_llama(num_hidden_layers=1), sites=("linear_inputs",))
    for site in profile.linear_inputs.sites:
        site.name = site.name.replace("mlp.gate_proj", "mlp.other.up_proj")
    text = rendered(*channels_tables(profile, n=7))
    assert "other.up_proj" in text
    assert "mlp.up_proj" in text
    assert "self_attn.q_proj" not in text


def test_curves_are_the_sorted_channels(profile):
    data = figure_data(profile, "channels")
    assert set(data["activation"]) == set(EVERY)
    for (kind, layer), line in data.groupby(["activation", "layer"]):
        sites = [site for site in getattr(profile, kind).sites if site.layer == layer]
        site = max(sites, key=lambda site: site.absmax.max())
        head = int(site.absmax.argmax())
        absmax = np.maximum(-site.channels.min[head], site.channels.max[head])
        assert set(line["name"]) == {site.name}
        assert (
            line["absmax"].to_numpy(np.float32) == np.sort(absmax)[::-1][line["rank"] - 1]
        ).all()
        assert line["rank"].iloc[[0, -1]].tolist() == [1, len(absmax)]


def test_the_figure_is_saved_with_its_numbers(profile, tmp_path):
    written = {path.name for path in save_figures(profile, tmp_path)}
    assert {"channels.png", "channels.svg", "channels.csv"} <= written
    table = pd.read_csv(tmp_path / "channels.csv")
    assert len(table) == len(figure_data(profile, "channels"))
    layers = pd.read_csv(tmp_path / "layers.csv")
    assert set(layers["activation"]) == {"attention_logits", "hidden_states"}


@pytest.mark.parametrize("sites", [("keys",), ("keys", "values"), EVERY[:3], EVERY])
def test_one_panel_a_kind(sites):
    figure = plot(recorded(tiny_llama(), sites=sites), "channels")
    panels = [ax for ax in figure.axes if ax.get_xlabel()]
    assert len(panels) == len(sites)
    for ax in panels:
        assert len(ax.lines) == 2
        assert "largest" in ax.get_ylabel()


def test_a_profile_without_channels_is_refused():
    with pytest.raises(UsageError, match=r"no channels.*--sites all records them"):
        plot(recorded(tiny_llama()), "channels")
