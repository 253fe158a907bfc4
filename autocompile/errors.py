"""The tree of errors that reach a user as one line, each with the exit code of the command.

AutocompileError
|-- NothingMeasured    1  a study ended without one usable measurement
|-- UserError          2  the input is wrong, or the study is in use elsewhere
|   `-- ConfigMismatch    a best-config file does not fit the model or machine it is applied to
`-- MachineError       3  this machine cannot do it: no GPU, no compiler, no disk
"""

from __future__ import annotations


class AutocompileError(Exception):
    """What the CLI prints as one line; any other exception is a bug and keeps its traceback."""

    exit_code = 1


class NothingMeasured(AutocompileError):
    """No slice of the study ended with a measurement, not even eager."""


class UserError(AutocompileError):
    """The message says where, what was found and what was expected."""

    exit_code = 2


class ConfigMismatch(UserError):
    """The message names the field of ``made_for`` that differs, and both values."""


class MachineError(AutocompileError):
    """The message names what is missing on this machine and how to mend it."""

    exit_code = 3
