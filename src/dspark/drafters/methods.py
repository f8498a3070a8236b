"""Names of the speculative methods; imports nothing, so that the command line can list them at once."""

__all__ = ["METHODS", "TRAINED"]

METHODS = ("none", "ngram", "dspark", "dflash")
TRAINED = ("dspark", "dflash")  # methods with a checkpoint
