"""Faults that ``test_groups`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

divided_by_all_ranks = patched(
    "Gradients of tables that are cut among some ranks are divided by the number of all.",
    mutated("fastimpl.pipeline.exchange:AllToAll.gradients", "self.layout.world_size)", "dist.get_world_size())"),
    kills="PIPE-367",
)
all_ranks_stop_together = patched(
    "A schedule of some of the ranks asks all of them for batches.",
    mutated("twinproof.pipeline.driver:Pipeline.agree", "group=self._group", "group=None"),
    kills="PIPE-367",
)
gradients_of_all_ranks = patched(
    "The mean of dense gradients of some ranks is over the sums of all.",
    mutated("twinproof.pipeline.stages:DenseGradients.reduce", "(flat, group=process_group)", "(flat)"),
    kills="PIPE-367",
)
each_rank_by_itself = patched(
    "Each rank decides by itself whether what was looked up ahead is outdated.",
    mutated("fastimpl.pipeline.schedules:forget_outdated", "not p.agree(int(not changed))", "changed"),
    kills="PIPE-432",
)
evaluations_of_all_ranks = patched(
    "An evaluation hands its group to nobody, so that it stops with all ranks of the job.",
    mutated(
        "twinproof.pipeline.driver:EvalPipelineSparseDist.__init__",
        "        process_group,\n        engine,\n",
        "        engine=engine,\n",
    ),
    kills="PIPE-692",
)
