"""DSpark: confidence-scheduled speculative decoding with semi-autoregressive generation."""

__version__ = "0.1.0"
