"""Varied prompts for training answers: topics, programs, sums, documents to work on, follow-up questions.

    python examples/varied_prompts.py ANSWERS.jsonl... --output prompts.jsonl [--count 3000] [--seed 0]

ANSWERS are jsonl or jsonl.gz files that `dspark data generate` wrote: their answers serve as documents (to summarise, to explain,
to question) and as first turns of longer conversations. Each line of the output is
{"domain", "source", "messages"}. No built-in prompt is among them: those stay held out.
"""
# ruff: noqa: E501 - lists of phrases

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from dspark.errors import DSparkError
from dspark.train.data import conversation, read_records

TOPICS = """
sleep; houseplants; compost; bicycle maintenance; public speaking; job interviews; sourdough; knitting; chess openings;
budgeting; renting a flat; moving house; insulation; solar panels; electric cars; tides; volcanoes; the water cycle;
photosynthesis; vaccines; antibiotics; blood pressure; back pain; stretching; marathon training; yoga; meditation;
learning Spanish; learning the piano; watercolours; black and white photography; film editing; podcasts; writing a novel;
poetry; fairy tales; detective stories; the Roman empire; the silk road; the industrial revolution; printing; the moon
landing; black holes; comets; satellites; weather forecasts; climate change; coral reefs; bees; wolves; migrating birds;
dinosaurs; cats; puppies; aquariums; horses; dairy farming; orchards; vegetable gardens; mushrooms; tea; coffee; chocolate;
cheese; pasta; curry; soups; pickles; picnics; school lunches; birthday parties; weddings; funerals; neighbours; lost
property; complaints; refunds; insurance; taxes; pensions; mortgages; inflation; interest rates; shares; trade; unemployment;
elections; parliaments; courts; contracts; privacy; passwords; phishing; backups; home networks; printers; spreadsheets;
email; meetings; minutes; teamwork; feedback; remote work; burnout; time management; exams; homework; reading aloud;
libraries; museums; theatre; opera; jazz; folk music; football; tennis; swimming; hiking; camping; maps; compasses; sailing;
trains; buses; airports; packing; hotels; Japan; Brazil; Kenya; Iceland; Italy; Canada; the Alps; deserts; rivers; lakes;
islands; lighthouses; bridges; tunnels; skyscrapers; castles; clocks; telescopes; microscopes; lasers; magnets; batteries;
engines; steam; gears; pulleys; friction; gravity; sound; light; colour; mirrors; glass; steel; concrete; wood; paper; ink;
recycling; plastics; paint; soap; salt; sugar; vitamins; allergies; first aid; dentists; glasses; hearing; memory; habits;
motivation; friendship; grandparents; siblings; adoption; toys; board games; puzzles; magic tricks; kites; balloons
""".replace("\n", " ")

ASKS = """
What is the best way to get started with {}?; Explain {} to a ten-year-old.; Explain {} in three short paragraphs.;
Give me five practical tips about {}.; What are the most common mistakes people make with {}?; Why does {} matter?;
Write a short story that has to do with {}.; Write a poem about {}, in rhyming couplets.; What is the history of {}?;
Write a friendly email to a colleague about {}.; Make a one-week plan for somebody who wants to learn about {}.;
What should I know about {} before I spend any money on it?; List the advantages and disadvantages of {}.;
Compare {} and {}.; How are {} and {} related?; I have to give a five-minute talk on {}. Please draft it.;
My daughter is fascinated by {}. What could we do together this weekend?; Write ten quiz questions about {}, with answers.;
I have never understood {}. Can you describe it step by step?; Write a dialogue between two friends who disagree about {}.;
Write a product description for a magazine about {}.; Suggest a title and an outline for a book about {}.;
Which questions should I ask an expert on {}?; Tell me a surprising fact about {} and explain it.;
Write a letter to a newspaper about {}.; How would you measure whether somebody is good at {}?;
Write a checklist for {}.; What might {} look like in fifty years?; Give me a glossary of ten terms about {}.;
I am worried about {}. What can I do?; We are a small club and want to do something with {}. Any ideas?;
Write a Python function that stores a list of notes about {} and searches them.;
Write an HTML page about {}, with a heading, a list and a table.; Write a SQL schema for a database about {}.;
Write a JavaScript class that models {}.; A shop sells things to do with {} at 12 each and gives 15% off from five on.
What do seven cost?; Plan a budget of 300 for {} over six weeks and show the sums in a table.
""".replace("\n", " ")

