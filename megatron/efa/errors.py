"""The one exception that reaches an operator."""


class EfaError(Exception):
    """What is wrong, where (key, rank, node, link), and what to do, in one sentence.

    Entry points print the sentence without a traceback and exit with `exit_code`.
    """

    exit_code = 2
