"""DIFF V2 as a transformers model; importing it registers it with the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from quantdiff.models.diff_v2.configuration_diff_v2 import DiffV2Config
from quantdiff.models.diff_v2.modeling_diff_v2 import DiffV2ForCausalLM, DiffV2Model

__all__ = ["DiffV2Config", "DiffV2ForCausalLM", "DiffV2Model"]

AutoConfig.register(DiffV2Config.model_type, DiffV2Config, exist_ok=True)
AutoModel.register(DiffV2Config, DiffV2Model, exist_ok=True)
AutoModelForCausalLM.register(DiffV2Config, DiffV2ForCausalLM, exist_ok=True)
