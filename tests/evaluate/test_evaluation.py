"""The harness end to end on tiny models: exact figures, several turns, resuming, divergences, reports."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.core import DSparkError
from dspark.drafters.base import ProposeBatch
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.evaluate.cells import CellStore
from dspark.evaluate.conversations import (
    Conversation,
    Messages,
    PromptSet,
    load_conversations,
    load_prompt_sets,
)
from dspark.evaluate.evaluation import (
    EvaluationSettings,
    Group,
    make_contestants,
    plan_groups,
    run_evaluation,
)
from dspark.evaluate.figures import draw_figures
from dspark.evaluate.playing import Contestant
from dspark.evaluate.reporting import write_report
from dspark.evaluate.rounds import CollisionThresholds
from dspark.evaluate.summary import DEFINITIONS, first_divergences, summarise
from dspark.schedule.policies import FixedLength, Threshold
from dspark.testing import ScriptedDrafter, TableTarget, tiny_tokenizer

GAMMA = 4
CONFIG = EngineConfig(kv_cache_tokens=1024)


def cycle(size: int = 8, right: float = 0.9) -> torch.Tensor:
    table = torch.full((size, size), (1 - right) / (size - 1), dtype=torch.float64)
    for t in range(size):
        table[t, (t + 1) % size] = right
    return table


def two_right(batch: ProposeBatch, drafts: torch.Tensor) -> torch.Tensor:
    """The first two drafts are the successors, the third skips one, the rest go on from there."""
    last = drafts[:, -1] if drafts.shape[1] else torch.tensor([r.token_ids[-1] for r in batch.requests])
    return (last + (2 if drafts.shape[1] == 2 else 1)) % 8


def encode(messages: Messages) -> list[int]:
    return [int(character) for message in messages for character in message["content"]]


def asked(name: str, domain: str, *turns: str) -> Conversation:
    return Conversation(name, domain, [{"role": "user", "content": turns[0]}], turns[1:])


SETS = [
    PromptSet("one", (asked("a", "chat", "0"), asked("b", "math", "123"), asked("c", "chat", "45"))),
    PromptSet("two", (asked("d", "two", "7"),)),
]


class Case:
    """A target of counting numbers, the two-right drafter and the argmax, and a directory."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.target = TableTarget(cycle())
        self.directory = directory
        self.settings = EvaluationSettings(
            **{"temperatures": (0.0,), "max_tokens": 16, "warmup_tokens": 2, **settings}
        )
        self.contestants = make_contestants(
            self.target,
            {
                "scripted": (ScriptedDrafter(None, two_right, GAMMA), FixedLength(GAMMA)),
                "copy": (ScriptedDrafter.copy_target(self.target, 2), FixedLength(5)),
            },
            None,
            CONFIG,
            self.settings,
        )

    def run(self, sets: list[PromptSet] = SETS, progress: Any = lambda group: None) -> CellStore:
        store = CellStore(self.directory, {"max_tokens": self.settings.max_tokens, "drafters": {"copy": "x"}})
        run_evaluation(self.contestants, sets, self.settings, store, self.target, encode, progress)
        return store

    def summary(self, store: CellStore) -> dict[tuple[str, str, str], dict[str, Any]]:
        entries = summarise(list(store.cells.values()))
        return {(e["prompts"], e["domain"], e["drafter"]): e for e in entries}


