"""Recorded rounds instead of a synthetic model: confidences and outcomes of a real drafter, replayed.

The format, as .npz arrays or as one JSON object a line (.jsonl):

| key | shape | meaning |
|---|---|---|
| confidence | [N, gamma] | conditional acceptance c_k that the drafter promised, 0..1, calibrated or not |
| confidence_logits | [N, gamma] | the same as logits, in its stead; a calibration needs these |
| accepted | [N] | drafts accepted under *full* verification, 0..gamma |
| request | [N] | optional: which request the round belongs to, rounds of one in order |
| domain | [N] | optional: name of the request's domain |

A recorder without confidences leaves both out and gives `gamma`. Rounds that were verified in part are censored
(nobody knows how far they would have gone), so a `scheduled` below gamma is refused. What `dspark calibrate` collects
(.safetensors) is read as well; of it, the shorter blocks at the ends of answers are left out.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dspark.calibrate.calibration import Calibration, sigmoid
from dspark.errors import DSparkError
from dspark.simulate.acceptance import AcceptanceState, Block

__all__ = ["RecordedRounds", "read_rounds", "recorded_temperatures"]

ANY = "any"  # domain of rounds that name none: it serves every request


@dataclass(frozen=True, eq=False)
class RecordedRounds:
    """N rounds of a drafter. A simulated request replays one recorded request of its domain from its first round on,
    and over again if it is longer.

    Raises:
        DSparkError: shapes that do not fit, counts or probabilities out of range, no rounds.
    """

    gamma: int
    accepted: np.ndarray  # [N] int64
    confidence: np.ndarray | None  # [N, gamma] float64
    request: np.ndarray  # [N] int64
    domain: np.ndarray  # [N] str

    def __post_init__(self) -> None:
        n = len(self.accepted)
        if not n:
            raise DSparkError("there are no rounds to replay")
        if len(self.request) != n or len(self.domain) != n:
            raise DSparkError(
                f"{n} rounds, {len(self.request)} requests, {len(self.domain)} domains: give one each"
            )
        if self.gamma < 1 or self.accepted.min() < 0 or self.accepted.max() > self.gamma:
            raise DSparkError(f"accepted must lie between 0 and gamma ({self.gamma}) in every round")
        c = self.confidence
        if c is not None and (c.shape != (n, self.gamma) or not ((c >= 0) & (c <= 1)).all()):
            raise DSparkError(
                f"confidence must be [{n}, {self.gamma}] numbers between 0 and 1, got {list(c.shape)}"
            )

    @property
    def domain_names(self) -> tuple[str, ...]:
        return tuple(sorted(set(self.domain.tolist())))

    def recorded(self, domain: str) -> Block:
        """Every round of `domain`, as it was recorded."""
        own = self.domain == domain
        survival = None if self.confidence is None else self.confidence[own].cumprod(axis=1)
        return Block(survival, self.accepted[own])

    def start(
        self, domains: tuple[str, ...], domain: np.ndarray, seeds: np.random.SeedSequence
    ) -> AcceptanceState:
        known = self.domain_names
        unknown = [name for name in domains if name not in known]
        if unknown and known != (ANY,):
            raise DSparkError(f"no rounds of domain {unknown[0]!r}: the file has {', '.join(known)}")
        return _Replayed(self, domains, domain, np.random.default_rng(seeds))


class _Replayed:
    def __init__(
        self, rounds: RecordedRounds, domains: tuple[str, ...], domain: np.ndarray, rng: np.random.Generator
    ) -> None:
        order = np.lexsort((np.arange(len(rounds.request)), rounds.request, rounds.domain))
        self._accepted = rounds.accepted[order]
        self._survival = None if rounds.confidence is None else rounds.confidence[order].cumprod(axis=1)
        same = rounds.request[order], rounds.domain[order]
        new = np.concatenate(([True], (same[0][1:] != same[0][:-1]) | (same[1][1:] != same[1][:-1])))
        first = np.flatnonzero(new)
        count = np.diff(np.append(first, len(order)))
        written = np.add.reduceat(self._accepted + 1, first)  # tokens
        self._first, self._count = np.zeros((2, len(domain)), dtype=np.int64)
        for index, name in enumerate(domains):
            groups = np.flatnonzero((same[1][first] == name) | (same[1][first] == ANY))
            mine = np.flatnonzero(domain == index)
            # By tokens, so that every recorded round is as likely as it was: a request that is hard to draft takes
            # more rounds for an answer as it is, and would count twice if it were chosen by rounds.
            chosen = rng.choice(groups, len(mine), p=written[groups] / written[groups].sum())
            self._first[mine], self._count[mine] = first[chosen], count[chosen]
        self._at = np.zeros(len(domain), dtype=np.int64)

    def block(self, requests: np.ndarray, with_survival: bool) -> Block:
        rows = self._first[requests] + self._at[requests]
        self._at[requests] = (self._at[requests] + 1) % self._count[requests]
        survival = self._survival[rows] if with_survival and self._survival is not None else None
        return Block(survival, self._accepted[rows])


def read_rounds(
    path: str | Path, temperature: float | None = None, calibration: Calibration | None = None
) -> RecordedRounds:
    """Rounds from an .npz, .jsonl or .safetensors file; of the last, those at `temperature` alone if it is given.

    `calibration`: confidences are what it makes of the recorded logits, as in the engine; None: as the head gave them.

    Raises:
        DSparkError: no such file, another format, a key is missing, censored rounds, or a calibration that does not
            fit: of another gamma, drafter or target, or for rounds without logits.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        return _from_collected(path, temperature, calibration)
    try:
        columns = _from_npz(path) if path.suffix == ".npz" else _from_lines(path)
    except (OSError, UnicodeDecodeError, zipfile.BadZipFile, ValueError) as error:
        if isinstance(error, DSparkError):
            raise
        raise DSparkError(f"cannot read the rounds of {path}: {error}") from None
    try:
        return _rounds(columns, calibration)
    except (ValueError, TypeError) as error:
        raise DSparkError(f"{path}: {error}") from None


