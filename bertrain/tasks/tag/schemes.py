"""Tagging schemes: how the tags of words say where entities begin and end.

    words   Ada   Lovelace   met   Charles   in   London
    BIO     B-PER I-PER      O     B-PER     O    B-LOC      also called IOB2
    IOB1    I-PER I-PER      O     I-PER     O    I-LOC      B- only where an entity follows another of its type
    BIOES   B-PER E-PER      O     S-PER     O    S-LOC
    BILOU   B-PER L-PER      O     U-PER     O    U-LOC
    IO      I-PER I-PER      O     I-PER     O    I-LOC      adjacent entities of a type are one; also PER PER O ...
    words   NOUN  NOUN       VERB  NOUN      ADP  NOUN       a class for each word, without entities

Any sequence of tags has entities by the rules of CoNLL's own script, which `find_entities` implements: I-PER after O
begins one. So broken sequences can be repaired: find the entities, and write them in the scheme again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

SchemeName = Literal["BIO", "IOB1", "BIOES", "BILOU", "IO", "words"]
Tags = Sequence[str]
OUTSIDE = "O"
IS_PREFIXED = re.compile(r"[BIESLU]-.+", re.DOTALL).fullmatch
# The prefix of an entity's only word, first, inner and last word.
PREFIXES = {"BIO": "BBII", "IOB1": "IIII", "BIOES": "SBIE", "BILOU": "UBIL", "IO": "IIII"}
AS_BIOES = {"L": "E", "U": "S"}


class Entity(NamedTuple):
    """Words first .. stop - 1 of a sentence."""

    type: str
    first: int
    stop: int


@dataclass(frozen=True)
class Scheme:
    name: SchemeName
    is_prefixed: bool = True  # false for IO written as the types alone, and for classes of words

    def labels(self, tags: Iterable[Tags]) -> tuple[str, ...]:
        """The classes for all tags of these types: O first, then those of each type in the order of the scheme."""
        if self.name == "words":
            return tuple(sorted({tag for sentence in tags for tag in sentence}))
        types = sorted({entity.type for sentence in tags for entity in self.entities(sentence)})
        prefixes = sorted(set(PREFIXES[self.name]), key="BIELSU".index)
        return OUTSIDE, *(self._tag(prefix, name) for name in types for prefix in prefixes)

    def entities(self, tags: Tags) -> list[Entity]:
        """The entities of a sentence; in a scheme without any, each of its words."""
        if self.name == "words":
            return [Entity(tag, place, place + 1) for place, tag in enumerate(tags)]
        return find_entities(tags, self.is_prefixed)

    def write(self, entities: Iterable[Entity], num_words: int) -> list[str]:
        """The tags of a sentence with these entities."""
        tags = [OUTSIDE] * num_words
        last: Entity | None = None
        for entity in entities:
            only, first, inner, end = tuple(PREFIXES[self.name])
            size = entity.stop - entity.first
            prefixes = only if size == 1 else first + inner * (size - 2) + end
            if self.name == "IOB1" and last is not None and (last.type, last.stop) == (entity.type, entity.first):
                prefixes = "B" + prefixes[1:]
            tags[entity.first : entity.stop] = [self._tag(prefix, entity.type) for prefix in prefixes]
            last = entity
        return tags

    def convert(self, tags: Tags, to: Scheme) -> list[str]:
        """The entities of `tags` in the scheme `to`, as a valid sequence; classes of words stay as they are."""
        if to.name == "words":
            return list(tags)
        return to.write(find_entities(tags, self.is_prefixed), len(tags))

    def _tag(self, prefix: str, name: str) -> str:
        return f"{prefix}-{name}" if self.is_prefixed else name


def has_prefixes(sentences: Iterable[Tags]) -> bool:
    return any(IS_PREFIXED(tag) for tags in sentences for tag in tags)


def find_entities(tags: Tags, is_prefixed: bool = True) -> list[Entity]:
    """The entities of a sentence, as conlleval and seqeval's default mode find them; L and U read as E and S."""
    found: list[Entity] = []
    first, before, type_before = 0, OUTSIDE, ""
    for place, tag in enumerate([*tags, OUTSIDE]):
        prefix, _, name = tag.partition("-") if is_prefixed else ("I" if tag != OUTSIDE else OUTSIDE, "", tag)
        prefix, name = AS_BIOES.get(prefix, prefix), name if tag != OUTSIDE else ""
        if before != OUTSIDE and (before in "ES" or prefix in "BSO" or name != type_before):
            found.append(Entity(type_before, first, place))
            before = OUTSIDE
        if prefix != OUTSIDE and before == OUTSIDE:
            first = place
        before, type_before = prefix, name
    return found


def recognize(sentences: Sequence[Tags]) -> Scheme:
    """The scheme of a file's tags. Raises ValueError if they are of two schemes."""
    prefixes = {tag[0] for tags in sentences for tag in tags if IS_PREFIXED(tag)}
    if not prefixes:
        has_outside = any(OUTSIDE in tags for tags in sentences)
        return Scheme("IO" if has_outside else "words", is_prefixed=False)
    if prefixes & {"E", "S"} and prefixes & {"L", "U"}:
        raise ValueError("tags of BIOES (E-, S-) and of BILOU (L-, U-)")
    if prefixes & {"E", "S"}:
        return Scheme("BIOES")
    if prefixes & {"L", "U"}:
        return Scheme("BILOU")
    if prefixes == {"I"}:
        return Scheme("IO")
    begins = "".join(tags[entity.first][0] for tags in sentences for entity in _separate_entities(tags))
    return Scheme("IOB1" if "B" not in begins and "I" in begins else "BIO")


def _separate_entities(tags: Tags) -> list[Entity]:
    """The entities that do not follow another of their type at once, which IOB1 too would begin with B-."""
    entities = find_entities(tags)
    ends = {(entity.type, entity.stop) for entity in entities}
    return [entity for entity in entities if (entity.type, entity.first) not in ends]
