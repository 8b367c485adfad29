"""The models of a training: loaded by role, adapted, quantized, frozen, saved."""
