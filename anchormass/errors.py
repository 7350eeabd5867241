"""The one exception this package raises on purpose."""


class AnchorMassError(ValueError):
    """A bad value, file or state, said in one line that names it and the fix.

    It is a `ValueError`, so code that expects one works; the command line prints it
    without a traceback.
    """
