"""Languages: their names, and which one a text is in, by its script and its most frequent words."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

from bertrain.base.errors import UserError

LANGUAGES = {
    "en": "English", "de": "German", "fr": "French", "es": "Spanish", "it": "Italian", "pt": "Portuguese",
    "nl": "Dutch", "ru": "Russian", "zh": "Chinese", "ja": "Japanese", "ko": "Korean", "ar": "Arabic", "el": "Greek",
    "he": "Hebrew", "hi": "Hindi", "th": "Thai",
}  # fmt: skip
_ISO_639 = (
    "aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el en "
    "eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu ja jv "
    "ka kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne "
    "ng nl nn no nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg si sk sl sm sn so sq sr ss st "
    "su sv sw ta te tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu"
)
_STOP_WORDS = {
    "en": "the and of to is that it for was with", "de": "der die und das ist nicht ein zu den mit",
    "fr": "le les et des est une du dans pour qui", "es": "el los las que y por con una del en",
    "it": "il che di non per sono della gli è nel", "pt": "o os que não uma do da em com para",
    "nl": "de het een van en niet dat zijn op voor", "ru": "и в не на что с по как это из",
}  # fmt: skip
_SCRIPTS = {
    "CJK": "zh", "HANGUL": "ko", "ARABIC": "ar", "GREEK": "el", "HEBREW": "he", "DEVANAGARI": "hi", "THAI": "th",
}  # fmt: skip


def check_language(code: str) -> None:
    """Refuse what is no language, whose sentences would be split by the rules of none."""
    if code != "auto" and code not in _ISO_639.split():
        raise UserError("unknown-language", f"--language is {code!r}; give the two letters of a language, such as de")


def guess_language(texts: list[str]) -> str:
    """The code of the language of most of the text, by its script and its most frequent words; "" if unsure."""
    text = " ".join(text[:4096] for text in texts).lower()
    names = (unicodedata.name(letter, "").split(" ")[0] for letter in text if letter.isalpha())
    scripts = Counter(name.split("-")[0] for name in names)
    kana = scripts["HIRAGANA"] + scripts["KATAKANA"]
    if kana > 0.1 * scripts.total():
        return "ja"
    for script, code in _SCRIPTS.items():
        if scripts[script] > scripts.total() / 2:
            return code
    words = Counter(re.findall(r"[^\W\d_]+", text))
    hits = Counter({code: sum(words[word] for word in stops.split()) for code, stops in _STOP_WORDS.items()})
    (best, most), (_, second) = hits.most_common(2)
    return best if most > 0.05 * words.total() and most > 1.2 * second else ""
