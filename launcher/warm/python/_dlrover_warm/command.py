"""What an interpreter's command line asks for."""

import os


class Command:
    """A command line, read as the interpreter reads it. kind is "file", "module" or "code", and what names it."""

    def __init__(self, argv):
        """Raises ValueError for what only a fresh interpreter can do."""
        self.argv = list(argv)
        self.python = argv[0]
        self.options = []  # pairs of a letter, or a long name, and its value
        self.kind = "file"
        rest = list(argv[1:])
        while rest and rest[0].startswith("-") and rest[0] != "-" and self.kind == "file":
            word = rest.pop(0)
            if word == "--":
                break
            if word.startswith("--"):
                self._long(word, rest)
            else:
                self._letters(word[1:], rest)
        if self.kind == "file":
            if not rest or rest[0] == "-":
                raise ValueError("the script is the standard input")
            self.what = rest.pop(0)
        self.args = rest

    def _long(self, word, rest):
        if word != "--check-hash-based-pycs" or not rest:
            raise ValueError("an option of the interpreter, %s" % word)
        self.options.append((word, rest.pop(0)))

    def _letters(self, letters, rest):
        while letters:
            letter, letters = letters[0], letters[1:]
            if letter in "cmWX":
                if not letters and not rest:
                    raise ValueError("the option -%s of the interpreter has no value" % letter)
                value, letters = letters or rest.pop(0), ""
                if letter in "cm":
                    self.kind, self.what = {"c": "code", "m": "module"}[letter], value
                else:
                    self.options.append((letter, value))
            elif letter in "bBdEIOPqRsSuv":
                self.options.append((letter, ""))
            else:
                raise ValueError("the option -%s of the interpreter" % letter)

    def unlike(self, other):
        """Why an interpreter that was started by the other command line cannot run this; "": it can."""
        if self.python != other.python:
            return "the interpreter is %s, not %s" % (self.python, other.python)
        if sorted(self.options) != sorted(other.options):
            return "the interpreter has other options: %s, not %s" % (self.options, other.options)
        return ""


def of_this_process():
    """The words by which this interpreter was started."""
    with open("/proc/self/cmdline", "rb") as f:
        return [os.fsdecode(word) for word in f.read().split(b"\0")[:-1]]
