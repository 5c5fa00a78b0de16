"""Which test files of a project concern which of our components, and which names are put in place of upstream's."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SUITES", "Suite", "project_of"]


@dataclass(frozen=True)
class Suite:
    """Test files of one project that are run in one process.

    Attributes:
        project, name: of the ledger, and of this part of it.
        stem: the component whose names are used.
        folder: of the test files, in the checkout; it is copied beside what it needs.
        files: names of the test files.
        names: patterns; our names of this form take the place of upstream's of the same name.
        modules: imported before; upstream's names are replaced in these packages and below.
        packages: of the checkout, beside the tests' own, that test files import and no installation has.
        replaced: text of the copies that is replaced by other text, for a machine without a GPU.
        lifts_gpu_skips: run what upstream skips only because its authors thought of GPUs.
    """

    project: str
    name: str
    stem: str
    folder: str
    files: tuple[str, ...]
    names: tuple[str, ...]
    modules: tuple[str, ...]
    packages: tuple[str, ...] = ()
    replaced: tuple[tuple[str, str], ...] = ()
    lifts_gpu_skips: bool = False

    def takes(self, name: str) -> bool:
        """Whether a name of ours takes the place of upstream's."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.names)


_TYPES = ("*",)
_BATCHES = ("torchrec.sparse.jagged_tensor", "torchrec.sparse.jagged_tensor_validator", "torchrec.sparse.tensor_dict")
_MODULES = (
    "torchrec.modules.embedding_modules",
    "torchrec.modules.embedding_configs",
    "torchrec.modules.fp_embedding_modules",
    "torchrec.modules.feature_processor_",
    "torchrec.modules.regroup",
)
_STORAGE = (
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.hf_storage",
    "torch.distributed.checkpoint._consolidate_hf_safetensors",
)
_ON_CPU = (('torch.device("cuda:0")', 'torch.device("cpu")'), ('torch.device(f"cuda:{rank}")', 'torch.device("cpu")'))

SUITES = (
    Suite(
        project="torchrec",
        name="batches",
        stem="pipeline",
        folder="torchrec/sparse/tests",
        files=(
            "test_keyed_jagged_tensor.py",
            "test_jagged_tensor.py",
            "test_keyed_tensor.py",
            "test_jagged_tensor_validator.py",
            "test_tensor_dict.py",
        ),
        names=_TYPES,
        modules=("torchrec", "torchrec.distributed", *_BATCHES, *_MODULES),
    ),
    Suite(
        project="torchrec",
        name="modules",
        stem="pipeline",
        folder="torchrec/modules/tests",
        files=(
            "test_embedding_modules.py",
            "test_regroup.py",
            "test_fp_embedding_modules.py",
            "test_feature_processor_.py",
        ),
        names=_TYPES,
        modules=("torchrec", "torchrec.distributed", *_BATCHES, *_MODULES),
        packages=("torchrec/sparse/tests",),
    ),
    Suite(
        project="torchrec",
        name="pipelines",
        stem="pipeline",
        folder="torchrec/distributed/train_pipeline/tests",
        files=(
            "test_train_pipelines.py",
            "test_train_pipelines_utils.py",
            "test_postproc.py",
            "test_tracing.py",
            "test_train_pipeline_prefetch_sparse_dist.py",
            "test_prefetch_embedding_pipelined_forward.py",
        ),
        names=("*TrainPipeline*", "EvalPipeline*"),
        modules=(
            "torchrec.distributed.train_pipeline.train_pipelines",
            "torchrec.distributed.train_pipeline",
        ),
        packages=("torchrec/distributed/tests",),
        replaced=_ON_CPU,
        lifts_gpu_skips=True,
    ),
    Suite(
        project="safetensors",
        name="torch",
        stem="checkpoint",
        folder="bindings/python/tests",
        files=("test_pt_comparison.py", "test_pt_model.py", "test_simple.py", "test_pread_backend.py"),
        names=("save_file", "load_file"),
        modules=("safetensors.torch",),
    ),
    Suite(
        project="pytorch",
        name="storage",
        stem="checkpoint",
        folder="test/distributed/checkpoint",
        files=(
            "test_hf_storage.py",
            "test_hf_safetensor_e2e.py",
            "test_consolidate_hf_safetensors.py",
            "test_quantized_hf_storage.py",
        ),
        names=("*HuggingFaceStorage*", "consolidate_safetensors_files*"),
        modules=_STORAGE,
    ),
)
_MARKS = {
    "torchrec": "torchrec/sparse/jagged_tensor.py",
    "safetensors": "bindings/python/tests",
    "pytorch": "test/distributed/checkpoint",
}


def project_of(checkout: Path) -> str | None:
    """The project that a folder is a checkout of; None when it is none of those that are known."""
    return next((project for project, mark in _MARKS.items() if (checkout / mark).exists()), None)