def test_exact_figures_of_known_drafts(tmp_path: Path) -> None:
    case = Case(tmp_path)
    summary = case.summary(case.run())
    assert list(summary)[:3] == [("one", "chat", name) for name in ("none", "scripted", "copy")]
    assert {key[:2] for key in summary} == {("one", d) for d in ("chat", "math", "all")} | {("two", "all")}

    # 15 tokens in rounds of 2 accepted + 1; the fifth round has room for two drafts only.
    e = summary["one", "all", "scripted"]
    assert (e["gamma"], e["prompts_asked"], e["answers"], e["output_tokens"]) == (4, 3, 3, 48)
    assert (e["rounds"], e["committed"], e["drafted"], e["accepted"]) == (15, 45, 54, 30)
    assert e["accepted_length"] == 3
    assert e["accepted_length_interval"] == (3, 3)
    assert e["accepted_per_drafted"] == pytest.approx(30 / 54)
    assert e["committed_per_verified"] == pytest.approx(45 / (54 + 15))
    assert [p["conditional"] for p in e["positions"]] == [1, 1, 0]
    assert [p["reached"] for p in e["positions"]] == [15, 15, 12]
    assert [p["survival"] for p in e["positions"]] == [1, 1, 0]
    assert [p["soft"] for p in e["positions"]] == pytest.approx([0.9, 0.9, 0.1 / 7])
    assert e["positions"][0]["conditional_interval"] == pytest.approx((15 / (15 + 3.8415), 1), abs=1e-4)
    assert (e["identical"], e["compared"]) == (3, 3)
    assert summary["one", "math", "scripted"]["rounds"] == 5
    assert summary["one", "math", "scripted"]["accepted_length_interval"] is None

    assert summary["two", "all", "copy"]["gamma"] == 2  # what the drafter can do
    assert summary["two", "all", "copy"]["accepted_length"] == 3
    plain = summary["one", "all", "none"]
    assert (plain["accepted_length"], plain["positions"], plain["draft_ms"]) == (1, [], None)
    assert plain["speedup"] == {"median": 1, "min": 1, "max": 1}
    assert first_divergences([*case.run().cells.values()]) == []
    # 16 tokens of a cycle of 8 hold 13 4-grams, 5 of them repeats: not looping
    assert e["repetition_share"] == pytest.approx(5 / 13)
    assert e["accepted_length_non_looping"] == 3


def test_looping_outputs_are_left_out(tmp_path: Path) -> None:
    case = Case(tmp_path, max_tokens=31)
    entry = case.summary(case.run())["one", "all", "scripted"]
    assert entry["looping_answers"] == 3
    assert entry["accepted_length_non_looping"] is None
    assert entry["accepted_length"] == 3


def test_unresolved_suspects_have_no_rate(tmp_path: Path) -> None:
    case = Case(tmp_path, collisions=CollisionThresholds(alternatives=0))
    assert case.summary(case.run())["one", "all", "scripted"]["collisions"]["rate"] is None


def test_groups_hold_one_domain_and_take_turns() -> None:
    groups = list(plan_groups(SETS, EvaluationSettings(concurrency=2)))
    expected = [("chat", "ac"), ("math", "b")]
    shown = [(g.domain, "".join(c.id for c in g.conversations)) for g in groups]
    assert shown == [*expected, *expected, ("two", "d"), ("two", "d")]
    assert [g.temperature for g in groups] == [0, 0, 1, 1, 0, 1]


@pytest.mark.parametrize("concurrency", [1, 2])
def test_turns_follow_the_models_own_answers(tmp_path: Path, concurrency: int) -> None:
    table = cycle(64)
    target = TableTarget(table, eos_token_ids=(5,))
    settings = EvaluationSettings(
        temperatures=(0.0,), concurrency=concurrency, max_tokens=20, warmup_tokens=0
    )
    tokenizer = tiny_tokenizer(tmp_path)
    seen: list[list[tuple[str, str]]] = []

    def recorded(messages: Messages) -> list[int]:
        seen.append([(m["role"], m["content"]) for m in messages])
        return tokenizer.encode("".join(m["content"] for m in messages))

    drafter = ScriptedDrafter.copy_target(target, 3)
    contestants = make_contestants(target, {"copy": (drafter, FixedLength(3))}, tokenizer, CONFIG, settings)
    store = CellStore(tmp_path / "out", {})
    sets = [PromptSet("s", (asked("x", "s", "a", "c", "d"), asked("y", "s", "b")))]
    run_evaluation(contestants, sets, settings, store, target, recorded)
    longest = [("user", "a"), ("assistant", "bcdef"[:4]), ("user", "c"), ("assistant", "de"), ("user", "d")]
    assert seen.count(longest) == seen.count(longest[:3]) == 2  # plain and drafted
    (entry,) = (e for e in summarise([*store.cells.values()]) if e["drafter"] == "copy")
    assert (entry["prompts_asked"], entry["answers"], entry["identical"]) == (2, 4, 4)


