"""Decoders with cross-attention: two attention modules a layer, each with maps of its own."""

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import BartConfig, BartForCausalLM

import quantdiff
from quantdiff.analysis import figure_data, profile_report, save_figures
from quantdiff.errors import UsageError
from quantdiff.statistics import Histogram
from tests.tiny import VOCABULARY, build, tiny_diffllama, tiny_ids

SELF, CROSS = "self_attn", "encoder_attn (cross-attention)"


@pytest.fixture(scope="module")
def bart():
    config = BartConfig(
        vocab_size=VOCABULARY, d_model=32, decoder_layers=3, decoder_attention_heads=4,
        decoder_ffn_dim=48, max_position_embeddings=64, init_std=0.2,
    )  # fmt: skip
    model = build(BartForCausalLM, config)
    encoded = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), quantdiff.record(model, maps=True) as recorder:
        model(tiny_ids(2, 24), encoder_hidden_states=encoded)
    return recorder.profile(source="random ids")


def of_module(sites, module):
    return [site for site in sites if site.name.endswith(f".{module}")]


def cells(ax):
    """Heads by layers."""
    (mesh,) = ax.collections
    shape = len(ax.get_yticks()), len(ax.get_xticks())
    return np.asarray(mesh.get_array()).reshape(shape)


def test_the_heads_of_each_module_have_a_panel(bart):
    data = figure_data(bart, "heads")
    assert data["name"].nunique() == 6
    assert data["module"].unique().tolist() == [SELF, CROSS]
    for page in (bart.plot("heads"), quantdiff.compare(bart).plot("heads")):
        panels = [ax for ax in page.axes if ax.get_label() != "<colorbar>"]
        assert len(panels) == 2
        for ax, module in zip(panels, (SELF, CROSS), strict=True):
            assert ax.get_title()[:6] == module[:6]
            sites = of_module(bart.attention_logits.sites, module)
            assert cells(ax).T.tolist() == [site.absmax.tolist() for site in sites]
            assert ax.collections[0].get_clim() == (0, bart.attention_logits.absmax)
    with pytest.raises(UsageError, match="leave ax out"):
        bart.plot("heads", ax=page.axes[0])


def test_the_maps_of_each_module_have_a_line(bart):
    for page in (bart.plot("maps"), quantdiff.compare(bart).plot("maps")):
        lines = page.axes[1].lines
        assert len({line.get_marker() for line in lines}) == len(lines) == 2
        for line, module in zip(lines, (SELF, CROSS), strict=True):
            assert line.get_xdata().tolist() == [0, 1, 2]
            expected = [site.summary["entropy"] for site in of_module(bart.maps, module)]
            assert line.get_ydata().tolist() == expected


def test_comparisons_measure_each_module_by_itself(bart):
    frame = quantdiff.compare(bart).maps().set_index("module")
    assert frame.index.tolist() == [SELF, CROSS]
    for module, row in frame.iterrows():
        sites = of_module(bart.maps, module)
        assert row["rows"] == sum(site.summary["rows"] for site in sites)
        assert row["context_rms_min"] == min(site.summary["context_rms_min"] for site in sites)
    assert frame["lower"].tolist() == [24**-0.5, 0]  # an encoder's text may be longer


def test_everything_is_written(bart, tmp_path):
    quick = bart.copy()
    quick.detail = "extremes"  # without the figure of magnitudes
    written = {path.name for path in save_figures(quick, tmp_path)}
    assert {"heads.png", "heads.csv", "maps.svg", "maps.csv", "layers.png"} <= written
    keys = {part.key for part in quantdiff.compare(bart).tables().tables}
    assert "maps" in keys
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(profile_report(bart)[-1])
    assert sum(CROSS in line for line in console.export_text().splitlines()) == 3


def test_a_smaller_module_has_the_branches_of_its_own_heads():
    with torch.no_grad(), quantdiff.record(tiny_diffllama()) as recorder:
        recorder._model(tiny_ids(2, 12))
    profile = recorder.profile(source="random ids")
    (small,) = profile.copy().attention_logits.sites[:1]
    small.name += " (cross-attention)"
    small.count, small.min, small.max = small.count[:2], small.min[:2], small.max[:2]
    whole = small.histogram
    small.histogram = Histogram(whole.counts[:2], whole.first, whole.zeros[:2])
    before = quantdiff.compare(profile).branches().set_index("branch")["count"]
    profile.attention_logits.sites.insert(1, small)
    profile.attention_logits.branches[small.name] = [1, 1]  # not those of the layer's other module
    after = quantdiff.compare(profile).branches().set_index("branch")["count"]
    assert (after - before).tolist() == [small.count.sum(), 0]
    data = figure_data(profile, "magnitudes")
    counts = data[data["activation"] == "attention_logits"].groupby("branch")["count"].sum()
    assert counts.tolist() == after.tolist()
