"""The one kind of error a user can cause."""

EXIT_USER_ERROR = 2


class UserError(Exception):
    """Something only the user can mend: one sentence saying what is wrong, where, and what to do.

    The command line prints the sentence and exits with code 2. Every other exception is our own
    failure and keeps its traceback.
    """


class AgreedError(UserError):
    """An error that every rank of a run comes to at the same point; the first rank says it for all."""


class SaidElsewhereError(UserError):
    """What befell this rank because another one ended in a sentence, which that one has said."""


def nearest(word: str, candidates: list[str]) -> str:
    """A suggestion to append to a sentence about an unknown `word`, or nothing."""
    import difflib

    close = difflib.get_close_matches(word, candidates, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
