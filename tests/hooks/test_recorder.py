"""The recorder on small models: right numbers, and a model that never notices."""

import inspect

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from quantdiff import RecordingError, Scheme, UsageError, fake_quantize, record
from quantdiff.statistics.storage import to_json
from tests.reference import Materialised, check_profile
from tests.tiny import VOCABULARY, build, tiny_diff_v2, tiny_diffllama, tiny_ids, tiny_llama

MODELS = {"llama": tiny_llama, "diffllama": tiny_diffllama}
# The cache argument was called past_key_values before.
PARAMETERS = inspect.signature(LlamaForCausalLM.forward).parameters
CACHE = "cache" if "cache" in PARAMETERS else "past_key_values"
ATTENTION = ["eager", "sdpa", "flex_attention"]


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def padded(lengths, side, width=None, seed=0):
    """A batch of random sequences of the given lengths, padded on one side."""
    width = width or max(lengths)
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.int64), None
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        place = slice(width - length, width) if side == "left" else slice(0, length)
        ids[row, place] = tiny_ids(1, length, seed=seed + row)[0]
        mask[row, place] = 1
    return {"input_ids": ids, "attention_mask": mask}


def fit(x, width, side):
    """Zeros on one side up to a width."""
    missing = width - x.shape[1]
    return torch.nn.functional.pad(x, (missing, 0) if side == "left" else (0, missing))


def profile_of(model, *batches, **options):
    with record(model, **options) as recorder:
        for batch in batches:
            model(**batch)
    return recorder.profile()


def numbers(profile):
    """All statistics as one array, for comparison."""
    frame = profile.to_frame()
    return frame[["count", "absmax", "min", "max", "mean", "std", "kurtosis"]].to_numpy(float)


def assert_same(a, b):
    """The same statistics up to rounding, and the same largest values up to sequence numbers."""
    assert np.allclose(numbers(a), numbers(b), rtol=1e-3, atol=1e-5, equal_nan=True)
    for kind in ("attention_logits", "hidden_states"):
        x, y = getattr(a, kind), getattr(b, kind)
        assert x.count == y.count
        # Bins are exact counts of values that rounding may carry over an edge.
        assert x.median == pytest.approx(y.median, rel=8e-3)
        # Short recordings keep all values, down to sums that nearly cancel.
        rounding = 1e-6 * x.largest.values.max(initial=0.0)
        assert np.allclose(x.largest.values, y.largest.values, rtol=1e-4, atol=rounding)


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("family", MODELS)
class TestEveryNumber:
    def test_equals_the_materialised_one(self, family, attention):
        model = MODELS[family]()
        model.set_attn_implementation(attention)
        batches = [padded([30, 17, 24], "right"), padded([9, 30], "left", seed=7)]
        before = [model(**batch).logits for batch in batches]
        with record(model) as recorder:
            during = [model(**batch).logits for batch in batches]
        for x, y in zip(before, during, strict=True):
            assert torch.equal(x, y)
        check_profile(to_json(recorder.profile()), Materialised(model).run(batches))

    def test_padding_side_changes_nothing(self, family, attention):
        model = MODELS[family]()
        model.set_attn_implementation(attention)
        lengths = [20, 31, 5]
        left = profile_of(model, padded(lengths, "left", 40))
        right = profile_of(model, padded(lengths, "right", 40))
        alone = profile_of(model, *(padded([n], "right", seed=i) for i, n in enumerate(lengths)))
        for other in (right, alone):
            assert_same(left, other)
            top, same = left.attention_logits.top(20), other.attention_logits.top(20)
            assert [vars(x) | {"value": 0} for x in top] == [vars(x) | {"value": 0} for x in same]


