"""Which changed lines of C++ are worth a judge, and whether they changed a program, for ``ci/mutation.py``."""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from pathlib import Path

# Comments, directives, what only the compiler reads; thresholds and hints to the cache: results are the same without.
_HINTS = r"= regime\(|\bfetch_(line|row|values|row_far)\(|__builtin_prefetch"
NOT_MUTATED = (r"^\s*(//|#)", r"^\s*(static_assert|using|template|namespace|private:|public:)\b", _HINTS)
_TYPES = re.compile(r"\b[A-Za-z_]\w*\d\w*\b|\bsize_t\b|\b(?:static|reinterpret|const)_cast\b|<[\w:, ]+>[ &*(]")
_NO_OPERATORS = ("+>", "->=", "><", "=>", "!= >", "+*", "*+", "/+", "+/", "%+", "*-", "/-", "|*", "*/*")


def tokens_of(line: str) -> tuple[str, ...]:
    """The words and signs of a line of C++ without comments: lines of the same tokens are the same program."""
    return tuple(re.findall(r"\w+|[^\w\s]", re.sub(r"//.*|/\*.*?\*/", "", line)))


def is_sensible(before: str, after: str) -> bool:
    """Whether a line of C++ may compile and mean something else.

    The rules know no types: they change the numbers inside names, and the signs around arguments of templates.
    """
    if tokens_of(before) == tokens_of(after):
        return False
    if sorted(_TYPES.findall(before)) != sorted(_TYPES.findall(after)):
        return False
    return not any(sign in after and sign not in before for sign in _NO_OPERATORS)


def code_digest(product: Path) -> str:
    """The digest of the code and data that a program would run: what is loaded of it."""
    words = ["objcopy", "-O", "binary", "--remove-section=.note.*", "--remove-section=.gnu_debug*"]
    with tempfile.NamedTemporaryFile() as file:
        subprocess.run([*words, str(product), file.name], check=True)
        return hashlib.sha256(Path(file.name).read_bytes()).hexdigest()


def has_changed(product: Path) -> bool:
    """Whether a program has other code than without a mutant."""
    return code_digest(product) != product.with_suffix(".plain").read_text()
