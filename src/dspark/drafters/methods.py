"""Names of the speculative methods; imports nothing, so that the command line can list them at once."""

__all__ = ["AUTOREGRESSIVE", "BLOCK", "METHODS", "TRAINED"]

BLOCK = ("dspark", "dflash")  # draft a block in one pass
AUTOREGRESSIVE = ("eagle3", "mtp")  # draft token by token
TRAINED = BLOCK + AUTOREGRESSIVE  # methods with a checkpoint
METHODS = ("none", "ngram", *TRAINED)
