"""What a person did wrong, told in one sentence with the remedy. The command line turns these into exit codes."""


class UserError(Exception):
    """A mistake the user can mend: one sentence, exit code 2, no traceback."""


class Interrupted(Exception):
    """The user or the system asked the run to stop; its state is saved. Exit code 130."""
