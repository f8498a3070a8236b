"""The one error that users see."""

__all__ = ["DSparkError"]


class DSparkError(ValueError):
    """Bad input or an unusable file. The message is one line and says what to do."""
