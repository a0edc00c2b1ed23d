"""What is summarised: records of a file as prompts of a model, or random tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIELDS = ("document", "summary")
TASK = "Write a detailed summary of the following report.\n\n{document}\n\nSummary:\n"


@dataclass(frozen=True)
class Example:
    """A prompt, and what a good answer is.

    Attributes
    ----------
    prompt : tuple of int
        Token ids.
    reference : str
        A summary by somebody else.
    """

    prompt: tuple[int, ...]
    reference: str


def read_records(path: Path, count: int) -> list[dict[str, str]]:
    """Read the first records of a file, JSON lines ``{"document", "summary"}``.

    Raises
    ------
    ValueError
        Naming the line that is none, or how many records there are if those are too few.
    """
    records: list[dict[str, str]] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if len(records) == count:
                break
            if line.strip():
                records.append(_record(line, f"{path}, line {number}"))
    if len(records) < count:
        raise ValueError(f"{path} must have {count} records, one a request, got {len(records)}")
    return records


def _record(line: str, where: str) -> dict[str, str]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} must be a JSON object: {error}") from error
    fields = record if isinstance(record, dict) else {}
    texts = {field: fields[field] for field in FIELDS if isinstance(fields.get(field), str)}
    if len(texts) < len(FIELDS) or not all(texts.values()):
        raise ValueError(f"{where} must have texts {' and '.join(FIELDS)}")
    return texts


def summaries(
    records: Sequence[dict[str, str]], tokenizer: PreTrainedTokenizerBase, document_tokens: int
) -> list[Example]:
    """Ask for a summary of each document, cut to so many tokens."""
    examples = []
    for record in records:
        ids = tokenizer(record["document"], add_special_tokens=False)["input_ids"]
        text = TASK.format(document=tokenizer.decode(ids[:document_tokens]))
        if tokenizer.chat_template is None:
            prompt = tokenizer(text)["input_ids"]
        else:
            chat = [{"role": "user", "content": text}]
            said = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            prompt = tokenizer(said, add_special_tokens=False)["input_ids"]
        examples.append(Example(tuple(prompt), record["summary"]))
    return examples


def random_examples(count: int, vocabulary: int, tokens: int) -> list[Example]:
    """Random prompts of `tokens` to 5/4 of it, and references that mean nothing."""
    draw = random.Random(1)
    lengths = [draw.randint(tokens, tokens * 5 // 4) for _ in range(count)]
    return [
        Example(
            tuple(draw.randrange(1, vocabulary) for _ in range(length)),
            as_words([draw.randrange(1, vocabulary) for _ in range(32)]),
        )
        for length in lengths
    ]


def as_words(tokens: Sequence[int]) -> str:
    """Token ids as text, where there is no tokenizer."""
    return " ".join(map(str, tokens))
