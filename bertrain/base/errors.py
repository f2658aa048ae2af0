"""How a command ends: the exit codes, the one kind of error a user can cause, and what befalls a rank among others."""

EXIT_USER_ERROR = 2
EXIT_LOST_RANK = 69
EXIT_REQUEUE = 75
EXIT_HUNG = 124

EXIT_CODES = {
    0: "done",
    1: "a failure of ours, with its traceback; with `--nproc`, a rank that failed or was killed",
    EXIT_USER_ERROR: "something only the user can mend, said in one sentence; also Ctrl-C, after the step was saved",
    EXIT_LOST_RANK: "of a rank: another one is gone, whose launcher knows how",
    EXIT_REQUEUE: "stopped by SIGTERM or SIGUSR1 and saved: start it again (a batch system's requeue) and it goes on",
    EXIT_HUNG: "nothing moved for `train.hang_timeout`; the sentence names the rank that stopped",
}
"""What each exit code says. 75 is EX_TEMPFAIL and 69 EX_UNAVAILABLE of sysexits.h, 124 that of timeout(1)."""


class UserError(Exception):
    """An error that only the user can fix: one sentence that says what is wrong, where, and what to do.

    The command line prints the sentence with its `code` and exits with code 2. Every other exception is our own
    failure and keeps its traceback. Tests pin the code; docs/errors.md lists every code with its sentence.
    """

    exit_code = EXIT_USER_ERROR

    def __init__(self, code: str, message: str = "") -> None:
        super().__init__(code, message)
        self.code, self.message = (code, message) if message else ("unnamed", code)

    def __str__(self) -> str:
        return self.message


class AgreedError(UserError):
    """An error that every rank of a run comes to at the same point; the first rank says it for all."""


class DivergedError(AgreedError):
    """Training came to nothing: step after step was not finite."""


class RequeueError(AgreedError):
    """The machine is wanted for something else: the run is saved, and goes on when it is started again."""

    exit_code = EXIT_REQUEUE


class ReportedElsewhereError(UserError):
    """What befell this rank because another one ended in a sentence, which that one has said."""


class LostRankError(Exception):
    """Another rank is gone without a word. No failure of this one, and nothing that a user can mend."""


def nearest(word: str, candidates: list[str]) -> str:
    """A suggestion to append to a sentence about an unknown `word`, or nothing."""
    import difflib

    close = difflib.get_close_matches(word, candidates, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