def recorded_temperatures(path: str | Path) -> tuple[float, ...]:
    """The temperatures of a .safetensors file's answers; empty where the file does not tell.

    Raises:
        DSparkError: no such file, or another format.
    """
    if Path(path).suffix != ".safetensors":
        return ()
    from dspark.calibrate.rounds import load_rounds

    return tuple(sorted({answer.temperature for answer in load_rounds(Path(path)).answers}))


def _from_collected(path: Path, temperature: float | None, calibration: Calibration | None) -> RecordedRounds:
    from dspark.calibrate.rounds import load_rounds

    collected = load_rounds(path)
    source = collected.source
    if calibration is not None:
        calibration.check_fits(source.drafter_identity, source.target_identity, source.gamma)
    keep = collected.lengths == source.gamma
    if temperature is not None:
        keep &= collected.column("temperature") == temperature
    full = collected.select(keep)
    confidence = _probabilities(full.logits, calibration)
    return RecordedRounds(source.gamma, full.accepted, confidence, full.answer, full.column("domain"))


def _probabilities(logits: np.ndarray, calibration: Calibration | None) -> np.ndarray:
    """[N, gamma] conditional acceptance, calibrated if there is a calibration."""
    if calibration is None:
        return sigmoid(logits)
    if calibration.gamma != logits.shape[1]:
        raise DSparkError(
            f"the calibration is for {calibration.gamma} drafts, the recorded blocks have {logits.shape[1]}: "
            "give one that was fitted to as many"
        )
    return calibration.conditional(logits)


def _from_npz(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        return {key: file[key] for key in file.files}


def _from_lines(path: Path) -> dict[str, np.ndarray]:
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DSparkError(f"{path}, line {number} is not JSON ({error})") from None
        if not isinstance(row, dict) or (rows and row.keys() != rows[0].keys()):
            raise DSparkError(f"{path}, line {number}: expected an object with the keys of the first line")
        rows.append(row)
    return {key: np.array([row[key] for row in rows]) for key in (rows[0] if rows else ())}


def _rounds(columns: dict[str, np.ndarray], calibration: Calibration | None) -> RecordedRounds:
    if "accepted" not in columns:
        raise DSparkError("key 'accepted' is missing; a round is at least confidence and accepted")
    accepted = columns["accepted"].astype(np.int64)
    confidence = _confidence(columns, calibration)
    if confidence is None and "gamma" not in columns:
        raise DSparkError("key 'confidence' is missing; without confidences give 'gamma'")
    gamma = int(np.ravel(columns["gamma"])[0]) if confidence is None else confidence.shape[1]
    if "scheduled" in columns and (columns["scheduled"] < gamma).any():
        raise DSparkError("some rounds were verified in part: record with every draft verified, or drop them")
    request = columns.get("request", np.zeros(len(accepted), dtype=np.int64)).astype(np.int64)
    domain = columns.get("domain", np.full(len(accepted), ANY)).astype(str)
    return RecordedRounds(gamma, accepted, confidence, request, domain)


def _confidence(columns: dict[str, np.ndarray], calibration: Calibration | None) -> np.ndarray | None:
    """[N, gamma] float64, or None where none was recorded."""
    logits, given = columns.get("confidence_logits"), columns.get("confidence")
    if calibration is not None and logits is None:
        raise DSparkError(
            "a calibration is for logits, and key 'confidence_logits' is missing: record logits, or leave it out"
        )
    from_logits = logits is not None and (given is None or calibration is not None)
    found = logits if from_logits else given
    if found is not None and found.ndim != 2:
        raise DSparkError("confidence must hold one number a slot, equally many in every round")
    if found is None:
        return None
    found = found.astype(np.float64)
    return _probabilities(found, calibration) if from_logits else found
