"""``python -m conformance.provers.simt FILE.cpp [-I FOLDER]... [OPTIONS]``: builds proofs and runs them.

Options after ``--`` are the program's own, such as ``--policies exhaustive``. ``--flags`` alone prints what a build
system of one's own gives to the compiler.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from conformance.provers.simt.build import SimtError, build, compile_flags


def main(arguments: list[str]) -> int:
    """The program's exit status: 0 without a fault, 1 with one, 2 where nothing could be run."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    own, others = arguments[:cut], arguments[cut + 1 :]
    parser = argparse.ArgumentParser(prog="python -m conformance.provers.simt", description=__doc__)
    parser.add_argument("source", nargs="?", help="a .cpp with proofs")
    parser.add_argument("-I", dest="includes", action="append", default=[], help="a folder of the kernels' headers")
    parser.add_argument("--flags", action="store_true", help="print the compiler's flags")
    options = parser.parse_args(own)
    if options.flags:
        sys.stdout.write(" ".join(compile_flags()) + "\n")
        return 0
    if options.source is None:
        parser.error("a source is needed")
    try:
        program = build(options.source, includes=options.includes)
    except SimtError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return subprocess.run([str(program), *others], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
