"""Faults that ``test_exchanges`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

sizes_sent_again = patched(
    "Sizes that were sent are sent again.",
    mutated("fastimpl.pipeline.input_dist:fuse_input_dists", "if each.received is None and each", "if each"),
    kills="PIPE-593",
    of="fastimpl",
)
others_fused = patched(
    "What is none of ours is fused.",
    mutated(
        "fastimpl.pipeline.input_dist:fuse_input_dists",
        "isinstance(each, InputDist) and not each.is_read",
        'not getattr(each, "is_read", False)',
    ),
    kills="PIPE-593",
    of="fastimpl",
)
sizes_of_all_devices = patched(
    "Sizes on several devices are read in one go.",
    mutated("fastimpl.pipeline.input_dist:InputDist._read", " and each.words.device == here", ""),
    kills="PIPE-593",
    of="fastimpl",
)
failures_replaced = patched(
    "Rows of a batch whose exchange failed are read ahead.",
    mutated("fastimpl.pipeline.stages:StreamedStages.prefetch", "batch.failure is not None or ", ""),
    kills="PIPE-592",
    of="fastimpl",
)
failures_overtaken = patched(
    "A batch whose exchange failed is looked up.",
    mutated("twinproof.pipeline.driver:Pipeline.look_up", "if batch.failure is None and missing:", "if missing:"),
    kills="PIPE-592",
)
ranks_of_any_type = patched(
    "A rank may be of any type.",
    mutated(
        "twinproof.pipeline.sharding:check_plan",
        "type(rank) is not int or not 0 <= rank < world_size",
        "not 0 <= int(rank or 0) < world_size",
    ),
    kills="PIPE-596",
)
parts_of_any_kind = patched(
    "What a kind does not use is taken.",
    mutated("twinproof.pipeline.sharding:TableSharding._check_parts", " or (value is not None and not is_stored)", ""),
    kills="PIPE-596",
)
nothing_is_not_exchanged = patched(
    "A rank that sends nothing and gets nothing leaves an exchange out.",
    mutated(
        "fastimpl.pipeline.input_dist:InputDist._send",
        "self.layout.world_size == 1",
        "self.layout.world_size == 1 or not any(out) and not any(sent)",
    ),
    kills="PIPE-624",
    of="fastimpl",
)
empty_bags_are_not_exchanged = patched(
    "A rank that has no column to give and gets none leaves an exchange out.",
    mutated(
        "fastimpl.pipeline.exchange:AllToAll._all_to_all",
        "dist.all_to_all_single(result,",
        "(any(received) or any(sent)) and dist.all_to_all_single(result,",
    ),
    kills="PIPE-624",
    of="fastimpl",
)
