#pragma once
// Pooling, the fused step and the movement of ids.
void pipeline_tests();
