"""Linear inputs, keys, values and hidden states with their channels, against plain references."""

import importlib
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import StaticCache

from quantdiff import Profile, RecordingError, UsageError, record
from quantdiff.errors import LeftAloneWarning
from quantdiff.statistics.storage import to_json
from tests import reference
from tests.hooks.test_differential import OWN, Small
from tests.hooks.test_recorder import CACHE, fit, padded
from tests.standins import IDS, DiffAttention, Grouped, MotifAttention, make
from tests.tiny import SETTINGS, tiny_diff_v2, tiny_diffllama, tiny_ids, tiny_llama

EVERY = ("linear_inputs", "keys", "values", "hidden_states")
MODELS = {"llama": tiny_llama, "diffllama": tiny_diffllama, "diff_v2": tiny_diff_v2}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


class Seen:
    """What passes of a transformers model show, by plain hooks: (G, tokens, C) a sequence.

    Keys are those that its eager function is given, values those of the projection.
    """

    def __init__(self, model):
        self.model, self.found = model, {}
        self.module = importlib.import_module(type(model).__module__)
        self.eager, self.handles, self.taken = self.module.eager_attention_forward, [], set()

    def keep(self, kind, name, x):
        """x: (B, G, N, C)."""
        for b, real in enumerate(self.real):
            self.found.setdefault((kind, name), []).append(x[b][:, real].float())

    def __enter__(self):
        model = self.model
        names = {module: name for name, module in model.named_modules()}

        def inputs(module, args):
            self.keep("linear_inputs", names[module], args[0][:, None])

        def values(module, args, out):
            width = model.model.layers[0].self_attn.head_dim
            heads = out.unflatten(-1, (-1, width)).transpose(1, 2)
            self.keep("values", names[module].removesuffix(".v_proj"), heads)

        def hidden(module, args, out):
            out = out if torch.is_tensor(out) else out[0]
            self.keep("hidden_states", names[module], out[:, None])

        for name, module in model.model.named_modules():
            if isinstance(module, nn.Linear):
                self.handles.append(module.register_forward_pre_hook(inputs))
            if name.endswith("v_proj"):
                self.handles.append(module.register_forward_hook(values))
        for layer in model.model.layers:
            self.handles.append(layer.register_forward_hook(hidden))

        def attend(attention, query, key, value, mask, **kwargs):
            if attention not in self.taken:
                self.taken.add(attention)
                self.keep("keys", names[attention], key[:, :, -query.shape[2] :])
            return self.eager(attention, query, key, value, mask, **kwargs)

        self.module.eager_attention_forward = attend
        model.set_attn_implementation("eager")
        return self

    def __exit__(self, *exception):
        self.module.eager_attention_forward = self.eager
        for handle in self.handles:
            handle.remove()

    def run(self, batch, **options):
        mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
        self.real = mask[:, -batch["input_ids"].shape[1] :].bool()
        self.taken.clear()
        return self.model(**batch, **options)