DOCUMENTS = """
Summarise the following text in five bullet points.; Summarise this in one sentence.; Rewrite this text in simpler words.;
Correct and improve this text.; What are the main claims of this text?; Write a reply to this message.;
Write three questions that this text answers, and answer them.; Turn this text into a formal letter.; Shorten this text by half.;
Which parts of this text could be wrong, and why?; Write a title and a short abstract for this text.; Turn this into a table.;
Translate this text into Spanish.; Rewrite this as a conversation between a teacher and a pupil.; List all names, numbers and
dates in this text.
""".replace("\n", " ")

CODE = """
Explain this code line by line.; Write tests for this code.; Review this code and suggest improvements.;
Rewrite this code with better names and comments.; Find the bugs in this code.; Rewrite this in JavaScript.;
Add error handling to this code.; What does this code print, and why?
""".replace("\n", " ")

LANGUAGES = """
Python; Python; Python; JavaScript; TypeScript; Java; C; C++; Go; Rust; SQL; Bash; Ruby; PHP; C#; Kotlin
""".replace("\n", " ")

PROGRAMS = """
reverses a linked list; checks whether a string is a palindrome; counts the words of a text file; parses a CSV file without a
library; finds the shortest path in a grid; sorts a list of people by last name; merges two sorted lists; finds all anagrams in a
list; validates an email address; converts Roman numerals; implements a stack with two queues; caches the results of slow calls;
retries a request three times; reads JSON from a URL and prints a table; renames all files in a directory; computes a moving
average; removes duplicates but keeps the order; finds the longest common prefix; balances brackets; evaluates an arithmetic
expression; simulates dice; draws a progress bar; hashes a password; rotates a matrix; finds prime numbers up to n; multiplies two
matrices; walks a binary tree level by level; detects a cycle in a graph; groups log lines by hour; finds overlapping intervals;
splits a bill among friends; converts temperatures; implements an LRU cache; schedules jobs by priority; counts vowels; flattens
nested lists; implements binary search; computes the edit distance of two words; finds the second largest number; checks a Sudoku
board; encodes a string by run lengths; computes compound interest; formats a duration in hours and minutes; generates all
permutations; finds the missing number; queries customers without orders; joins orders with products and sums the revenue; updates
prices by category; stores sessions with an expiry time; limits how often a user may call an API
""".replace("\n", " ")

CODE_ASKS = """
Write a {} function that {}.; Write a {} program that {}, with comments.; In {}, how do I write something that {}?;
Write {} code that {}, and three tests for it.; Show two ways to write {} code that {}, and compare them.;
I am learning {}. Please explain step by step how to write a function that {}.; Write a {} class that {}, and show how it is used.;
Give me a short {} example that {}, then explain its running time.
""".replace("\n", " ")

SUMS = """
A train leaves at {a}:15 and travels {b} km at {c} km/h. When does it arrive?; {a} workers paint a wall in {b} hours. How long do
{c} workers take?; A jacket costs {b} euros after a discount of {a}%. What did it cost before?; What is {a}% of {b}?;
Solve {a}x + {b} = {c} for x and check the answer.; Solve x^2 - {a}x - {b} = 0.; A rectangle is {a} m wide and {b} m long. What
are its area and its perimeter?; Mia has {b} marbles. She gives a third to Tom and {a} to Ann. How many are left?; The mean of
{a}, {b} and a third number is {c}. What is the third number?; A bag holds {a} red and {b} blue balls. Two are drawn. What is the
probability that both are red?; A tank of {b} litres fills at {a} litres a minute and leaks 2 litres a minute. When is it full?;
Convert {b} miles to kilometres and {c} pounds to kilograms.; A loan of {b} euros bears {a}% interest a year. What is owed after 3
years with compound interest?; What is the greatest common divisor of {b} and {c}?; Simplify {b}/{c} and write it as a decimal.;
A farmer has {a} cows and twice as many hens. How many legs do they have together?; Sam is {a} years older than Eva, and together
they are {b}. How old are they?; A car uses {a} litres per 100 km. What do {b} km cost at 1.80 euros a litre?; Find the slope and
the intercept of the line through ({a}, {b}) and ({b}, {c}).; In how many ways can {a} people sit in a row?; Differentiate
f(x) = {a}x^3 - {b}x + {c}.; What is the sum of the whole numbers from {a} to {c}?; A shop sold {a} cakes on Monday and {b}% more
on Tuesday. How many in all?; A recipe for {a} people needs {b} g of flour. How much do {c} people need?; Prove that the sum of
two odd numbers is even, with {a} and {b} as an example.; A ladder of {b} dm leans on a wall, its foot {a} dm away. How high does
it reach?; What is the median of {c}, {a}, {b}, {a} and {c}?; Tickets cost {a} euros for adults and half for children. {b} people
paid {c} euros. How many were children?
""".replace("\n", " ")

