"""GPTQ: weights rounded column by column, each column compensating the errors of those before it.

Frantar et al., arXiv 2210.17323. Implemented here rather than taken from a library, so that grids
are made as for the site `weights`, with any bit width and group size; it needs no GPU. The two ways
of rounding share their grids, except those of groups in the columns' own order, which are made from
the weights as changed by the errors so far. The checkpoint formats `gptq-4bit` and `gptq-8bit` are
a different matter: their grids are those of the kernels that read them.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quantdiff.errors import QuantizationError, UsageError
from quantdiff.hooks.found import Found
from quantdiff.hooks.layers import layer_of
from quantdiff.hooks.linears import in_order
from quantdiff.quantization.chosen import Schemes
from quantdiff.quantization.grid import Grid, NoGridError
from quantdiff.quantization.layerwise import Layerwise
from quantdiff.quantization.quantizer import found_in, refuse_quantized
from quantdiff.quantization.rounding import in_groups
from quantdiff.quantization.scheme import Scheme
from quantdiff.quantization.weights import by_output, weight_modules
from quantdiff.statistics.precision import true_fp32

__all__ = ["gptq_rounded", "gptq_weight"]

DAMPING = 0.01  # of the mean of the Hessian's diagonal, as in the paper
_BLOCK = 128  # columns after which the error is passed to all that are left


@contextmanager
def gptq_rounded(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *schemes: Scheme,
    act_order: bool = False,
) -> Iterator[None]:
    """Give a model GPTQ's weights within a context.

    Works layer by layer: the inputs of a layer's linear modules come from the rounded layers before
    it. Anything else is quantized inside the context, by `fake_quantize` without a scheme for
    `weights`.

    Args:
        model: any whose weights `fake_quantize` can round.
        batches: inputs of the model, on its device; padding does not count.
        schemes: for `weights`: one, or several for different layers.
        act_order: take the columns with the largest inputs first, not in their own order.

    Raises:
        UsageError: a scheme for another site, two for one layer, a layer that does not exist, or no
            batches.
        QuantizationError: inputs that are not finite or whose padding cannot be determined, a group
            that does not divide them, or a model that cannot be run layer by layer or is quantized
            already.
    """
    for scheme in schemes:
        if scheme.site != "weights":
            raise UsageError(f"GPTQ rounds weights, and the scheme is for {scheme.site}")
    refuse_quantized(model)
    work = list(batches)
    if not work:
        raise UsageError("GPTQ needs a batch of text to see what goes into the linear modules")
    found, chosen = found_in(model), Schemes(schemes)
    chosen.check_layers(len(found.layers))
    modules = weight_modules(found, chosen) if chosen else {}
    kept: dict[nn.Parameter, Tensor] = {}
    try:
        if modules:
            with torch.no_grad():
                _round_layers(model, found, modules, work, kept, act_order=act_order)
        yield
    finally:
        for weight, data in kept.items():
            weight.data = data


def _round_layers(
    model: nn.Module,
    found: Found,
    modules: dict[str, tuple[nn.Module, Scheme]],
    work: list[Mapping[str, Any]],
    kept: dict[nn.Parameter, Tensor],
    *,
    act_order: bool,
) -> None:
    """Round the weights of all layers; the originals go into `kept`."""
    last = max(layer_of(name, found.layers) or 0 for name in modules)
    steps = Layerwise(model, [layer for _, layer in found.layers], work)
    for number in range(last + 1):
        own = {n: m for n, m in modules.items() if layer_of(n, found.layers) == number}
        if own:
            hessians = _hessians(found, {n: module for n, (module, _) in own.items()}, steps)
            for name, (module, scheme) in own.items():
                weight: Any = module.weight
                if weight in kept:  # modules may share one
                    continue
                plain = by_output(module, weight.data)
                rounded = gptq_weight(plain, hessians[name], scheme, name, act_order=act_order)
                kept[weight] = weight.data
                weight.data = by_output(module, rounded).contiguous()
        if number < last:
            steps.advance()


def _hessians(found: Found, modules: dict[str, nn.Module], steps: Layerwise) -> dict[str, Tensor]:
    """2·Xᵀ·X over the real tokens of each module's inputs, (in, in) fp64."""
    sums: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        def see(module: nn.Module, args: Any, kwargs: Any) -> None:
            given = args[0] if args else next(iter(kwargs.values()))  # torch: input, others: x
            rows = _real_rows(given.float(), steps.real, name, flat=in_order(found, name))
            with true_fp32():
                more = (2 * rows.T @ rows).double()
            sums[name] = sums[name] + more if name in sums else more

        return see

    handles = [
        module.register_forward_pre_hook(hook(name), with_kwargs=True)
        for name, module in modules.items()
    ]
    try:
        steps.look()
    finally:
        for handle in handles:
            handle.remove()
    for name, module in modules.items():
        if name not in sums:  # an expert without tokens
            weight: Any = module.weight
            width = by_output(module, weight).shape[1]
            sums[name] = torch.zeros(width, width, dtype=torch.float64, device=weight.device)
    return sums