@given(
    lengths=st.lists(st.integers(2, 24), min_size=1, max_size=5),
    sides=st.lists(st.sampled_from(["left", "right"]), min_size=5, max_size=5),
    cuts=st.lists(st.integers(1, 3), min_size=1, max_size=5),
    extra=st.integers(0, 6),
    seed=st.integers(0, 100),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_batches_padding_order_and_merging_change_nothing(lengths, sides, cuts, extra, seed, order):
    model = tiny_diffllama()
    single = [padded([n], "right", seed=seed + i) for i, n in enumerate(lengths)]
    expected = profile_of(model, *single)
    shuffled = list(enumerate(lengths))
    order.shuffle(shuffled)
    parts, merged = [], None
    while shuffled:
        size = cuts[len(parts) % len(cuts)]
        group, shuffled = shuffled[:size], shuffled[size:]
        rows = [padded([n], "right", seed=seed + i) for i, n in group]
        width = max(n for _, n in group) + extra
        side = sides[len(parts) % len(sides)]
        batch = {name: torch.cat([fit(row[name], width, side) for row in rows]) for name in rows[0]}
        parts.append(batch)
    assert_same(expected, profile_of(model, *parts))
    for part in parts:
        profile = profile_of(model, part)
        merged = profile if merged is None else merged.merge(profile)
    assert_same(expected, merged)
    assert merged.data == expected.data


class TestCache:
    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    @pytest.mark.parametrize("side", ["left", None])
    def test_prefill_and_decode_equal_one_pass(self, attention, side):
        model = tiny_llama()
        model.set_attn_implementation(attention)
        batch = padded([18, 12], "left") if side else {"input_ids": tiny_ids(2, 18)}
        whole = profile_of(model, batch)
        with record(model) as recorder:
            cache = None
            for first, last in ((0, 7), (7, 8), (8, 9), (9, 14), (14, 18)):
                given = {"input_ids": batch["input_ids"][:, first:last]}
                if side:
                    given["attention_mask"] = batch["attention_mask"][:, :last]
                    places = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
                    given["position_ids"] = places[:, first:last]
                output = model(**given, use_cache=True, **{CACHE: cache})
                cache = output[CACHE]
        steps = recorder.profile()
        if side:
            # The one pass lets the model number the padded tokens: the same statistics need the
            # same rotary positions.
            positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
            whole = profile_of(model, {**batch, "position_ids": positions})
        assert_same(whole, steps)
        assert steps.data == whole.data
        assert [vars(x) | {"value": 0} for x in whole.attention_logits.top(20)] == [
            vars(x) | {"value": 0} for x in steps.attention_logits.top(20)
        ]

    def test_generation_is_one_sequence(self):
        model = tiny_llama()
        with record(model) as recorder:
            tokens = model.generate(
                tiny_ids(2, 6), max_new_tokens=5, do_sample=False, pad_token_id=2
            )
        assert_same(recorder.profile(), profile_of(model, {"input_ids": tokens[:, :-1]}))
        assert recorder.profile().data["sequences"] == 2


class TestDiffLlama:
    def test_each_logit_counts_once_and_branches_are_the_halves(self):
        profile = profile_of(tiny_diffllama(), {"input_ids": tiny_ids(2, 10)})
        layers, heads = 2, 4
        assert profile.attention_logits.count == layers * heads * 2 * 55
        assert profile.model["layout"] == "halves"
        frame = profile.to_frame()
        logits = frame[frame.activation == "attention_logits"]
        assert logits.branch.tolist() == [1, 1, 2, 2] * layers
        assert all(x.branch == (1 if x.head < 2 else 2) for x in profile.attention_logits.top(100))


class TestDtypes:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    def test_statistics_are_fp32_of_what_the_model_multiplied(self, dtype, attention):
        model = tiny_llama().to(dtype)
        model.set_attn_implementation(attention)
        batch = padded([30, 21], "right")
        profile = profile_of(model, batch)
        assert profile.model["dtype"] == str(dtype).removeprefix("torch.")
        # Rounding to 8 bits of mantissa makes the two runs differ where sums round differently.
        if attention == "eager":
            check_profile(to_json(profile), Materialised(model).run([batch]))


class TestRefusals:
    def test_a_layer_that_never_runs(self):
        model = tiny_llama()
        model.config.num_hidden_layers = 1
        with pytest.raises(RecordingError, match=r"never fired.*model\.layers\.1"), record(model):
            model(input_ids=tiny_ids())

    def test_a_recording_inside_a_recording(self):
        model = tiny_llama()
        with record(model), pytest.raises(RecordingError, match="recorded already"), record(model):
            pass
        profile_of(model, {"input_ids": tiny_ids()})

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_non_finite_logits_name_layer_and_head(self, bad):
        model = tiny_llama()
        model.model.layers[1].self_attn.q_proj.weight[8 * 2] = bad  # first row of head 2
        with pytest.raises(RecordingError, match="layer 1, head 2"), record(model):
            model(input_ids=tiny_ids())

    def test_non_finite_hidden_states_name_the_layer(self):
        model = tiny_llama()
        model.model.layers[1].mlp.down_proj.weight[3] = float("nan")
        with pytest.raises(RecordingError, match="hidden states of layer 1"), record(model):
            model(input_ids=tiny_ids())

    def test_an_attention_keyword_that_is_not_known(self):
        model = tiny_llama()
        with pytest.raises(RecordingError, match="strange_bias"), record(model):
            model(input_ids=tiny_ids(), strange_bias=torch.ones(1))

    def test_a_layer_called_by_itself(self):
        model = tiny_llama()
        hidden = torch.zeros(1, 4, 32)
        embeddings = model.model.rotary_emb(hidden, torch.arange(4)[None])
        with record(model), pytest.raises(RecordingError, match="outside of the recorded model"):
            model.model.layers[0](hidden, position_embeddings=embeddings)

    @pytest.mark.parametrize("sites", [(), ("keys", "values"), ("linear_inputs",)])
    @pytest.mark.parametrize("family", [*MODELS, "diff_v2"])
    def test_a_decoder_that_runs_twice_in_one_forward(self, family, sites):
        model = Looped((MODELS | {"diff_v2": tiny_diff_v2})[family]())
        once = {"input_ids": tiny_ids(), "times": 1}
        with record(model, sites=sites) as recorder:
            model(**once)
            with pytest.raises(RecordingError, match=r"layers\.0\S* is called several times"):
                model(tiny_ids(), times=2)
        profile = recorder.profile()
        assert profile.partial
        assert_same(profile, profile_of(model, once, once, sites=sites))

    def test_a_module_that_stands_in_two_layers(self):
        for part, sites in (("self_attn", ()), ("mlp", ("linear_inputs",))):
            model = tiny_llama()
            first, second = model.model.layers
            setattr(second, part, getattr(first, part))
            words = rf"layers\.0\.{part}\S* is called several times in a forward pass"
            with pytest.raises(RecordingError, match=words), record(model, sites=sites):
                model(input_ids=tiny_ids())

    def test_a_model_without_dispatched_attention(self):
        with pytest.raises(RecordingError, match="no list of like blocks"):
            record(torch.nn.Linear(2, 2))

    def test_nothing_recorded(self):
        with record(tiny_llama()) as recorder:
            pass
        with pytest.raises(RecordingError, match="nothing was recorded"):
            recorder.profile()

    def test_options(self):
        with pytest.raises(UsageError, match="'extremes' or 'full'"):
            record(tiny_llama(), detail="some")
        with pytest.raises(UsageError, match="top_k"):
            record(tiny_llama(), top_k=-1)


class Looped(torch.nn.Module):
    """Runs a model several times in one forward."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, times):
        for _ in range(times):
            output = self.model(input_ids=input_ids, use_cache=False)
        return output


def test_attention_modules_may_be_the_layers():
    model = tiny_diffllama()
    names = [f"model.layers.{i}.self_attn" for i in range(2)]
    batch = padded((16, 9), "left")
    profile = profile_of(model, batch, layers=names)
    assert [site.name for site in profile.hidden_states.sites] == names
    whole = profile_of(model, batch)
    assert profile.attention_logits.top(100) == whole.attention_logits.top(100)


def test_the_decoder_alone_can_be_run():
    model = tiny_llama()
    with record(model) as recorder:
        model.model(input_ids=tiny_ids(2, 12))
    assert_same(recorder.profile(), profile_of(model, {"input_ids": tiny_ids(2, 12)}))


def test_a_full_recording_contains_the_extremes():
    model, batch = tiny_diffllama(), padded([20, 9], "right")
    full, short = profile_of(model, batch), profile_of(model, batch, detail="extremes")
    columns = ["count", "absmax", "min", "max"]
    assert (full.to_frame()[columns] == short.to_frame()[columns]).to_numpy().all()
    assert full.attention_logits.top(100) == short.attention_logits.top(100)
    assert short.attention_logits.median is None


class Wrapper(torch.nn.Module):
    """Hands its arguments on under names of its own."""

    def __init__(self, model):
        super().__init__()
        self.lm = model

    def forward(self, tokens, padding):
        return self.lm(input_ids=tokens, attention_mask=padding)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_known_through_a_wrapper(side):
    model, batch = tiny_llama(), padded([20, 11], side)
    with record(Wrapper(model)) as recorder:
        recorder._model(batch["input_ids"], batch["attention_mask"])
    assert_same(profile_of(model, batch), recorder.profile())
    assert recorder.profile().data["tokens"] == 31


@pytest.mark.parametrize("mask", [torch.zeros(2, 16), torch.ones(3, 16).long(), -torch.ones(2, 16)])
def test_a_2d_mask_of_another_meaning_is_refused(mask):
    model = tiny_llama()
    mask = mask - torch.inf if mask.sum() == 0 else mask
    with pytest.raises(RecordingError, match="1 for tokens and 0 for padding"), record(model):
        model(input_ids=tiny_ids(2, 16), attention_mask=mask)


CONTEXTS = {
    "record": record,
    "fake_quantize": lambda model: fake_quantize(model, Scheme("attention_logits", 8)),
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("attention", ATTENTION)
def test_a_ready_mask_with_a_fill_that_is_added(attention, context):
    model, causal = tiny_llama(), torch.ones(12, 12, dtype=torch.bool).tril()
    model.set_attn_implementation(attention)
    mask = torch.zeros(1, 1, 12, 12).masked_fill(~causal, -1e9)
    with (
        CONTEXTS[context](model),
        pytest.raises(RecordingError, match=r"LlamaAttention .* filled with -1e\+09"),
    ):
        model(input_ids=tiny_ids(1, 12), attention_mask=mask)
    place = torch.arange(12.0)
    ramp = (place - place[:, None]) * 600  # as far as -6600
    mask = ramp.masked_fill(~causal, torch.finfo(torch.float32).min)[None, None]
    with CONTEXTS[context](model) as entered:
        model(input_ids=tiny_ids(1, 12), attention_mask=mask)
    if context == "record":
        logits = entered.profile().attention_logits
        assert logits.count == 2 * 4 * 78
        assert logits.rank(1) == pytest.approx(6600, rel=0.01)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_padding_is_taken_from_a_ready_mask(attention, side):
    model, batch = tiny_llama(), padded([20, 11], side)
    model.set_attn_implementation(attention)
    causal = torch.ones(20, 20, dtype=torch.bool).tril()
    seen = causal & batch["attention_mask"][:, None, None, :].bool()
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    lowest = torch.finfo(torch.float32).min
    added = torch.zeros(seen.shape).masked_fill(~seen, lowest)
    ready = seen if attention == "sdpa" else added
    given = {"input_ids": batch["input_ids"], "position_ids": positions}
    expected = profile_of(model, {**given, "attention_mask": batch["attention_mask"]})
    found = profile_of(model, {**given, "attention_mask": ready})
    assert_same(expected, found)
    assert found.data == expected.data


@pytest.mark.parametrize("side", ["left", "right"])
def test_ready_masks_of_several_passes_with_a_cache(side):
    """The second sequence ends early: its last tokens are padding, in chunks and one by one."""
    model, batch = tiny_llama(), padded([18, 12], side)
    model.set_attn_implementation("sdpa")
    told = batch["attention_mask"]
    places = (told.cumsum(1) - 1).clamp(min=0)
    causal = torch.ones(18, 18, dtype=torch.bool).tril()
    seen = causal & told[:, None, None, :].bool()
    with record(model) as recorder:
        cache, first = None, 0
        for last in (7, 13, 14, 15, 18):
            output = model(
                input_ids=batch["input_ids"][:, first:last],
                attention_mask=seen[:, :, first:last, :last],
                position_ids=places[:, first:last],
                use_cache=True,
                **{CACHE: cache},
            )
            cache, first = output[CACHE], last
    whole = profile_of(model, {**batch, "position_ids": places})
    assert_same(whole, recorder.profile())
    assert recorder.profile().data == whole.data


def test_a_mask_below_the_diagonal_holds_no_padding():
    """Nobody attends the last token, which is a real one."""
    model = tiny_llama()
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril(-1)
    mask[..., 0, 0] = True
    profile = profile_of(model, {"input_ids": tiny_ids(1, 12), "attention_mask": mask})
    assert profile.data["tokens"] == 12
    assert profile.attention_logits.count == 2 * 4 * (66 + 1)


class TestPacked:
    """Several sequences in one row, told by their positions alone."""

    PLACES = torch.arange(6).repeat(2)[None]

    @pytest.mark.parametrize("context", CONTEXTS)
    @pytest.mark.parametrize("attention", ATTENTION)
    def test_is_refused(self, attention, context):
        model = tiny_llama()
        model.set_attn_implementation(attention)
        together = torch.cat([torch.arange(12)[None], self.PLACES])
        for places in (self.PLACES, together):
            given = {"input_ids": tiny_ids(len(places), 12), "position_ids": places}
            words = "position_ids that start anew pack several sequences into one.* row of its own"
            with CONTEXTS[context](model), pytest.raises(RecordingError, match=words):
                model(**given, use_cache=False)

    def test_is_refused_with_a_ready_mask(self):
        text = torch.arange(12) // 6
        mask = (text == text[:, None]).tril()[None, None]
        model = tiny_llama()
        with record(model), pytest.raises(RecordingError, match="pack several sequences"):
            model(input_ids=tiny_ids(1, 12), position_ids=self.PLACES, attention_mask=mask)

    @pytest.mark.parametrize("attention", ATTENTION)
    def test_other_positions_are_recorded(self, attention):
        model = tiny_llama()
        model.set_attn_implementation(attention)
        batch = padded([12, 7], "left")
        padding = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        for more, tokens in (
            ({"position_ids": torch.arange(5, 17)[None]}, 24),  # an offset
            ({"position_ids": self.PLACES, "use_cache": True}, 24),  # then the mask is whole
            ({"position_ids": padding, "attention_mask": batch["attention_mask"]}, 19),
        ):
            profile = profile_of(
                model, {"input_ids": batch["input_ids"], "use_cache": False} | more
            )
            assert profile.data["tokens"] == tokens
            pairs = 2 * 78 if tokens == 24 else 78 + 28
            assert profile.attention_logits.count == 2 * 4 * pairs


def test_padding_of_an_encoder_is_not_that_of_the_decoder():
    from transformers import BartConfig, BartForCausalLM

    config = BartConfig(
        vocab_size=VOCABULARY, d_model=32, decoder_layers=2, decoder_ffn_dim=48,
        decoder_attention_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    model = build(BartForCausalLM, config)
    kept = torch.tensor([[1] * 20, [0] * 20])
    states = torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(0))
    given = {"encoder_hidden_states": states, "encoder_attention_mask": kept}
    profile = profile_of(model, {"input_ids": tiny_ids(2, 12), **given})
    assert profile.data["tokens"] == profile.hidden_states.sites[0].count[0] // 32 == 24
    counts = {site.name: site.count.tolist() for site in profile.attention_logits.sites}
    assert counts["model.decoder.layers.0.self_attn"] == [2 * 78] * 4
    assert counts["model.decoder.layers.0.encoder_attn (cross-attention)"] == [12 * 20] * 4
