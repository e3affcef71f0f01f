"""Layer by layer, head by head: cells, rankings, and bits shared out under a budget."""

import io
import itertools

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import Gemma4ForCausalLM, Gemma4TextConfig, Lfm2Config, Lfm2ForCausalLM

from quantdiff import Scheme, UsageError, fake_quantize
from quantdiff.analysis.evaluation import Text, evaluation
from quantdiff.analysis.sensitivity import Sensitivity, measure_sensitivity, share_out
from quantdiff.analysis.sweep import SweepResults, make_grid, sweep, sweep_report
from quantdiff.analysis.sweep.entries import Entry, each_one
from quantdiff.analysis.sweep.mixed import (
    check_budget,
    mixed_table,
    plan_bits,
    plot_plan,
    save_plan_figures,
)
from quantdiff.analysis.sweep.ranking import (
    plot_sensitivity,
    ranking_table,
    save_sensitivity_figures,
)
from quantdiff.analysis.sweep.sensitivities import sensitivities, sensitivity_name
from quantdiff.quantization import schemes
from tests.analysis.sweep import conftest as written
from tests.tiny import SETTINGS, build, tiny_diffllama, tiny_llama, tiny_tokenizer

LAYERS = 3
WEIGHTS = [schemes(name) for name in ("W8A16", "W4A16", "W3A16")]


@pytest.fixture
def run(text, tmp_path):
    def run(models, wanted, each, *, evaluations=("divergence",), **options):
        options = {"out": tmp_path / "out", "text": text} | options
        return sweep(models, wanted, evaluations, each=each, **options)

    return run


@pytest.fixture(scope="module")
def model():
    """Three layers, the last of which adds little."""
    made = tiny_llama(num_hidden_layers=LAYERS, seed=4)
    with torch.no_grad():
        for module in (made.model.layers[2].mlp.down_proj, made.model.layers[2].self_attn.o_proj):
            module.weight *= 0.05
    return made, tiny_tokenizer(), "live"


def shown(part):
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(part)
    return console.export_text()


def test_each_layer_is_a_cell_and_costs_what_is_measured_alone(run, model, text, tmp_path):
    results = run([model], WEIGHTS, "layer")
    assert results.failed == []
    assert len(results.record["cells"]) == 1 + len(WEIGHTS) * LAYERS
    alone = evaluation("divergence", model[0], model[1], text)
    alone.prepare(tmp_path, batch_size=1)

    def cost(chosen):
        outcome = alone.run(lambda: fake_quantize(model[0], *chosen), batch_size=1)
        return outcome.metrics[0].value

    expected = measure_sensitivity(cost, WEIGHTS[0], LAYERS, (8, 4, 3))
    found = Sensitivity.of(results)
    assert found.bits == [8, 4, 3]
    for layer, bits in itertools.product(range(LAYERS), found.bits):
        assert found.costs[layer][bits] == pytest.approx(expected.costs[layer][bits], rel=1e-6)
    assert found.ranking(3) == expected.ranking(3)
    assert found.ranking(3)[-1] == 2
    assert found.cost == "kl (divergence)"
    # From the disk, by name; nothing is computed a second time.
    again = Sensitivity.of(
        SweepResults.load(tmp_path / "out"), model="live", site="weights", each="layer"
    )
    assert again == found
    assert again.correlation(found, 4) == pytest.approx(1)
    notes, doing = [], []
    options = {"note": notes.append, "progress": lambda now: doing.append(now.doing)}
    run([model], WEIGHTS[:1], "layer", **options)
    assert notes == ["4 of 4 cells are finished already"]
    run([model], [schemes("W2A16")], "layer", **options)
    assert "live · divergence · W2 dynamic channel layer 2" in doing


