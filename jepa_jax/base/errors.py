"""Errors that end a command with one message instead of a traceback, and the exit codes of all commands."""

EXIT_OK = 0
EXIT_USER_ERROR = 2  # invalid flag, config value, data file, checkpoint or disk: the message says what to change
EXIT_DIVERGED = 3  # NaN or infinite loss, or collapsed features; the last good checkpoint is kept
EXIT_DOES_NOT_FIT = 4  # the plan was made: the config does not fit the GPU
EXIT_PROCESS_LOST = 5  # another process of the run is gone; the same command continues from the newest checkpoint
EXIT_INTERRUPTED = 130  # Ctrl-C (128 + SIGINT); a checkpoint was written and the same command resumes
EXIT_TERMINATED = 143  # SIGTERM (128 + 15); a checkpoint was written and the same command resumes


class UserError(Exception):
    """An error that the user can fix; the message names the key or file, its value and the fix."""

    exit_code = EXIT_USER_ERROR


class DataLost(UserError):
    """Batches ended in mid-run, because of a file or a worker; the state is good and is saved."""


class Diverged(UserError):
    """The loss became NaN or infinite."""

    exit_code = EXIT_DIVERGED
    status = "diverged"


class Collapsed(Diverged):
    """The features became constant or identical; raised if config.train.stop_on_collapse is set."""

    status = "collapsed"
