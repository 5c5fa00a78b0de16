"""``twinproof new-impl``: a package with a component of one's own, which runs at once and fails for the right reasons.

What is written are a few verbs; every other name is the reference's. A verb that is not written yet raises, so that the
suite says at once what depends on it, and falls silent verb by verb.
"""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import sys
from pathlib import Path

__all__ = ["TEMPLATES", "add_options", "run", "write"]

_INIT = '''"""{name}: a {stem} component of one's own, judged by ``twinproof verify --impl {name}``."""
'''

_HEAD = '''"""The {stem} component of {name}. What is not written here is the reference's.

Write the verbs that raise, one after the other, and run after each:

    twinproof verify --impl {name} conformance.{stem} -q

{meaning}
"""

from refimpl import {stem} as reference
from refimpl.{stem} import *  # noqa: F403  Every name of the contract.
from {home} import {module}

__all__ = reference.__all__
# What the suite may ask beyond the contract, as names; what is not declared is not asked.
CAPABILITIES = reference.CAPABILITIES


'''

_KVSTORE = '''class Rows(reference.DictRows):
    """The rows of a store. Each call is atomic for its table, and changes nothing when it raises.

    Verbs that are not written here work on self.tables[table], a dictionary from id to row.
    """

    def read(self, table, ids, begin, end, out):
        raise NotImplementedError("Rows.read: bytes [begin, end) of the rows of ids; a missing id has its initial row")

    def write(self, table, ids, values, begin, now, *, visit):
        raise NotImplementedError("Rows.write: values at [begin, begin + width) of rows; of duplicates the last wins")

    def delete(self, table, ids):
        raise NotImplementedError("Rows.delete: remove rows, and say how many there were")


class KVStore(store.KVStore, engine=lambda options: reference.LockedRows(Rows(options))):
    """A store over these rows."""
'''

_CHECKPOINT = '''class Save(reference.GatherAndSave):
    """How bytes get from the tensors of all ranks into files that nobody sees yet."""

    def write(self, prepared):
        # What prepare gave, here the reference's: the job, the instruction, the folder and this rank's chunks.
        raise NotImplementedError("Save.write: this rank's bytes into the files of folder, and their sums")


class Load(reference.ReadWholeFiles):
    """How stored values get into the caller's tensors."""

    def read(self, job):
        raise NotImplementedError("Load.read: fill the target of every range of job.ranges in place")


class HuggingFaceStorageWriter(dcp.HuggingFaceStorageWriter, engine=Save):
    """A writer over this engine."""


class HuggingFaceStorageReader(dcp.HuggingFaceStorageReader, engine=Load):
    """A reader over this engine."""
'''

_OFFLOAD = '''class Transfers(reference.Blocking):
    """How states and masters get to host memory and back. ``bindings`` of twinproof.offload.states lists them."""

    def to_host(self, bundles, *, only=None, copies=True, binds=True):
        raise NotImplementedError("Transfers.to_host: copy every tensor to its place in host memory, and bind it there")

    def to_device(self, bundles, *, for_good=False):
        raise NotImplementedError("Transfers.to_device: copy every tensor to memory of the device, and bind it there")


class OptimizerStateOffloader(offloader.OptimizerStateOffloader, transfers=Transfers):
    """An offloader over these transfers."""
'''

_PIPELINE = '''class Lookup(reference.PlainLookup):
    """What a bag is, and what a step does to its rows."""

    def pool(self, tables, feature_tables, bags):
        raise NotImplementedError("Lookup.pool: float32 [bags, sum of D], rows added in ascending position")

    def update(self, tables, feature_tables, bags, grad, optimizer, hyper):
        raise NotImplementedError("Lookup.update: sum the gradients of each row, then one step of the optimizer")


class TableBatchedEmbeddingBags(modules.TableBatchedEmbeddingBags, engine=Lookup):
    """Tables over this lookup."""


class ShardedEmbeddingBagCollection(
    sharded.ShardedEmbeddingBagCollection,
    bags=TableBatchedEmbeddingBags,
    engine=Lookup,
    exchange=reference.ToldEverything,
):
    """The sharded collection over them."""
'''

# Component -> (the package that holds what is shared, modules of it, where the verbs' meaning stands, the verbs).
TEMPLATES: dict[str, tuple[str, str, str, str]] = {
    "kvstore": ("twinproof.kvstore", "store", "Their meaning is RowEngine's, in twinproof.kvstore.rows.", _KVSTORE),
    "checkpoint": (
        "twinproof.checkpoint",
        "dcp",
        "Their meaning is SaveEngine's, in twinproof.checkpoint.plan, and LoadEngine's, in .catalog.",
        _CHECKPOINT,
    ),
    "offload": ("twinproof.offload", "offloader", "Their meaning is Transfers', in twinproof.offload.", _OFFLOAD),
    "pipeline": (
        "twinproof.pipeline",
        "modules, sharded",
        "Their meaning is Lookup's, in twinproof.pipeline.modules.",
        _PIPELINE,
    ),
}


def write(name: str, stem: str, folder: Path) -> Path:
    """Write the package ``folder/name``.

    Raises:
        ValueError: a name that cannot be imported, or that imports something else. FileExistsError: something is there.
    """
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"not a name that Python can import: {name!r}")
    home, module, meaning, verbs = TEMPLATES[stem]
    package = folder / name
    # It would be found in the place of torch, or of the library, by every command that runs in its folder.
    if not package.exists() and importlib.util.find_spec(name) is not None:
        raise ValueError(f"there is a module of this name, which the package would hide: {name!r}")
    package.mkdir(parents=True)
    facts = {"name": name, "stem": stem, "home": home, "module": module, "meaning": meaning}
    (package / "__init__.py").write_text(_INIT.format(**facts), encoding="utf-8")
    (package / f"{stem}.py").write_text(_HEAD.format(**facts) + verbs, encoding="utf-8")
    return package


def add_options(command: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    command.add_argument("name", metavar="NAME", help="of the package, as Python imports it")
    command.add_argument("--component", choices=sorted(TEMPLATES), required=True)
    command.add_argument("--into", type=Path, default=Path(), metavar="FOLDER", help="default: here")


def run(options: argparse.Namespace, _: list[str]) -> int:
    """Write it, and say what to run."""
    try:
        package = write(options.name, options.component, options.into)
    except FileExistsError:
        sys.stderr.write(f"twinproof: {options.into / options.name} is there already; nothing was written\n")
        return 2
    except (ValueError, OSError) as error:
        sys.stderr.write(f"twinproof: {error}\n")
        return 2
    command = f"twinproof verify --impl {options.name} conformance.{options.component} -q"
    path = "" if options.into == Path() else f"PYTHONPATH={options.into} "
    sys.stdout.write(f"wrote {package}/{options.component}.py: write its verbs, and run\n  {path}{command}\n")
    return 0
