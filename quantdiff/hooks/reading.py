"""Reading the logits of a call of transformers' dispatch."""

from quantdiff.hooks.biases import position_bias
from quantdiff.hooks.dispatch import AttentionCall
from quantdiff.hooks.logits import Logits
from quantdiff.hooks.masks import check_options, read_mask
from quantdiff.hooks.passes import Pass

__all__ = ["read_call"]


def read_call(call: AttentionCall, now: Pass, *, cross: bool) -> Logits:
    """What the call's softmax sees.

    Args:
        call: of an attention function.
        now: the current pass.
        cross: whether it is cross-attention.

    Raises:
        RecordingError: an unknown keyword or mask.
    """
    check_options(call)
    visible, bias = now.visible(call, lambda: read_mask(call), cross=cross)
    scale = call.options.get("scaling")
    return Logits(
        call.query,
        call.key,
        float(call.query.shape[-1] ** -0.5 if scale is None else scale),
        visible,
        call.options.get("softcap"),
        position_bias(call, bias),
        cross,
        call.options.get("s_aux"),
    )
