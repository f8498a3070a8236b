"""Losslessness audit: the exact output distribution of a policy and an acceptance rule on a tiny model."""

from dspark.audit.verdict import AuditResult, audit
from dspark.audit.witness import Deviation, Fork, Witness
from dspark.audit.world import World, appendix_a, overlap, random_world

__all__ = [
    "AuditResult",
    "Deviation",
    "Fork",
    "Witness",
    "World",
    "appendix_a",
    "audit",
    "overlap",
    "random_world",
]