FOLLOW_UPS = """
Can you give me an example?; Please make that shorter.; Explain the second point in more detail.; Why is that?;
Thank you. What should I do first?; Please write that as a list.; Are you sure? Check it step by step.;
Now explain it to a child.; What are the exceptions?; Could you put it in a more friendly tone?; What else should I consider?;
Summarise what you said in one sentence.
""".replace("\n", " ")


def phrases(text: str) -> list[str]:
    """The phrases that semicolons separate."""
    return [" ".join(phrase.split()) for phrase in text.split(";")]


def read_answers(paths: Iterable[Path]) -> Iterator[dict]:
    """Domain and messages of every record.

    Raises:
        DSparkError: a file that cannot be read, or a record without an answer; the message says where.
    """
    for path in paths:
        for number, record in read_records(path):
            messages = conversation(record, f"{path}:{number}")
            if len(messages) < 2 or messages[-1]["role"] != "assistant":
                raise DSparkError(f"{path}:{number} needs messages that end with an answer of the assistant")
            yield {"domain": record.get("domain") or "chat", "messages": messages}


def varied(answers: list[dict], seed: int) -> Iterator[dict]:
    """Prompts without end: 35% topics, 15% programs, 15% sums, 20% documents, 15% follow-ups."""
    rng = random.Random(seed)
    topics, asks, sums = phrases(TOPICS), phrases(ASKS), phrases(SUMS)
    languages, programs, code_asks = phrases(LANGUAGES), phrases(PROGRAMS), phrases(CODE_ASKS)
    while True:
        kind = rng.random() * (1.0 if answers else 0.65)
        if kind < 0.35:
            ask = rng.choice(asks)
            yield _row("chat", "topic", ask.format(*rng.sample(topics, 2)))
            continue
        if kind < 0.5:
            yield _row(
                "code", "program", rng.choice(code_asks).format(rng.choice(languages), rng.choice(programs))
            )
            continue
        if kind < 0.65:
            a, b, c = (rng.randint(*bounds) for bounds in ((2, 12), (15, 90), (100, 600)))
            yield _row("math", "sum", rng.choice(sums).format(a=a, b=b, c=c))
            continue
        row = rng.choice(answers)
        question, answer = row["messages"][-2]["content"], row["messages"][-1]["content"]
        if kind < 0.85:
            tasks = CODE if row["domain"] == "code" else DOCUMENTS
            yield _row(row["domain"], "document", f"{rng.choice(phrases(tasks))}\n\n{answer[:2400]}")
        else:
            turns = [question[:2000], answer[:2000], rng.choice(phrases(FOLLOW_UPS))]
            yield _row(row["domain"], "follow-up", *turns)


def _row(domain: str, source: str, *turns: str) -> dict:
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]
    return {"domain": domain, "source": source, "messages": messages}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("answers", nargs="*", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        answers = list(read_answers(args.answers))
    except DSparkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows: dict[str, dict] = {}
    for row in varied(answers, args.seed):
        rows.setdefault(json.dumps(row["messages"]), row)
        if len(rows) == args.count:
            break
    args.output.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