def check(site, head, kept, rank=100):
    """One group of a site against its values, (tokens, C) a sequence."""
    x = torch.cat(kept)
    exact = reference.statistics(x.reshape(1, -1), torch.ones(1, x.numel(), dtype=torch.bool))
    assert site.count[head] == exact["count"][0]
    assert site.min[head] == x.min()
    assert site.max[head] == x.max()
    assert (site.channels.min[head] == x.amin(0).numpy()).all()
    assert (site.channels.max[head] == x.amax(0).numpy()).all()
    assert abs(site.moments.mean[head] - exact["mean"][0]) <= 1e-6 * exact["std"][0]
    assert np.isclose(site.moments.std[head], exact["std"][0], rtol=1e-5)
    assert np.isclose(site.moments.kurtosis[head], exact["kurtosis"][0], rtol=1e-4)
    assert np.isclose(site.histogram.percentile(50)[head], exact["median"][0], rtol=5e-3)
    largest = x.abs().amax(1).double().numpy()
    assert site.channels.tokens.count[head] == len(largest)
    for percent in (0, 50, 90):
        found = site.channels.tokens.percentile(percent)[head]
        assert np.isclose(found, np.percentile(largest, percent), rtol=5e-3)
    row = list(site.rows())[head]
    assert np.isclose(row["channel_ratio"], x.abs().max() / np.median(x.abs().amax(0)), rtol=1e-6)
    assert np.isclose(row["token_ratio"], x.abs().max() / np.median(largest), rtol=5e-3)
    places = [
        place[-2:]
        for place in site.top.coordinates.tolist()
        if site.groups == 1 or place[1] == head
    ]
    for name, column in (("top_token", 0), ("top_channel", 1)):
        counts = Counter(place[column] for place in places)
        most = min(counts, key=lambda number: (-counts[number], number), default=None)
        assert row[name] == most
        assert row[f"{name}_share"] == (counts[most] / len(places) if places else None)


def items(kept, place, n):
    """The n largest of (G, tokens, C) a sequence, as tuples that end in their coordinates."""
    found = []
    for sequence, x in enumerate(kept):
        values, flat = x.abs().flatten().topk(min(n, x.numel()))
        for value, at in zip(values.tolist(), flat.tolist(), strict=True):
            group, token, channel = (int(i) for i in np.unravel_index(at, x.shape))
            found.append((value, *place(group), sequence, token, channel))
    return found


def check_top(part, expected, kind):
    found = [tuple(vars(item).values()) for item in part.top(100)]
    order = sorted(expected, key=lambda item: (-item[0], *item[1:]))[: len(found)]
    assert [item[0] for item in found] == [item[0] for item in order]
    assert set(found) <= set(expected), kind


@pytest.mark.parametrize("family", MODELS)
def test_every_statistic_is_that_of_the_plain_values(family):
    model = MODELS[family](num_attention_heads=8, num_key_value_heads=4)
    batches = [padded([30, 17, 24], "right"), padded([9, 30], "left", seed=7),
               {"input_ids": tiny_ids(2, 12, seed=3)}]  # fmt: skip
    before = [model(**batch).logits for batch in batches]
    with Seen(model) as seen, record(model, sites=EVERY) as recorder:
        for batch in batches:
            seen.run(batch)
    model.set_attn_implementation("sdpa")
    for batch, logits in zip(batches, before, strict=True):
        assert torch.equal(model(**batch).logits, logits)
    profile = recorder.profile()
    names = list(dict.fromkeys(name for kind, name in seen.found if kind == "linear_inputs"))
    assert {site.name for site in profile.linear_inputs.sites} == set(names)
    for kind in EVERY:
        part, expected = getattr(profile, kind), []
        for site in part.sites:
            kept = seen.found[kind, site.name]
            assert site.groups == len(kept[0])
            for head in range(site.groups):
                check(site, head, [x[head] for x in kept])
            more = {"linear_inputs": lambda g, n=site.name: (n,), "hidden_states": lambda g: ()}
            place = more.get(kind, lambda g: (g,))
            expected += items(kept, lambda g, s=site, p=place: (s.layer, *p(g)), 100)
        check_top(part, expected, kind)


@pytest.mark.parametrize("name", OWN)
def test_keys_and_values_of_quantdiffs_own_modules(name):
    torch.manual_seed(0)
    model, caught = Small(lambda i: OWN[name](i, "sdpa"), layers=1).eval(), {}
    heads = model.blocks[0].attention.heads
    heads.register_forward_hook(lambda m, args, out: caught.update(args=args))
    batch = padded([11, 7], "left")
    with record(model, sites=("keys", "values")) as recorder:
        model(**batch)
    profile, mask = recorder.profile(), batch["attention_mask"].bool()
    for kind, x in (("keys", caught["args"][1]), ("values", caught["args"][2])):
        (site,) = getattr(profile, kind).sites
        assert (site.name, site.groups) == ("blocks.0.attention", x.shape[1])
        for head in range(x.shape[1]):
            check(site, head, [x[b, head][mask[b]] for b in range(2)])


