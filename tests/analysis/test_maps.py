"""The table and the figure of the attention maps."""

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from rich.console import Console

import quantdiff
from quantdiff.analysis.figures import plot, save_figures
from quantdiff.analysis.maps import maps_frame
from quantdiff.analysis.tables import profile_report
from quantdiff.errors import UsageError
from tests.analysis.test_figures import undrawn
from tests.tiny import SETTINGS, build, tiny_diff_v2, tiny_diffllama, tiny_ids, tiny_llama


@pytest.fixture(scope="module")
def profiles():
    found = {}
    for name, model in (
        ("llama", tiny_llama(num_hidden_layers=3)),
        ("v1", tiny_diffllama(num_hidden_layers=3)),
        ("v2", tiny_diff_v2(num_hidden_layers=3)),
    ):
        with quantdiff.record(model, maps=True, spans=[(2, 4), (0, 1)]) as recorder:
            model(tiny_ids(2, 24))
        found[name] = recorder.profile()
        found[name].model["name"] = name
    return found


def printed(profile, width=100):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for part in profile_report(profile):
        console.print(part)
    return console.export_text()


@pytest.mark.parametrize("name", ["llama", "v1", "v2"])
def test_the_table_shows_the_maps_that_weigh_the_values(profiles, name):
    text = printed(profiles[name])
    part = text[text.index("attention maps, by layer") :].splitlines()
    header, rows = part[1].split(), [line.split() for line in part[2:5]]
    assert ("λ" in header) == ("negative" in header) == (name != "llama")
    kind = "softmax" if name == "llama" else "difference"
    shown = [site for site in profiles[name].maps if site.kind == kind]
    for row, site in zip(rows, shown, strict=True):
        s = site.summary
        assert row[0] == str(site.layer)
        assert f"{s['row_sum']:.3f}" in row
        assert f"{s['sink']:.3f}" in row
        assert row[-2:] == [f"{s['span_mass']:.3f}", f"{s['rest_mass']:.3f}"]
        if name == "v1":
            assert row[1] == f"{profiles[name].model['lambda'][site.layer]:.3f}"
        if name == "v2":
            lam = profiles[name].lambdas[site.layer]
            assert row[1] == f"{lam.moments.mean.mean():.3f}"
    assert ("amplifies by up to" in " ".join(text.split())) == (name == "v1")


@pytest.mark.parametrize("name", ["llama", "v1", "v2"])
def test_the_figure(profiles, name, tmp_path):
    page = plot(profiles[name], "maps")
    FigureCanvasAgg(page).draw()
    sink, middle, norm = page.axes
    data = maps_frame(profiles[name])
    kinds = list(dict.fromkeys(data["kind"]))
    assert len(sink.lines) == len(kinds)
    for line, kind in zip(sink.lines, ("softmax",) if name == "llama" else
                          ("difference", "branch 1", "branch 2"), strict=True):  # fmt: skip
        assert np.allclose(line.get_ydata(), data[data["kind"] == kind]["sink"])
    label, measure = ("entropy", "entropy") if name == "llama" else ("negative", "negative_mass")
    assert middle.get_ylabel().startswith(label)
    shown = data[data["kind"] == ("softmax" if name == "llama" else "difference")]
    assert np.allclose(middle.lines[0].get_ydata(), shown[measure])
    bounds = sorted(line.get_ydata()[0] for line in norm.lines[1:])
    expected = [24**-0.5, 1.0] + ([2**0.5] if name == "v2" else [])
    assert bounds == pytest.approx(expected)
    frame, hidden = page.bbox, undrawn(page)
    for ax in page.axes:
        for text in [ax.xaxis.label, ax.yaxis.label, *ax.get_xticklabels(), *ax.texts]:
            if text.get_text() and text not in hidden:
                box = text.get_window_extent()
                assert frame.x0 <= box.x0 <= box.x1 <= frame.x1
                assert frame.y0 <= box.y0 <= box.y1 <= frame.y1
    files = {path.name for path in save_figures(profiles[name], tmp_path)}
    assert {"maps.png", "maps.svg", "maps.csv"} <= files
    assert mpl.rcParams["text.usetex"] is False


def test_a_hybrids_kinds_of_maps_are_lines_of_their_own(profiles):
    hybrid = profiles["v1"].copy()
    hybrid.maps = [
        *(site for site in hybrid.maps if site.layer != 1),
        *(site for site in profiles["llama"].copy().maps if site.layer == 1),
    ]
    for page in (plot(hybrid, "maps"), quantdiff.compare(hybrid).plot("maps")):
        middle = page.axes[1]
        assert len({line.get_linestyle() for line in middle.lines}) == len(middle.lines) == 2


def test_no_lower_bound_is_claimed_where_a_learned_sink_takes_a_share(profiles):
    from transformers import GptOssConfig, GptOssForCausalLM

    options = {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
    model = build(GptOssForCausalLM, GptOssConfig(**SETTINGS | options))
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(6.0)
    with torch.no_grad(), quantdiff.record(model, maps=True) as recorder:
        model(tiny_ids(2, 24))
    sinks = recorder.profile()
    for profile, bounded in ((sinks, False), (profiles["llama"], True)):
        (row,) = quantdiff.compare(profile).maps().to_dict("records")
        assert row["lower"] == (24**-0.5 if bounded else 0)
        assert row["lower"] <= row["context_rms_min"] * (1 + 1e-6)
        for page in (plot(profile, "maps"), quantdiff.compare(profile).plot("maps")):
            assert ("1/√n" in [text.get_text() for text in page.axes[2].texts]) == bounded
    assert min(site.summary["context_rms_min"] for site in sinks.maps) < 24**-0.5


def test_without_maps(profiles, tmp_path):
    model = tiny_llama()
    with quantdiff.record(model) as recorder:
        model(tiny_ids(1, 8))
    plain = recorder.profile()
    with pytest.raises(UsageError, match="has no maps"):
        plot(plain, "maps")
    with pytest.raises(UsageError, match="panels of its own"):
        plot(profiles["v1"], "maps", activation="attention_logits")
    assert not any("maps" in path.name for path in save_figures(plain, tmp_path))
    assert "attention maps" not in printed(plain)
