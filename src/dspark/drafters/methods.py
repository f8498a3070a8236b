"""Names of the speculative methods; imports nothing, so that the command line can list them at once."""

__all__ = ["AUTOREGRESSIVE", "BLOCK", "LOOKUP", "METHODS", "NAMES", "TRAINED"]

BLOCK = ("dspark", "dflash")  # draft a block in one pass
AUTOREGRESSIVE = ("eagle3", "mtp")  # draft token by token
TRAINED = BLOCK + AUTOREGRESSIVE  # methods with a checkpoint
METHODS = ("none", "ngram", *TRAINED)
LOOKUP = "+lookup"  # behind a trained method: prompt lookup first
NAMES = (*METHODS, *(method + LOOKUP for method in TRAINED))  # as the command line has them