class TestHeads:
    """Which heads a module has, where it attends by itself."""

    @pytest.mark.parametrize(
        ("build", "keys", "values"),
        [
            (DiffAttention, [0, 2, 4, 1, 3, 5], [(0, 1), (2, 3), (4, 5)]),
            (MotifAttention, [0, 2, 1, 3], [(0,), (2,), (1,), (3,)]),
            (Grouped, [0, 2, 1, 3], [(0, 1), (2, 3)]),
            (lambda i: Grouped(i, repeated=True), [0, 2, 1, 3], [(0, 1), (2, 3)]),
        ],
    )
    def test_each_is_counted_once_in_the_order_of_the_calls(self, build, keys, values):
        model, caught = make(build, layers=1), {}
        attention = model.blocks[0].attn
        attention.v.register_forward_hook(lambda m, args, out: caught.update(v=out))
        with record(model, sites=("keys", "values")) as recorder:
            model(IDS)
        k = attention.seen[1]
        v = caught["v"].unflatten(-1, (-1, k.shape[-1])).transpose(1, 2)
        profile = recorder.profile()
        for kind, heads in (
            ("keys", [k[:, head] for head in keys]),
            ("values", [torch.cat([v[:, head] for head in some], -1) for some in values]),
        ):
            (site,) = getattr(profile, kind).sites
            assert site.groups == len(heads)
            for number, x in enumerate(heads):
                check(site, number, list(x))

    def test_a_model_that_repeats_its_keys_itself(self):
        class Repeating(nn.Module):
            def __init__(self):
                super().__init__()
                self.heads = nn.Linear(48, 48)

            def forward(self, x, mask=None):
                k = self.heads(x).unflatten(-1, (2, 24)).transpose(1, 2)
                self.seen = k
                q, wide = torch.cat([k, k * 2], 1), k.repeat_interleave(2, 1)
                out = nn.functional.scaled_dot_product_attention(q, wide, wide, is_causal=True)
                return out[:, :2].transpose(1, 2).flatten(2)

        model = make(lambda i: Repeating(), layers=1)
        with record(model, sites=("keys",)) as recorder:
            model(IDS)
        (site,) = recorder.profile().keys.sites
        assert site.groups == 2
        for head in range(2):
            check(site, head, list(model.blocks[0].attn.seen[:, head]))


def tiny_static(model, batch):
    return StaticCache(config=model.config, max_cache_len=32)


def steps(model, batch, cuts, cache=None):
    """A pass in several, with a cache."""
    first = 0
    for last in cuts:
        mask = batch["attention_mask"][:, :last]
        places = (mask.cumsum(1) - 1).clamp(min=0)[:, first:last]
        given = {"input_ids": batch["input_ids"][:, first:last], "attention_mask": mask}
        output = model(**given, position_ids=places, use_cache=True, **{CACHE: cache})
        cache, first = output[CACHE], last


def assert_alike(a, b, kinds=EVERY, exact=False):
    """The same statistics, up to the rounding of other matrix shapes."""
    rtol = 0 if exact else 1e-4
    for kind in kinds:
        x, y = getattr(a, kind), getattr(b, kind)
        assert x.count == y.count
        assert [s.name for s in x.sites] == [s.name for s in y.sites]
        for one, other in zip(x.sites, y.sites, strict=True):
            atol = 0 if exact else 1e-5 * float(one.absmax.max())
            assert (one.count == other.count).all()
            assert (one.channels.tokens.count == other.channels.tokens.count).all()
            for end in ("min", "max"):
                pair = getattr(one.channels, end), getattr(other.channels, end)
                assert np.allclose(*pair, rtol=rtol, atol=atol)
            if exact:
                assert (one.histogram.counts == other.histogram.counts).all()
        assert_same_top(x.top(20), y.top(20), rtol)


