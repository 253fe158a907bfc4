"""A script that does not import: line 3 asks for a module that nobody has."""

import a_module_that_nobody_has


def build(ctx: object) -> object:
    return a_module_that_nobody_has