def test_sites_together_and_other_metrics(run, model):
    wanted = [schemes("KV4"), schemes("KV2"), schemes("W3A4")]
    results = run([model], wanted, "layer", evaluations=("perplexity", "divergence"))
    every = {sensitivity_name(one): one for one in sensitivities(results)}
    kv, mixed = every
    assert kv == "keys and values, dynamic, token, asymmetric, layer by layer"
    assert mixed == "weights and linear_inputs, dynamic, layer by layer".replace("_", " ")
    assert every[kv].bits == [4, 2]
    assert every[mixed].bits == [3]
    (plain,) = (
        row["value"] for row in results.rows
        if row["site"] is None and row["eval"] == "perplexity" and row["metric"] == "nll"
    )  # fmt: skip
    by_nll = Sensitivity.of(results, site="keys+values", evaluation="perplexity")
    assert by_nll.cost == "nll, worse by (perplexity)"
    for row in results.rows:
        if row["eval"] == "perplexity" and row["metric"] == "nll" and row["site"] == "keys+values":
            (layer,) = row["options"]["schemes"][0]["layers"]
            assert by_nll.costs[layer][row["bits"]] == row["value"] - plain
    # What is better the higher it is costs the fewer the less it falls.
    agreement = Sensitivity.of(results, site="keys+values", metric="agreement")
    assert all(0 <= cost <= 1 for by in agreement.costs.values() for cost in by.values())
    assert max(agreement.costs[0].values()) > 0
    with pytest.raises(UsageError, match="sites of other bits each"):
        plan_bits(every[mixed], 4)


@pytest.mark.parametrize("build", [tiny_llama, tiny_diffllama])
@pytest.mark.parametrize(
    ("site", "count"), [("attention_logits", 4), ("attention_maps", 4), ("keys", 2), ("values", 2)]
)
def test_each_head_is_a_cell(run, build, site, count, tmp_path):
    live = build(), tiny_tokenizer(), "live"
    results = run([live], make_grid(bits=(4, 2), sites=(site,)).schemes, "head")
    assert results.failed == []
    found = Sensitivity.of(results)
    assert found.of_heads
    assert set(found.costs) == set(itertools.product(range(2), range(count)))
    assert all(cost > 0 for by in found.costs.values() for cost in by.values())
    assert len({by[2] for by in found.costs.values()}) == 2 * count
    assert list(found.frame().columns) == ["layer", "head", "bits", "cost"]
    with pytest.raises(UsageError, match="shared out among layers"):
        share_out(found, 4)
    assert f"{found.ranking(2)[0][1]}" in shown(ranking_table(found))


@pytest.fixture(scope="module")
def hybrid():
    """Three layers, of which the second alone has attention."""
    kinds = ["conv", "full_attention", "conv"]
    config = Lfm2Config(**SETTINGS | {"num_hidden_layers": LAYERS}, layer_types=kinds)
    return build(Lfm2ForCausalLM, config), tiny_tokenizer(), "hybrid"


class TestLayersWithoutTheSite:
    @pytest.mark.parametrize("site", ["attention_logits", "attention_maps", "keys", "values"])
    def test_are_not_tried(self, run, hybrid, site):
        results = run([hybrid], [Scheme(site, bits) for bits in (8, 4)], "layer")
        assert [row["options"].get("layers") for row in results.rows if row["metric"] == "kl"] == [
            None, [1], [1]
        ]  # fmt: skip
        plan = plan_bits(Sensitivity.of(results), 4)
        assert plan.best.bits == {1: 4}
        assert plan.best.average == 4

    def test_are_not_tried_where_a_model_attends_by_itself(self):
        class Attention(torch.nn.Module):
            def forward(self, x):
                return torch.nn.functional.scaled_dot_product_attention(x, x, x)

        class Mixed(torch.nn.Module):
            def __init__(self, mixer):
                super().__init__()
                self.mixer, self.out = mixer, torch.nn.Linear(4, 4)

        mixers = [torch.nn.Linear(4, 4), Attention(), torch.nn.Linear(4, 4)]
        entry = Entry((Scheme("keys", 4),))
        for kinds, expected in (
            (mixers, [1]),
            (mixers[::2], [0, 1]),
        ):  # in the last nothing is seen
            model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(map(Mixed, kinds))})
            _, *found = each_one([entry], model, "layer")
            assert [layer for one in found for layer in one.schemes[0].layers] == expected

    def test_hold_other_sites(self, run, hybrid):
        wanted = [Scheme("weights", 4), Scheme("linear_inputs", 4), Scheme("hidden_states", 4)]
        found = sensitivities(run([hybrid], [*wanted, schemes("W4A4+KV4")], "layer"))
        assert [list(one.costs) for one in found] == [list(range(LAYERS))] * 4

    def test_have_no_heads(self, run, hybrid):
        found = Sensitivity.of(run([hybrid], [schemes("K4")], "head"))
        assert set(found.costs) == {(1, 0), (1, 1)}

    @pytest.mark.parametrize(("metric", "plain"), [("kl", 0.0), ("nll", 3.0)])
    def test_of_an_earlier_version_are_in_no_average(self, tmp_path, metric, plain):
        rows = [written.row("fp", "m", metric=metric, value=plain)]
        for layer, bits in itertools.product(range(LAYERS), (8, 4)):
            value = plain + (layer == 1) / bits
            rows.append(
                written.row(f"{layer}-{bits}", "m", ("dynamic", "tensor", True), bits,
                            metric=metric, value=value)
            )  # fmt: skip
            rows[-1]["options"]["layers"] = [layer]
        found = Sensitivity.of(SweepResults.load(written.write_sweep(tmp_path, rows)))
        assert found.costs == {1: {8: 1 / 8, 4: 1 / 4}}
        for row in rows[1:]:  # which every layer has
            row |= {"site": "weights", "granularity": "channel"}
        other = SweepResults.load(written.write_sweep(tmp_path / "weights", rows))
        assert list(Sensitivity.of(other).costs) == [0, 1, 2]