def assert_same_top(top, other, rtol):
    """The same places; those whose values rounding cannot tell apart in any order."""
    places = [
        {tuple(vars(item).values())[1:]: item.value for item in part} for part in (top, other)
    ]
    if not rtol:
        assert list(places[0].items()) == list(places[1].items())
        return
    assert np.allclose(*([abs(item.value) for item in part] for part in (top, other)), rtol=rtol)
    for one, another in (places, places[::-1]):
        last = min(map(abs, one.values()), default=0.0)
        for place, value in one.items():
            if place in another:
                assert np.isclose(value, another[place], rtol=rtol)
            else:
                assert abs(value) <= last * (1 + 2 * rtol)


class TestCache:
    @pytest.mark.parametrize("cache", [None, tiny_static])
    @pytest.mark.parametrize("family", MODELS)
    def test_prefill_and_decode_equal_one_pass(self, family, cache):
        model = MODELS[family]()
        batch = padded([18, 12], "left")
        positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        with record(model, sites=EVERY) as recorder:
            model(**batch, position_ids=positions)
        whole = recorder.profile()
        with record(model, sites=EVERY) as recorder:
            steps(model, batch, (7, 8, 9, 14, 18), cache and cache(model, batch))
        assert_alike(whole, recorder.profile())

    def test_a_sliding_cache(self):
        from tests.hooks.test_practice import mistral

        model, batch = mistral(), padded([20, 20], "left")
        with record(model, sites=("keys", "values")) as recorder:
            model(**batch)
        whole = recorder.profile()
        with record(model, sites=("keys", "values")) as recorder:
            steps(model, batch, (9, 10, 11, 17, 20))
        assert_alike(whole, recorder.profile(), ("keys", "values"))


