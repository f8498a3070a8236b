"""Whether to draft at all: a gate with trials, and the verdict of what drafted rounds brought."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dspark.compilation import compiled
from dspark.errors import DSparkError

__all__ = ["AimConfig", "DraftGate", "Realised"]

_LOOK = 32  # rounds without drafts from one estimate to the next
_LISTEN = 8  # of them, from one whose time is learned from to the next
_FAR = 32  # rounds before the next trial beyond which nobody need prepare for it
_SUPPOSED = 2  # rounds that the scatter of gains rests on before there are any
_YOUNG = (
    30  # rounds of one request, behind which the doubt in a verdict is 1.4 times what it is in the long run
)
_FIRST = 6  # times `exploration` may be spent on the first retry, where nothing was known before
_LASTS = 3  # times the length of a trial, until it is clear that it was in vain
_INSIST = 3  # times the wait, behind which a trial is made against the odds


@dataclass(frozen=True)
class AimConfig:
    """`acceptance`: mean conditional acceptance by slot, where it was measured, as calibrations have it: no trial is
    then made on hope alone, not even the first. `hysteresis`: gain needed to switch drafting on again; it goes off
    where plain decoding is shown to be faster.

    Drafting is tried for `trial_rounds` (of one request, fewer of many) at the start, and again after `retry_after`
    rounds without it; each trial in vain doubles the wait, up to `retry_at_most`. The wait is never shorter than
    what a trial cost (in rounds of plain decoding, until drafting was off again) over `exploration`, so that trials
    in vain take that share of the time in the long run. No trial is made where it could not pay even if every draft
    were accepted with probability `hope`; and where it could not pay half way from what rounds at any load have
    taught to that, the wait is three times as long. While drafting is on, it pauses for `pause_rounds` behind the first
    trial and after every `pause_after` drafted rounds, where prices follow the machine: only plain decoding tells what
    plain decoding takes (0: never), unless drafting pays so clearly that no such news could matter. What drafted rounds
    brought is remembered with `memory` a round (longer than the history: it settles whether to draft, not how much) and
    judged with `doubt` standard errors in favour of drafting: rounds without drafts teach nothing, so a wrong "off"
    lasts, while a wrong "on" is soon found out.
    """

    prior: float = 0.6
    acceptance: tuple[float, ...] = ()
    weight: float = 2.0
    decay: float = 0.95
    hysteresis: float = 0.03
    trial_rounds: int = 8
    retry_after: int = 64
    retry_at_most: int = 1024
    pause_after: int = 256
    pause_rounds: int = 24
    exploration: float = 0.01
    hope: float = 0.9
    memory: float = 0.995
    doubt: float = 1.0

    def __post_init__(self) -> None:
        for name in ("hysteresis", "doubt"):
            if getattr(self, name) < 0:
                raise DSparkError(f"{name} must be 0 or more, got {getattr(self, name)}")
        for name in ("hope", "memory", "exploration"):
            if not 0 < getattr(self, name) < 1:
                raise DSparkError(f"{name} must lie between 0 and 1, got {getattr(self, name)}")
        if self.trial_rounds < 1 or not 1 <= self.retry_after <= self.retry_at_most:
            raise DSparkError(
                "trial_rounds must be 1 or more, and retry_after between 1 and retry_at_most: drafting that is "
                "never tried again stays off for ever"
            )
        if self.pause_after < 1 or self.pause_rounds < 0:
            raise DSparkError("pause_after must be 1 or more, and pause_rounds 0 or more")


class DraftGate:
    """Whether to draft at all, with a memory, counted in rounds.

    It is *on* through a trial and as long as drafting pays, then *off*: every `_LOOK` rounds an estimate is asked, and
    behind its patience a trial is *due*. One that nothing known speaks for is *put off*, until it is `_INSIST` times
    the patience and the gate *insists*. While it is on, it *pauses* now and then, to hear what plain decoding takes.

    Args:
        trial_rounds: how long a trial lasts, if not as configured.
        pauses: whether anything listens to what rounds take.
    """

    def __init__(self, config: AimConfig, trial_rounds: int | None = None, pauses: bool = False) -> None:
        self._config, self.trial_rounds = config, trial_rounds or config.trial_rounds
        self._pauses = pauses and config.pause_rounds > 0
        self._pause, self._to_pause = 0, self.trial_rounds
        self._trial, self._off, self._wait = self.trial_rounds, 0, config.retry_after
        self._lasted = 0  # drafted rounds since the last trial
        self._lost = 0.0  # since the last trial began, in rounds of plain decoding
        self._unlikely = False  # the trial that is due, by what is known
        self.on = True
        self.fresh = True  # nothing was filed yet

    @property
    def trying(self) -> bool:
        """A trial is due or under way: draft, whatever the estimate says."""
        return self._trial > 0 or (self._off > 0 and self._off >= self._patience)

    @property
    def resting(self) -> bool:
        """Off, and not to be asked in this round: an estimate costs time in a round that is to cost none.

        A trial that is due waits for the next look, too: where none can pay, each round would ask again.
        """
        return not self.on and self._off % _LOOK > 0

    @property
    def pausing(self) -> bool:
        """On, but not in this round."""
        return self._pause > 0

    @property
    def deaf(self) -> bool:
        """The time of this round need not be learned from."""
        return not self.on and self._off > self._config.pause_rounds and self._off % _LISTEN > 0

    @property
    def insists(self) -> bool:
        """A trial is due for so long that no estimate counts: estimates may be wrong, and age."""
        return self._off >= _INSIST * self._patience

    def put_off(self, loss: float) -> None:
        """The trial that is due is not made: nothing known speaks for it.

        A first trial that acceptance as measured before speaks against waits as if it had been made, with a `loss` of
        so many rounds of plain decoding in each of its own; where not even hope speaks for it (inf), as long as any.
        Put off to the end, the wait begins anew, and is twice as long: that it cannot pay at best is as good as a trial
        in vain.
        """
        config = self._config
        if self.fresh and config.acceptance:
            self._trial, self._wait = 0, config.retry_at_most if loss == math.inf else config.retry_after
            self._lost = min(_LASTS * self.trial_rounds * loss, config.exploration * config.retry_at_most)
        if self._unlikely and self.insists:
            self._off, self._wait = 1, min(2 * self._wait, config.retry_at_most)
        self._unlikely = loss == math.inf

    @property
    def far(self) -> float:
        """Rounds to the next trial, as far as is known; 0 if drafting is on, or it is soon."""
        due = self._patience * (_INSIST if self._unlikely else 1)
        return 0 if self.on or due - self._off <= _FAR else due - self._off

    @property
    def _patience(self) -> float:
        config = self._config
        more = 1.0 if config.acceptance else max(1.0, _FIRST * config.retry_after / self._wait)
        share = config.exploration * more
        return max(self._wait, self._lost / share)

    def passes(self, gain: float) -> bool:
        """`gain`: expected tokens per second with drafts, over those without."""
        return self.trying or gain > (1.0 if self.on else 1 + self._config.hysteresis)

    def lose(self, rounds: float) -> None:
        """Rounds of plain decoding that the last round cost besides what was filed."""
        self._lost += rounds

    def observe(self, wanted: bool, drafted: bool, lost: float = 0.0, clear: bool = False) -> None:
        """File a round in which drafting was possible; one whose drafter had nothing to say tells nothing.

        `lost`: rounds of plain decoding that the time would have been worth, less what it brought in such rounds.
        `clear`: drafting pays however wrong the price of plain decoding may be, so that a pause would be for nothing.
        """
        config, self.fresh = self._config, False
        if self._pause > 0 and not wanted:
            self._pause -= 1
            return
        if wanted and not drafted:
            return
        if not wanted:
            self.on = False
            self._off += 1
            return
        if self._off > 0 and self._off >= self._patience:
            self._trial, self._lasted, self._lost = self.trial_rounds, 0, 0.0
            self._wait = min(2 * self._wait, config.retry_at_most)
        elif self._trial == 0:
            self._lasted += 1
        self._lost = max(0.0, self._lost + lost)
        if self._lasted >= config.retry_after:  # it goes on for long without a trial: it pays
            self._wait, self._lost = config.retry_after, 0.0
        self._trial, self._off, self.on, self._unlikely = max(0, self._trial - 1), 0, True, False
        self._to_pause -= self._pauses
        if self._to_pause <= 0:
            self._pause, self._to_pause = 0 if clear else config.pause_rounds, config.pause_after


@compiled
def file_round(
    sums: np.ndarray, memory: float, tokens: float, plain_worth: float
) -> tuple[float, float, float]:
    """Add a round to `sums` [7], which fade by `memory`: their weight, the gain, and its standard error."""
    m, t, b = memory, tokens, plain_worth
    w, w2, ts, bs, tt, tb, bb = sums
    w, w2, ts, bs = m * w + 1.0, m * m * w2 + 1.0, m * ts + t, m * bs + b
    tt, tb, bb = m * tt + t * t, m * tb + t * b, m * bb + b * b
    sums[:] = w, w2, ts, bs, tt, tb, bb
    if bs <= 0:
        return w, 0.0, 0.0
    g = ts / bs
    spread = (max(tt - 2 * g * tb + g * g * bb, 0.0) + _SUPPOSED * ts / w) / (w + _SUPPOSED)
    return w, g, math.sqrt(spread * w2) / bs


class Realised:
    """What drafted rounds brought over plain decoding: a ratio of decayed sums, with its standard error.

    `gain`: tokens over their plain worth. `error`: its standard error (of a ratio of means, rounds taken as
    independent). Both are 0 where nothing is known. A few rounds that went alike by chance do not make the error 0:
    `_SUPPOSED` rounds that scatter as counts do, with the mean for a variance, are supposed beside them. `rounds`: how
    many weigh in.
    """

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._sums = np.zeros(7)  # of w, w^2, and by w: tokens, their plain worth, their squares and product
        self._outcomes = 0.0
        self.rounds = self.gain = self.error = 0.0

    def add(self, tokens: float, plain_worth: float, requests: int = 1) -> None:
        """File a round. `plain_worth`: tokens that plain decoding decides in the seconds it took."""
        self._outcomes = self._memory * self._outcomes + requests
        self.rounds, self.gain, self.error = file_round(
            self._sums, self._memory, float(tokens), float(plain_worth)
        )

    def at_best(self, doubt: float) -> float:
        """The gain, `doubt` standard errors up; more of them while it is young.

        It is asked in every round, and one look below 1 is enough: with one standard error all along, a gain of a
        few percent would be given up by chance within the first fifty rounds.
        """
        n = self._outcomes
        return self.gain + doubt * math.sqrt(1 + _YOUNG / n) * self.error if n > 0 else 0.0
