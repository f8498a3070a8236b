"""Run an engine to the end and hold it to its own promises on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dspark.core import RequestOutput, SamplingParams
from dspark.engine.engine import Engine

__all__ = ["check_step", "run_engine"]


def run_engine(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    after_step: Callable[[Engine], None] | None = None,
) -> list[RequestOutput]:
    """Add one request a prompt, step until none is left, and return the outputs in order.

    `check_step` runs after every step, `after_step` behind it. At the end the events must add up to the
    outputs and every block must be free.
    """
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    ids = [engine.add(prompt, p) for prompt, p in zip(prompts, each, strict=True)]
    tokens: dict[str, list[int]] = {i: [] for i in ids}
    text = dict.fromkeys(ids, "")
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished:
        events = engine.step()
        for event in events:
            assert event.request_id not in outputs, "an event behind the last one of its request"
            assert len(event.origins) == len(event.token_ids)
            tokens[event.request_id] += event.token_ids
            text[event.request_id] += event.text
            if event.output is not None:
                outputs[event.request_id] = event.output
        check_step(engine)
        if after_step is not None:
            after_step(engine)
    for i in ids:
        assert outputs[i].finished
        assert outputs[i].token_ids == tokens[i], "the events' tokens are not the output's"
        assert outputs[i].text == text[i], "the events' text is not the output's"
    assert engine.pool.num_free == engine.pool.num_blocks, "blocks leaked"
    return [outputs[i] for i in ids]


def check_step(engine: Engine) -> None:
    """Assert what holds between two steps: block ownership and the length algebra of every request."""
    scheduler = engine.scheduler
    engine.pool.check_integrity(r.table for r in (*scheduler.running, *scheduler.waiting))
    for r in scheduler.running:
        request = r.request
        assert not request.finished
        assert request.pending >= 1
        assert 0 <= request.cached <= r.table.capacity(engine.pool.block_size)
        assert request.committed < request.max_total
        if not r.prefilling:
            assert request.pending == 1
    for r in scheduler.waiting:
        assert not r.table.blocks
        assert r.request.cached == 0