def _real_rows(x: Tensor, real: Tensor | None, name: str, *, flat: bool) -> Tensor:
    """The inputs of real tokens, (tokens, in).

    Args:
        x: (B, N, in), or (B·N, in); without padding any tokens, for example those of an expert.
        real: (B, N) bool, or None for all.
        name: of the module.
        flat: whether inputs of shape (B·N, in) are the tokens in order.

    Raises:
        QuantizationError: some are padding, and which ones cannot be determined.
    """
    if real is None or bool(real.all()):
        return x.flatten(0, -2)
    if x.shape[:-1] != real.shape and not (flat and x.shape[:-1] == (real.numel(),)):
        raise QuantizationError(
            f"the inputs of {name}, {tuple(x.shape)}, are not known to be the tokens of the batch "
            "in their order, so that its padding cannot be told; give GPTQ batches without padding"
        )
    return x.flatten(0, -2)[real.flatten().to(x.device)]


@torch.no_grad()
def gptq_weight(
    weight: Tensor, hessian: Tensor, scheme: Scheme, name: str = "", *, act_order: bool = False
) -> Tensor:
    """Round a weight matrix to the grids of a scheme so that W·X changes little.

    The grid of a matrix or a channel is made from the original weights. That of a group is made
    when its first column is reached, from the weights as changed by the errors so far; with
    `act_order`, which scatters a group's columns, before anything is rounded.

    Args:
        weight: (out, in).
        hessian: 2·X·Xᵀ of its inputs, (in, in) fp64. If it has no Cholesky factor with 1 % of the
            mean of its diagonal added to the diagonal, ten times as much is tried, and so on up to
            the mean itself. Weights of an input that is always zero are rounded to nearest; it
            counts as 0 in the mean, where the paper's code has 1 in whatever unit the inputs have.
        scheme: for `weights`.
        name: of the module, for messages.
        act_order: take the columns by descending diagonal of the Hessian.

    Returns:
        (out, in) in the weight's dtype.

    Raises:
        QuantizationError: NaN or infinity, a Hessian without a Cholesky factor even then, or a
            group size that does not divide the inputs.
    """
    if not bool(torch.isfinite(hessian).all()):
        raise QuantizationError(f"NaN or infinity among the inputs of {name}")
    precise = torch.promote_types(weight.dtype, torch.float32)  # as rounding to nearest divides
    left = weight.double()  # (out, in), still to be rounded, with the errors so far
    size, count = scheme.group, left.shape[1]
    in_groups(left, size or count, name, scheme.site)
    order = torch.arange(count, device=left.device)
    if act_order:
        order = hessian.diagonal().argsort(descending=True, stable=True)
    factor = _factor(hessian[order][:, order], name)
    left = left[:, order]
    known: dict[int, Grid] = {}  # by group
    if size is None:
        whole = weight.amin((0, 1), keepdim=True), weight.amax((0, 1), keepdim=True)
        rows = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        known[0] = _grid(*(whole if scheme.granularity == "tensor" else rows), scheme, name)
    elif act_order:
        for g, part in enumerate(weight.split(size, 1)):
            known[g] = _grid(part.amin(1, keepdim=True), part.amax(1, keepdim=True), scheme, name)
    # Blocks begin with a group, whose weights then contain all errors so far.
    step = _BLOCK if size is None else size * max(_BLOCK // size, 1)
    groups = (order // (size or count)).tolist()
    for first in range(0, count, step):
        last = min(first + step, count)
        block, errors = left[:, first:last], torch.zeros_like(left[:, first:last])
        part = factor[first:last, first:last]
        for i in range(last - first):
            g = groups[first + i]
            if g not in known:
                assert size is not None
                own = block[:, i : i + size]
                known[g] = _grid(own.amin(1, keepdim=True), own.amax(1, keepdim=True), scheme, name)
            column = block[:, i : i + 1]
            found = known[g].quantize(column.to(precise)).double()  # (out, 1)
            errors[:, i : i + 1] = (column - found) / part[i, i]
            block[:, i + 1 :] -= errors[:, i : i + 1] * part[i, i + 1 :]
            block[:, i : i + 1] = found
        left[:, last:] -= errors @ factor[first:last, last:]
    return left[:, order.argsort()].to(weight.dtype)


def _factor(hessian: Tensor, name: str) -> Tensor:
    """The upper Cholesky factor of the damped Hessian's inverse, (in, in) fp64."""
    diagonal = hessian.diagonal()
    mean = diagonal.mean() if bool((diagonal > 0).any()) else torch.ones_like(diagonal[0])
    solid = hessian + torch.diag(torch.where(diagonal > 0, 0.0, mean))
    damping = DAMPING
    while damping <= 1:
        damped = solid + damping * mean * torch.eye(len(solid), device=solid.device).double()
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not bool(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not bool(failed):
                return upper
        damping *= 10
    raise QuantizationError(
        f"the inputs of {name} leave GPTQ no Cholesky factor, however much it is damped; calibrate "
        "on more text"
    )


def _grid(least: Tensor, most: Tensor, scheme: Scheme, name: str) -> Grid:
    try:
        return Grid.of(least, most, scheme.bits, scheme.symmetric)
    except NoGridError:
        raise QuantizationError(f"NaN or infinity among the weights of {name}") from None
