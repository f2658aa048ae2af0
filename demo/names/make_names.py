"""Writes train.conll and dev.conll: messages to a workshop, with the persons, places and companies in them tagged.

Invented for the how-to docs/how-to-tag.md; no text is from elsewhere. The names of dev.conll are not in train.conll.
Run from the root of the repository: python demo/names/make_names.py
"""

from __future__ import annotations

import random
from pathlib import Path

NAMES = {
    "train": {
        "person": "Anna Berg|Tom|Maria Santos|Peter Novak|Julia|David Cole|Nina Fischer|Omar Haddad|Lucy|Jan de Vries",
        "place": "Lisbon|Graz|New Haven|Oslo|Little Falls|Porto|Hamburg|Bruges|Cape Hill|Turin",
        "company": "Nordlicht Pumps|Acme|Blue River Tools|Hansen & Sons|Kestrel|Weber Steel|Orbit Supply|Delta Gear",
    },
    "dev": {
        "person": "Clara Weiss|Paul|Ines Moreau|Viktor|Hannah Stone|Ahmed Said",
        "place": "Vienna|Leeds|San Remo|Ghent|Boston",
        "company": "Falcon Motors|Brightwell|North Sea Cables|Meyer Tools",
    },
}
MESSAGES = """\
Hello , this is {person} from {company} .
The drill that I bought in {place} does not start .
{person} said that the parts would come on Monday .
Please send the invoice to {company} , {place} .
Can {person} call me back before noon ?
We moved our office from {place} to {place} .
I asked {person} and {person} , and nobody knows the price .
The pump from {company} leaks again .
Is there a shop of yours near {place} ?
Thank you for the quick answer !
My order number is 4711 , and my name is {person} .
{company} charges less than {company} for the same work .
When does the train to {place} leave ?
{person} of {company} will visit you in {place} next week .
The manual is missing , and the box was open .
Your driver in {place} , a man called {person} , was very kind .
I would like a refund , please .
{company} has no spare parts left in {place} .
Regards , {person}
Both saws broke within a week .
"""


def sentences(split: str, count: int, seed: int) -> list[list[tuple[str, str]]]:
    draw, templates = random.Random(seed), MESSAGES.splitlines()
    names = {kind: several.split("|") for kind, several in NAMES[split].items()}
    found = []
    for number in range(count):
        rows: list[tuple[str, str]] = []
        for word in templates[number % len(templates)].split():
            if word.startswith("{"):
                kind = word.strip("{}")
                first, *others = draw.choice(names[kind]).split()
                rows += [(first, f"B-{kind}"), *((other, f"I-{kind}") for other in others)]
            else:
                rows.append((word, "O"))
        found.append(rows)
    return found


def main() -> None:
    for split, count, seed in (("train", 160, 1), ("dev", 40, 2)):
        blocks = ["".join(f"{word}\t{tag}\n" for word, tag in rows) for rows in sentences(split, count, seed)]
        (Path(__file__).parent / f"{split}.conll").write_text("\n".join(blocks))


if __name__ == "__main__":
    main()
