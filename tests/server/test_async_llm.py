"""AsyncLLM over a tiny model: the texts of `LLM.generate`, and nothing left behind whoever goes away."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from dspark import LLM, DSparkError, SamplingParams
from dspark.async_llm import AsyncLLM, OverloadedError
from dspark.engine.engine import Engine

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
PROMPTS = ["abc", "hello there", "x", "once upon a time"]


def make(model: Path, **options) -> LLM:
    return LLM(model, speculative_config={"method": "ngram"}, kv_cache_tokens=1024, **options)


@pytest.fixture
def llm(tiny_model: Path) -> Iterator[AsyncLLM]:
    served = AsyncLLM(make(tiny_model, max_num_seqs=4))
    yield served
    served.close()


def is_empty(engine: Engine) -> bool:
    return not engine.has_unfinished and engine.pool.num_free == engine.pool.num_blocks


def test_requests_that_come_together_run_in_one_batch(llm: AsyncLLM, tiny_model: Path) -> None:
    alone = [out.token_ids for out in make(tiny_model).generate(PROMPTS, GREEDY)]

    async def all_of_them() -> list[list[int]]:
        outputs = await asyncio.gather(*(llm.generate(prompt, GREEDY) for prompt in PROMPTS))
        return [output.token_ids for output in outputs]

    assert asyncio.run(all_of_them()) == alone
    assert llm.llm.engine.timings.steps < 4 * 12
    assert is_empty(llm.llm.engine)


def test_a_stream_adds_up(llm: AsyncLLM) -> None:
    async def read() -> tuple[str, str]:
        events = [event async for event in llm.stream("abc", GREEDY)]
        assert [event.output is None for event in events] == [True] * (len(events) - 1) + [False]
        return "".join(event.text for event in events), events[-1].output.text

    text, whole = asyncio.run(read())
    assert text == whole != ""


def test_a_reader_that_goes_away_takes_its_request_along(llm: AsyncLLM) -> None:
    async def leave() -> None:
        events = llm.stream("abc", LONG)
        await anext(events)
        await events.aclose()
        task = asyncio.create_task(llm.generate("xyz", LONG))
        await anext(llm.stream("abc", GREEDY))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await llm.generate("abc", GREEDY)  # behind the two commands to abort

    asyncio.run(leave())
    assert llm.num_running == 0
    assert is_empty(llm.llm.engine)


def test_whoever_is_cancelled_before_the_request_is_in_takes_it_along(llm: AsyncLLM) -> None:
    async def cancel() -> None:
        task = asyncio.create_task(llm.generate("abc", LONG))
        await asyncio.sleep(0)  # it has asked, and cannot have been answered yet
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await llm.generate("abc", GREEDY)

    asyncio.run(cancel())
    assert "async-0" not in llm._deliver
    assert is_empty(llm.llm.engine)


def test_a_reader_whose_loop_is_closed_stops_nobody_else(llm: AsyncLLM) -> None:
    loop = asyncio.new_event_loop()
    events = llm.stream("abc", LONG)
    loop.run_until_complete(anext(events))
    loop.close()
    assert len(asyncio.run(llm.generate("abc", GREEDY)).token_ids) == 12
    assert llm.healthy


def test_what_is_refused_is_refused_to_its_own_caller(llm: AsyncLLM) -> None:
    async def ask() -> None:
        good, bad = await asyncio.gather(
            llm.generate("abc", GREEDY),
            llm.generate({"prompt_token_ids": [10**6]}, GREEDY),
            return_exceptions=True,
        )
        assert len(good.token_ids) == 12
        assert isinstance(bad, DSparkError)

    asyncio.run(ask())


def test_more_than_may_wait_are_told_so(tiny_model: Path) -> None:
    llm = AsyncLLM(make(tiny_model, max_num_seqs=1), max_waiting=1)

    async def ask() -> list[object]:
        return await asyncio.gather(*(llm.generate("abc", LONG) for _ in range(3)), return_exceptions=True)

    first, second, third = asyncio.run(ask())
    assert first.token_ids == second.token_ids
    assert isinstance(third, OverloadedError)
    llm.close()
    with pytest.raises(DSparkError, match="max_waiting"):
        AsyncLLM(llm.llm, max_waiting=-1)


def test_closing_ends_what_runs(llm: AsyncLLM) -> None:
    engine = llm.llm.engine

    async def close() -> None:
        events = llm.stream("abc", LONG)
        await anext(events)
        await asyncio.to_thread(llm.close)
        last = [event async for event in events][-1]
        assert last.output.finish_reason == "abort"
        with pytest.raises(DSparkError, match="closed"):
            await llm.generate("abc", GREEDY)

    asyncio.run(close())
    assert not llm.healthy
    assert (llm.num_running, llm.num_waiting) == (0, 0)
    assert is_empty(engine)
    with pytest.raises(DSparkError, match="closed"):
        llm.llm.generate("abc", GREEDY)


def test_a_round_that_fails_ends_its_requests_and_no_others(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = llm.llm.engine.runner
    verify, calls = runner.verify, []

    def fail_once(*args):
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("out of luck")
        return verify(*args)

    monkeypatch.setattr(runner, "verify", fail_once)

    async def ask() -> None:
        assert (await llm.generate("abc", GREEDY)).finish_reason == "abort"
        assert (await llm.generate("abc", GREEDY)).finish_reason == "length"

    asyncio.run(ask())
    assert llm.healthy
