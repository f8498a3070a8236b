"""`dspark evaluate`: accepted length, position-wise acceptance, collisions and speed of several drafters."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.cli.destination import check_directory
from dspark.cli.evaluate_report import report
from dspark.cli.lists import floats
from dspark.cli.options import add_model_options, load_llm, speculative_config
from dspark.drafters.methods import NAMES

if TYPE_CHECKING:
    from dspark.evaluate.cells import CellStore
    from dspark.evaluate.conversations import PromptSet
    from dspark.evaluate.evaluation import EvaluationSettings

__all__ = ["add_parser"]


def add_parser(verbs: Any) -> None:
    """Add the verb to the `add_subparsers` object of `dspark`."""
    parser = verbs.add_parser(
        "evaluate",
        help="how good are drafters?",
        description=__doc__,
        epilog="The same command goes on with an interrupted run, or adds drafters, prompts and temperatures to it. "
        "Exit code 1: at temperature 0 a drafter's output is not plain decoding's.",
    )
    parser.add_argument(
        "--drafters",
        default="none,ngram,dspark",
        metavar="LIST",
        help=f"names ({', '.join(NAMES)}) and checkpoint directories (%(default)s); none is always measured",
    )
    parser.add_argument(
        "--prompts",
        nargs="+",
        default=["builtin"],
        metavar="SET",
        help="builtin, or .jsonl files (%(default)s)",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="first N prompts of each set; default: all")
    parser.add_argument("--temperatures", type=floats, default="0,1", metavar="LIST", help="%(default)s")
    parser.add_argument(
        "--max-tokens", type=int, default=256, metavar="N", help="of each answer (%(default)s)"
    )
    parser.add_argument(
        "--concurrency", type=int, default=1, metavar="N", help="conversations at a time (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of sampling (%(default)s)")
    parser.add_argument(
        "--output", default="evaluation", metavar="DIR", help="directory of the results (%(default)s)"
    )
    parser.add_argument(
        "--figures", action="store_true", help="draw figures, too (needs the extra dspark[figures])"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    _add_collision_options(parser)
    add_model_options(parser, with_method=False, with_drafter=False)
    parser.set_defaults(run=run)


def _add_collision_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("cross-mode collisions")
    group.add_argument(
        "--probable",
        type=float,
        default=0.1,
        metavar="P",
        help="least probability of each part (%(default)s)",
    )
    group.add_argument(
        "--improbable",
        type=float,
        default=0.01,
        metavar="P",
        help="most probability of the second part behind the first (%(default)s)",
    )
    group.add_argument(
        "--alternatives",
        type=int,
        default=4,
        metavar="N",
        help="tokens tried in the place of the first part; 0 skips it (%(default)s)",
    )


@dataclass(frozen=True)
class _Entrant:
    """A drafter of the command line: its `speculative_config`, and what tells it from another of the same label."""

    label: str
    config: dict[str, Any]
    fingerprint: str


def run(args: argparse.Namespace) -> int:
    """Check everything that is cheap to check, measure what is missing, report."""
    from dspark.evaluate.cells import CellStore
    from dspark.evaluate.conversations import load_prompt_sets
    from dspark.evaluate.evaluation import EvaluationSettings, plan_groups
    from dspark.evaluate.figures import require_matplotlib
    from dspark.evaluate.rounds import CollisionThresholds

    if args.figures:
        require_matplotlib()
    settings = EvaluationSettings(
        temperatures=args.temperatures,
        max_tokens=args.max_tokens,
        concurrency=args.concurrency,
        seed=args.seed,
        collisions=CollisionThresholds(
            probable=args.probable, improbable=args.improbable, alternatives=args.alternatives
        ),
    )
    check_directory(Path(args.output).expanduser())
    sets = load_prompt_sets(args.prompts, args.limit)
    entrants = _entrants(args)
    store = CellStore(Path(args.output).expanduser(), _fixed(args, settings, entrants))
    names = ["none", *(entrant.label for entrant in entrants)]
    groups = list(plan_groups(sets, settings))
    keys = [group.key(name) for group in groups for name in names]
    try:
        if store.missing(keys):
            _measure(args, settings, sets, entrants, store, len(groups))
    except KeyboardInterrupt:
        report(args, store, [store.cells[key] for key in keys if key in store.cells], complete=False)
        raise
    return report(args, store, [store.cells[key] for key in keys], complete=True)


def _entrants(args: argparse.Namespace) -> list[_Entrant]:
    from dspark import __version__
    from dspark.core import DSparkError
    from dspark.drafters.checkpoint import read_drafter_config

    entrants: dict[str, _Entrant] = {}
    for text in dict.fromkeys(part.strip() for part in args.drafters.split(",")):
        count, path = args.num_speculative_tokens, Path(text).expanduser()
        if text == "none":
            continue
        if text in NAMES:
            label, config = text, speculative_config(text, None, count)
            fingerprint = f"shipped with dspark {__version__}"
        elif text and path.is_dir():
            label = "/".join(path.resolve().parts[-2:])
            config = speculative_config(read_drafter_config(path).method, str(path), count)
            fingerprint = _fingerprint(path)
        else:
            raise DSparkError(
                f"--drafters: {text!r} is neither a method ({', '.join(NAMES)}) nor a checkpoint directory"
            )
        if label in entrants:
            raise DSparkError(f"--drafters: two checkpoints end in {label!r}: rename one of the directories")
        entrants[label] = _Entrant(label, config, fingerprint)
    return list(entrants.values())


def _fingerprint(directory: Path) -> str:
    """Of a checkpoint's contents."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.json")) + sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def _fixed(
    args: argparse.Namespace, settings: EvaluationSettings, entrants: Sequence[_Entrant]
) -> dict[str, Any]:
    """What all cells of a directory have in common."""
    names = ("model", "dtype", "activation_dtype", "device", "threads", "num_speculative_tokens")
    shared = ("max_tokens", "concurrency", "seed", "collisions")
    return {
        **{name: getattr(args, name) for name in names},
        **{name: value for name, value in asdict(settings).items() if name in shared},
        "drafters": {entrant.label: entrant.fingerprint for entrant in entrants},
    }


def _measure(
    args: argparse.Namespace,
    settings: EvaluationSettings,
    sets: Sequence[PromptSet],
    entrants: Sequence[_Entrant],
    store: CellStore,
    num_groups: int,
) -> None:
    """Load the target once, and every drafter over it."""
    from dspark.cli.progress import progress_bar
    from dspark.drafters.registry import build_drafter
    from dspark.evaluate.evaluation import make_contestants, run_evaluation

    llm = load_llm(args, {"method": "none"}, max_num_seqs=args.concurrency)
    target, tokenizer, config = llm.engine.target, llm.tokenizer, llm.engine.config
    del llm  # its KV pool is not needed
    drafters = {}
    for entrant in entrants:
        drafter, policy = build_drafter(entrant.config, target)
        assert drafter is not None, "only plain decoding has no drafter"
        drafters[entrant.label] = (drafter, policy)
    contestants = make_contestants(target, drafters, tokenizer, config, settings)
    with progress_bar("groups", num_groups) as advance:
        run_evaluation(
            contestants,
            sets,
            settings,
            store,
            target,
            lambda messages: tokenizer.apply_chat_template(messages),
            lambda group: advance(f"{group.prompts} T={group.temperature:g}"),
        )
