"""The one exception that is meant for people: shown as a single message, without a traceback."""


class UserError(Exception):
    """Something the user can put right.

    The message says what was wrong, which value, where it came from, and what to do. The command
    line prints it without a traceback and exits with status 2.
    """
