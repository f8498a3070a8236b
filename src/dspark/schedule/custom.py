"""Policies of the user's own: as objects, or by import path."""

from __future__ import annotations

from typing import Any

from dspark.errors import DSparkError
from dspark.imports import make_imported
from dspark.schedule.base import Dependence, Policy

__all__ = ["check_policy", "load_policy"]

_NEEDED = ("dependence", "uses_survival", "draft_lengths", "verify_lengths")


def load_policy(path: str, otherwise: str = "") -> Policy:
    """The policy that `module:factory` makes. The module is looked for in the current directory, too.

    Args:
        otherwise: what else could be done about a `path` of another form.

    Raises:
        DSparkError: the path leads nowhere, or what it leads to makes no policy.
    """
    policy: Policy = make_imported(path, _instance, _NEEDED, otherwise)
    check_policy(policy, path)
    return policy


def check_policy(policy: Any, what: str) -> None:
    """Refuse what is no policy; `what` it is called in the message."""
    missing = [name for name in _NEEDED if not hasattr(policy, name)]
    if isinstance(policy, type):
        raise DSparkError(f"{what}: {policy.__name__} is a class, give an object of it")
    if missing:
        raise DSparkError(f"{what}: {policy!r:.60} is no policy, it has no {', '.join(missing)}")
    if not isinstance(policy.dependence, Dependence):
        raise DSparkError(f"{what}: dependence must be a dspark.schedule.policies.Dependence")


def _instance(found: Any) -> Any:
    """A policy as it is; what a class or another callable makes."""
    return found() if not hasattr(found, "verify_lengths") or isinstance(found, type) else found