@given(
    lengths=st.lists(st.integers(2, 20), min_size=1, max_size=4),
    side=st.sampled_from(["left", "right"]),
    extra=st.integers(0, 5),
    seed=st.integers(0, 100),
)
@settings(max_examples=12)
def test_padding_batches_and_merging_change_nothing(lengths, side, extra, seed):
    model = tiny_diffllama()
    rows = [padded([n], "right", seed=seed + i) for i, n in enumerate(lengths)]
    width = max(lengths) + extra
    together = {name: torch.cat([fit(row[name], width, side) for row in rows]) for name in rows[0]}
    profiles = []
    for batches in (rows, [together], *([row] for row in rows)):
        with torch.no_grad(), record(model, sites=EVERY) as recorder:
            for batch in batches:
                # Keys tell their places, which padding on the left would shift.
                places = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
                model(**batch, position_ids=places)
        profiles.append(recorder.profile())
    whole, padded_, merged, *more = profiles
    for other in more:
        merged = merged.merge(other)
    assert_alike(whole, padded_)
    assert_alike(whole, merged, exact=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_recorded_as_it_is(dtype):
    model = tiny_llama().to(dtype)
    with Seen(model) as seen, record(model, sites=EVERY) as recorder:
        seen.run(padded([30, 21], "right"))
    profile = recorder.profile()
    for kind in EVERY:
        for site in getattr(profile, kind).sites:
            kept = seen.found[kind, site.name]
            for head in range(site.groups):
                check(site, head, [x[head] for x in kept])


def test_plain_torch_gives_what_the_compiled_kernels_give():
    model, batch = tiny_diffllama(), padded([14, 9], "left")
    profiles = []
    for compiled in (True, False):
        with record(model, sites=EVERY, compiled=compiled) as recorder:
            model(**batch)
        profiles.append(recorder.profile())
    assert_alike(*profiles, exact=True)


class TestProfile:
    def test_survives_the_disk(self, tmp_path):
        with record(tiny_llama(), sites=EVERY) as recorder:
            recorder._model(tiny_ids())
        profile = recorder.profile()
        profile.save(tmp_path)
        loaded = Profile.load(tmp_path)
        assert to_json(loaded) == to_json(profile)
        assert to_json(loaded)["format"] == "quantdiff.profile/1"
        assert_alike(loaded, profile, exact=True)
        assert_alike(loaded.merge(profile), profile.merge(loaded), exact=True)
        frame = loaded.to_frame()
        assert set(frame["activation"]) == {"attention_logits", *EVERY}
        keys = frame[frame["activation"] == "keys"]
        assert keys["head"].tolist() == [0, 1, 0, 1]
        assert keys["channel_ratio"].notna().all()

    def test_extremes_alone_keep_the_channels(self):
        model, batch = tiny_llama(), padded([14, 9], "right")
        profiles = []
        for detail in ("full", "extremes"):
            with record(model, sites=EVERY, detail=detail) as recorder:
                model(**batch)
            profiles.append(recorder.profile())
        full, extremes = profiles
        for kind in EVERY:
            for one, other in zip(getattr(full, kind).sites, getattr(extremes, kind).sites,
                                  strict=True):  # fmt: skip
                assert (one.channels.absmax == other.channels.absmax).all()
                assert other.channels.tokens is other.histogram is None
                for row, less in zip(one.rows(), other.rows(), strict=True):
                    assert row["channel_ratio"] == less["channel_ratio"]
                    assert less["token_ratio"] is less["median"] is None

    def test_without_sites_nothing_is_added(self):
        with record(tiny_llama()) as recorder:
            recorder._model(tiny_ids())
        profile = recorder.profile()
        assert profile.sites == {}
        assert not set(EVERY[:3]) & set(to_json(profile))
        for kind in EVERY[:3]:
            with pytest.raises(UsageError, match=rf"no {kind}; record.*--sites {kind} records"):
                getattr(profile, kind)

    def test_profiles_with_other_sites_are_not_merged(self):
        profiles = []
        for sites in ((), ("keys",), ("hidden_states",), ("keys", "values")):
            with record(tiny_llama(), sites=sites) as recorder:
                recorder._model(tiny_ids())
            profiles.append(recorder.profile())
        for one in profiles:
            for other in profiles:
                if one is not other:
                    with pytest.raises(UsageError, match="cannot be merged"):
                        one.merge(other)


class Mixer(nn.Module):
    """An attention of torch's own beside the model's, whose output projection no hook sees."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        return self.linear(self.attention(x, x, x, need_weights=False)[0])


def test_a_linear_module_that_is_used_past_its_hooks_is_left_out():
    model = tiny_llama()
    model.model.layers[1].mlp = Mixer().eval()
    words = r"layers\.1\.mlp\.attention\.out_proj is used by torch.* are not recorded"
    with pytest.warns(LeftAloneWarning, match=words):
        recorder = record(model, sites=("linear_inputs",))
    with torch.no_grad(), recorder:
        model(tiny_ids())
    sites = recorder.profile().linear_inputs.sites
    assert all(site.count.all() for site in sites)
    names = [site.name for site in sites if ".1.mlp" in site.name]
    assert names == ["model.layers.1.mlp.linear"]


class TestRefusals:
    @pytest.mark.parametrize(
        ("sites", "words"),
        [
            ("keys", r"sites are a list of names, as in \('keys',\)"),
            (("weights",), "'weights' is not recorded on request; known: linear_inputs, keys"),
            (("attention_maps",), "'attention_maps' is not recorded on request"),
        ],
    )
    def test_what_is_not_recorded(self, sites, words):
        with pytest.raises(UsageError, match=words):
            record(tiny_llama(), sites=sites)

    def test_a_layer_without_linear_modules(self):
        class Plain(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList(nn.Identity() for _ in range(2))

            def forward(self, x):
                return x

        with pytest.raises(RecordingError, match="no linear module"):
            record(Plain(), layers=["blocks.0", "blocks.1"], sites=("linear_inputs",))

    def test_padding_that_is_not_told_before_the_linear_modules(self):
        model = tiny_llama()
        ready = torch.zeros(2, 1, 16, 16)
        with (
            record(model, sites=("linear_inputs",)),
            pytest.raises(RecordingError, match="only a ready attention mask"),
        ):
            model(tiny_ids(), attention_mask=ready)
        with record(model, sites=("keys", "values")) as recorder:
            model(tiny_ids(), attention_mask=ready)
        assert recorder.profile().keys.count == 2 * 2 * 2 * 16 * 8

    def test_inputs_that_are_not_the_tokens(self):
        model = tiny_llama()
        mlp = model.model.layers[0].mlp
        real = mlp.forward
        mlp.forward = lambda x: real(x[:, :3]).repeat(1, 6, 1)[:, : x.shape[1]]
        with (
            record(model, sites=("linear_inputs",)),
            pytest.raises(
                RecordingError,
                match=r"gate_proj, \(2, 3, 32\), are not the 2 sequences of 16 tokens",
            ),
        ):
            model(tiny_ids())

    def test_what_a_layer_calls_twice_has_both_inputs(self):
        model = tiny_llama()
        mlp = model.model.layers[0].mlp
        real = mlp.forward
        mlp.forward = lambda x: real(x) + real(3 * x)
        found = []
        for each in (tiny_llama(), model):
            with record(each, sites=("linear_inputs",)) as recorder:
                each(tiny_ids())
            found.append({site.name: site for site in recorder.profile().linear_inputs.sites})
        plain, twice = (sites["model.layers.0.mlp.gate_proj"] for sites in found)
        assert twice.count[0] == 2 * plain.count[0]
        assert twice.absmax[0] == pytest.approx(3 * plain.absmax[0])
        later = "model.layers.1.mlp.gate_proj"
        assert found[1][later].count[0] == plain.count[0]

    def test_the_tokens_of_an_expert(self):
        """They may be as many as those of the pass, but in an order of their own."""
        model = tiny_llama()
        mlp = model.model.layers[0].mlp
        mlp.experts = nn.ModuleList([nn.Linear(32, 32)])
        real = mlp.forward
        mlp.forward = lambda x: real(x) + mlp.experts[0](x.flatten(0, 1).flip(0)).view_as(x)
        with (
            record(model, sites=("linear_inputs",)),
            pytest.raises(RecordingError, match=r"experts\.0, \(32, 32\), are not the 2 sequences"),
        ):
            model(tiny_ids())

    def test_a_router_among_the_experts_sees_all_tokens(self):
        from transformers import JetMoeConfig, JetMoeForCausalLM

        sizes = {"num_key_value_heads": 2, "kv_channels": 8, "num_local_experts": 2}
        sizes |= {"num_experts_per_tok": 2, "num_attention_heads": 4}
        torch.manual_seed(0)
        model = JetMoeForCausalLM(JetMoeConfig(**SETTINGS | sizes)).eval()
        seen = []
        router = model.model.layers[1].self_attention.experts.router.layer
        router.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        with torch.no_grad(), record(model, sites=("linear_inputs",)) as recorder:
            model(tiny_ids())
        sites = {site.name: site for site in recorder.profile().linear_inputs.sites}
        site = sites["model.layers.1.self_attention.experts.router.layer"]
        assert site.count[0] == seen[0].numel()
        assert site.absmax[0] == float(seen[0].abs().max())

    def test_nan_names_the_module(self):
        model = tiny_llama()
        model.model.layers[1].self_attn.v_proj.weight[3] = torch.nan
        with (
            record(model, sites=("values",)),
            pytest.raises(
                RecordingError,
                match=r"NaN or infinity among the values of layer 1 \(model.layers.1",
            ),
        ):
            model(tiny_ids())
