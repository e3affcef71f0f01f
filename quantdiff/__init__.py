"""How large activations get, what that costs at low bits, and how much differential attention saves."""