def test_heads_are_counted_layer_by_layer(run):
    config = Gemma4TextConfig(
        **SETTINGS, head_dim=8, global_head_dim=16, num_global_key_value_heads=1,
        attention_k_eq_v=True, hidden_size_per_layer_input=0, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    live = build(Gemma4ForCausalLM, config), tiny_tokenizer(), "live"
    results = run([live], [Scheme("keys", 4), Scheme("values", 4)], "head")
    assert results.failed == []
    keys, values = sensitivities(results)
    assert set(keys.costs) == set(values.costs) == {(0, 0), (0, 1), (1, 0)}
    assert all(
        cost > 0 for one in (keys, values) for by in one.costs.values() for cost in by.values()
    )


def test_each_ranking_has_the_measure_of_its_own(run, model, tmp_path):
    run([model], WEIGHTS[1:], "layer", evaluations=("perplexity",))
    (alone,) = sensitivities(SweepResults.load(tmp_path / "out"))
    before = save_sensitivity_figures([alone], tmp_path / "figures")
    results = run([model], [schemes("KV4")], "layer")
    weights, cache = sensitivities(results)
    assert weights == alone
    assert [one.metric for one in (weights, cache)] == ["nll", "kl"]
    files = save_sensitivity_figures([weights, cache], tmp_path / "figures")
    assert not set(before) & set(files)
    assert set(files) == set((tmp_path / "figures").iterdir())
    (by_loss,) = sensitivities(results, evaluation="perplexity")
    assert by_loss == alone


def test_figures_of_heads_leave_those_of_layers(tmp_path):
    one = Sensitivity(tuple(WEIGHTS[0]), {0: {4: 0.1}, 1: {4: 0.2}}, "m", "divergence", "kl")
    heads = Sensitivity((Scheme("keys", 4),), {(0, 0): {4: 0.1}, (0, 1): {4: 0.2}}, "m")
    (tmp_path / "layers-notes.png").write_text("of somebody")
    written = [*save_sensitivity_figures([one], tmp_path), tmp_path / "layers-notes.png"]
    written += save_sensitivity_figures([heads], tmp_path)
    assert set(tmp_path.iterdir()) == set(written)


def test_tables_and_figures(run, model, tmp_path):
    results = run([model], WEIGHTS, "layer")
    run([model], [schemes("K2"), schemes("K4")], "head")
    results = SweepResults.load(tmp_path / "out")
    # Its cells are no lines over bits.
    assert "W3" not in "".join(map(shown, sweep_report(results)))
    layers, heads = sensitivities(results)
    assert (layers.of_heads, heads.of_heads) == (False, True)
    table = shown(ranking_table(layers)).splitlines()
    rows = [line.split()[0] for line in table if line.strip() and line.split()[0].isdigit()]
    assert rows == [str(layer) for layer in layers.ranking(3)]
    page = plot_sensitivity(layers)
    (ax,) = page.axes
    for line, bits in zip(ax.lines, layers.bits, strict=True):
        assert list(line.get_ydata()) == [layers.costs[n][bits] for n in range(LAYERS)]
    assert len([ax for ax in plot_sensitivity(heads).axes if ax.get_title()]) == 2
    files = {path.name for path in save_sensitivity_figures([layers, heads], tmp_path / "figures")}
    assert files == {
        f"{kind}.{end}" for kind in ("layers-1", "heads-2") for end in ("png", "svg", "csv")
    }
    assert save_sensitivity_figures([], tmp_path / "none") == []
    assert not (tmp_path / "none").exists()


def test_a_layer_that_costs_nothing_or_less_is_drawn():
    costs = {0: {4: 0.3, 3: 2.0}, 1: {4: -0.01, 3: 0.02}, 2: {4: 0.0, 3: 0.5}}
    (ax,) = plot_sensitivity(Sensitivity(tuple(WEIGHTS[0]), costs, "m", "p", "nll")).axes
    low, high = ax.get_ylim()
    for line, bits in zip(ax.lines, (4, 3), strict=True):
        assert list(line.get_ydata()) == [costs[n][bits] for n in range(LAYERS)]
        places = ax.transData.transform([(0, y) for y in (low, *line.get_ydata(), high)])[:, 1]
        assert np.isfinite(places).all()
        assert places.min() == places[0]
        assert places.max() == places[-1]
    assert ax.get_yscale() == "symlog"


@pytest.mark.parametrize(
    "costs",
    [(-0.01, 0.0, 2e-4, 0.3), (-1.0, -2.0, -3.0, 0.0), (0.0,) * 4, (0.0, 0.0, 0.0, 0.5)],
)
def test_a_head_that_costs_nothing_or_less_is_no_missing_head(costs):
    places = list(itertools.product(range(2), range(2)))
    told = {place: {4: cost} for place, cost in zip(places, costs, strict=True)}
    ax = plot_sensitivity(Sensitivity((Scheme("keys", 4),), told, "m", "p", "nll")).axes[0]
    (mesh,) = ax.collections
    mesh.update_scalarmappable()
    colors = mesh.get_facecolors()
    assert len(colors) == len(costs)
    assert not any(np.allclose(color, mesh.cmap(np.ma.masked)) for color in colors)
    assert (colors[:, 3] == 1).all()
    drawn = dict(zip(mesh.get_array().ravel().tolist(), map(tuple, colors), strict=True))
    assert len(set(drawn.values())) == len(set(costs))


def test_a_plan_that_costs_nothing_or_less_is_drawn(tmp_path):
    costs = {0: {8: -0.1, 4: 0.05, 3: 2.0}, 1: {8: 0.0, 4: 0.5, 3: 3.0}}
    plan = plan_bits(Sensitivity(tuple(WEIGHTS[0]), costs, "m", "p", "nll"), 8)
    nothing = written.write_sweep(tmp_path, [written.row("fp", "m")])
    (ax, *_) = plot_plan(plan, SweepResults.load(nothing)).axes
    drawn = [y for line in ax.lines for y in line.get_ydata()]
    assert min(drawn) == pytest.approx(-0.1)
    assert ax.get_yscale() == "symlog"
    assert ax.get_ylim()[0] < -0.1


def test_mixed_bits_are_measured_beside_uniform_ones(run, model, tmp_path):
    results = run([model], WEIGHTS, "layer")
    one = Sensitivity.of(results)
    plan = plan_bits(one, 5)
    assert plan.best == share_out(one, 5)[-1]
    assert plan.best.average <= 5
    assert plan.uniform == 4
    assert plan.measured(results) == [None, None]
    assert "–" in shown(mixed_table(plan, results))
    results = run([model], plan.wanted, None)
    assert results.failed == []
    mixed, uniform = plan.measured(results)
    assert mixed < uniform
    by_name = {row["scheme"]: row["value"] for row in results.rows if row["metric"] == "kl"}
    assert by_name["W3-8A16"] == mixed
    assert uniform in by_name.values()
    frame = plan.frame(results)
    assert frame["measured"].dropna().tolist() == [mixed, uniform]
    told = plan.told(results)
    assert told["bits"] == [plan.best.bits[layer] for layer in range(LAYERS)]
    assert (told["measured"], told["uniform_measured"]) == (mixed, uniform)
    table = shown(mixed_table(plan, results))
    assert "at most 5 bits" in table
    widest = one.ranking(3)[0]
    assert f"layers with 8 bits: {widest}; 4 bits: {1 - widest}; 3 bits: 2" in table
    labels = [t.get_text() for t in plot_plan(plan, results).legends[0].get_texts()]
    assert labels == [
        "mixed, sum of the layers' costs", "mixed, measured", "uniform, sum of the layers' costs",
        "uniform, measured",
    ]  # fmt: skip
    assert len(save_plan_figures([plan], results, tmp_path / "figures")) == 3
    # The rest of the folder is as it was.
    assert Sensitivity.of(results) == one


def test_a_budget_that_all_layers_keep_is_uniform(run, model):
    results = run([model], WEIGHTS, "layer")
    plan = plan_bits(Sensitivity.of(results), 8)
    every_layer = tuple(range(LAYERS))
    assert all(scheme.layers == every_layer for schemes in plan.wanted for scheme in schemes)
    results = run([model], plan.wanted, None)
    mixed, uniform = plan.measured(results)
    assert mixed == uniform
    assert len(results.record["cells"]) == 1 + len(WEIGHTS) * LAYERS + 1


def test_layers_that_were_not_tried_stay_as_they_are(run, model):
    wanted = [Scheme("weights", bits, layers=(n,)) for bits in (8, 4) for n in (0, 2)]
    plan = plan_bits(Sensitivity.of(run([model], [[], *wanted], None)), 8)
    (mixed,), (uniform,) = plan.wanted
    assert mixed == uniform == Scheme("weights", 8, layers=(0, 2))


def test_costs_are_those_without_a_remedy(run, model):
    plain = Sensitivity.of(run([model], WEIGHTS[:2], "layer"))
    wanted = [Scheme(one.site, one.bits, layers=(n,)) for (one,) in WEIGHTS for n in range(LAYERS)]
    results = run([model], wanted[: 2 * LAYERS], None, remedies=("rotate",))
    assert any("remedy" in row["options"] for row in results.rows)
    assert Sensitivity.of(results) == plain


def test_a_budget_without_bits_in_common_is_refused():
    found = Sensitivity(
        tuple(WEIGHTS[0]), {0: {8: 0.1, 4: 0.2}, 1: {6: 0.1, 3: 0.3}}, "live", "divergence", "kl"
    )
    with pytest.raises(UsageError, match="no bits within a budget of 6 were measured in all"):
        plan_bits(found, 6)


def test_budgets_are_refused_before_anything_is_measured():
    check_budget(WEIGHTS, 3)
    with pytest.raises(
        UsageError, match=r"a budget of 2\.9 bits is below the fewest that are tried, 3"
    ):
        check_budget(WEIGHTS, 2.9)
    with pytest.raises(UsageError, match="below the fewest that are tried, 4"):
        check_budget([*WEIGHTS, schemes("KV4"), ()], 3.5)
    with pytest.raises(UsageError, match="W4A8 has sites of other bits each"):
        check_budget([schemes("W4A8")], 6)


class TestWhatIsNotWhole:
    def test_a_failed_cell(self, run, model, known):
        def fail(call):
            if call == 3:
                raise RuntimeError("no memory")

        known.on_run = fail
        options = {"evaluations": ("counted",)}
        results = run([model], [*WEIGHTS, schemes("K4")], "layer", **options)
        (one,) = sensitivities(results, metric="perplexity")
        assert one.template[0].site == "keys"
        with pytest.raises(UsageError, match=r"no sensitivities .*keys, dynamic, token"):
            Sensitivity.of(results, site="weights", metric="perplexity")
        known.on_run = None
        results = run([model], [*WEIGHTS, schemes("K4")], "layer", **options)
        assert len(sensitivities(results, metric="perplexity")) == 2
        with pytest.raises(UsageError, match="2 sensitivities"):
            Sensitivity.of(results, metric="perplexity")
        with pytest.raises(UsageError, match="largest is no cost"):
            sensitivities(results, metric="largest")
        with pytest.raises(UsageError, match="no costs by kl"):
            sensitivities(results, metric="kl")

    def test_cells_that_have_nothing_to_do_with_it(self, run, model, known):
        from quantdiff.analysis.evaluation import Stopped

        run([model], [[], schemes("K4")], None)  # another evaluation, not of single layers
        (one,) = sensitivities(run([model], WEIGHTS, "layer", evaluations=("counted",)))
        assert one.metric == "perplexity"
        before = known.calls
        with pytest.raises(Stopped):
            run(
                [model], [schemes("H4")], None, evaluations=("counted",),
                stop=lambda: known.calls > before,
            )  # fmt: skip
        results = run([model], WEIGHTS, "layer", evaluations=("counted",))
        assert results.missing == 1
        assert [found.costs for found in sensitivities(results)] == [one.costs]

    def test_scores_that_are_better_the_higher_they_are(self, run, model, known):
        results = run([model], WEIGHTS, "layer", evaluations=("counted",))
        signs = []
        for name in ("perplexity", "acc"):
            for row in results.rows:
                if row["metric"] != "largest":
                    row["metric"] = name
            (one,) = sensitivities(results, metric=name)
            signs.append([cost for by in one.costs.values() for cost in by.values()])
        assert max(map(abs, signs[0])) > 0
        assert signs[1] == [-cost for cost in signs[0]]

    def test_a_stopped_sweep(self, run, model, known, tmp_path):
        from quantdiff.analysis.evaluation import Stopped

        with pytest.raises(Stopped):
            run([model], WEIGHTS, "layer", stop=lambda: known.calls == 3, evaluations=("counted",))
        results = SweepResults.load(tmp_path / "out")
        assert sensitivities(results, metric="perplexity") == []
        with pytest.raises(UsageError, match=r"cells of .* are missing"):
            Sensitivity.of(results)


@pytest.mark.parametrize(
    ("wanted", "each", "words"),
    [
        (WEIGHTS, "block", "by each layer or head, not by each 'block'"),
        (WEIGHTS, "head", "weights have no heads"),
        ([[]], "layer", "no scheme that could be tried layer by layer"),
        ([Scheme("keys", 4, layers=(0,))], "layer", "one for keys is for some"),
        ([Scheme("keys", 4, heads=(0,))], "layer", "one for keys is for some"),
        ([schemes("KV4+L4")], "head", "query heads and for key-value heads"),
    ],
)
def test_refusals(run, model, wanted, each, words, tmp_path):
    with pytest.raises(UsageError, match=words):
        run([model], wanted, each)
    assert not (tmp_path / "out").exists()


def test_remedies_are_left_out(run, model):
    with pytest.raises(UsageError, match="layer by layer goes without remedies"):
        run([model], WEIGHTS, "layer", remedies=("rotate",))


def test_models_of_their_own_depth(run, model):
    other = tiny_llama(num_hidden_layers=2), tiny_tokenizer(), "other"
    results = run([model, other], WEIGHTS[:2], "layer")
    assert len(results.record["cells"]) == (1 + 2 * LAYERS) + (1 + 2 * 2)
    first, second = sensitivities(results)
    assert (first.model, second.model) == ("live", "other")
    assert (len(first.costs), len(second.costs)) == (LAYERS, 2)
    with pytest.raises(UsageError, match="the same layers"):
        first.correlation(second, 4)


def test_two_texts_rank_alike(run, model, tmp_path):
    """What the correlation is for: the same layers measured on other text."""
    path = tmp_path / "other.txt"
    path.write_text("a winter of whales and kings at the sea " * 20)
    found = [
        Sensitivity.of(run([model], WEIGHTS, "layer", text=text, out=tmp_path / str(n)))
        for n, text in enumerate((Text(str(path), 96, 24), Text("corpus", 96, 24)))
    ]
    ranks = [np.argsort(one.ranking(3)) for one in found]
    expected = np.corrcoef(*ranks)[0, 1]
    assert found[0].correlation(found[1], 3) == pytest.approx(expected)
    assert expected > 0.4
