"""Any task of lm-evaluation-harness, on the live model in place."""

import contextlib
import copy
import hashlib
import json
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantdiff.analysis.evaluation.base import (
    CUT,
    Evaluation,
    Metric,
    Outcome,
    Stopped,
    Text,
    quiet,
    unstopped,
)
from quantdiff.analysis.evaluation.forward import Forward, evaluating, scaled
from quantdiff.analysis.evaluation.pairs import Pair
from quantdiff.analysis.evaluation.reading import split_limit
from quantdiff.analysis.evaluation.scoring import log_likelihoods
from quantdiff.analysis.evaluation.tasks import (
    FEWSHOT_SEED,
    as_lm_eval,
    lm_eval_version,
    load_tasks,
    task_fingerprint,
)
from quantdiff.errors import CutWarning, QuantizationError, UsageError, require

__all__ = ["COSTS", "Harness", "build"]

# The lm-eval metrics whose direction is known; tasks may bring others.
_BETTER = ("acc", "acc_norm", "acc_bytes", "acc_all", "acc_mutual_info", "exact_match", "f1")
_WORSE = ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")
COSTS = dict.fromkeys(_BETTER, -1) | dict.fromkeys(_WORSE, 1)


@dataclass
class Harness(Evaluation):
    """`lm-eval:TASK`, `lm-eval:FILE.yaml`, and either with `@N` for N documents of each task.

    Metrics and standard errors are lm-eval's. A metric keeps its lm-eval name, followed by a comma
    and the filter unless there is none, and preceded by the task (`task:acc`) where there are
    several; groups come first. Items: what lm-eval recorded for each document, under the same
    names, in the order of the documents, where it is a number or a tuple of numbers.

    lm-eval passes padded batches to the model without a mask, so padding would count in dynamic
    ranges. Log-likelihoods are computed here instead, with the same tokens and cuts; generation is
    lm-eval's own. The log-likelihoods are computed from fp32 logits, whatever the model's dtype, as
    in lm-eval with `softmax_dtype=float32`; otherwise lm-eval sums them in bf16 or fp16.

    A request longer than the model's context is cut from the left, as in lm-eval. Where that
    happens there is a warning, and the last metric, `cut`, is the share of requests that were cut.

    Attributes:
        forward: the model.
        tokenizer: a copy, because lm-eval sets a padding token.
        tasks: what `TaskManager.load` returned.
        limit: documents of each task, or None for all.
    """

    forward: Forward
    tokenizer: Any
    tasks: dict[str, Any]
    limit: int | None
    name: str
    data: str
    settings: dict[str, Any]
    total: int
    unit: str = "questions"

    def run(
        self,
        context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        *,
        batch_size: int,
        progress: Callable[[int], None] = quiet,
        stop: Callable[[], bool] = unstopped,
    ) -> Outcome:
        """See `Evaluation.run`."""
        evaluator = require("lm_eval.evaluator", "eval", f"run {self.name}")
        told = 0

        def tell(units: int) -> None:
            nonlocal told
            told += units
            progress(units)

        requests = sum(
            len(task.instances) * task.config.repeats for task in self.tasks["tasks"].values()
        )
        for task in self.tasks["tasks"].values():
            task.set_fewshot_seed(seed=FEWSHOT_SEED)
        with evaluating(self.forward.model), as_lm_eval():
            model = _language_model(
                self.forward, self.tokenizer, batch_size, scaled(tell, requests, self.total), stop
            )
            with context():
                results = evaluator.evaluate(lm=model, task_dict=self.tasks, limit=self.limit)
        progress(self.total - told)
        outcome = _outcome(results)
        if not model.cut:
            return outcome
        warnings.warn(
            f"{self.name}: {model.cut:,} of {requests:,} requests were cut from the left to fit "
            f"into the model's context of {model.max_length:,} tokens; what they ask about may be "
            "gone",
            CutWarning,
            stacklevel=2,
        )
        cut = Metric(CUT, model.cut / requests, None, requests)
        return Outcome((*outcome.metrics, cut), outcome.items)


