"""The hooks that record a model: between q·kᵀ and softmax, and at every layer's output."""

from quantdiff.hooks.recorder import Recorder, record

__all__ = ["Recorder", "record"]