def test_a_conversation_ends_where_the_context_does(tmp_path: Path) -> None:
    target = TableTarget(cycle(), max_context=24)
    settings = EvaluationSettings(temperatures=(0.0,), max_tokens=4, warmup_tokens=0)
    contestants = make_contestants(target, {}, None, EngineConfig(), settings)
    sets = [PromptSet("s", (asked("x", "s", "1" * 10, "2" * 8, "3" * 6),))]
    store = CellStore(tmp_path, {})
    run_evaluation(contestants, sets, settings, store, target, encode)
    (entry,) = summarise([*store.cells.values()])
    assert (entry["prompts_asked"], entry["answers"]) == (1, 2)
    too_long = [PromptSet("t", (asked("y", "t", "1" * 24),))]
    with pytest.raises(DSparkError, match="prompt y has 24 tokens, the context holds 24: leave it out"):
        run_evaluation(contestants, too_long, settings, store, target, encode)


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    def interrupt(group: Group) -> None:
        if group.domain == "math":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Case(tmp_path).run(progress=interrupt)
    path = tmp_path / "cells.jsonl"
    first = path.read_text()
    assert first.count("\n") == 2 * 3  # groups a and b, three ways each
    path.write_text(first + first[:50])  # the machine went down in the middle of a line

    done: list[str] = []
    case = Case(tmp_path)
    store = case.run(progress=lambda group: done.append(group.conversations[0].id))
    assert done == ["a", "b", "c", "d"]
    whole = path.read_text()
    assert whole.startswith(first)
    assert whole.count("\n") == 4 * 3
    before = case.target.forwards
    assert case.run().cells == store.cells
    assert case.target.forwards == before
    assert case.summary(store)["one", "all", "scripted"]["accepted_length"] == 3


def test_a_half_written_group_is_measured_again(tmp_path: Path) -> None:
    Case(tmp_path).run()
    path = tmp_path / "cells.jsonl"
    path.write_text("".join(line + "\n" for line in path.read_text().split("\n")[:4]))
    store = Case(tmp_path).run()
    assert len(store.cells) == 4 * 3
    assert path.read_text().count("\n") == 4 + 3 * 3


def test_other_prompts_of_the_same_id_are_other_cells(tmp_path: Path) -> None:
    Case(tmp_path).run([SETS[1]])
    store = Case(tmp_path).run([PromptSet("two", (asked("d", "two", "1"),))])
    assert len(store.cells) == 2 * 3


def test_a_directory_keeps_one_setting(tmp_path: Path) -> None:
    CellStore(tmp_path, {"max_tokens": 3, "drafters": {"a": "1"}})  # nothing measured: nothing to keep
    Case(tmp_path).run([SETS[1]])
    with pytest.raises(DSparkError, match="with max_tokens 16, not 17: choose another directory"):
        CellStore(tmp_path, {"max_tokens": 17})
    with pytest.raises(DSparkError, match="another drafter 'copy'"):
        CellStore(tmp_path, {"max_tokens": 16, "drafters": {"copy": "y"}})
    CellStore(tmp_path, {"max_tokens": 16, "drafters": {"new": "z"}})
    kept = json.loads((tmp_path / "settings.json").read_text())
    assert kept["drafters"] == {"copy": "x", "new": "z"}


def test_a_greedy_divergence_is_found_and_later_turns_are_not_compared(tmp_path: Path) -> None:
    case = Case(tmp_path)
    wrong = cycle()
    wrong[3] = wrong[4]  # 3 is followed by 5
    case.contestants.append(Contestant("wrong", Engine(TableTarget(wrong), config=CONFIG), None, 0))
    sets = [PromptSet("s", (asked("x", "s", "0", "1"), asked("y", "s", "7")))]
    tokenizerless = case.run(sets)
    found = first_divergences([*tokenizerless.cells.values()])
    assert found[0] == {
        "drafter": "wrong", "prompts": "s", "conversation": "x", "turn": 0, "position": 3, "plain": 4, "drafted": 5,
    }  # fmt: skip
    assert [d["conversation"] for d in found] == ["x", "y"]
    entry = case.summary(tokenizerless)["s", "all", "wrong"]
    assert (entry["answers"], entry["identical"], entry["compared"]) == (3, 0, 2)


