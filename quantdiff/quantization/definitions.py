"""What quantization means here, as written into results."""

__all__ = ["DEFINITIONS"]

DEFINITIONS = {
    "attention_logits": "what softmax sees before masking: q·kᵀ·scaling, soft-capped where the "
    "model does, plus additive position biases",
    "grid": "symmetric: integers −(2^(b−1)−1) … 2^(b−1)−1, step = absmax / (2^(b−1)−1) in fp32, "
    "round half to even; asymmetric: integers 0 … 2^b−1 with an integer zero point; "
    "attention maps: integers 0 … 2^b−1, step = largest weight / (2^b−1)",
    "range": "dynamic: from the values themselves; absmax, percentile, mse, entropy: from a "
    "calibration; dynamic ones are of one sequence, static ones of all. tensor: one range for a "
    "layer's values, all heads and branches, or for a weight matrix; head: for a head; row: for a "
    "query; token: for a token, of keys and values in one head; channel: of keys and values for "
    "one of a head's over all tokens, of weights for an output; group:N: for N neighbouring "
    "channels of a token, or inputs of an output",
}
