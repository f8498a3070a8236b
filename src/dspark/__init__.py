"""DSpark: confidence-scheduled speculative decoding with semi-autoregressive generation."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["LLM", "DSparkError", "RequestOutput", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from dspark.core import DSparkError, RequestOutput, SamplingParams
    from dspark.llm import LLM


def __getattr__(name: str) -> Any:
    """Load the public names when they are used: `dspark --help` must not wait for torch."""
    if name == "LLM":
        from dspark.llm import LLM

        return LLM
    if name in ("DSparkError", "RequestOutput", "SamplingParams"):
        from dspark import core

        return getattr(core, name)
    raise AttributeError(f"module 'dspark' has no attribute {name!r}")