def test_only_drafters_that_verify_everything(tmp_path: Path) -> None:
    drafter = ScriptedDrafter.fixed([1])
    for drafters, message in (
        ({"x": (drafter, Threshold(1, 0.5))}, "x: an evaluation verifies all drafts"),
        ({"none": (drafter, FixedLength(1))}, "'none' is the name of plain decoding"),
    ):
        with pytest.raises(DSparkError, match=message):
            make_contestants(TableTarget(cycle()), drafters, None, CONFIG, EvaluationSettings())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperatures": ()}, "at least one temperature"),
        ({"temperatures": (-1.0,)}, "temperature"),
        ({"max_tokens": 1}, "max_tokens must be 2 or more"),
        ({"concurrency": 0}, "concurrency must be 1 or more"),
        ({"collisions": CollisionThresholds(probable=0.1, improbable=0.1)}, "improbable < probable"),
        ({"collisions": CollisionThresholds(alternatives=-1)}, "alternatives must be 0 or more"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DSparkError, match=message):
        EvaluationSettings(**settings)


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_prompt_files(tmp_path: Path) -> None:
    source = write(
        tmp_path / "mixed.jsonl",
        '{"turns": ["one", "two", "three"]}',
        "",
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "domain": "code"}',
        '{"prompt": "p\u2028q", "id": 7}',
    )
    builtin, mixed = load_prompt_sets(["builtin", source], limit=3)
    assert (len(builtin.conversations), builtin.domains) == (3, ("chat", "math", "code"))
    first, second, third = mixed.conversations
    assert first == asked("mixed-1", "mixed", "one", "two", "three")
    assert [m["role"] for m in second.messages] == ["system", "user"]
    assert (second.id, second.domain) == ("mixed-3", "code")
    assert load_conversations(source) == mixed.conversations
    assert load_conversations("3") == builtin.conversations
    assert (third.id, third.messages[0]["content"]) == ("7", "p\u2028q")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is not JSON"),
        ('{"turns": []}', "line 1: expected an object"),
        ('{"turns": ["a", 3]}', "line 1: expected an object"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
            "user's last",
        ),
        ("[]", "line 1: expected an object"),
        ('{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 1}', "two prompts have the id '1'"),
        ("", "there are no prompts"),
    ],
)
def test_bad_prompt_files(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(DSparkError, match=message):
        load_prompt_sets([write(tmp_path / "x.jsonl", line)])


def test_bad_prompt_sources(tmp_path: Path) -> None:
    with pytest.raises(DSparkError, match="cannot read prompts from 'nowhere'"):
        load_prompt_sets(["nowhere"])
    with pytest.raises(DSparkError, match="two prompt sets are called 'builtin'"):
        load_prompt_sets(["builtin", "builtin"])
    with pytest.raises(DSparkError, match="number of prompts must be 1 or more"):
        load_prompt_sets(["builtin"], 0)


def report_of(store: CellStore, **changes: Any) -> dict[str, Any]:
    cells = list(store.cells.values())
    values = {
        "complete": True,
        "model": "counting",
        "versions": {"dspark": "0"},
        "machine": {"cpu": "abacus", "cores": 1, "threads": 1},
        "settings": {"max_tokens": 16},
        "divergences": first_divergences(cells),
        "summary": summarise(cells),
    }
    return {**values, **changes}


def test_report_files(tmp_path: Path) -> None:
    store = Case(tmp_path).run()
    write_report(tmp_path, report_of(store), ["f.png"])
    text = (tmp_path / "report.md").read_text()
    assert "| all | scripted | 4 | 3.00 (3.00..3.00) | 3.00 | 0.556 | 0.652 | 0.00% (0 of 39) |" in text
    assert (
        "| all | scripted | 1.00 (0.80..1.00) n=15 | 1.00 (0.80..1.00) n=15 | 0.00 (0.00..0.24) n=12 |"
        in text
    )
    assert "![f.png](f.png)" in text
    assert "Incomplete" not in text
    assert all(f"**{name}**" in text for name in DEFINITIONS)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "summary.csv").read_text())))
    (row,) = (r for r in rows if (r["prompts"], r["domain"], r["drafter"]) == ("one", "all", "scripted"))
    assert (row["accepted_length"], row["collision_pairs"], row["identical"]) == ("3.0", "39", "3")
    positions = list(csv.DictReader(io.StringIO((tmp_path / "positions.csv").read_text())))
    assert [p["reached"] for p in positions if (p["prompts"], p["drafter"]) == ("two", "copy")] == ["5", "5"]
    assert json.loads((tmp_path / "evaluation.json").read_text())["model"] == "counting"

    write_report(tmp_path, report_of(store, complete=False))
    assert "**Incomplete**" in (tmp_path / "report.md").read_text()


def test_figures_without_matplotlib_name_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DSparkError, match=r"pip install 'dspark\[figures\]'"):
        draw_figures(tmp_path, [])


def test_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra dspark[figures]")
    store = Case(tmp_path, temperatures=(0.0, 1.0)).run()
    files = draw_figures(tmp_path, summarise(list(store.cells.values())))
    kinds = ("accepted-length", "conditional-acceptance", "draft-time")
    assert files == [f"{kind}-T{t}.png" for t in (0, 1) for kind in kinds]
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in files)
