"""`bertrain data prepare`: text in, a folder of shards out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bertrain.data.examples import Pair, TokenDocument, pairs_of_documents
from bertrain.data.text import Document, find_inputs, read_documents
from bertrain.data.tokenizer import Tokenizer, Vocabulary
from bertrain.data.write import Example, write_shards
from bertrain.errors import UserError

SENTENCES_PER_CALL = 4096


def prepare(
    inputs: Iterable[str | Path],
    out: str | Path,
    *,
    vocab: str | Path | None = None,
    lower_case: bool = True,
    max_seq_length: int = 512,
    short_seq_prob: float = 0.1,
    seed: int = 12345,
    rows_per_shard: int = 65536,
) -> dict[str, Any]:
    """Turn plain text (a sentence per line, a blank line between documents) into unmasked training examples.

    Returns the manifest of the folder written at `out`. Without `vocab`, BERT's uncased vocabulary is used.
    """
    if not 8 <= max_seq_length <= 1 << 16:
        raise UserError(f"--max-seq-length is {max_seq_length}; it must be between 8 and 65536")
    if not 0 <= short_seq_prob <= 1:
        raise UserError(f"--short-seq-prob is {short_seq_prob}; it is a probability, between 0 and 1")
    if rows_per_shard < 1:
        raise UserError(f"--rows-per-shard is {rows_per_shard}; it must be at least 1")
    vocabulary = Vocabulary.load(vocab, lower_case=lower_case)
    files = find_inputs(inputs)
    documents = tokenize_documents(read_documents(files), Tokenizer(vocabulary))
    pairs = pairs_of_documents(documents, max_seq_length=max_seq_length, short_seq_prob=short_seq_prob, seed=seed)
    preparation = {
        "inputs": [file.name for file in files],
        "max_seq_length": max_seq_length,
        "short_seq_prob": short_seq_prob,
        "seed": seed,
    }
    return write_shards(
        Path(out),
        examples_of_pairs(pairs, vocabulary),
        vocabulary,
        preparation=preparation,
        rows_per_shard=rows_per_shard,
    )


def tokenize_documents(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[TokenDocument]:
    """Documents of words to documents of numbers, a few thousand sentences to each call of the tokenizer.

    Sentences without a word, and documents without a sentence, are left out.
    """
    waiting: list[Document] = []
    sentences = 0
    for document in documents:
        waiting.append(document)
        sentences += len(document)
        if sentences >= SENTENCES_PER_CALL:
            yield from _tokenize(waiting, tokenizer)
            waiting, sentences = [], 0
    yield from _tokenize(waiting, tokenizer)


def _tokenize(documents: list[Document], tokenizer: Tokenizer) -> Iterator[TokenDocument]:
    encoded = iter(tokenizer.encode([sentence for document in documents for sentence in document]))
    for document in documents:
        sentences = [tokens for tokens in (next(encoded) for _ in document) if tokens]
        if sentences:
            yield sentences


def examples_of_pairs(pairs: Iterable[Pair], vocabulary: Vocabulary) -> Iterator[Example]:
    """[CLS] A [SEP] B [SEP] of each pair."""
    start, separator = [vocabulary.id_of("[CLS]")], [vocabulary.id_of("[SEP]")]
    for pair in pairs:
        tokens = start + pair.a + separator + pair.b + separator
        yield Example(tokens, len(pair.a) + 2, pair.is_random)
