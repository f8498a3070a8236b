"""From measured cells to the figures of an evaluation; the definitions are in `DEFINITIONS`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dspark.evaluate.cells import Cell
from dspark.evaluate.statistics import bootstrap_ratio, wilson

__all__ = ["DEFINITIONS", "OVERALL", "first_divergences", "summarise"]

PLAIN = "none"
OVERALL = "all"  # all domains of a prompt set together

DEFINITIONS = {
    "accepted length": (
        "tau: tokens that decoding rounds committed / rounds, bonus included, all gamma drafts verified. The "
        "first token of an answer comes from the prompt's pass, which is no round. 95% interval: bootstrap "
        "over prompts"
    ),
    "accepted / drafted": "acceptance rate of drafts, bonus excluded",
    "committed / verified": (
        "acceptance rate of verified rows, bonus included: tokens committed / (drafts verified + rounds)"
    ),
    "conditional acceptance": (
        "at slot k: accepted / reached, where reached means that it was verified and all drafts before it "
        "accepted; drafts behind the end of an answer are left out. Wilson's 95% interval, which takes rounds "
        "as independent"
    ),
    "prefix survival": (
        "at slot k: the product of conditional acceptances up to k (product-limit estimate: rounds whose "
        "drafts end early count as long as they last)"
    ),
    "soft acceptance": (
        "at slot k: mean of sum_v min(p_t(v), p_d(v)) where k was reached, p_d one-hot for a drafter that "
        "does not sample. It estimates conditional acceptance with less noise. At temperature 0, where both "
        "are one-hot and it would repeat the count, it is p_t(draft) at temperature 1"
    ),
    "collision rate": (
        "cross-mode collisions / adjacent draft pairs whose first draft was reached. x_k and x_k+1 collide "
        "when p_t(x_k | h) and a lower bound of the target's probability of x_k+1 two places behind h are "
        "`probable` or more, while p_t(x_k+1 | h, x_k) is `improbable` or less (CollisionThresholds)"
    ),
    "draft ms": "wall time of one proposal, for all requests of the round together",
    "tokens/s": (
        "output tokens / wall time of the groups, prompt processing included, time spent on recording taken "
        "out"
    ),
    "speed-up": "ratio of tokens/s to plain decoding, taken within each group of conversations; median",
    "repetition": (
        "share of 4-grams of the outputs that occurred before in the same output; an output is looping above "
        "0.5"
    ),
}


def summarise(cells: Sequence[Cell], resamples: int = 2000) -> list[dict[str, Any]]:
    """One entry per (prompt set, temperature, domain, drafter), domains in order and "all" last.

    A set of one domain has an "all" entry only. Rates without a trial are None.
    """
    plain = {_group(cell): cell for cell in cells if cell["drafter"] == PLAIN}
    merged: dict[tuple[str, float], dict[str, dict[str, list[Cell]]]] = {}
    for cell in cells:
        domains = merged.setdefault((cell["prompts"], cell["temperature"]), {})
        domains.setdefault(cell["domain"], {}).setdefault(cell["drafter"], []).append(cell)
    entries = []
    for (prompts, temperature), domains in merged.items():
        whole: dict[str, list[Cell]] = {}
        for drafters in domains.values():
            for drafter, some in drafters.items():
                whole.setdefault(drafter, []).extend(some)
        shown = {**(domains if len(domains) > 1 else {}), OVERALL: whole}
        for domain, drafters in shown.items():
            for drafter, some in drafters.items():
                head = {"prompts": prompts, "temperature": temperature, "domain": domain, "drafter": drafter}
                entries.append({**head, **_figures(some, plain, resamples)})
    return entries


def _group(cell: Cell) -> tuple[str, float, tuple[str, ...]]:
    return cell["prompts"], cell["temperature"], tuple(cell["conversations"])


def _figures(cells: list[Cell], plain: Mapping[Any, Cell], resamples: int) -> dict[str, Any]:
    answers = [answer for cell in cells for answer in cell["answers"]]
    steady = [answer for answer in answers if not answer["looping"]]
    total = {
        name: sum(answer[name] for answer in answers)
        for name in ("output_tokens", "rounds", "committed", "drafted", "verified", "accepted")
    }
    beside = [plain[_group(cell)] for cell in cells if _group(cell) in plain]
    compared = [answer["identical"] for answer in answers if answer["identical"] is not None]
    return {
        "gamma": cells[0]["gamma"],
        "prompts_asked": sum(len(cell["conversations"]) for cell in cells),
        "answers": len(answers),
        **total,
        "accepted_length": _ratio(total["committed"], total["rounds"]),
        "accepted_length_interval": _tau_interval(answers, resamples),
        "accepted_length_non_looping": _ratio(_sum(steady, "committed"), _sum(steady, "rounds")),
        "looping_answers": len(answers) - len(steady),
        "repetition_share": _ratio(_sum(answers, "repeated_ngrams"), _sum(answers, "ngrams")),
        "accepted_per_drafted": _ratio(total["accepted"], total["drafted"]),
        "committed_per_verified": _ratio(total["committed"], total["verified"] + total["rounds"]),
        "positions": _positions([answer["slots"] for answer in answers]),
        "collisions": _collisions([answer["slots"] for answer in answers]),
        "draft_ms": _ratio(1e3 * _sum(cells, "draft_seconds"), _sum(cells, "draft_rounds")),
        "tokens_per_s": _rate(cells),
        "plain_tokens_per_s": _rate(beside),
        "speedup": _speedup(cells, plain),
        "identical": sum(compared) if compared else None,
        "compared": len(compared),
    }


def _sum(entries: Iterable[Mapping[str, Any]], name: str) -> float:
    return sum(entry[name] for entry in entries)


def _ratio(value: float, by: float) -> float | None:
    return value / by if by else None


def _tokens(cells: Iterable[Cell]) -> float:
    return sum(_sum(cell["answers"], "output_tokens") for cell in cells)


def _rate(cells: Sequence[Cell]) -> float | None:
    return _ratio(_tokens(cells), _sum(cells, "seconds"))


def _tau_interval(answers: Sequence[Mapping[str, Any]], resamples: int) -> tuple[float, float] | None:
    """Bootstrap over conversations: the turns of one belong together."""
    prompts: dict[str, list[int]] = {}
    for answer in answers:
        sums = prompts.setdefault(answer["conversation"], [0, 0])
        sums[0] += answer["committed"]
        sums[1] += answer["rounds"]
    committed, rounds = ([sums[i] for sums in prompts.values()] for i in (0, 1))
    return bootstrap_ratio(committed, rounds, resamples)


def _positions(slots: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Slot by slot, counted from 1 as the paper does."""
    width = max((len(s["reached"]) for s in slots), default=0)
    positions = []
    survival = 1.0
    for k in range(width):
        reached, accepted, soft = (
            sum(s[name][k] for s in slots if k < len(s[name])) for name in ("reached", "accepted", "soft")
        )
        survival *= accepted / reached
        positions.append(
            {
                "position": k + 1,
                "reached": reached,
                "accepted": accepted,
                "conditional": accepted / reached,
                "conditional_interval": wilson(accepted, reached),
                "survival": survival,
                "soft": soft / reached,
            }
        )
    return positions


