"""Exit codes, errors that a user can fix, and errors of a rank that another rank caused."""

EXIT_USER_ERROR = 2
EXIT_LOST_RANK = 69
EXIT_REQUEUE = 75
EXIT_HUNG = 124
EXIT_INTERRUPTED = 130

EXIT_CODES = {
    0: "done",
    1: "a bug, with its traceback; with `--nproc`, a rank that failed or was killed; a check that does not pass, or "
    "`mlperf run` without an experiment that converged",
    EXIT_USER_ERROR: "an error that the user can fix, in one sentence with a code",
    EXIT_LOST_RANK: "this rank lost a peer; the launcher reports the cause",
    EXIT_REQUEUE: "stopped by SIGTERM or SIGUSR1 and saved; start the command again (or requeue the job) to continue",
    EXIT_HUNG: "no progress for `train.hang_timeout`; the message names the rank that hangs",
    EXIT_INTERRUPTED: "stopped by Ctrl-C; in training, after saving the step",
}  # the meaning of each exit code. 75 is EX_TEMPFAIL and 69 EX_UNAVAILABLE in sysexits.h; 124 is that of timeout(1).


class UserError(Exception):
    """An error that only the user can fix: one sentence that says what is wrong, where, and what to do.

    The command line prints the sentence with its `code` and exits with code 2. Every other exception is our own
    failure and keeps its traceback. Tests pin the code; docs/errors.md lists every code with its sentence.
    Characters that do not print, such as a newline in a path, are escaped: it stays one line, and a terminal obeys
    nothing in it.
    """

    exit_code = EXIT_USER_ERROR

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)
        escaped = (one if one.isprintable() else one.encode("unicode_escape").decode() for one in message)
        self.code, self.message = code, "".join(escaped)

    def __str__(self) -> str:
        return self.message


class AgreedError(UserError):
    """An error that every rank raises at the same point; only the first rank prints it."""


class DivergedError(AgreedError):
    """Training diverged: too many steps in a row were not finite."""


class RequeueError(AgreedError):
    """The run was stopped by a signal and saved; it continues when it is started again."""

    exit_code = EXIT_REQUEUE


class StoppedError(AgreedError):
    """Ctrl-C stopped the run."""

    exit_code = EXIT_INTERRUPTED


class ReportedElsewhereError(UserError):
    """This rank stopped because another rank raised an error, which that rank prints."""


class LostRankError(Exception):
    """Another rank is gone without an error of its own; neither this rank nor the user is the cause."""


def nearest(word: str, candidates: list[str]) -> str:
    """A suggestion to append to a sentence about an unknown `word`, or nothing."""
    import difflib

    close = difflib.get_close_matches(word, candidates, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
