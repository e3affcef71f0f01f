"""Linear inputs, keys, values and hidden states with ranges from a calibration."""

import dataclasses
import importlib

import numpy as np
import pytest
import torch
from torch import nn

from quantdiff import (
    CalibrationTable,
    QuantizationError,
    Scheme,
    UsageError,
    calibrate,
    fake_quantize,
)
from quantdiff.calibration.observers import Observed, observe
from quantdiff.hooks.logits import Logits
from quantdiff.quantization import rounding
from quantdiff.quantization.logits import softmax_of
from quantdiff.statistics import Visible
from tests.hooks.test_differential import OWN, Small
from tests.hooks.test_recorder import padded
from tests.hooks.test_sites import CACHE, EVERY, MODELS, Seen, steps
from tests.quantization.plain_sites import arranged, maps_and_values
from tests.quantization.test_fake_quantize import Fixed, grid_of
from tests.standins import IDS, Grouped, MotifAttention, make
from tests.tiny import tiny_ids, tiny_llama

OBSERVERS = ("absmax", "percentile:99", "mse", "entropy")
STATIC = [
    *(Scheme(site, 5, name, "head") for site in ("keys", "values") for name in OBSERVERS),
    *(Scheme(site, 3, "absmax", "channel", symmetric=False) for site in ("keys", "values")),
    *(Scheme(site, 6, name, "tensor") for site in ("linear_inputs", "hidden_states")
      for name in OBSERVERS),
    Scheme("linear_inputs", 4, "percentile:95", symmetric=False),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def texts():
    return [padded([14, 9], "right", seed=5), padded([20, 11], "right", seed=11)]


@pytest.fixture(scope="module")
def tables():
    return {name: calibrate(build(), texts(), sites=EVERY) for name, build in MODELS.items()}


def rounded(x, ends, scheme):
    """x on the grid of each pair of ends, which broadcast with it, in fp64."""
    least, most = np.broadcast_arrays(*ends)
    grids = [
        grid_of(*pair, scheme.bits, scheme.symmetric)
        for pair in zip(least.flat, most.flat, strict=True)
    ]
    step, zero = (
        torch.tensor([grid[i] for grid in grids], dtype=torch.float64).view(least.shape)
        for i in (0, 1)
    )
    low, high = grids[0][2:]
    found = ((x.double() / step).round() + zero).clamp(low, high) - zero
    return (found * step).to(x.dtype)


class Rounded:
    """A model of transformers one layer of which computes with rounded values, by plain hooks."""

    def __init__(self, model, scheme, table):
        self.model, self.scheme, self.table = model, scheme, table
        (self.number,) = scheme.layers
        self.module, self.handles = importlib.import_module(type(model).__module__), []
        self.rotate = self.module.apply_rotary_pos_emb

    def ends(self, name, *shape):
        return [end.reshape(*shape, -1) for end in self.table.range(self.scheme, name)]

    def __enter__(self):
        layer, scheme = self.model.model.layers[self.number], self.scheme
        names = {module: name for name, module in self.model.named_modules()}
        name = names[layer.self_attn]
        if scheme.site == "linear_inputs":
            for module in layer.modules():
                if isinstance(module, nn.Linear):
                    hook = lambda m, args: rounded(args[0], self.ends(names[m]), scheme)  # noqa: E731
                    self.handles.append(module.register_forward_pre_hook(hook))
        elif scheme.site == "hidden_states":
            self.handles.append(layer.register_forward_hook(self.hidden(names[layer])))
        elif scheme.site == "values":
            projection = layer.self_attn.v_proj

            def values(module, args, out):
                x = out.unflatten(-1, (-1, layer.self_attn.head_dim))  # (B, N, G, D)
                groups = x.shape[2]
                return rounded(x, self.ends(name, groups), scheme).flatten(2)

            self.handles.append(projection.register_forward_hook(values))
        else:
            calls = iter(range(100))

            def rotate(query, key, *tables):
                query, key = self.rotate(query, key, *tables)
                if next(calls) != self.number:
                    return query, key
                return query, rounded(key, self.ends(name, key.shape[1], 1), scheme)

            self.module.apply_rotary_pos_emb = rotate

    def hidden(self, name):
        def hook(module, args, out):
            x = out if torch.is_tensor(out) else out[0]
            found = rounded(x, self.ends(name), self.scheme)
            return found if torch.is_tensor(out) else (found, *out[1:])

        return hook

    def __exit__(self, *exception):
        self.module.apply_rotary_pos_emb = self.rotate
        for handle in self.handles:
            handle.remove()


@pytest.mark.parametrize("scheme", STATIC, ids=str)
@pytest.mark.parametrize("family", MODELS)
def test_equals_plain_rounding(tables, family, scheme):
    model, table, batch = MODELS[family](), tables[family], padded([9, 13], "left", seed=2)
    real = batch["attention_mask"].bool()
    plain = model(**batch).logits
    for layer in (0, 1):
        one = dataclasses.replace(scheme, layers=(layer,))
        with Rounded(model, one, table):
            expected = model(**batch).logits
        with fake_quantize(model, one, table=table):
            found = model(**batch).logits
        gap = (found - expected)[real].abs().max()
        assert gap <= 1e-6 * (1 + expected.abs().max())
        assert (plain - expected)[real].abs().max() > 100 * gap


@pytest.mark.parametrize("family", MODELS)
def test_ranges_are_those_of_the_plain_values(tables, family):
    model, table = MODELS[family](), tables[family]
    with Seen(model) as seen:
        for batch in texts():
            seen.run(batch)
    again = calibrate(model, texts(), sites=EVERY)  # by the same attention function
    model.set_attn_implementation("sdpa")
    for scheme in STATIC:
        kept = {name: x for (kind, name), x in seen.found.items() if kind == scheme.site}
        assert set(kept) == {site.name for site in table.more[scheme.site].sites}
        for name, parts in kept.items():
            x = torch.cat([part.transpose(0, 1) for part in parts]).numpy()  # (tokens, G, C)
            if scheme.granularity == "channel":
                expected = x.min(0), x.max(0)
            else:
                values = Observed.of(x.swapaxes(0, 1).reshape(x.shape[1], -1))
                expected = observe(scheme.observer, values, scheme.bits, scheme.symmetric,
                                   scheme.percentile)  # fmt: skip
            for end, plain in zip(again.range(scheme, name), expected, strict=True):
                assert end.dtype == np.float32
                assert np.array_equal(end, plain)


@pytest.mark.parametrize("granularity", ["head", "channel"])
@pytest.mark.parametrize("name", OWN)
def test_keys_and_values_of_quantdiffs_own_modules(name, granularity):
    torch.manual_seed(0)
    model, caught = Small(lambda i: OWN[name](i, "sdpa"), layers=1).eval(), {}
    heads = model.blocks[0].attention.heads
    heads.register_forward_hook(lambda m, args, out: caught.update(args=args, out=out))
    table = calibrate(model, texts(), sites=("keys", "values"))
    schemes = [Scheme(site, 4, "absmax", granularity) for site in ("keys", "values")]
    with fake_quantize(model, *schemes, table=table):
        model(**padded([11, 7], "left"))
    q, k, v, kept = caught["args"]
    causal = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    seen = causal & kept.bool()[:, None, :, None] & kept.bool()[:, None, None]
    k, v = (
        rounded(x, [end.reshape(x.shape[1], 1, -1) for end in
                    table.range(scheme, "blocks.0.attention")], scheme)
        for x, scheme in zip((k, v), schemes, strict=True)
    )  # fmt: skip
    weights, wide = maps_and_values(q, *arranged(name, q, k, v), seen, heads.scale)
    gap = (caught["out"] - weights @ wide).abs().max()
    assert gap < 1e-6 * (1 + float(v.abs().max()))


@pytest.mark.parametrize("build", [MotifAttention, lambda i: Grouped(i, repeated=True)])
def test_heads_of_a_module_that_attends_by_itself(build):
    """Each head is rounded to its own range, however often and in whichever call it is shown."""
    model, batch = make(build, layers=1), {"input_ids": IDS}
    table = calibrate(model, [batch], sites=("keys", "values"))
    scheme = Scheme("values", 8, "absmax", "channel")
    with fake_quantize(model, scheme, table=table):
        found = model(IDS)
    attention_ = model.blocks[0].attn
    order = {MotifAttention: [0, 2, 1, 3]}.get(build, [0, 1, 2, 3])

    def values(module, args, out):
        x = out.unflatten(-1, (4, -1))  # (B, N, heads, D)
        least, most = (end.reshape(4, -1) for end in table.range(scheme, "blocks.0.attn"))
        back = np.argsort(order)
        return rounded(x, (least[back], most[back]), scheme).flatten(2)

    handle = attention_.v.register_forward_hook(values)
    expected = model(IDS)
    handle.remove()
    assert (found - expected).abs().max() <= 1e-6 * (1 + expected.abs().max())
    assert not torch.equal(found, model(IDS))


@pytest.mark.parametrize("every", [False, True], ids=["cached", "every"])
@pytest.mark.parametrize("family", MODELS)
def test_prefill_and_decode_equal_one_pass(tables, family, every):
    model, batch = MODELS[family](), padded([18, 12], "left")
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    schemes = [Scheme("keys", 4, "absmax", "channel"), Scheme("values", 4, "mse")]
    if every:
        schemes += [
            Scheme("linear_inputs", 8, "percentile:99.9"), Scheme("hidden_states", 8, "absmax")
        ]  # fmt: skip
    outs = []
    with fake_quantize(model, *schemes, table=tables[family]):
        whole = model(**batch, position_ids=positions).logits
        real = model.forward

        def forward(**given):
            outs.append(real(**given))
            return outs[-1]

        model.forward = forward
        steps(model, batch, (7, 8, 9, 14, 18))
    real_tokens = batch["attention_mask"].bool()
    found = torch.cat([out.logits for out in outs], 1)
    gap = (whole - found)[real_tokens].abs().amax(-1)
    # Of the many values of all sites one so near to a boundary that it goes to either side, since
    # sums of other shapes round otherwise, changes its token and those that attend it.
    assert (gap.quantile(0.8) if every else gap.max()) < 1e-5
    assert gap.max() < 0.1 * whole[real_tokens].abs().max()  # by a step of one value
    assert CACHE in outs[-1]


def test_a_table_survives_the_disk_and_merging(tables, tmp_path):
    table = tables["diffllama"]
    table.save(tmp_path)
    loaded = CalibrationTable.load(tmp_path)
    assert loaded.same_as(table)
    halves = [calibrate(MODELS["diffllama"](), [text], sites=EVERY) for text in texts()]
    merged = halves[0].merge(halves[1])
    for scheme in STATIC:
        for site in table.more[scheme.site].sites:
            expected = table.range(scheme, site.name)
            for other in (loaded, merged):
                for end, wanted in zip(other.range(scheme, site.name), expected, strict=True):
                    assert np.array_equal(end, wanted)
        assert loaded.moved(scheme) == table.moved(scheme)
    assert "keys, values" in repr(loaded)


class TestConvergence:
    def test_of_the_same_text_again_nothing_moves(self):
        table = calibrate(tiny_llama(), texts()[:1] * 4, sites=EVERY)
        for scheme in STATIC:
            assert table.moved(scheme).largest <= (0 if scheme.observer == "absmax" else 0.02)

    def test_says_which_channel_of_which_head_moved_most(self):
        table = calibrate(tiny_llama(), texts(), sites=("keys",))
        scheme = Scheme("keys", 8, "absmax", "channel")
        moved = table.moved(scheme)
        changes = [
            1 - first.channels.absmax / site.channels.absmax
            for first, site in zip(table.more["keys"].earlier, table.more["keys"].sites,
                                   strict=True)
        ]  # fmt: skip
        assert moved.largest == pytest.approx(max(change.max() for change in changes))
        assert moved.median == pytest.approx(np.median(np.stack(changes)))
        assert changes[moved.layer].max(1).argmax() == moved.head

    def test_warns_where_another_site_has_not_settled(self):
        table = calibrate(tiny_llama(), texts()[:1] * 4, sites=("linear_inputs",))
        assert table.warning() is None
        for site in table.more["linear_inputs"].earlier:
            site.histogram.counts[:] = 0
        table._ranges.clear()
        table._observed.clear()
        assert "99.9th percentile of the linear inputs moved" in table.warning()


class TestRefusals:
    @pytest.mark.parametrize(
        ("given", "words"),
        [
            (("linear_inputs", 8, "absmax", "token"),
             "granularity token is always dynamic; with the range absmax use tensor"),
            (("keys", 8, "mse", "token"), "with the range mse use head or channel"),
            (("values", 8, "absmax", "group:8"), "granularity group:8 is always dynamic"),
            (("keys", 8, "mse", "channel"), "use the range absmax"),
            (("values", 8, "percentile:99.9", "channel"), "only the extremes of a channel"),
            (("attention_maps", 8, "absmax"), "hold no ranges of attention_maps"),
        ],
    )  # fmt: skip
    def test_schemes(self, given, words):
        with pytest.raises(UsageError, match=words) as error:
            Scheme(*given)
        assert "\n" not in str(error.value)

    def test_the_default_granularity_fits_the_range(self):
        assert [Scheme("keys", 8, r).granularity for r in ("dynamic", "mse")] == ["token", "head"]
        assert Scheme("linear_inputs", 8, "percentile:99.9").granularity == "tensor"

    @pytest.mark.parametrize("site", EVERY)
    def test_a_table_without_the_site(self, site):
        table = calibrate(tiny_llama(), texts())
        words = rf"no ranges of {site}: calibrate again with sites=\('{site}',\), or --sites {site}"
        with pytest.raises(UsageError, match=words):
            fake_quantize(tiny_llama(), Scheme(site, 8, "absmax"), table=table)

    def test_no_table(self):
        with pytest.raises(UsageError, match="give table"):
            fake_quantize(tiny_llama(), Scheme("linear_inputs", 8, "absmax"))

    @pytest.mark.parametrize("site", EVERY)
    def test_the_table_of_another_model(self, tables, site):
        for other in (tiny_llama(num_hidden_layers=3), tiny_llama(num_attention_heads=8)):
            with pytest.raises(UsageError, match="of another model"):
                fake_quantize(other, Scheme(site, 8, "absmax"), table=tables["llama"])

    def test_other_key_heads_under_the_same_names(self, tables):
        other = tiny_llama(num_key_value_heads=4)
        with (
            fake_quantize(other, Scheme("keys", 8, "absmax"), table=tables["llama"]),
            pytest.raises(QuantizationError, match="ranges of 2 heads of keys for "),
        ):
            other(tiny_ids())

    def test_a_module_that_the_calibration_never_saw(self):
        model = tiny_llama()
        layer = model.model.layers[1]
        layer.extra = nn.Linear(32, 32)
        table = calibrate(model, texts(), sites=("linear_inputs",))
        scheme = Scheme("linear_inputs", 8, "absmax")
        layer.register_forward_hook(lambda m, args, out: m.extra(out) if m.used else out)
        layer.used = False
        with fake_quantize(model, scheme, table=table):
            model(tiny_ids())
            layer.used = True
            with pytest.raises(
                QuantizationError, match=r"saw no linear_inputs of .*layers.1.extra"
            ):
                model(tiny_ids())

    def test_nan_is_named(self, tables):
        model = tiny_llama()
        model.model.layers[1].self_attn.v_proj.weight[3] = torch.nan
        for scheme in (Scheme("values", 8, "absmax"), Scheme("linear_inputs", 8, "absmax")):
            with (
                fake_quantize(model, scheme, table=tables["llama"]),
                pytest.raises(QuantizationError, match="NaN or infinity among the"),
            ):
                model(tiny_ids())


def test_what_is_clipped_is_on_the_grid_with_gradients_too():
    """Half precision has no room for x + (rounded − x) where x lies far beyond the range."""
    x = torch.tensor([[22500.0, 300.0, 0.3]], dtype=torch.bfloat16, requires_grad=True)
    scheme, ends = Scheme("hidden_states", 8, "absmax"), (-torch.ones(1, 1), torch.ones(1, 1))
    plain = rounding.rounded(x.detach(), (1,), scheme, "here", ends=ends)
    with torch.enable_grad():
        found = rounding.rounded(x, (1,), scheme, "here", ends=ends)
        found.backward(torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16))
    assert torch.equal(found, plain)
    assert found[0, :2].tolist() == [1, 1]
    assert x.grad.tolist() == [[1, 2, 3]]