def _collisions(slots: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    pairs, suspects = (int(_sum(slots, name)) for name in ("pairs", "suspects"))
    if any(s["collisions"] is None for s in slots):
        return {"pairs": pairs, "suspects": suspects, "collisions": None, "rate": None, "interval": None}
    found = int(_sum(slots, "collisions"))
    return {
        "pairs": pairs,
        "suspects": suspects,
        "collisions": found,
        "rate": _ratio(found, pairs),
        "interval": wilson(found, pairs),
    }


def _speedup(cells: Sequence[Cell], plain: Mapping[Any, Cell]) -> dict[str, float] | None:
    """Of tokens/s over plain decoding's, within each group."""
    ratios = []
    for cell in cells:
        base = plain.get(_group(cell))
        rates = (_rate([cell]), None if base is None else _rate([base]))
        if rates[0] and rates[1]:
            ratios.append(rates[0] / rates[1])
    if not ratios:
        return None
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


def first_divergences(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Greedy answers that are not plain decoding's, in the order of the cells."""
    return [
        {
            **{name: cell[name] for name in ("drafter", "prompts")},
            **{name: answer[name] for name in ("conversation", "turn")},
            **answer["divergence"],
        }
        for cell in cells
        for answer in cell["answers"]
        if answer["divergence"] is not None
    ]