def _language_model(
    forward: Forward,
    tokenizer: Any,
    batch_size: int,
    progress: Callable[[int], None],
    stop: Callable[[], bool],
) -> Any:
    """The model as lm-eval calls it; `progress` counts requests, `cut` those that were cut."""
    base: Any = require("lm_eval.models.huggingface", "eval", "run a model in lm-eval").HFLM

    class Masked(base):
        """lm-eval's model, with log-likelihoods from masked batches."""

        cut = 0

        def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> Any:
            return super().loglikelihood(requests, disable_tqdm=True)

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> Any:
            return super().loglikelihood_rolling(requests, disable_tqdm=True)

        def generate_until(self, requests: Any, disable_tqdm: bool = True) -> Any:
            answers = []
            for start in range(0, len(requests), batch_size):
                if start and stop():
                    raise Stopped
                part = requests[start : start + batch_size]
                answers += super().generate_until(part, disable_tqdm=True)
                progress(len(part))
            return answers

        def _model_generate(self, *given: Any, **options: Any) -> Any:
            # On a GPU transformers compiles the model for a static cache, which bypasses all hooks.
            return super()._model_generate(*given, **options | {"disable_compile": True})

        def tok_batch_encode(
            self, strings: Any, *given: Any, left_truncate_len: int | None = None, **options: Any
        ) -> Any:
            if left_truncate_len:
                lengths = (len(self.tok_encode(string)) for string in strings)
                self.cut += sum(length > left_truncate_len for length in lengths)
            return super().tok_batch_encode(
                strings, *given, left_truncate_len=left_truncate_len, **options
            )

        def _loglikelihood_tokens(
            self, requests: Any, disable_tqdm: bool = True, override_bs: int | None = None
        ) -> list[tuple[float, bool]]:
            pairs = [_pair(start, end, self.max_length) for _, start, end in requests]
            self.cut += sum(
                len(pair.context) < len(start)
                for pair, (_, start, _) in zip(pairs, requests, strict=True)
            )
            sums, greedy = log_likelihoods(
                forward, pairs, batch_size=batch_size, progress=progress, stop=stop
            )
            return list(zip(sums.tolist(), greedy.tolist(), strict=True))

    with _kept_as_it_is(forward.model):
        return Masked(pretrained=forward.model, tokenizer=tokenizer, batch_size=batch_size)


@contextlib.contextmanager
def _kept_as_it_is(model: Any) -> Iterator[None]:
    """Keep lm-eval from tying a model's weights again."""
    own = vars(model).get("tie_weights")
    model.tie_weights = lambda *_, **__: None
    try:
        yield
    finally:
        del model.tie_weights
        if own is not None:
            model.tie_weights = own


def _pair(context: Sequence[int], continuation: Sequence[int], limit: int) -> Pair:
    """The pair, cut from the left where it is too long, as in lm-eval."""
    if not 0 < len(continuation) <= limit:
        raise UsageError(
            f"lm-eval asks for the likelihood of {len(continuation)} tokens, where the model takes "
            f"1 to {limit}"
        )
    whole = (*context, *continuation)[-(limit + 1) :]
    return Pair(whole[: -len(continuation)], tuple(continuation))


def _outcome(results: dict[str, Any]) -> Outcome:
    several = len(results["results"]) > 1
    groups = results.get("groups", {})
    metrics = []
    for task, values in sorted(results["results"].items(), key=lambda part: part[0] not in groups):
        for key, value in values.items():
            metric, _, kind = key.partition(",")
            if not kind or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            name = _name(task, metric, kind, several)
            if not math.isfinite(value):
                raise QuantizationError(f"{name} of lm-eval is not finite: {value}")
            error = values.get(f"{metric}_stderr,{kind}")
            error = float(error) if isinstance(error, (int, float)) else None
            count = values.get("sample_count", {}).get(key, values.get("sample_len", 0))
            metrics.append(Metric(name, float(value), error, int(count)))
    items: dict[str, NDArray[Any]] = {}
    for task, samples in results["samples"].items():
        for kind in dict.fromkeys(sample["filter"] for sample in samples):
            own = [sample for sample in samples if sample["filter"] == kind]
            for metric in own[0]["metrics"]:
                try:
                    array = np.array([sample[metric] for sample in own], dtype=np.float64)
                except (KeyError, TypeError, ValueError):
                    continue  # texts, or present in only some documents
                items[_name(task, metric, kind, several)] = array
    return Outcome(tuple(metrics), items)


def _name(task: str, metric: str, kind: str, several: bool) -> str:
    return (f"{task}:" if several else "") + metric + ("" if kind == "none" else f",{kind}")


def _generation(model: Any, tasks: dict[str, Any]) -> dict[str, str]:
    """Fingerprint of the generation settings, if tasks generate; config and tensors lack them."""
    asked = {instance.request_type for task in tasks.values() for instance in task.instances}
    config = getattr(model, "generation_config", None)
    if config is None or "generate_until" not in asked:
        return {}
    told = {
        name: value
        for name, value in config.to_dict().items()
        if not name.startswith("_") and name != "transformers_version"  # states its origin
    }
    content = json.dumps(told, sort_keys=True, default=str).encode()
    return {"generation": hashlib.sha256(content).hexdigest()}


def build(name: str, argument: str, model: Any, tokenizer: Any, text: Text) -> Harness:
    """Make `lm-eval:TASK` for a model.

    Raises:
        UsageError: the task is unknown or cannot be loaded.
        MissingExtraError: lm-eval is not installed.
    """
    task, limit = split_limit(argument)
    tasks = load_tasks(task, tokenizer)
    data, count = task_fingerprint(tasks["tasks"], limit)
    return Harness(
        forward=Forward(model, tokenizer),
        tokenizer=copy.deepcopy(tokenizer),
        tasks=tasks,
        limit=limit,
        name=name,
        data=data,
        settings={
            "version": 1,
            "lm_eval": lm_eval_version(),
            "limit": limit,
            "fewshot_seed": FEWSHOT_SEED,
            "num_fewshot": {k: t.get_config("num_fewshot") for k, t in tasks["tasks"].items()},
        }
        | _generation(model, tasks["tasks"]),
        total=count,
    )