ZEROS = [
    Scheme("values", 8, "absmax"), Scheme("values", 8, "absmax", "channel"),
    Scheme("attention_logits", 8, "absmax", "head"), Scheme("hidden_states", 8, "absmax"),
]  # fmt: skip


class TestRangesOfZeros:
    """Of a head or a channel that was zero in the calibration, and is not any more."""

    def spoil(self, model, site):
        """What makes a head's numbers zero, and what was there."""
        layer = model.model.layers[1]
        if site == "hidden_states":
            handle = layer.register_forward_hook(lambda m, args, out: out * 0)
            return handle.remove
        name = "v_proj" if site == "values" else "q_proj"
        weight = getattr(layer.self_attn, name).weight
        before = weight.clone()
        weight[8:16] = 0  # of head 1

        def back():
            weight[:] = before

        return back

    @pytest.mark.parametrize("scheme", ZEROS, ids=str)
    def test_other_values(self, scheme):
        model = tiny_llama()
        back = self.spoil(model, scheme.site)
        sites = () if scheme.site == "attention_logits" else (scheme.site,)
        table = calibrate(model, texts(), sites=sites)
        with fake_quantize(model, scheme, table=table):
            model(tiny_ids())
        back()
        words = rf"saw no {scheme.site} of .*layers.1.* but zeros"
        with (
            fake_quantize(model, scheme, table=table),
            pytest.raises(QuantizationError, match=words),
        ):
            model(tiny_ids())
        if scheme.granularity == "head":
            with fake_quantize(model, dataclasses.replace(scheme, heads=(0,)), table=table):
                model(tiny_ids())

    def test_a_percentile_below_which_all_are_zeros(self):
        """More text would not help, as where a ReLU leaves little."""
        model = tiny_llama()
        for layer in model.model.layers:
            layer.mlp.act_fn = nn.Threshold(1.0, 0.0)
        table = calibrate(model, texts(), sites=("linear_inputs",))
        for symmetric in (True, False):
            scheme = Scheme("linear_inputs", 8, "percentile:50", symmetric=symmetric)
            words = r"more than 50 % of the linear_inputs of \S+down_proj were .* higher percentile"
            with (
                fake_quantize(model, scheme, table=table),
                pytest.raises(QuantizationError, match=words),
            ):
                model(tiny_ids())
        for range_ in ("percentile:100", "absmax"):
            with fake_quantize(model, Scheme("linear_inputs", 8, range_), table=table):
                model(tiny_ids())

    def test_a_percentile_of_logits(self):
        q, ends = torch.randn(1, 2, 5, 8), np.zeros(2, np.float32)
        logits = Logits(q, q, 1.0, Visible.causal(1, 5, 5))
        words = r"more than 99\.9 % of the attention_logits of a head of here .* higher percentile"
        with pytest.raises(QuantizationError, match=words):
            softmax_of(
                logits, Scheme("attention_logits", 8, "percentile"), Fixed(ends, ends), "here"
            )
